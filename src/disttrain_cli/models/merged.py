"""Flash attention by several calls that share one softmax: attention sinks, and spans of rows.

A sink is a score of each head that takes part in the softmax without a value (gpt-oss): a factor
of the result. Rows of a span see the span's later rows, too: flash attention has no such mask, but
with queries and keys of a span in reverse order, the keys shifted by one row, it is a causal one.
Each call returns its log-sum per row and head, by which the results are weighted; and flash
attention's backward, given the result and the log-sum of the whole softmax, returns that call's
part of the gradients (as in ring attention, Liu et al. 2023, arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

CAUSAL = (-1, 0)


class Call(NamedTuple):
    """Arguments of flash attention over segments, in addition to rows and scale."""

    starts: tuple[Tensor, Tensor]  # first row of every segment of queries and of keys, and the end
    longest: tuple[int, int]
    window: tuple[int, int]  # rows before and after that a row sees; −1: all


class Later(NamedTuple):
    """Rows of spans in reverse order: queries but each span's last, keys but each span's first."""

    queries: Tensor
    keys: Tensor
    call: Call


def merged(
    query_RHD: Tensor,
    key_RGD: Tensor,
    value_RGD: Tensor,
    sinks_H: Tensor | None,
    call: Call,
    later: Later | None,
    scale: float | None,
) -> Tensor:
    """Return attention [R, H, D] of a call and of the spans' later rows, with sinks if any."""
    made: Tensor = _Merged.apply(query_RHD, key_RGD, value_RGD, sinks_H, call, later, scale)
    return made


def forward(
    rows: tuple[Tensor, Tensor, Tensor], call: Call, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a call's result [R, H, D], its log-sums [H, R] and an unused seed."""
    causal = call.window == CAUSAL
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn(
        *rows, *call.starts, *call.longest, causal, scale, list(call.window)
    )
    return made


def backward(
    gradient: Tensor,
    rows: tuple[Tensor, Tensor, Tensor],
    made: Tensor,
    sums: Tensor,
    seed: Tensor,
    call: Call,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a call's gradients of its rows, given the whole softmax's result and log-sums."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        gradient,
        *rows,
        made,
        sums,
        *call.starts,
        *call.longest,
        call.window == CAUSAL,
        seed,
        scale,
        list(call.window),
    )
    return gradients


class _Merged(Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        call: Call,
        later: Later | None,
        scale: float | None,
    ) -> Tensor:
        made, sums, seed = forward((query, key, value), call, scale)
        if later is not None:
            some = _rows_of(query, key, value, later)
            other, beyond, _ = forward(some, later.call, scale)
            within = sums.index_select(1, later.queries)
            total = torch.logaddexp(within, beyond)
            part = made.index_select(0, later.queries) * _weight(within, total, made)
            part += other * _weight(beyond, total, made)
            made.index_copy_(0, later.queries, part)
            sums.index_copy_(1, later.queries, total)
        if sinks is not None:
            total = torch.logaddexp(sums, sinks.to(sums.dtype)[:, None])
            made.mul_(_weight(sums, total, made))
            sums = total
        ctx.save_for_backward(query, key, value, sinks, made, sums, seed)
        ctx.call, ctx.later, ctx.scale = call, later, scale
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, made, sums, seed = ctx.saved_tensors
        rows = (query, key, value)
        gradients = backward(gradient, rows, made, sums, seed, ctx.call, ctx.scale)
        if (later := ctx.later) is not None:
            own, result = (one.index_select(0, later.queries) for one in (gradient, made))
            more = backward(
                own,
                _rows_of(*rows, later),
                result,
                sums.index_select(1, later.queries),
                seed,
                later.call,
                ctx.scale,
            )
            places = (later.queries, later.keys, later.keys)
            for total, place, part in zip(gradients, places, more, strict=True):
                total.index_add_(0, place, part)
        of_sinks = None
        if sinks is not None:
            inner = (gradient.to(sums.dtype) * made).sum(-1).t()  # [H, R]
            of_sinks = (
                -(torch.exp(sinks.to(sums.dtype)[:, None] - sums) * inner).sum(1).to(sinks.dtype)
            )
        return *gradients, of_sinks, None, None, None


def _rows_of(
    query: Tensor, key: Tensor, value: Tensor, later: Later
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        query.index_select(0, later.queries),
        key.index_select(0, later.keys),
        value.index_select(0, later.keys),
    )


def _weight(part_HR: Tensor, total_HR: Tensor, like: Tensor) -> Tensor:
    """Return the share [R, H, 1] of a call in the softmax."""
    return torch.exp(part_HR - total_HR).t()[..., None].to(like.dtype)
