"""How the weights of a layer are divided over a tensor-parallel group (Megatron-LM, Shoeybi et al.
2019, section 3).

A column-parallel linear is divided by its outputs and the row-parallel linear after it by its
inputs: between the two every rank has its own heads or features and nothing is sent. What a
row-parallel linear gives is a partial sum over the group; its bias, which every rank has whole, is
added after the sum. The gradient of a column-parallel linear's input is a partial sum too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Division:
    """Which linears and embeddings of a layer are divided, by the end of their path; all else is
    whole on every rank.

    An embedding divided by ids gives partial sums (zero for ids of other ranks); a linear divided
    by ids gives the logits of its ids.
    """

    column: tuple[str, ...] = ()
    # column-parallel, its outputs two halves (value and gate) that are divided alike
    fused: tuple[str, ...] = ()
    thirds: tuple[str, ...] = ()  # the same of three: an attention's queries, keys and values
    quarters: tuple[str, ...] = ()  # and of four: an FFN's whose features go beside an attention's
    row: tuple[str, ...] = ()
    # row-parallel, its inputs five parts: an attention's features and the FFN's four
    fifths: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()  # divided by token ids
    # whole on every rank, which sees its own heads with them (norms of queries and keys)
    per_head: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Row-parallel linears, and how many parts of their inputs are divided alike."""
        return (self.row, 1), (self.fifths, 5)


@dataclass(frozen=True)
class Shard:
    """Which part of a whole tensor one TP rank holds: a `tp`-th of a dimension, of each of its
    `halves` alike."""

    dim: int
    halves: int
    tp: int
    rank: int


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """What part of the whole a parameter is; None where every TP rank has all of it."""
    return getattr(parameter, "shard", None)


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the tensor that a parameter is a part of."""
    shape, shard = list(parameter.shape), shard_of(parameter)
    if shard is not None:
        shape[shard.dim] *= shard.tp
    return tuple(shape)


def piece(whole: Tensor, shard: Shard | None) -> Tensor:
    """A rank's part of a whole tensor, as a view where that is possible."""
    if shard is None:
        return whole
    halves = whole.unflatten(shard.dim, (shard.halves, -1))
    return halves.chunk(shard.tp, shard.dim + 1)[shard.rank].flatten(shard.dim, shard.dim + 1)


class WithoutBias(nn.Linear):
    """A row-parallel linear on all ranks but the first, which adds the bias once."""

    def forward(self, given: Tensor) -> Tensor:
        return functional.linear(given, self.weight)


def own_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, stop) of the rows of a state tensor that one of so many ranks holds: ⌈rows / ranks⌉,
    the last ones fewer or none."""
    most = -(-rows // ranks)
    return min(rows, rank * most), min(rows, (rank + 1) * most)


@dataclass(frozen=True)
class Place:
    """A rank's place among those that share the work of a replica on a stage."""

    tp: int = 1
    tp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    gathers: bool = False  # keys and values: tokens are levelled then (`levelling`)
    # modules whole on every TP rank, each of which works on items of its own (`replicated`)
    replicated: frozenset[str] = frozenset()

    def own_rows(self, rows: int) -> tuple[int, int]:
        """(start, stop) of the rows of a split state tensor that the rank holds: those of its TP
        group, divided over the TP ranks in the same way."""
        start, stop = self.of_group(rows)
        first, last = own_rows(stop - start, self.tp, self.tp_rank)
        return start + first, start + last

    def of_group(self, rows: int) -> tuple[int, int]:
        """(start, stop) of the rows of a tensor, or the tokens of a replica's sequences, that the
        rank and its TP group work on."""
        return own_rows(rows, self.cp, self.cp_rank)
