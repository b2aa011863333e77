"""DeepSpeed's engine of one stage: what is kept of it, and what keeps it from doing the rest.

Kept are its optimizers (ZeRO-1, bf16), its reduction of gradients and its configuration. It neither
computes nor moves a slot and takes no norm: `UnitEngine` does. The numbers in the comments are the
traps listed in docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import nn

from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.runtime.engine.optimizer import add_at_once, step_unchecked
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.spec.stage_graph import RankCoords


class StageModule(PipelineModule):
    """The layers of one stage under DeepSpeed's pipeline type, without its uniform grid (trap
    2)."""

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


class StageEngine(PipelineEngine):
    """One rank's weights under DeepSpeed: reduction of their gradients, and optimizer."""

    _starting = True

    def __init__(
        self, module: StageModule, optimizer: torch.optim.Optimizer | None, config: dict[str, Any]
    ) -> None:
        super().__init__(
            args=None,
            model=module,
            optimizer=optimizer,
            mpu=module.mpu(),
            config=config,
            config_class=DeepSpeedConfig(config, module.mpu()),
        )
        self._starting = False
        if self.using_bf16_optimizer:  # trap 8 forbids a subclass
            self.optimizer.step = partial(step_unchecked, self.optimizer)
            add_at_once(self.optimizer)

    def is_first_stage(self) -> bool:
        """Both ends while starting: its ping-pong with neighbours assumes equal DP (trap 3)."""
        return self._starting or super().is_first_stage()

    def is_last_stage(self) -> bool:
        return self._starting or super().is_last_stage()

    @contextmanager
    def backward_under_way(self) -> Iterator[None]:
        """Gradients that are made inside are its own business (trap 28)."""
        self._running_engine_backward = True
        try:
            yield
        finally:
            self._running_engine_backward = False

    def complete_gradients(self) -> None:
        """Zeros where a replica's layers had nothing to do (trap 30)."""
        if not self.using_bf16_optimizer:
            for parameter in self.module.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

    def reduce(self) -> None:
        """Sum the gradients over the replicas."""
        if self.using_bf16_optimizer:  # in place; stock DeepSpeed copies up to 500 million of them
            for gradients in self.optimizer.fp32_groups_gradients_flat:
                dist.all_reduce(gradients, group=self.mpu.get_data_parallel_group())
            return
        self._exec_reduce_grads()

    def take_step(self) -> None:
        """Let the optimizer step with the gradients as they are, and forget them."""
        self._force_grad_boundary = True
        self._take_model_step(None)
        self._force_grad_boundary = False
