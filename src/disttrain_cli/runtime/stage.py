"""One stage's computation: forward and backward of its layers for one slot, module by module.

Every stage is treated alike, first, last or in mid-pipeline: it maps the tensors that cross its entry to those
that cross its exit, and adds losses where one of its layers has one. Backward is one `autograd.backward` over
[losses, outputs] per module (deepspeed traps 11, 24). Modules inside a stage are separated by detached tensors,
so that each has its own forward and backward time whatever the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer, TensorSpec


@dataclass
class Segment:
    """Consecutive layers of one module on a stage, with the tensors that cross its two ends."""

    module: str
    layers: list[PipelineLayer]
    entry: list[str]
    exit: list[str]


@dataclass
class _Saved:
    """What one slot keeps of one segment from forward to backward."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    losses: list[Tensor]


@dataclass
class StageRunner:
    """Runs the segments of a stage and remembers the slots in flight."""

    segments: list[Segment]
    in_flight: dict[int, list[_Saved]] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)  # summed since the last `take_losses`

    def forward(self, slot: int, state: dict[str, Tensor], batch: Batch,
                timed: Callable[[str], Callable[[], None]]) -> dict[str, Tensor]:
        """Run a slot forward; `state` holds the tensors at the entry, the result those at the exit.

        `timed(module)` is called before each module and returns what is called after it.
        """
        saved = []
        for segment in self.segments:
            done = timed(segment.module)
            inputs = {name: state[name].detach().requires_grad_() for name in segment.entry}
            state = dict(inputs)
            losses = []
            for layer in segment.layers:
                written = layer(state, batch)
                for name in [n for n in written if n.startswith(LOSS_PREFIX)]:
                    loss = written.pop(name)
                    losses.append(loss)
                    self._add_loss(name.removeprefix(LOSS_PREFIX), loss)
                state.update(written)
            outputs = {name: state[name] for name in segment.exit}
            saved.append(_Saved(inputs, outputs, losses))
            state = outputs
            done()
        self.in_flight[slot] = saved
        return state

    def backward(self, slot: int, gradients: dict[str, Tensor],
                 timed: Callable[[str], Callable[[], None]]) -> dict[str, Tensor]:
        """Run a slot backward; `gradients` are those of the tensors at the exit, the result those at the entry."""
        for segment, kept in zip(reversed(self.segments), reversed(self.in_flight.pop(slot)), strict=True):
            done = timed(segment.module)
            tensors, seeds = [], []
            for loss in kept.losses:
                if loss.requires_grad:
                    tensors.append(loss)
                    seeds.append(torch.ones_like(loss))
            for name, tensor in kept.outputs.items():
                if tensor.requires_grad and tensor.numel():
                    tensors.append(tensor)
                    seeds.append(gradients[name].to(tensor.dtype))
            if tensors:
                torch.autograd.backward(tensors, seeds)
            gradients = {name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
                         for name, tensor in kept.inputs.items()}
            done()
        return gradients

    def take_losses(self) -> dict[str, float]:
        """Losses added since the last call, by name."""
        taken = {name: float(value) for name, value in self.losses.items()}
        self.losses.clear()
        return taken

    def _add_loss(self, name: str, loss: Tensor) -> None:
        value = loss.detach().float()
        self.losses[name] = self.losses[name] + value if name in self.losses else value


def build_segments(layers: Sequence[PipelineLayer], first: int,
                   live: Callable[[int], list[TensorSpec]]) -> list[Segment]:
    """Cut the layers of a stage, which start at layer `first` of the model, at module boundaries.

    `live(cut)` gives the tensors that cross before layer `cut`.
    """
    segments: list[Segment] = []
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index].module != layers[start].module:
            segments.append(Segment(layers[start].module, list(layers[start:index]),
                                    [spec.name for spec in live(first + start)],
                                    [spec.name for spec in live(first + index)]))
            start = index
    return segments
