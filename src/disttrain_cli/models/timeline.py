"""Ordered computation and messages of a layer in a TP group, to derive their overlap.

Recorded on the meta device, like its kernels (`operators`) and its messages (`footprint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from disttrain_cli.costs.hardware import KernelWork
from disttrain_cli.models.footprint import Begun, Noted, Waited
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.operators import Trace
from disttrain_cli.models.weight_parts import WeightPart, add_weight_gradients, deferred

#: A message that the following kernels wait for; one that begins; or successive kernels.
Event = Waited | Begun | KernelWork


class Timeline(NamedTuple):
    """One forward and one backward of a layer: a sequence of kernels and a sequence of messages.

    The two sequences run concurrently. A message begins once the kernels before it have run, and
    kernels after a `Waited` once that message has arrived. A message that is not overlapped with
    kernels is waited for as it begins.
    """

    forward: list[Event]
    backward: list[Event]  # with recomputation, the second forward first
    weights: list[Event]  # deferred weight gradients of a split backward


def timeline(
    layer: PipelineLayer,
    state: Mapping[str, Tensor],
    batch: Batch,
    recompute: bool = False,
    deferring: bool = False,
) -> Timeline:
    """Record a layer on the meta device that has joined a `Noted` group.

    Args and gradients as in `footprint`; tensors that a stage prepares once per batch do not count.
    """
    prepared, group, events = len(batch.tensors()), layer.group, list[Event]()
    assert isinstance(group, Noted)
    group.sent.clear()

    def compute() -> None:
        if (work := trace.take()).kernels:
            events.append(work)

    def observe(event: Begun | Waited) -> None:
        compute()
        events.append(event)

    def take() -> list[Event]:
        compute()
        taken = list(events)
        events.clear()
        return taken

    given = {
        name: tensor.detach().requires_grad_(tensor.requires_grad) for name, tensor in state.items()
    }
    parts: list[WeightPart] = []
    with ExitStack() as stack:
        group.observers.append(observe)
        stack.callback(group.observers.remove, observe)
        for weight in layer.parameters():
            if weight.requires_grad:
                stack.callback(weight.register_post_accumulate_grad_hook(_add).remove)
        trace = stack.enter_context(Trace())
        if recompute:
            made = checkpoint(layer, given, batch, use_reentrant=False, preserve_rng_state=False)
        else:
            made = layer(given, batch)
        forward = take()
        roots = [tensor for tensor in made.values() if tensor.requires_grad]
        if roots:
            with deferred(parts) if deferring else nullcontext():
                torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
        backward = take()
        add_weight_gradients(parts)
        later = take()
    if len(batch.tensors()) > prepared:
        return timeline(layer, state, batch, recompute, deferring)
    return Timeline(forward, backward, later)


def _add(weight: Tensor) -> None:
    """Add a gradient to an fp32 sum, as a stage does for its slots."""
    assert weight.grad is not None
    torch.empty_like(weight, dtype=torch.float32).add_(weight.grad)
    weight.grad = None
