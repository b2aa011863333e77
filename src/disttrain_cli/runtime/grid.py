"""DeepSpeed's view of the ranks: a ragged topology and grid in which every unit has its own DP size.

DeepSpeed asks its grid for groups and sizes; here the answers are those of the caller's own unit. Every rank
creates every group in the same order. The model-parallel group is the world: norms are reduced over all units.
"""

from __future__ import annotations

import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, ProcessTopology

from disttrain_cli.runtime.topology import Place, Topology


class RaggedTopology(ProcessTopology):
    """Coordinates (pipe, data) of all ranks; `get_dim('data')` answers for the caller's unit."""

    def __init__(self, topology: Topology, place: Place) -> None:
        super().__init__(axes=["pipe", "data"], dims=[0, 0])
        self.dims = [len(topology.stages), place.unit.dp]
        self.mapping = {self.ProcessCoord(pipe=stage.number, data=replica): rank
                        for stage in topology.stages for replica, rank in enumerate(stage.ranks)}


class UnitGrid(PipelineParallelGrid):
    """Groups and sizes of the caller's place; the getters are DeepSpeed's own."""

    def __init__(self, topology: Topology, place: Place) -> None:
        self._topo = RaggedTopology(topology, place)
        self.global_rank = place.rank
        self.world_size = topology.world_size
        self.data_parallel_size = place.unit.dp
        self.pipe_parallel_size = len(topology.stages)
        self.model_parallel_size = self.slice_parallel_size = 1
        self.stage_id = place.stage.number
        self.data_parallel_id = place.replica
        self.is_first_stage = self.is_last_stage = True
        self.ds_model_proc_group = dist.group.WORLD
        self.ds_model_world_size = self.pipe_parallel_size
        self.ds_model_rank = self.stage_id
        self.dp_groups = [list(stage.ranks) for stage in topology.stages]
        self.p2p_groups: list[list[int]] = []
        for stage in topology.stages:
            group = dist.new_group(list(stage.ranks))
            if stage is place.stage:
                self.dp_group, self.dp_proc_group = list(stage.ranks), group
        self.pp_group, self.pp_proc_group = list(range(self.world_size)), dist.group.WORLD
        self.slice_group, self.slice_proc_group = [place.rank], None
