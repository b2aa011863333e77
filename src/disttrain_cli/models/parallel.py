"""Tensor parallelism of a layer: the messages between the ranks of a TP group.

See Megatron-LM, Shoeybi et al. 2019. Between the sharded linears of a block every rank has all rows
and its own heads or features; everywhere else it has its local rows (`division.own_rows`) and all
features, so that norms, residuals and dropout are divided, too (sequence parallelism, Korthikanti
et al. 2022, section 4.2.2). Each function below is one half of a pair whose gradients are each
other's forwards. Without a group (a TP of 1, or one shard measured alone) they return their input.

A layer with `by_rows` reads and writes its split tensors as local rows, so its replicated weights
see a part of the rows only: their gradients are partial sums. All other layers read and write full
tensors, equal on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from disttrain_cli.models.group import Group, all_gathered, reduce_scattered
from disttrain_cli.models.overlapped import crossing

#: Minimum number of elements summed in one message.
BUCKET = 1 << 24


def across(f: Callable[[Tensor], Tensor], own_RD: Tensor, rows: int, group: Group | None) -> Tensor:
    """Apply `f` to the rows of the entire group: local rows in, local rows out.

    `f` maps [rows, D] to a partial sum [..., D'] of any number of rows, as sharded linears return
    it. For the backward the local rows are saved and gathered again (Korthikanti et al. 2022,
    section 4.2.2): a group divides its saved tensors. If the group overlaps, sharded linears
    communicate themselves (`overlapped`).
    """
    if group is None:
        return f(own_RD).flatten(0, -2)
    if not rows:  # in a CP group: rows of another rank
        return scatter(f(own_RD).flatten(0, -2), group)
    if group.overlap:
        with crossing(own_RD, rows, group) as whole_RD:
            return f(whole_RD).flatten(0, -2)
    whole_RD = gather(own_RD, rows, group)
    with _kept_as(own_RD.detach(), whole_RD, group):
        partial = f(whole_RD)
    return scatter(partial.flatten(0, -2), group)


def gather(local: Tensor, rows: int, group: Group | None) -> Tensor:
    """Gather local rows → all `rows` rows; the backward reduce-scatters the gradient."""
    return local if group is None or not rows else _Gather.apply(local, rows, group)


def scatter(partial: Tensor, group: Group | None) -> Tensor:
    """Reduce-scatter a partial sum of all rows → local rows of the sum."""
    return partial if group is None or not len(partial) else _Scatter.apply(partial, group)


def reduce(partial: Tensor, group: Group | None) -> Tensor:
    """All-reduce a partial sum that every rank then uses alike, so its gradient is full."""
    return partial if group is None else _Reduce.apply(partial, group)


def copy(whole: Tensor, group: Group | None) -> Tensor:
    """Return a replicated tensor for sharded linears; the backward all-reduces its gradient."""
    return whole if group is None else _Copy.apply(whole, group)


def split(whole: Tensor, group: Group | None) -> Tensor:
    """Return the local rows of a replicated tensor; only their gradient flows back."""
    # a copy, as a view that a later layer saves would keep all rows
    return whole if group is None else whole[group.local_rows(len(whole))].clone()


def share(whole: Tensor, group: Group | None) -> Tensor:
    """Return a tensor computed alike on all ranks; each backpropagates its local rows only."""
    return whole if group is None else _Share.apply(whole, group)


def once(loss: Tensor, group: Group | None) -> Tensor:
    """Return a loss computed alike on all ranks: its value on the first, its gradient on all."""
    return loss if group is None or group.rank == 0 else loss - loss.detach()


def embed(ids_R: Tensor, weight_VD: Tensor, first_id: int) -> Tensor:
    """Return embeddings of a vocabulary shard from `first_id` on; zeros for other ranks' ids."""
    local = ids_R - first_id
    foreign = (local < 0) | (local >= len(weight_VD))
    return functional.embedding(local.masked_fill(foreign, 0), weight_VD).masked_fill(
        foreign.unsqueeze(1), 0.0
    )


def all_reduced(tensor: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum (or maximum) of a tensor over the group, as a new tensor."""
    # a copy, as autograd may have saved the input
    total = tensor.to(group.wire(tensor)).clone(memory_format=torch.contiguous_format)
    group.all_reduce(total, op)
    return total.to(tensor.device)


def sum_over(tensors: Sequence[Tensor], group: Group) -> None:
    """Replace tensors of one dtype by their sums over the group, small ones in few messages."""
    bucket: list[Tensor] = []
    for index, tensor in enumerate(tensors, 1):
        bucket.append(tensor)
        if index == len(tensors) or sum(one.numel() for one in bucket) >= BUCKET:
            flat = all_reduced(torch.cat([one.flatten() for one in bucket]), group)
            for one, total in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                one.copy_(total.view_as(one))
            bucket.clear()


def _kept_as(local: Tensor, whole: Tensor, group: Group) -> AbstractContextManager[Any]:
    """Make autograd save local rows instead of gathered ones, and gather again in the backward.

    A recomputed layer saves nothing anyway, and the hooks of the recomputation must stay innermost.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return nullcontext()
    address, rows, packed, again = whole.untyped_storage()._cdata, len(whole), [0], list[Tensor]()

    def pack(tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != address:
            return tensor.detach()  # an output saved by its own node would never be freed
        packed[0] += 1
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if not again:  # one message serves the views of all nodes
            again.extend([all_gathered(local, rows, group)] * packed[0])
        return again.pop().as_strided(*kept)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: int, group: Group) -> Tensor:
        ctx.group = group
        return all_gathered(local, rows, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return reduce_scattered(gradient, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.rows = group, len(partial)
        return reduce_scattered(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return all_gathered(gradient, ctx.rows, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: Group) -> Tensor:
        return all_reduced(partial, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient, None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return all_reduced(gradient, ctx.group), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Group) -> Tensor:
        ctx.local_rows = group.local_rows(len(whole))
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        local = torch.zeros_like(gradient)
        local[ctx.local_rows] = gradient[ctx.local_rows]
        return local, None
