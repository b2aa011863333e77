"""The engine: DeepSpeed's pipeline engine, driven over units of different shape.

What is kept of DeepSpeed: its schedule, ZeRO-1 and bf16 optimizers, gradient reduction, accelerator handling.
What is replaced: how a slot is loaded, computed and moved (`StageRunner`, `Broker`), and how the gradient norm is
taken (once over all units: replicas hold equal gradients, so each rank counts its own partition or share).
The numbers in the comments are the traps listed in docs/deepspeed.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import Tensor, nn

from disttrain_cli.data.slots import ReplicaItems, Slot, StepOrder
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.runtime.broker import Broker
from disttrain_cli.runtime.grid import UnitGrid
from disttrain_cli.runtime.stage import StageRunner
from disttrain_cli.runtime.topology import Place
from disttrain_cli.runtime.tracing import Tracer


class StageModule(PipelineModule):
    """The layers of one stage under DeepSpeed's pipeline type, without its uniform grid (trap 2)."""

    def __init__(self, layers: Sequence[PipelineLayer], grid: UnitGrid, place: Place) -> None:
        nn.Module.__init__(self)
        self.layers = nn.ModuleList(layers)
        self._grid, self._topo = grid, grid.topology()
        self._local_start, self._local_stop = place.stage.layers.start, place.stage.layers.stop
        self.stage_id, self.num_stages = grid.stage_id, grid.pipe_parallel_size
        self.global_rank, self.world_size = place.rank, grid.world_size
        self.loss_fn, self.tied_modules = None, nn.ModuleDict()
        self.tied_comms: dict[str, Any] = {}
        self.activation_checkpoint_interval = 0
        self.dynamic_shape = True
        for parameter in self.parameters():
            parameter.ds_pipe_replicated = False

    def mpu(self) -> UnitGrid:
        return self._grid


class UnitEngine(PipelineEngine):
    """One rank's engine. `run_step` executes one optimizer step."""

    _starting = True

    def __init__(self, module: StageModule, optimizer: torch.optim.Optimizer, config: dict[str, Any],
                 runner: StageRunner, upstream: Broker | None, downstream: Broker | None, place: Place,
                 tracer: Tracer, module_kinds: Mapping[str, str]) -> None:
        super().__init__(args=None, model=module, optimizer=optimizer, mpu=module.mpu(), config=config,
                         config_class=DeepSpeedConfig(config, module.mpu()))
        self._starting = False
        self.runner, self.upstream, self.downstream = runner, upstream, downstream
        self.place, self.tracer, self.module_kinds = place, tracer, module_kinds
        self.order: StepOrder
        self.fetch: Callable[[int], Batch]
        self.data_wait_ns = 0
        self._patch_norm()

    # ---- DeepSpeed's questions -------------------------------------------------------------------------------
    def is_first_stage(self) -> bool:
        """Both ends while starting: its ping-pong with neighbours assumes equal DP (trap 3)."""
        return self._starting or super().is_first_stage()

    def is_last_stage(self) -> bool:
        return self._starting or super().is_last_stage()

    def _patch_norm(self) -> None:
        """One norm over all units, and every replica's gradients counted once (traps 5-8, 30, 33)."""
        optimizer = self.optimizer
        if hasattr(optimizer, "fp32_groups_gradient_flat_partition"):  # bf16, ZeRO-1
            def partitions(for_clipping: bool = False) -> Any:
                if for_clipping:
                    return optimizer.fp32_groups_gradients_flat
                return optimizer.fp32_groups_gradient_flat_partition, {}
            optimizer.get_grads_for_norm = partitions
        elif hasattr(optimizer, "scaled_global_norm"):  # fp32, ZeRO-1
            optimizer.scaled_global_norm = lambda norm_type=2: _world_norm(
                [g for group in optimizer.averaged_gradients.values() for g in group], 1.0, self.device)

    def clip_fp32_gradients(self) -> None:
        """Clip without ZeRO: every replica holds the whole gradient, so each counts 1 / DP of it."""
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        self._global_grad_norm = _world_norm(gradients, 1.0 / self.place.unit.dp, self.device)
        scale = self.gradient_clipping() / (float(self._global_grad_norm) + 1e-6)
        if scale < 1.0:
            torch._foreach_mul_(gradients, scale)

    # ---- one step --------------------------------------------------------------------------------------------
    def get_ready(self) -> None:
        """Called before the clock of a step starts: a rank begins as soon as it can."""

    def run_step(self, order: StepOrder, fetch: Callable[[int], Batch], learning_rate: float) -> None:
        """Train on the global batch of `order`; `fetch(slot)` waits for this rank's inputs of a slot."""
        self.order, self.fetch, self.data_wait_ns = order, fetch, 0
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.module.train()
        self._exec_schedule(schedule.TrainSchedule(micro_batches=len(order.slots), stages=self.num_stages,
                                                   stage_id=self.stage_id))

    def grad_norm(self) -> float:
        """Global gradient norm of the last step, before clipping."""
        return math.nan if self._global_grad_norm is None else float(self._global_grad_norm)

    def _exec_schedule(self, pipe_schedule: schedule.PipeSchedule) -> None:
        """Execute DeepSpeed's schedule; its buffers become slot numbers, which every instruction here needs."""
        self._state: dict[int, dict[str, Tensor]] = {}  # slot → tensors waiting between two instructions
        forwards, backwards = 0, 0
        for commands in pipe_schedule:
            for command in sorted(commands, key=self._late):
                kind = type(command)
                if kind in (schedule.RecvActivation, schedule.ForwardPass):
                    slot = forwards
                elif kind is schedule.SendActivation:
                    slot = forwards - 1
                elif kind in (schedule.RecvGrad, schedule.BackwardPass):
                    slot = backwards
                elif kind is schedule.SendGrad:
                    slot = backwards - 1
                else:
                    slot = -1
                getattr(self, self._INSTRUCTION_MAP[kind])(slot)
                forwards += kind is schedule.ForwardPass
                backwards += kind is schedule.BackwardPass

    def _late(self, command: schedule.PipeInstruction) -> bool:
        """Sends go first where they cannot block (gloo); NCCL keeps the stock order, which pairs both sides."""
        return self.device.type == "cpu" and type(command) not in (schedule.SendActivation, schedule.SendGrad)

    def _receive_activation(self, slot: int) -> None:
        assert self.upstream is not None
        start = self.tracer.now()
        tensors, size, peer = self.upstream.receive(self.order.slots[slot])
        self._state[slot] = tensors
        self.tracer.record("receive_activation", start, slot=slot, bytes=size, peer=peer)

    def _forward(self, slot: int) -> None:
        start = self.tracer.now()
        batch = self.fetch(slot)
        self.data_wait_ns += self.tracer.record("load", start, slot=slot)
        self._state[slot] = self.runner.forward(slot, self._state.pop(slot, {}), batch, self._timed("forward", slot))

    def _send_activation(self, slot: int) -> None:
        assert self.downstream is not None
        start = self.tracer.now()
        size, peer = self.downstream.send(self.order.slots[slot], self._state.pop(slot))
        self.tracer.record("send_activation", start, slot=slot, bytes=size, peer=peer)

    def _receive_gradient(self, slot: int) -> None:
        assert self.downstream is not None
        start = self.tracer.now()
        gradients, size, peer = self.downstream.receive(self.order.slots[slot])
        self._state[slot] = gradients
        self.tracer.record("receive_gradient", start, slot=slot, bytes=size, peer=peer)

    def _backward(self, slot: int) -> None:
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        self._running_engine_backward = True  # trap 28
        gradients = self.runner.backward(slot, self._state.pop(slot, {}), self._timed("backward", slot))
        self._running_engine_backward = False
        if self.using_bf16_optimizer:
            self.optimizer.update_hp_grads(clear_lp_grads=False)
        if self.upstream is not None:
            self._state[slot] = gradients

    def _send_gradient(self, slot: int) -> None:
        assert self.upstream is not None
        start = self.tracer.now()
        size, peer = self.upstream.send(self.order.slots[slot], self._state.pop(slot))
        self.tracer.record("send_gradient", start, slot=slot, bytes=size, peer=peer)

    def _reduce(self, slot: int) -> None:
        start = self.tracer.now()
        waited = [broker.drain() for broker in (self.upstream, self.downstream) if broker is not None]
        if any(waited):
            self.tracer.record("wait", start)
        start = self.tracer.now()
        if not self.using_bf16_optimizer:
            for parameter in self.module.parameters():  # a replica whose layers had nothing to do (trap 30)
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._reduce_gradients()
        self.tracer.record("reduce", start, bytes=sum(p.numel() * p.element_size() for p in self.module.parameters())
                           if self.place.unit.dp > 1 else 0)

    def _step(self, slot: int) -> None:
        start = self.tracer.now()
        self._update()
        self.tracer.record("step", start)

    def _reduce_gradients(self) -> None:
        super()._exec_reduce_grads()

    def _update(self) -> None:
        self._force_grad_boundary = True
        self._take_model_step(None)
        self._force_grad_boundary = False

    def _timed(self, operation: str, slot: int) -> Callable[[str], Callable[[], None]]:
        """Record one trace row per module, with the work that the slot brings to it."""
        def before(module: str) -> Callable[[], None]:
            start = self.tracer.now()

            def after() -> None:
                current = self.order.slots[slot]
                items = current.replicas[self.place.unit.name][self.place.replica]
                self.tracer.record(operation, start, slot=slot, module=module,
                                   **amounts(current, self.module_kinds[module], items))
            return after
        return before

    def _nothing(self, slot: int) -> None:
        """Tied weights do not exist; every stage loads what its layers need in `_forward`."""

    #: By name, so that subclasses may replace one: the base class's map holds its own functions (trap 4).
    _INSTRUCTION_MAP = {  # noqa: RUF012
        schedule.OptimizerStep: "_step",
        schedule.ReduceGrads: "_reduce",
        schedule.ReduceTiedGrads: "_nothing",
        schedule.LoadMicroBatch: "_nothing",
        schedule.ForwardPass: "_forward",
        schedule.BackwardPass: "_backward",
        schedule.SendActivation: "_send_activation",
        schedule.RecvActivation: "_receive_activation",
        schedule.SendGrad: "_send_gradient",
        schedule.RecvGrad: "_receive_gradient",
    }


def amounts(slot: Slot, kind: str, items: ReplicaItems) -> dict[str, int]:
    """What a trace row says of the work that some items of a slot bring to a module of a kind."""
    work = slot.work(kind, items)
    images = {"encoder": len(items.images), "generator": len(items.targets),
              "llm": int(np.isin(slot.image_sequence, items.sequences).sum())}[kind]
    return {"tokens": int(work.tokens), "images": images, "sequences": len(items.sequences),
            "sum_length_sq": int(work.sum_length_sq)}


def _world_norm(tensors: Sequence[Tensor], weight: float, device: torch.device) -> Tensor:
    """Square root of the world's sum of `weight` · Σ tensor²."""
    squared = torch.zeros((), device=device)
    if tensors:
        squared = weight * torch.stack(torch._foreach_norm(list(tensors))).float().square().sum()
    dist.all_reduce(squared)
    return squared.sqrt()
