"""Gathering and summing the rows of a TP group chunk by chunk, while the device works on the chunks
that are there.

A chunk is one rank's own rows. Every rank sends to the next one round the group and receives from
the one before, so that in each of `size` − 1 steps one chunk travels behind what is computed with
another (the paper's StepCCL; Wang et al. 2023, "Overlap communication with dependent computation
via decomposition in large deep learning models").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from disttrain_cli.models.group import Group


def arriving(
    own_RD: Tensor, rows: int, group: Group, into: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """The rows of every rank and where they belong among all `rows`: own ones first, then those of
    the rank before, …

    Each chunk travels on while the caller works on it. With `into` [rows, D] they arrive there, and
    all are in it at the end.
    """
    chunk = own_RD.contiguous()
    if into is not None:
        into[group.local_rows(rows)] = chunk
    for step in range(group.size):
        place, then = (group.rows_of(rows, group.rank - back) for back in (step, step + 1))
        if step == group.size - 1:
            yield place, chunk
            return
        if into is None:
            coming = chunk.new_empty(then.stop - then.start, *chunk.shape[1:])
        else:
            coming = into[then]
        underway = group.pass_on(chunk, coming)
        yield place, chunk
        underway.wait()
        chunk = coming


def summed(partial: Callable[[slice], Tensor], rows: int, group: Group) -> Tensor:
    """Own rows of the sum over the group of what `partial` makes for some of all `rows`, a new
    tensor each.

    The sum of each rank's rows begins at the rank after it, and travels on to it while the ranks
    make their parts of others.
    """
    first, *others = (group.rows_of(rows, group.rank - back) for back in range(1, group.size + 1))
    total = partial(first)
    for place in others:
        coming = total.new_empty(place.stop - place.start, *total.shape[1:])
        underway = group.pass_on(total, coming)
        made = partial(place)
        underway.wait()
        total = made.add_(coming)
    return total


def gathered(
    own_RD: Tensor,
    rows: int,
    group: Group,
    factors: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    keep: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """All `rows` of the group times each factor [D, F], and its bias added: [rows, F] each.

    With `keep` the rows themselves come first.
    """
    made = [own_RD.new_empty(rows, factor.shape[1]) for factor in factors]
    whole = own_RD.new_empty(rows, *own_RD.shape[1:]) if keep else None
    for place, chunk in arriving(own_RD, rows, group, whole):
        for factor, bias, product in zip(factors, biases, made, strict=True):
            _multiply(chunk, factor, bias, product[place])
    return whole, made


def scattered(
    given: Sequence[Tensor],
    rows: int,
    group: Group,
    factors: Sequence[Tensor],
    bias: Tensor | None = None,
) -> Tensor:
    """Own rows of the sum over the group, and over what is given [rows, F], of the products with
    their factors [F, D]; a bias is added once, by the first rank."""
    added = None if group.rank else bias

    def partial(place: slice) -> Tensor:
        made = given[0].new_empty(place.stop - place.start, factors[0].shape[1])
        _multiply(given[0][place], factors[0], added, made)
        for rows_RF, factor in zip(given[1:], factors[1:], strict=True):
            torch.addmm(made, rows_RF[place], factor, out=made)
        return made

    return summed(partial, rows, group)


def _multiply(rows_RD: Tensor, factor: Tensor, bias: Tensor | None, into: Tensor) -> None:
    """As `functional.linear`, without a tensor of its own."""
    if bias is None:
        torch.mm(rows_RD, factor, out=into)
    else:
        torch.addmm(bias, rows_RD, factor, out=into)
