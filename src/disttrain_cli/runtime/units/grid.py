"""DeepSpeed's grid over a ragged graph of ranks, where units differ in DP, CP and TP sizes.

DeepSpeed reads groups and sizes from its grid; here they are those of the caller's unit. Every rank
creates every group in the same order (`communicators`). The model-parallel group is the world,
whose ranks are counted by stage and TP rank so that different weights have different ranks;
DeepSpeed does not know of TP itself. To DeepSpeed all ranks that hold the same weights are data
parallel, including those of a CP group. Where EP is above 1, experts have replicas of their own.
"""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology

from disttrain_cli.models.group import Group
from disttrain_cli.runtime.units import communicators
from disttrain_cli.spec.stage_graph import Coordinates, RankCoords, StageGraph


class RaggedTopology(ProcessTopology):
    """Coordinates (pipe, data, model) of all ranks; `get_dim` depends on the caller's unit.

    This holds for `get_dim('data')` and `get_dim('model')`.
    """

    def __init__(self, graph: StageGraph, coords: RankCoords) -> None:
        super().__init__(axes=list(Coordinates._fields), dims=[0, 0, 0])
        self.dims = [len(graph.stages), coords.unit.dp_cp_size, coords.unit.tp]
        self.mapping = graph.rank_by_coordinates


class UnitGrid(PipelineParallelGrid):
    """Groups and sizes for the caller's coordinates; the getters are DeepSpeed's own."""

    tp: Group | None = None  # the TP group, if it has more than one rank
    cp: Group | None = None  # the CP group, likewise
    ep: Group | None = None  # the EP group, likewise
    replicas: Group  # ranks with the same weights
    expert_replicas: Group  # ranks with the same experts: `replicas` where EP is 1
    # this rank and its tied-embedding peer, if any
    twins: dist.ProcessGroup | None = None
    # all groups of this rank by name, in order of creation
    groups: dict[str, dist.ProcessGroup]
    ways: communicators.Ways  # for messages to and from neighbouring stages; empty for gloo
    # (True if this rank sends, its peers) by names of the groups of `ways`
    exchanges: dict[str, tuple[bool, list[int]]]

    def __init__(self, graph: StageGraph, coords: RankCoords) -> None:
        self._topo = RaggedTopology(graph, coords)
        self.global_rank = coords.rank
        self.world_size = graph.world_size
        self.data_parallel_size = coords.unit.dp_cp_size
        self.pipe_parallel_size = len(graph.stages)
        self.model_parallel_size = self.slice_parallel_size = 1
        self.stage_id = coords.stage.number
        self.data_parallel_id = coords.holder
        self.is_first_stage = self.is_last_stage = True
        self.ds_model_proc_group = dist.group.WORLD
        self.ds_model_world_size = sum(stage.tp for stage in graph.stages)
        self.ds_model_rank = (
            sum(stage.tp for stage in graph.stages[: coords.stage.number]) + coords.tp_rank
        )
        self.dp_groups: list[list[int]] = []
        self.p2p_groups: list[list[int]] = []
        self.groups, self.ways, self.exchanges = {"world": dist.group.WORLD}, {}, {}
        for one in communicators.communicators(graph, messages=communicators.in_order()):
            group = dist.new_group(
                list(one.ranks),
                group_desc=one.name,
                pg_options=communicators.nccl_options(one.kind, dist.get_backend()),
            )
            if one.kind == "data parallel":
                self.dp_groups.append(list(one.ranks))
            if coords.rank in one.ranks:
                self.groups[one.name] = group
                self._join(one, group, coords)
                if one.way is not None:
                    self.exchanges[one.name] = (
                        coords.stage.number == one.way[0],
                        communicators.peers(graph, one.way, coords.rank),
                    )
        self.pp_group, self.pp_proc_group = list(range(self.world_size)), dist.group.WORLD
        self.slice_group, self.slice_proc_group = [coords.rank], None

    def _join(
        self, one: communicators.Communicator, group: dist.ProcessGroup, coords: RankCoords
    ) -> None:
        if one.kind == "data parallel":
            self.dp_group, self.dp_proc_group = list(one.ranks), group
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
        elif one.way is not None:
            self.ways[one.way] = group
