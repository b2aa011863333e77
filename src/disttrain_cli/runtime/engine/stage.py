"""Forward and backward of one stage's layers for one slot, module by module.

Every stage is treated alike, first, last or in mid-pipeline: it maps the tensors that cross its
entry to those that cross its exit, and adds losses where one of its layers has one. Backward is one
`autograd.backward` over [losses, outputs] per module. Modules inside a stage are separated by
detached tensors, so that each has separate forward and backward times in any layout.

A forward-only layer (`engine.gradients`) runs without a graph, and a module with only such layers
has no backward. Where activations are recomputed, a layer saves only its inputs (Chen et al. 2016,
arXiv 1604.06174), by torch's non-reentrant checkpoints (deepspeed traps 20, 21, 32). Dropout uses
no random generator, so no generator state is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models.experts import recomputing
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import LOSS_PREFIX, Batch, PipelineLayer, TensorSpec
from disttrain_cli.models.replicated import Exchange
from disttrain_cli.models.weight_parts import WeightPart, add_weight_gradients, deferred
from disttrain_cli.runtime.engine.faults import Sums


@dataclass
class Segment:
    """Consecutive layers of one module on a stage, with the tensors that cross its two ends."""

    module: str
    layers: list[PipelineLayer]
    entry: list[str]
    exit: list[str]
    carrying: frozenset[str]  # tensors of the entry that require gradients
    returning: frozenset[str]  # tensors of the exit whose gradients are received
    first_layer: int  # in the model
    # tensors of the entry that its layers read, and tensors of the exit that they write
    reads: Sequence[TensorSpec] = ()
    writes: Sequence[TensorSpec] = ()

    @property
    def still(self) -> bool:
        """True if the segment is forward-only."""
        return not self.carrying and not any(layer.trained for layer in self.layers)


@dataclass
class _Entered:
    """Tensor that crossed the entry, reduced to what its gradient needs.

    Layers that need its values save them themselves.
    """

    like: Tensor  # on the meta device: shape and dtype only
    device: torch.device
    gradient: Tensor | None = None

    def total(self) -> Tensor:
        """Return its gradient; zeros where nothing differentiable was computed from it."""
        if self.gradient is None:
            return torch.zeros_like(self.like, device=self.device)
        return self.gradient


class _Enter(torch.autograd.Function):
    """Identity that starts a new graph at a tensor and records its gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, entered: _Entered) -> Tensor:
        ctx.entered = entered
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.entered.gradient = gradient.contiguous()
        return None, None, None


def _enter(tensor: Tensor) -> tuple[Tensor, _Entered]:
    entered = _Entered(torch.empty_like(tensor, device="meta"), tensor.device)
    anchor = tensor.new_empty(0, requires_grad=True)
    return _Enter.apply(anchor, tensor, entered), entered


@dataclass
class _Saved:
    """State of one segment in one slot that is saved from forward to backward."""

    inputs: dict[str, _Entered]
    # the graph's edges for their gradients, without the tensors
    outputs: dict[str, tuple[GradientEdge, torch.dtype]]
    losses: list[Tensor]
    exchange: Exchange | None = None  # for a module whose items are distributed over a TP group


@dataclass
class StageRunner:
    """Execution of a stage's segments, with the saved state of the slots in flight."""

    segments: list[Segment]
    recompute: bool = False
    sums: Sums | None = None  # to locate non-finite numbers; None = off
    in_flight: dict[int, list[_Saved]] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)  # summed since the last clear
    deferring: bool = False  # True to defer weight gradients to `weights`
    tp: Group | None = None  # the TP group over which items of some modules are distributed
    # deferred weight gradients, by slot and layer
    put_aside: dict[int, dict[PipelineLayer, list[WeightPart]]] = field(default_factory=dict)

    @property
    def still(self) -> bool:
        """True if the stage is forward-only."""
        return all(segment.still for segment in self.segments)

    @property
    def trained(self) -> list[Parameter]:
        """Trained weights, each once."""
        layers = [layer for segment in self.segments for layer in segment.layers]
        weights = (weight for layer in layers for weight in layer.parameters())
        return list(dict.fromkeys(weight for weight in weights if weight.requires_grad))

    def forward(
        self,
        slot: int,
        state: dict[str, Tensor],
        batch: Batch,
        timed: Callable[[str], Callable[[], None]],
    ) -> dict[str, Tensor]:
        """Run a slot forward; `state` holds the tensors at the entry, the result those at the exit.

        `timed(module)` is called before each module; the function it returns is called after it.
        """
        saved = []
        for segment in self.segments:
            done = timed(segment.module)
            inputs = {name: state[name].detach() for name in segment.entry}
            exchange, passing, own = None, dict[str, Tensor](), batch
            if (share := batch.shares.get(segment.module)) is not None:
                assert self.tp is not None
                exchange, own = Exchange(share, self.tp, segment.reads, segment.writes), share.batch
                passing, inputs = inputs, exchange.entering(inputs)
            carrying = {}
            for name in inputs:
                if name in segment.carrying:
                    inputs[name], carrying[name] = _enter(inputs[name])
            state = inputs
            losses = []
            for layer in segment.layers:
                written = self._compute(layer, state, own)
                for name in [n for n in written if n.startswith(LOSS_PREFIX)]:
                    loss = written.pop(name)
                    losses.append(loss)
                    self._add_loss(name.removeprefix(LOSS_PREFIX), loss)
                state.update(written)
            left = segment.exit if exchange is None else [spec.name for spec in segment.writes]
            made = {name: state[name] for name in left}
            if not segment.still:
                outputs = {
                    name: (get_gradient_edge(tensor), tensor.dtype)
                    for name, tensor in made.items()
                    if tensor.requires_grad
                }
                differentiable = [loss for loss in losses if loss.requires_grad]
                saved.append(_Saved(carrying, outputs, differentiable, exchange))
            if exchange is not None:
                made = passing | exchange.leaving(made)
            state = {name: made[name] for name in segment.exit}
            if self.sums is not None:
                self.sums.note(
                    "forward", slot, segment.first_layer, segment.module, [*state.values(), *losses]
                )
            done()
        if torch.is_grad_enabled():
            self.in_flight[slot] = saved
        return state

    def backward(
        self, slot: int, gradients: dict[str, Tensor], timed: Callable[[str], Callable[[], None]]
    ) -> dict[str, Tensor]:
        """Run a slot backward, from the gradients at the exit to those at the entry.

        `timed` as in `forward`.
        """
        saved = self.in_flight.pop(slot)
        for segment in reversed(self.segments):
            if segment.still:
                gradients = {}
                continue
            kept = saved.pop()
            done = timed(segment.module)
            roots: list[Tensor | GradientEdge] = [*kept.losses]
            seeds = [torch.ones_like(loss) for loss in kept.losses]
            back = gradients if kept.exchange is None else kept.exchange.returned(gradients)
            for name, (edge, dtype) in kept.outputs.items():
                roots.append(edge)
                seeds.append(back[name].to(dtype))
            if roots:
                self._backward(slot, roots, seeds)
            entry = {name: entered.total() for name, entered in kept.inputs.items()}
            if kept.exchange is not None:
                entry = _joined(segment, kept.exchange.entered(entry), gradients)
            gradients = entry
            if self.sums is not None:
                self.sums.note(
                    "backward",
                    slot,
                    _LAST_LAYER - segment.first_layer,
                    segment.module,
                    gradients.values(),
                )
            done()
        return gradients

    def waiting(self, slots: Iterable[int]) -> list[Parameter]:
        """Return the weights with deferred gradients in some slots, each once per gradient."""
        return [
            cast(Parameter, weight)
            for slot in slots
            for parts in self.put_aside.get(slot, {}).values()
            for weight, _ in parts
        ]

    def weights(
        self, slots: Sequence[int], timed: Callable[[int, str], Callable[[], None]]
    ) -> None:
        """Compute the deferred weight gradients of some slots.

        Layers are computed from the last one on, each in the order of the slots. `timed(slot,
        module)` is called before each uninterrupted run of work on a module in a slot; the function
        it returns is called after it.
        """
        for (slot, module), turns in groupby(self._turns(slots), lambda turn: turn[:2]):
            done = timed(slot, module)
            for *_, parts in turns:
                add_weight_gradients(parts)
            done()

    def _turns(self, slots: Sequence[int]) -> Iterator[tuple[int, str, list[WeightPart]]]:
        """Yield (slot, module, deferred gradients of a layer) in the order of `weights`."""
        aside = {slot: self.put_aside.pop(slot) for slot in slots if slot in self.put_aside}
        for segment in reversed(self.segments):
            for layer in reversed(segment.layers):
                for slot, by_layer in aside.items():
                    if layer in by_layer:
                        yield slot, segment.module, by_layer.pop(layer)

    @cached_property
    def _layer_of(self) -> dict[int, PipelineLayer]:
        """Layer by id of a weight."""
        return {
            id(weight): layer
            for segment in self.segments
            for layer in segment.layers
            for weight in layer.parameters()
        }

    def _backward(self, slot: int, roots: list[Tensor | GradientEdge], seeds: list[Tensor]) -> None:
        if not self.deferring:
            torch.autograd.backward(roots, seeds)
            return
        parts: list[WeightPart] = []
        with deferred(parts):
            torch.autograd.backward(roots, seeds)
        by_layer = self.put_aside.setdefault(slot, {})
        for weight, gradient in parts:
            by_layer.setdefault(self._layer_of[id(weight)], []).append((weight, gradient))

    def sum_losses(self, names: Iterable[str], device: torch.device) -> list[Tensor]:
        """Return this rank's sums of the named losses, float64 on its device: zero where absent."""
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        return [self.losses[name].double() if name in self.losses else nothing for name in names]

    def _compute(
        self, layer: PipelineLayer, state: dict[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        if not layer.trained and not layer.passes:
            with torch.no_grad():
                return layer(state, batch)
        if not self.recompute:
            return layer(state, batch)
        # the inputs that the recomputation will read
        inputs = {name: state[name] for name in layer.reads if name in state}
        written = checkpoint(
            layer,
            inputs,
            batch,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=lambda: (nullcontext(), recomputing()),
        )
        return cast(dict[str, Tensor], written)

    def _add_loss(self, name: str, loss: Tensor) -> None:
        value = loss.detach().float()
        self.losses[name] = self.losses[name] + value if name in self.losses else value


def _joined(
    segment: Segment, read: Mapping[str, Tensor], left: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the gradients at the entry of a segment.

    They are summed from those of the tensors that its layers read, and those at its exit, some of
    which bypass the segment.
    """
    written = {spec.name for spec in segment.writes}
    passing = {name: gradient for name, gradient in left.items() if name not in written}
    return {
        name: sum((side[name] for side in (passing, read) if name in side), start=0)
        for name in segment.entry
        if name in segment.carrying
    }


#: Minuend that reverses the order of modules for the backward.
_LAST_LAYER = (1 << 15) - 1


def build_segments(
    layers: Sequence[PipelineLayer],
    first: int,
    live: Callable[[int], list[TensorSpec]],
    carrying: Callable[[int], frozenset[str]] | None = None,
) -> list[Segment]:
    """Cut the layers of a stage, which start at layer `first` of the model, at module boundaries.

    `live(cut)` returns the tensors that cross before layer `cut`, `carrying(cut)` those of them
    that carry gradients (None: all of them).
    """
    segments: list[Segment] = []
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index].module != layers[start].module:
            own, entering, leaving = layers[start:index], live(first + start), live(first + index)
            read = {name for layer in own for name in layer.reads}
            written = {spec.name for layer in own for spec in layer.writes}
            entry, exit_ = [spec.name for spec in entering], [spec.name for spec in leaving]
            carried, returning = frozenset(entry), frozenset(exit_)
            if carrying is not None:
                carried, returning = (
                    carried & carrying(first + start),
                    returning & carrying(first + index),
                )
            segments.append(
                Segment(
                    layers[start].module,
                    list(own),
                    entry,
                    exit_,
                    carried,
                    returning,
                    first + start,
                    [spec for spec in entering if spec.name in read],
                    [spec for spec in leaving if spec.name in written],
                )
            )
            start = index
    return segments
