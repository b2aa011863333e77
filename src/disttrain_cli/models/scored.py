"""Attention with its scores in memory, one block of queries at a time, on any device.

It serves what no fused kernel does: soft caps of scores, and sinks and spans where flash attention
does not run (`attention.kernel_for`). Products run in the tensors' dtype, everything between them
in fp32. Saved are inputs, result and one log-sum per row and head; the backward computes the scores
again, so memory grows with the rows. Keys that no row of a block sees are not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import Function
from torch.utils.flop_counter import bmm_flop, flop_registry

#: Rows of a block, if all of them together then have at most so many scores per head.
LEAST_BLOCK, MOST_BLOCK, MOST_SCORES = 128, 1024, 1 << 22

_LIBRARY = torch.library.Library("disttrain", "FRAGMENT")
_LIBRARY.define("scores(Tensor query, Tensor key) -> Tensor")
_LIBRARY.impl(
    "scores",
    lambda query, key: torch.bmm(query, key.transpose(1, 2)),
    "CompositeExplicitAutograd",
)


def _scores_flops(query: Any, key: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    batch, keys, width = key.shape
    flops: int = bmm_flop(query.shape, (batch, width, keys))
    return flops


_scores_flops._get_raw = True  # type: ignore[attr-defined]  # tensors, not their shapes
flop_registry[torch.ops.disttrain.scores] = _scores_flops


class Seen(NamedTuple):
    """First and last key that each query sees, [n, L]; n is 1 if alike in all N segments."""

    first: NDArray[np.int64]
    last: NDArray[np.int64]
    both: Tensor  # [2, n, L] on the device


class Capped(NamedTuple):
    """Scale of the scores, and the soft cap that tanh then bends them to."""

    scale: float
    softcap: float | None


def scored(
    query_NLHD: Tensor,
    key_NSGD: Tensor,
    value_NSGD: Tensor,
    sinks_H: Tensor | None,
    seen: Seen,
    capped: Capped,
) -> Tensor:
    """Return attention of N segments [N, L, H, value width], with G heads of keys and values."""
    made: Tensor = _Scored.apply(query_NLHD, key_NSGD, value_NSGD, sinks_H, seen, capped)
    return made


class _Block(NamedTuple):
    """Consecutive queries, the keys that any of them sees, and what each of them does not see."""

    rows: slice
    keys: slice
    hidden: Tensor  # [n, 1, L, S]


def _blocks(seen: Seen, segments: int, keys: int) -> Iterator[_Block]:
    most = max(LEAST_BLOCK, min(MOST_BLOCK, MOST_SCORES // (segments * max(1, keys))))
    for start in range(0, seen.first.shape[1], most):
        rows = slice(start, start + most)
        some = slice(int(seen.first[:, rows].min()), int(seen.last[:, rows].max()) + 1)
        key = torch.arange(some.start, some.stop, device=seen.both.device)
        first, last = seen.both[:, :, None, rows, None]
        yield _Block(rows, some, (key < first) | (key > last))


class _Scored(Function):
    """Z = N · G pairs of a segment and a head of keys, each with E heads of queries."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        seen: Seen,
        capped: Capped,
    ) -> Tensor:
        segments, groups = len(key), key.shape[2]
        queries = _by_group(query, groups)
        out = queries.new_empty(*queries.shape[:3], value.shape[-1])
        sums = queries.new_empty(queries.shape[:3], dtype=_exact(query))
        keys, values = (_by_group(tensor, groups)[:, 0] for tensor in (key, value))
        for block in _blocks(seen, segments, key.shape[1]):
            scores = _scores_of(queries[:, :, block.rows], keys[:, block.keys], block, capped)
            total = torch.logsumexp(scores, -1)
            if sinks is not None:
                total = torch.logaddexp(total, _of_heads(sinks, segments, groups, total))
            weights = scores.sub_(total[..., None]).exp_().to(value.dtype)
            part = torch.bmm(weights.flatten(1, 2), values[:, block.keys])
            out[:, :, block.rows] = part.unflatten(1, weights.shape[1:3])
            sums[:, :, block.rows] = total
        made = _by_row(out, groups)
        ctx.save_for_backward(query, key, value, sinks, made, sums)
        ctx.seen, ctx.capped = seen, capped
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, made, sums = ctx.saved_tensors
        segments, groups = len(key), key.shape[2]
        queries, gradients, out = (_by_group(tensor, groups) for tensor in (query, gradient, made))
        keys, values = (_by_group(tensor, groups)[:, 0] for tensor in (key, value))
        of_query = torch.empty_like(queries)
        of_key, of_value = (torch.zeros_like(one, dtype=sums.dtype) for one in (keys, values))
        inner = (gradients.to(sums.dtype) * out).sum(-1)  # [Z, E, L]
        for block in _blocks(ctx.seen, segments, key.shape[1]):
            some, own = (tensor[:, :, block.rows] for tensor in (queries, gradients))
            scores = _scores_of(some, keys[:, block.keys], block, ctx.capped)
            slope = None
            if (cap := ctx.capped.softcap) is not None:  # 0 where it is hidden
                slope = 1.0 - (scores.clamp(min=-cap) / cap).square_()
            weights = scores.sub_(sums[:, :, block.rows, None]).exp_()
            own = own.flatten(1, 2)
            of_value[:, block.keys] += torch.bmm(
                weights.to(value.dtype).flatten(1, 2).transpose(1, 2), own
            )
            back = torch.bmm(own, values[:, block.keys].transpose(1, 2)).to(sums.dtype)
            back = back.unflatten(1, weights.shape[1:3]).sub_(inner[:, :, block.rows, None])
            back = back.mul_(weights).mul_(ctx.capped.scale)
            if slope is not None:
                back = back.mul_(slope)
            of_scores = back.to(query.dtype).flatten(1, 2)
            of_query[:, :, block.rows] = torch.bmm(of_scores, keys[:, block.keys]).unflatten(
                1, weights.shape[1:3]
            )
            of_key[:, block.keys] += torch.bmm(of_scores.transpose(1, 2), some.flatten(1, 2))
        of_sinks = None
        if sinks is not None:
            each = (_of_heads(sinks, segments, groups, sums) - sums).exp_().mul_(inner).sum(-1)
            of_sinks = each.unflatten(0, (segments, groups)).sum(0).flatten().neg_()
        return (
            _by_row(of_query, groups),
            *(_by_row(one[:, None].to(key.dtype), groups) for one in (of_key, of_value)),
            None if of_sinks is None else of_sinks.to(sinks.dtype),
            None,
            None,
        )


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _by_group(rows_NLHD: Tensor, groups: int) -> Tensor:
    """Return [N · G, heads of a group, L, D]."""
    by_group = rows_NLHD.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)
    return by_group.flatten(0, 1).contiguous()


def _by_row(heads_ZELD: Tensor, groups: int) -> Tensor:
    """Return [N, L, H, D] of `_by_group`'s layout."""
    return heads_ZELD.unflatten(0, (-1, groups)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()


def _of_heads(sinks_H: Tensor, segments: int, groups: int, like: Tensor) -> Tensor:
    return sinks_H.to(like.dtype).unflatten(0, (groups, -1)).repeat(segments, 1)[..., None]


def _scores_of(query_ZELD: Tensor, key_ZSD: Tensor, block: _Block, capped: Capped) -> Tensor:
    """Return the scores [Z, E, L, S] of a block, −∞ where a key is hidden."""
    product = torch.ops.disttrain.scores(query_ZELD.flatten(1, 2), key_ZSD)
    scores = product.to(_exact(product)).unflatten(1, query_ZELD.shape[1:3])
    if capped.softcap is None:
        scores = scores.mul_(capped.scale)
    else:
        scores = scores.mul_(capped.scale / capped.softcap).tanh_().mul_(capped.softcap)
    scores.view(len(block.hidden), -1, *scores.shape[2:]).masked_fill_(block.hidden, -torch.inf)
    return scores
