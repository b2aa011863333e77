"""Tensor-parallel sharding of a layer's weights (Megatron-LM, Shoeybi et al. 2019, section 3).

A column-parallel linear is sharded by its outputs and the row-parallel linear after it by its
inputs: between the two every rank has its own heads or features and nothing is communicated. The
output of a row-parallel linear is a partial sum over the group; its bias, replicated on every rank,
is added after the sum. The gradient of a column-parallel linear's input is a partial sum, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Division:
    """Sharded linears and embeddings of a layer, by the end of their path; all else is replicated.

    An embedding sharded by ids returns partial sums (zero for ids of other ranks); a linear sharded
    by ids returns the logits of its ids.
    """

    column: tuple[str, ...] = ()
    # column-parallel with two packed parts (value and gate), each sharded alike:
    # packed_colwise(parts=2)
    fused: tuple[str, ...] = ()
    thirds: tuple[str, ...] = ()  # three packed parts: an attention's queries, keys, values
    quarters: tuple[str, ...] = ()  # four packed parts: Q, K, V and a parallel FFN's features
    row: tuple[str, ...] = ()
    # row-parallel whose inputs are five packed parts: an attention's features and the FFN's four
    fifths: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()  # sharded by token ids
    # replicated, but applied to the rank's local heads only (norms of queries and keys)
    per_head: tuple[str, ...] = ()

    @property
    def inputs(self) -> tuple[tuple[tuple[str, ...], int], ...]:
        """Row-parallel linears, with the number of packed parts of their inputs."""
        return (self.row, 1), (self.fifths, 5)


@dataclass(frozen=True)
class Shard:
    """Shard of a tensor on one TP rank: a `tp`-th of `dim` in each of `halves` packed parts."""

    dim: int
    halves: int
    tp: int
    rank: int


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """Return the shard that a parameter is; None if every TP rank has the full tensor."""
    return getattr(parameter, "shard", None)


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the unsharded shape of a parameter."""
    shape, shard = list(parameter.shape), shard_of(parameter)
    if shard is not None:
        shape[shard.dim] *= shard.tp
    return tuple(shape)


def piece(whole: Tensor, shard: Shard | None) -> Tensor:
    """Return a rank's shard of a full tensor, as a view if possible."""
    if shard is None:
        return whole
    halves = whole.unflatten(shard.dim, (shard.halves, -1))
    return halves.chunk(shard.tp, shard.dim + 1)[shard.rank].flatten(shard.dim, shard.dim + 1)


class WithoutBias(nn.Linear):
    """Row-parallel linear on all ranks but the first, which alone adds the bias."""

    def forward(self, given: Tensor) -> Tensor:
        return functional.linear(given, self.weight)


def own_rows(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return (start, stop) of a TP rank's rows of a state tensor.

    Ranks have ⌈rows / tp⌉ rows, the last ones fewer or none.
    """
    most = -(-rows // ranks)
    return min(rows, rank * most), min(rows, (rank + 1) * most)


@dataclass(frozen=True)
class Place:
    """Rank coordinates within the TP and CP groups that share a replica's work on a stage."""

    tp: int = 1
    tp_rank: int = 0
    cp: int = 1
    cp_rank: int = 0
    gathers: bool = False  # CP all-gathers K and V; tokens are balanced (`levelling`)
    # modules replicated on every TP rank, each rank with items of its own (`replicated`)
    replicated: frozenset[str] = frozenset()

    def own_rows(self, rows: int) -> tuple[int, int]:
        """Return (start, stop) of the rank's rows of a sharded state tensor.

        They are its TP group's rows, divided over the TP ranks.
        """
        start, stop = self.of_group(rows)
        first, last = own_rows(stop - start, self.tp, self.tp_rank)
        return start + first, start + last

    def of_group(self, rows: int) -> tuple[int, int]:
        """Return (start, stop) of the rows, or of a replica's tokens, of the rank's TP group."""
        return own_rows(rows, self.cp, self.cp_rank)
