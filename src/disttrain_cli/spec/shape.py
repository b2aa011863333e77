"""Degrees of parallelism of a unit, as one record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

#: Communication of a CP group in attention, named as in Megatron-LM: rows are exchanged for heads
#: (all-to-all), or keys and values are gathered (all-gather).
CpCommType = Literal["a2a", "all_gather"]


@dataclass(frozen=True, order=True, kw_only=True, slots=True)
class ParallelShape:
    """Degrees of parallelism of a unit, without its layers per stage."""

    tp: int = 1
    cp: int = 1
    ep: int = 1  # divides the ranks of a stage, tp × cp × dp
    dp: int = 1
    pp: int = 1
    recompute: bool = False
    cp_comm_type: CpCommType = "a2a"
    ep_overlap: bool = False  # exchanges of an EP group overlap with experts
    # nodes with an equal run of an EP group's ranks; 0: those of a unit that begins with a node
    ep_nodes: int = 0

    @property
    def tp_cp_size(self) -> int:
        """Ranks that share the work of a replica on one stage."""
        return self.tp * self.cp

    @property
    def dp_cp_size(self) -> int:
        """Ranks that hold the same weights."""
        return self.dp * self.cp

    @property
    def gpus(self) -> int:
        return self.tp_cp_size * self.dp * self.pp

    @property
    def of_replica(self) -> ParallelShape:
        """Shape of one stage of one replica: without DP and PP."""
        return replace(self, dp=1, pp=1)
