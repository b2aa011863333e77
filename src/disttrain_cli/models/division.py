"""Tensor-parallel sharding of a layer's weights (Megatron-LM, Shoeybi et al. 2019, section 3).

A column-parallel linear is sharded by its outputs and the row-parallel linear after it by its
inputs: between the two every rank has its own heads or features and nothing is communicated. The
output of a row-parallel linear is a partial sum over the group; its bias, replicated on every rank,
is added after the sum. The gradient of a column-parallel linear's input is a partial sum, too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Sharding:
    """Dimension of a weight that TP ranks divide, and the packed parts that are divided alike.

    Packed parts are given by their relative widths. A linear is sharded by its outputs (0) or its
    inputs (1), a depthwise convolution by its channels (0), a vector by its entries (0).
    """

    dim: int | None  # None: replicated, but applied to the rank's local heads only
    packed: tuple[int, ...] = (1,)
    #: Sharded by token ids: an embedding returns partial sums (zero for ids of other ranks), a
    #: linear the logits of its ids.
    vocabulary: bool = False


#: Sharded weights of a layer, by the end of the path of a module or parameter, as in transformers'
#: `base_model_tp_plan`; all else is replicated.
Division = dict[str, Sharding]
REPLICATED: Division = {}


def colwise(*ends: str, packed: tuple[int, ...] = (1,)) -> Division:
    """Return modules and parameters that are sharded by outputs, channels or entries."""
    return dict.fromkeys(ends, Sharding(0, packed))


def rowwise(*ends: str, packed: tuple[int, ...] = (1,)) -> Division:
    """Return linears that are sharded by inputs."""
    return dict.fromkeys(ends, Sharding(1, packed))


def vocabulary(*ends: str) -> Division:
    """Return embeddings and linears that are sharded by token ids."""
    return dict.fromkeys(ends, Sharding(0, vocabulary=True))


def per_head(*ends: str) -> Division:
    """Return replicated modules that are applied to local heads: norms of queries and keys."""
    return dict.fromkeys(ends, Sharding(None))


def sharding_of(division: Division, path: str) -> Sharding | None:
    """Return the sharding of a submodule or parameter; None if it is not listed."""
    return next(
        (one for end, one in division.items() if path == end or path.endswith(f".{end}")), None
    )


def by_ids(division: Division, path: str) -> bool:
    """Return True if a submodule is sharded by token ids, of which it has a row each."""
    sharding = sharding_of(division, path)
    return sharding is not None and sharding.vocabulary


@dataclass(frozen=True)
class Shard:
    """Shard of a tensor on one TP or EP rank: a `tp`-th of `dim` in each of its packed parts."""

    dim: int
    packed: tuple[int, ...]  # relative widths of the parts
    tp: int
    rank: int
    of_experts: bool = False  # its ranks are an EP group's

    def widths(self, size: int) -> list[int]:
        """Return the widths of the packed parts of a dimension of this size."""
        return [size * part // sum(self.packed) for part in self.packed]


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """Return the shard that a parameter is; None if every TP rank has the full tensor."""
    return getattr(parameter, "shard", None)


def of_experts(parameter: nn.Parameter) -> bool:
    """Return True if a parameter holds some of the experts: those of one rank of an EP group."""
    shard = shard_of(parameter)
    return shard is not None and shard.of_experts


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the unsharded shape of a parameter."""
    shape, shard = list(parameter.shape), shard_of(parameter)
    if shard is not None:
        shape[shard.dim] *= shard.tp
    return tuple(shape)


def piece(whole: Tensor, shard: Shard | None) -> Tensor:
    """Return a rank's shard of a full tensor, as a view if it is not packed."""
    if shard is None:
        return whole
    parts = whole.split(shard.widths(whole.shape[shard.dim]), shard.dim)
    local = [part.chunk(shard.tp, shard.dim)[shard.rank] for part in parts]
    return local[0] if len(local) == 1 else torch.cat(local, shard.dim)


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
