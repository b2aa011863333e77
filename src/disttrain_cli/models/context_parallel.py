"""Context parallelism: a rank's rows, and the mapping of item rows to its tokens.

Every rank of a CP group holds the weights of its TP rank and an equal run of a slot's tokens, or of
the rows of its images, so that row-wise operators need no communication; for attention the group
exchanges rows for heads (`ulysses`), and where rows are merged or reordered, rows (`regrouped`).
Encoder outputs and a generator's conditioning are divided evenly over the group, independent of the
position of their tokens (`division.Place`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function

from disttrain_cli.models.division import own_rows
from disttrain_cli.models.group import Group, padded
from disttrain_cli.models.host import to_device
from disttrain_cli.models.layer import Items
from disttrain_cli.models.parallel import gather, reduce

Ints = NDArray[np.int64]


def own_part(
    items: Items, given_RD: Tensor, group: Group | None, cp: Group | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return where encoder rows go among this rank's tokens, these rows, and their shares.

    Shares are `Items.shares`. Each rank of a TP group has a part of the rows.

    Args:
        given_RD: this rank's local part of the rows of all items.
    """
    rows, shared, shares = items.rows, items.shared, items.shares
    assert rows is not None
    if shared is None:
        return rows if group is None else rows[group.local_rows(len(rows))], given_RD, None
    runs = 1 if cp is None else cp.size
    tp, tp_rank = (1, 0) if group is None else (group.size, group.rank)
    run, number = np.divmod(shared.numbers, max(1, -(-shared.tokens // runs)))
    most = own_rows(own_rows(shared.tokens, runs, 0)[1], tp, 0)[1]  # most rows of any rank
    bounds = np.array(
        [
            own_rows(stop - start, tp, tp_rank)
            for start, stop in (own_rows(shared.tokens, runs, rank) for rank in range(runs))
        ]
    )
    first, stop = bounds[run].T
    mine = np.flatnonzero((number >= first) & (number < stop))
    whole_RD = gather(padded(given_RD, most), runs * most, cp)
    own, there = (_index(each, rows) for each in (mine, (run * most + number - first)[mine]))
    return (
        rows.index_select(0, own),
        whole_RD.index_select(0, there),
        None if shares is None else shares.index_select(0, own),
    )


def assembled(own_RD: Tensor, items: Items, cp: Group | None) -> Tensor:
    """Return the rows of all items' tokens on every rank, from the rows among this rank's tokens.

    The result's gradient is that of all ranks, of which each rank takes its own rows.
    """
    if items.shared is None:
        return own_RD
    numbers = _index(items.shared.numbers, own_RD)
    whole_RD = own_RD.new_zeros(items.shared.tokens, *own_RD.shape[1:])
    return reduce(whole_RD.index_copy(0, numbers, own_RD), cp)


def bounds_of(rows: int, cp: Group) -> Ints:
    """Return [C + 1] the first row of each rank, and the end of the last."""
    return np.array([0, *(cp.rows_of(rows, rank).stop for rank in range(cp.size))])


def regrouped(own_RD: Tensor, source: Ints, given: Ints, taken: Ints, cp: Group) -> Tensor:
    """Redistribute rows over the group: row i of the result is row `source[i]` of the input.

    Both are given by this rank's local rows.

    Args:
        source: no row twice; some may be omitted.
        given, taken: first row of each rank in input and output, and the end of the last
            (`bounds_of`).
    """
    owner = np.searchsorted(given, source, "right") - 1
    taker = np.searchsorted(taken, np.arange(len(source)), "right") - 1
    if (owner == taker).all() and len(source) == given[-1] and (np.diff(source) == 1).all():
        return own_RD  # seen equally by all ranks: nothing moves
    mine, to_give = taker == cp.rank, owner == cp.rank
    order = np.argsort(owner[mine], kind="stable")
    given_RD = own_RD.index_select(0, _index(source[to_give] - given[cp.rank], own_RD))
    counts = [
        np.bincount(ranks, minlength=cp.size).tolist() for ranks in (taker[to_give], owner[mine])
    ]
    taken_RD = _Exchange.apply(given_RD, counts[0], counts[1], cp)
    return taken_RD.index_select(0, _index(np.argsort(order), own_RD))


def _index(numbers: Ints, like: Tensor) -> Tensor:
    return to_device(torch.from_numpy(numbers), like.device)


class _Exchange(Function):
    """All-to-all of rows with per-rank counts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, give: list[int], take: list[int], cp: Group) -> Tensor:
        ctx.give, ctx.take, ctx.cp = give, take, cp
        return cp.exchanged(rows, give, take)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return ctx.cp.exchanged(gradient, ctx.take, ctx.give), None, None, None
