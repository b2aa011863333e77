"""DeepSpeed's engine of one stage, reduced to the parts that are used.

In use are its optimizers' states (ZeRO-1, bf16) and its configuration. It neither computes nor
moves a slot and computes no norm (`UnitEngine` does), reduces no gradients (`reduction`) and
gathers no weights (`partitions`). The numbers in the comments are the traps listed in
docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import groups as deepspeed_groups
from torch import nn

from disttrain_cli.models.division import of_experts
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.runtime.engine.optimizer import groups_of
from disttrain_cli.runtime.engine.partitions import (
    Gathering,
    add_at_once,
    own_values,
    partitions_of,
    step_by_group,
)
from disttrain_cli.runtime.engine.reduction import Reduction
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.spec.stage_graph import RankCoords

#: DeepSpeed's name of the group of ranks with the same experts.
_EXPERTS = "experts"


class StageModule(PipelineModule):
    """Layers of one stage as DeepSpeed's pipeline module, without its uniform grid (trap 2)."""

    def __init__(self, layers: Sequence[PipelineLayer], grid: UnitGrid, coords: RankCoords) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(layers)
        self._grid, self._topo = grid, grid.topology()
        self._local_start, self._local_stop = coords.stage.layers.start, coords.stage.layers.stop
        self.stage_id, self.num_stages = grid.stage_id, grid.pipe_parallel_size
        self.global_rank, self.world_size = coords.rank, grid.world_size
        self.loss_fn, self.tied_modules = None, nn.ModuleDict()
        self.tied_comms: dict[str, Any] = {}
        self.activation_checkpoint_interval = 0
        self.dynamic_shape = True
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def mpu(self) -> UnitGrid:
        return self._grid


def _register_experts(module: StageModule, parameters: Sequence[dict[str, Any]]) -> None:
    """Make DeepSpeed partition and broadcast experts over the ranks that hold the same (trap 38).

    Args:
        parameters: the optimizer's groups.
    """
    names = {_EXPERTS, *(group["name"] for group in parameters if group["moe"])}
    ranks = module.mpu().expert_replicas.ranks
    deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP = dict.fromkeys(names, ranks)
    for parameter in filter(of_experts, module.parameters()):
        parameter.allreduce, parameter.group_name = False, _EXPERTS


class StageEngine(PipelineEngine):
    """One rank's weights under DeepSpeed: reduction of their gradients, optimizer, and gathering.

    Args:
        overlap: True to reduce gradients during the last pass of a step that computes any, and to
            gather weights during the next step's forwards.
    """

    _starting = True

    def __init__(
        self,
        module: StageModule,
        optimizer: torch.optim.Optimizer | None,
        config: dict[str, Any],
        overlap: bool = False,
    ) -> None:
        device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
        grid, parameters = module.mpu(), optimizer.param_groups if optimizer is not None else []
        self._moe = any(group["moe"] for group in parameters)
        _register_experts(module, parameters)
        replicas = [grid.expert_replicas if group["moe"] else grid.replicas for group in parameters]
        # DeepSpeed copies the fp32 masters from weights that it has rounded to bf16 (trap 37)
        values = [
            own_values(group["params"], of_group.size, of_group.rank)
            for group, of_group in zip(parameters, replicas, strict=True)
            if "bf16" in config
        ]
        super().__init__(
            # not LOCAL_RANK: a rank may see only its device, or share one (trap 36)
            args=SimpleNamespace(device_rank=device.index or 0),
            model=module,
            optimizer=optimizer,
            mpu=grid,
            config=config,
            config_class=DeepSpeedConfig(config, grid),
        )
        self._starting = False
        partitions = partitions_of(self.optimizer, [of_group.rank for of_group in replicas])
        joined = [of_group.ranks if of_group.size > 1 else None for of_group in replicas]
        for one, values_P in zip(partitions, values, strict=bool(values)):
            one.master_P.data.copy_(values_P)
        self.gathering = Gathering(partitions, joined, module.layers if overlap else ())
        if partitions:  # trap 8 forbids a subclass
            self.optimizer.step = partial(step_by_group, self.optimizer, partitions, self.gathering)
        if self.using_bf16_optimizer:
            add_at_once(pair for one in partitions for pair in one.sums)
        weights = [one.weights for one in partitions] or [
            group["params"] for group in groups_of(self.optimizer)
        ]
        self.reduction = Reduction(weights, partitions, joined, overlap)

    def _configure_distributed_model(self, model: nn.Module) -> None:
        self.has_moe_layers = self._moe  # otherwise only with modules of DeepSpeed's (trap 38)
        super()._configure_distributed_model(model)

    def _broadcast_model(self) -> None:
        """Broadcast the first replica's weights, as vectors where DeepSpeed fails for scalars."""
        scalars = [weight for weight in self.module.parameters() if not weight.ndim]
        for weight in scalars:
            weight.data = weight.data.view(1)
        super()._broadcast_model()
        for weight in scalars:
            weight.data = weight.data.view(())

    def is_first_stage(self) -> bool:
        """Return True during construction: DeepSpeed's ping-pong test assumes equal DP (trap 3)."""
        return self._starting or super().is_first_stage()

    def is_last_stage(self) -> bool:
        return self._starting or super().is_last_stage()

    @contextmanager
    def backward_under_way(self) -> Iterator[None]:
        """Mark a backward as running: DeepSpeed refuses one that it did not start (trap 28)."""
        self._running_engine_backward = True
        try:
            yield
        finally:
            self._running_engine_backward = False

    def take_step(self) -> None:
        """Step the optimizer with the current gradients, and clear them."""
        self._force_grad_boundary = True
        self._take_model_step(None)
        self._force_grad_boundary = False
