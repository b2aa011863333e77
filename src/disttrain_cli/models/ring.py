"""Ring all-gather and reduce-scatter of a TP group's rows, chunk by chunk, overlapped with GEMMs.

A chunk is one rank's local rows. Every rank sends to the next one round the group and receives from
the previous one, so that in each of `size` − 1 steps one chunk is in flight while another is
computed with (the paper's StepCCL; Wang et al. 2023, "Overlap communication with dependent
computation via decomposition in large deep learning models").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from disttrain_cli.models.group import Group


def arriving(
    own_RD: Tensor, rows: int, group: Group, into: Tensor | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the slice and the rows of every rank as they arrive, local ones first.

    Then follow the rows of the previous rank, and so on. Each chunk is sent on while the caller
    works on it. With `into` [rows, D] the rows are received there, and it holds all of them at the
    end.
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
    """Return the local rows of the sum over the group of `partial`.

    `partial` returns a new tensor for a slice of all `rows`. The sum of each rank's rows starts at
    the rank after it, and is sent on to it while the ranks compute their parts of others.
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
    """Return all `rows` rows of the group times each factor [D, F], plus its bias: [rows, F] each.

    With `keep` the gathered rows themselves are returned first.
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
    """Return the local rows of the sum over the group of products of rows and factors.

    Summed over the tensors in `given` [rows, F], each times its factor [F, D]; a bias is added
    once, by the first rank.
    """
    added = None if group.rank else bias

    def partial(place: slice) -> Tensor:
        made = given[0].new_empty(place.stop - place.start, factors[0].shape[1])
        _multiply(given[0][place], factors[0], added, made)
        for rows_RF, factor in zip(given[1:], factors[1:], strict=True):
            torch.addmm(made, rows_RF[place], factor, out=made)
        return made

    return summed(partial, rows, group)


def _multiply(rows_RD: Tensor, factor: Tensor, bias: Tensor | None, into: Tensor) -> None:
    """Compute `functional.linear` into an existing tensor."""
    if bias is None:
        torch.mm(rows_RD, factor, out=into)
    else:
        torch.addmm(bias, rows_RD, factor, out=into)
