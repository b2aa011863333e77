"""Memory and messages of one rank's shard of a layer, recorded on the meta device at any size.

The layer's own code runs forward and backward, as a stage runs it between other layers: its input
stays allocated until nothing needs it, the gradient of its output comes from outside, and weight
gradients are freed as soon as they are added to their sums. Storages are tracked from allocation to
release, and a TP group that sends nothing records the requested messages. Workspaces inside kernels
come from a table (`models.workspaces`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from disttrain_cli.models.group import Group, Underway
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.signatures import SignatureMode
from disttrain_cli.models.weight_parts import WeightPart, add_weight_gradients, deferred
from disttrain_cli.models.workspaces import symmetric_bytes, workspace_bytes

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "pass"]


class Message(NamedTuple):
    """One collective of a TP group, or one chunk passed on to the next rank.

    For a gather or a scatter the bytes are those of the full tensor.
    """

    operation: Operation
    bytes: int


class Begun(NamedTuple):
    """Start of a message, after earlier messages and the computation of its data."""

    message: Message
    number: int


class Waited(NamedTuple):
    """Point from which computation depends on the message of this number."""

    number: int


class Footprint(NamedTuple):
    """Memory and messages of one forward and one backward of a layer."""

    kept_bytes: int  # from forward to backward, including the input if it is saved
    transient_bytes: int  # peak of the forward or the backward beyond that
    forward: list[Message]
    backward: list[Message]  # with recomputation, those of the second forward first
    deferred_bytes: int = 0  # from the backward to the deferred weight gradients, if it is split
    symmetric_bytes: int = 0  # additional, permanent: its TP group's symmetric memory


@dataclass(frozen=True)
class Noted(Group):
    """TP group as seen by its first rank on the meta device: records messages, sends nothing.

    Each message is reported to all `observers` when it begins and when it is waited for.
    """

    ranks: Any = None
    size: int = 1
    rank: int = 0
    overlap: bool = False
    symmetric: bool = False
    sent: list[Message] = field(default_factory=list)
    observers: list[Callable[[Begun | Waited], None]] = field(default_factory=list)

    def all_gather(self, whole: Tensor, local: Tensor) -> None:
        self._begin("all_gather", whole).wait()

    def begin_all_gather(self, whole: Tensor, local: Tensor) -> Underway:
        return self._begin("all_gather", whole)

    def reduce_scatter(self, local: Tensor, partial: Tensor) -> None:
        self._begin("reduce_scatter", partial).wait()

    def all_reduce(self, tensor: Tensor, op: Any) -> None:
        self._begin("all_reduce", tensor).wait()

    def pass_on(self, chunk: Tensor, into: Tensor) -> Underway:
        return self._begin("pass", chunk, into)

    def _begin(self, operation: Operation, tensor: Tensor, *others: Tensor) -> Underway:
        message = Message(operation, tensor.numel() * tensor.element_size())
        number = len(self.sent)
        self.sent.append(message)
        self._notify(Begun(message, number))
        return Underway(tensors=(tensor, *others), arrived=lambda: self._notify(Waited(number)))

    def _notify(self, event: Begun | Waited) -> None:
        for observe in self.observers:
            observe(event)


def footprint(
    layer: PipelineLayer,
    state: Mapping[str, Tensor],
    batch: Batch,
    recompute: bool = False,
    deferring: bool = False,
) -> Footprint:
    """Run a layer on the meta device, in the TP group that it has joined, if any.

    Args:
        state: the layer's inputs on this rank; gradients are computed for tensors that require
            them.
        recompute: save only the inputs and run the forward again in the backward.
        deferring: compute weight gradients afterwards; the layer has a split backward
            (`weight_parts`).
    """
    prepared, group = len(batch.tensors()), layer.group
    sent = group.sent if isinstance(group, Noted) else []
    sent.clear()
    follow = _Follow([*layer.parameters(), *layer.buffers(), *batch.tensors(), *state.values()])
    with ExitStack() as stack:
        for weight in layer.parameters():
            if weight.requires_grad:
                stack.callback(weight.register_post_accumulate_grad_hook(_forget).remove)
        stack.enter_context(follow)
        entering = {name: _enter(tensor) for name, tensor in state.items()}
        if recompute:
            made = checkpoint(layer, entering, batch, use_reentrant=False, preserve_rng_state=False)
        else:
            made = layer(entering, batch)
        del entering
        roots = [_Leave.apply(tensor) for tensor in made.values() if tensor.requires_grad]
        del made
        kept, forward = follow.alive, list(sent)
        sent.clear()
        parts: list[WeightPart] = []
        if roots:
            with deferred(parts) if deferring else nullcontext():
                torch.autograd.backward(roots)
        del roots
        waiting = follow.alive if deferring else 0
        add_weight_gradients(parts)
    # tensors that a stage prepares once per batch for all layers do not count
    if len(batch.tensors()) > prepared:
        return footprint(layer, state, batch, recompute, deferring)
    return Footprint(kept, follow.most - kept, forward, list(sent), waiting, follow.symmetric)


def _forget(weight: Tensor) -> None:
    weight.grad = None


def _enter(tensor: Tensor) -> Tensor:
    """Return a tensor like this one as an earlier layer's output, referenced by its reader only."""
    if not tensor.requires_grad:
        return torch.empty_like(tensor)
    return _Enter.apply(torch.empty((), device=tensor.device, requires_grad=True), tensor.detach())


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor) -> Tensor:
        return torch.empty_like(like)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return None, None


class _Leave(torch.autograd.Function):
    """Consumes a layer's output without keeping it; its gradient is created on demand."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = tensor.shape, tensor.dtype
        return tensor.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype)


class _Follow(SignatureMode):
    """Tracks the bytes of storages created while active: alive, peak with workspaces, symmetric."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive = self.most = self.symmetric = 0
        self._known = known  # held, so that their storages' addresses are not reused
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in known}

    def count(
        self, func: Any, args: Any, kwargs: dict[str, Any], result: Any, new: list[Tensor]
    ) -> tuple[int, int]:
        return workspace_bytes(func, args, result), symmetric_bytes(func, args, result)

    def note(self, facts: Any, times: int, results: list[Tensor], new: list[Tensor]) -> None:
        workspace, symmetric = facts or (0, 0)
        for storage in (value.untyped_storage() for value in results if value.is_meta):
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.alive += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata)
        self.most = max(self.most, self.alive + workspace)
        self.symmetric = max(self.symmetric, symmetric)

    def _gone(self, address: int) -> None:
        self.alive -= self._sizes.pop(address)
