"""What one rank's part of a layer holds and sends while it runs, recorded on the meta device at any
size.

The layer's own code runs forward and backward, as a stage runs it between other layers: what a
layer before it made is there until nothing needs it, the gradient of its output comes from behind,
and gradients of weights are gone as soon as they are added to their sums. Storages are followed
from their making to their end, and a TP group that sends nothing notes what it was asked to send.
What kernels hold of their own is stated (`models.workspaces`).
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
    """One collective of a TP group, of a gather and a scatter the bytes of the whole; or a chunk
    that each rank passes on to the next."""

    operation: Operation
    bytes: int


class Begun(NamedTuple):
    """A message sets out, behind those begun before it and once what was computed before is
    there."""

    message: Message
    number: int


class Waited(NamedTuple):
    """What is computed from now on needs the message of this number."""

    number: int


class Footprint(NamedTuple):
    """One forward and one backward of a layer."""

    kept_bytes: int  # from the forward to the backward, the input a part of it if it is kept
    transient_bytes: int  # the most that the forward or the backward holds beyond that at a time
    forward: list[Message]
    backward: list[Message]  # where it recomputes, those of the second forward first
    deferred_bytes: int = 0  # from the backward to the weights' part, where it has two parts
    symmetric_bytes: int = 0  # beside all of that: its TP group's symmetric memory, which stays


@dataclass(frozen=True)
class Noted(Group):
    """A TP group as its first rank sees it, on the meta device: what it is asked to send is noted,
    nothing is sent.

    Each is told to all of `hear` as it begins and as it is waited for.
    """

    ranks: Any = None
    size: int = 1
    rank: int = 0
    overlap: bool = False
    symmetric: bool = False
    sent: list[Message] = field(default_factory=list)
    hear: list[Callable[[Begun | Waited], None]] = field(default_factory=list)

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
        self._tell(Begun(message, number))
        return Underway(tensors=(tensor, *others), arrived=lambda: self._tell(Waited(number)))

    def _tell(self, event: Begun | Waited) -> None:
        for told in self.hear:
            told(event)


def footprint(
    layer: PipelineLayer,
    state: Mapping[str, Tensor],
    batch: Batch,
    recompute: bool = False,
    deferring: bool = False,
) -> Footprint:
    """Run a layer on the meta device, in the TP group that it has joined, if any.

    Args:
        state: what it reads, of this rank; gradients are asked for where its tensors ask for them.
        recompute: keep its inputs only and run the forward again in the backward.
        deferring: compute the gradients of weights afterwards; the layer is split (`weight_parts`).
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
    # what a stage makes of the batch, once for all layers, does not count
    if len(batch.tensors()) > prepared:
        return footprint(layer, state, batch, recompute, deferring)
    return Footprint(kept, follow.most - kept, forward, list(sent), waiting, follow.symmetric)


def _forget(weight: Tensor) -> None:
    weight.grad = None


def _enter(tensor: Tensor) -> Tensor:
    """A tensor like this one, as if a layer before had made it: nobody holds it but who reads
    it."""
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
    """Hands a layer's output on: nobody holds it any more, and its gradient is made when it is
    needed."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = tensor.shape, tensor.dtype
        return tensor.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype)


class _Follow(SignatureMode):
    """Bytes of the storages made while it is active: those alive, and the most that ever were,
    workspaces with them; and the symmetric memory of a group."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.alive = self.most = self.symmetric = 0
        self._known = known  # and held, so that their storages' addresses are not given out again
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
