"""Process groups of one rank, as DeepSpeed asks for them and as the engine uses them.

Units differ in DP, CP and TP sizes, so groups and sizes are those of the caller's unit. Every rank
creates every group in the same order (`communicators`). To DeepSpeed all ranks that hold the same
weights are data parallel, including those of a CP group, and nothing is model parallel. Where EP is
above 1, experts have replicas of their own.
"""

from __future__ import annotations

import torch.distributed as dist

from disttrain_cli.models.group import Group
from disttrain_cli.runtime.units import communicators
from disttrain_cli.spec.stage_graph import RankCoords, StageGraph


class UnitGrid:
    """Groups and sizes for the caller's coordinates, with the getters that DeepSpeed calls."""

    tp: Group | None = None  # the TP group, if it has more than one rank
    cp: Group | None = None  # the CP group, likewise
    ep: Group | None = None  # the EP group, likewise
    replicas: Group  # ranks with the same weights
    replica_ranks: list[int]  # their numbers
    expert_replicas: Group  # ranks with the same experts: `replicas` where EP is 1
    # this rank and its tied-embedding peer, if any
    twins: dist.ProcessGroup | None = None
    # all groups of this rank by name, in order of creation
    groups: dict[str, dist.ProcessGroup]
    ways: communicators.Ways  # for messages to and from neighbouring stages; empty for gloo
    # (True if this rank sends, its peers) by names of the groups of `ways`
    exchanges: dict[str, tuple[bool, list[int]]]

    def __init__(self, graph: StageGraph, coords: RankCoords) -> None:
        self.groups, self.ways, self.exchanges = {"world": dist.group.WORLD}, {}, {}
        for one in communicators.communicators(graph, messages=communicators.in_order()):
            group = dist.new_group(
                list(one.ranks),
                group_desc=one.name,
                pg_options=communicators.nccl_options(one.kind, dist.get_backend()),
            )
            if coords.rank in one.ranks:
                self.groups[one.name] = group
                self._join(one, group, coords)
                if one.ways:
                    self.exchanges[one.name] = (
                        coords.rank in graph.stages[one.ways[0][0]].ranks,
                        communicators.peers(graph, one.ways[0], coords.rank),
                    )

    def _join(
        self, one: communicators.Communicator, group: dist.ProcessGroup, coords: RankCoords
    ) -> None:
        if one.kind == "data parallel":
            self.replica_ranks = list(one.ranks)
            self.replicas = Group(group, len(one.ranks), coords.holder)
            self.expert_replicas = self.replicas
        elif one.kind == "tensor parallel":
            self.tp = Group(group, coords.unit.tp, coords.tp_rank, coords.unit.tp_overlap)
        elif one.kind == "context parallel":
            self.cp = Group(group, coords.unit.cp, coords.cp_rank, gathers=coords.unit.gathers)
        elif one.kind == "expert parallel":
            self.ep = Group(group, coords.unit.ep, coords.ep_rank, coords.unit.ep_overlap)
        elif one.kind == "expert replicas":
            self.expert_replicas = Group(group, len(one.ranks), coords.expert_holder)
        elif one.kind == "tied weights":
            self.twins = group
        self.ways |= dict.fromkeys(one.ways, group)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        return self.replicas.ranks

    def get_data_parallel_group_ranks(self) -> list[int]:
        return self.replica_ranks

    def get_data_parallel_world_size(self) -> int:
        return self.replicas.size

    def get_model_parallel_group(self) -> None:
        """Return no group: norms are computed by our engine."""

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0
