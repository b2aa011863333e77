"""All-gather context parallelism: keys and values of all rows on every rank of a CP group.

Each rank attends with the queries of its local rows (Llama 3, arXiv 2407.21783, section 3.3.2). One
all-gather collects keys and values before attention, in the order of the rows, and one
reduce-scatter sums their gradients. Every run of a rank's rows attends to the rows from its first
segment's beginning on, in one kernel call on a view of them. So the gathered tensor is saved once
from forward to backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from disttrain_cli.models.group import Group, all_gathered, reduce_scattered


def gathered(
    key_RGD: Tensor, value_RGD: Tensor, rows: int, order: tuple[Tensor, Tensor] | None, cp: Group
) -> Tensor:
    """Return keys and values of all `rows` rows [R, 2 G, D] in order, from local ones.

    Args:
        order: [R] original index of each of the ranks' rows, and the inverse; None = in order.
    """
    made: Tensor = _Gathered.apply(torch.cat([key_RGD, value_RGD], 1), rows, order, cp)
    return made


def taken(whole_RGD: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of these rows' keys and values, and the full tensor for the next call.

    If each call takes the full tensor of the previous one, gradients accumulate in a single tensor.
    """
    key_RGD, value_RGD, left = _Taken.apply(whole_RGD, rows)
    return key_RGD, value_RGD, left


class _Gathered(Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, rows: int, order: tuple[Tensor, Tensor] | None, cp: Group
    ) -> Tensor:
        ctx.order, ctx.cp = order, cp
        whole = all_gathered(own, rows, cp)
        return whole if order is None else whole.index_select(0, order[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        by_rank = gradient if ctx.order is None else gradient.index_select(0, ctx.order[0])
        return reduce_scattered(by_rank, ctx.cp), None, None, None


class _Taken(Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, rows: slice) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.rows, ctx.whole = rows, (whole.shape, whole.dtype, whole.device)
        key, value = whole[rows].chunk(2, 1)
        return key, value, whole.view_as(whole)

    @staticmethod
    def backward(
        ctx: Any, key: Tensor | None, value: Tensor | None, left: Tensor | None
    ) -> tuple[Any, ...]:
        shape, dtype, device = ctx.whole
        total = torch.zeros(shape, dtype=dtype, device=device) if left is None else left
        for part, gradient in zip(total[ctx.rows].chunk(2, 1), (key, value), strict=True):
            if gradient is not None:
                part.add_(gradient)
        return total, None
