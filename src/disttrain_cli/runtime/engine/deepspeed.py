"""DeepSpeed's engine of one rank, reduced to the parts that are used.

In use are its optimizers' states (ZeRO-1, bf16), its configuration and its broadcast of weights. It
neither computes nor moves a slot and computes no norm (`UnitEngine` does), reduces no gradients
(`reduction`), and neither steps nor gathers partitioned weights (`partitions`). The numbers in the
comments are the traps listed in docs/deepspeed.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
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

#: DeepSpeed's name of the group of ranks with the same experts.
_EXPERTS = "experts"


class StageEngine(DeepSpeedEngine):
    """One rank's weights under DeepSpeed: reduction of their gradients, optimizer, and gathering.

    Args:
        layers: of the rank; also `module.layers`.
        config: DeepSpeed's configuration (`assemble.deepspeed_config`).
        overlap: True to reduce gradients during the last pass of a step that computes any, and to
            gather weights during the next step's forwards.
    """

    def __init__(
        self,
        layers: Sequence[PipelineLayer],
        grid: UnitGrid,
        optimizer: torch.optim.Optimizer | None,
        config: dict[str, Any],
        overlap: bool = False,
    ) -> None:
        module = nn.Module()
        module.layers = nn.ModuleList(layers)
        device = next((weight.device for weight in module.parameters()), torch.device("cpu"))
        parameters = optimizer.param_groups if optimizer is not None else []
        # DeepSpeed partitions and broadcasts experts over the ranks that hold the same (trap 38)
        names = {_EXPERTS, *(group["name"] for group in parameters if group["moe"])}
        self._moe = len(names) > 1
        deepspeed_groups._EXPERT_DATA_PARALLEL_GROUP = dict.fromkeys(
            names, grid.expert_replicas.ranks
        )
        for parameter in filter(of_experts, module.parameters()):
            parameter.allreduce, parameter.group_name = False, _EXPERTS
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
        self._running_engine_backward = True  # it refuses a backward of others (trap 28)
        partitions = partitions_of(self.optimizer, [of_group.rank for of_group in replicas])
        joined = [of_group.ranks if of_group.size > 1 else None for of_group in replicas]
        for one, values_P in zip(partitions, values, strict=bool(values)):
            one.master_P.data.copy_(values_P)
        self._partitions = partitions
        self.gathering = Gathering(partitions, joined, layers if overlap else ())
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

    def take_step(self) -> None:
        """Step the optimizer with the current gradients, and clear them."""
        if self._partitions:
            step_by_group(self.optimizer, self._partitions, self.gathering)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
