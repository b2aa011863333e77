"""Emulated layers: the model's layers with one number as weights, and a wait as computation.

They read and write the same rows as the real layers, so that routes, cuts, schedules and the order
of backwards are the model's. A row holds one number, or as many as in the model where messages have
their real size. Layers of one module on a stage wait together, as nothing is observable between
them; with experts whose EP group has several processes, these exchange rows before they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_cli.models.graph import LayerInfo
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer, TensorSpec
from disttrain_cli.runtime.rehearsal.device import Device

#: Rows to and from each process of an EP group.
Routes = tuple[list[int], list[int]]


@dataclass(frozen=True)
class EmulatedBatch(Batch):
    """Input of a stage's emulated layers in a slot."""

    # rows of a state tensor on this process
    rows: Callable[[TensorSpec], int] = field(default=lambda spec: 0)
    # by stage of the process and module: forward, backward
    seconds: list[dict[str, tuple[float, ...]]] = field(default_factory=list)
    # by stage and module, of each hop: of experts whose EP groups have several processes
    routes: list[dict[str, list[Routes]]] = field(default_factory=list)


class EmulatedLayer(PipelineLayer):
    """Name and one number of a layer, for the optimizer and checkpoints."""

    def __init__(self, info: LayerInfo) -> None:
        super().__init__()
        self.name, self.module, self.kind = info.name, info.module, info.kind
        self.weight = nn.Parameter(torch.zeros(1))


class EmulatedModule(PipelineLayer):
    """Layers of one module on a stage, which compute by waiting."""

    def __init__(
        self,
        layers: Sequence[LayerInfo],
        entry: Sequence[str],
        exit_: Sequence[str],
        device: Device,
        dtype: torch.dtype,
        scaled: bool,
        group: Group | None = None,
        chunk: int = 0,
    ) -> None:
        super().__init__()
        written = {spec.name: spec for layer in layers for spec in layer.writes}
        read = {name for layer in layers for name in layer.reads}
        self.module = layers[0].module
        self.reads = tuple(name for name in entry if name in read)
        self.writes = message_specs([written[name] for name in exit_ if name in written], scaled)
        self._losses = [LOSS_PREFIX + layer.loss for layer in layers if layer.loss is not None]
        self._device, self._dtype, self._group, self._chunk = device, dtype, group, chunk
        # makes outputs differentiable where no input is received
        self._trained = torch.zeros(1, requires_grad=True)

    def forward(self, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Wait for the forward's time; the backward through the result waits for its time."""
        assert isinstance(batch, EmulatedBatch)
        shapes = [(batch.rows(spec), *spec.shape) for spec in self.writes] + [()] * len(
            self._losses
        )
        routes = batch.routes[self._chunk].get(self.module)
        outputs = _Wait.apply(
            self._device,
            batch.seconds[self._chunk][self.module],
            None if routes is None else partial(self._exchange, routes),
            shapes,
            self._dtype,
            self._trained,
            *(state[name] for name in self.reads),
        )
        return dict(
            zip([*(spec.name for spec in self.writes), *self._losses], outputs, strict=True)
        )

    def _exchange(self, hops: list[Routes]) -> None:
        """Send a mixture's rows and their results; the pass begins when all processes have come.

        A row is one number. The exchanges' own time is part of the pass.
        """
        assert self._group is not None
        for give, take in [*hops, *((take, give) for give, take in reversed(hops))]:
            self._group.exchanged(torch.zeros(sum(give), 1), give, take)
        latest = torch.tensor([self._device.next_s], dtype=torch.float64)
        self._group.all_reduce(latest, dist.ReduceOp.MAX)
        self._device.arrive(float(latest))


def message_specs(specs: Sequence[TensorSpec], scaled: bool) -> tuple[TensorSpec, ...]:
    """Return the specs of state tensors in a rehearsal."""
    return tuple(replace(spec, shape=(1,)) for spec in specs) if scaled else tuple(specs)


class _Wait(torch.autograd.Function):
    """Zeros of given shapes, after a wait; their gradient is zeros too, after another."""

    @staticmethod
    def forward(
        ctx: Any,
        device: Device,
        seconds: tuple[float, ...],
        exchange: Callable[[], None] | None,
        shapes: list[tuple[int, ...]],
        dtype: torch.dtype,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.device, ctx.backward_s, ctx.exchange, ctx.shapes = (
            device,
            seconds[1],
            exchange,
            [tensor.shape for tensor in inputs],
        )
        if exchange is not None:
            exchange()
        if seconds[0]:
            device.run(seconds[0])
        return tuple(torch.zeros(shape, dtype=dtype) for shape in shapes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        if ctx.exchange is not None:
            ctx.exchange()
        if ctx.backward_s:
            ctx.device.run(ctx.backward_s)
        return (
            None,
            None,
            None,
            None,
            None,
            *(gradients[0].new_zeros(shape) for shape in ctx.shapes),
        )
