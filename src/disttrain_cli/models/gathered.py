"""Keys and values of all rows on every rank of a CP group, each of which attends with the queries
of its own rows (Llama 3, arXiv 2407.21783, section 3.3.2).

One all-gather brings them before attention, in the order of the rows, and one reduce-scatter sums
their gradients. Every run of a rank's rows attends to those from its first segment's beginning on,
in one call of the kernel, which is given a view of them. So they are kept once, whole, from the
forward to the backward.
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
    """Own rows of keys and values → all `rows` rows [R, 2 G, D], in their order.

    Args:
        order: [R] which row each of the ranks' rows is, and the way back; None = in their order.
    """
    made: Tensor = _Gathered.apply(torch.cat([key_RGD, value_RGD], 1), rows, order, cp)
    return made


def taken(whole_RGD: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """These rows of keys and of values, as views, and all of both, for the next who takes some.

    Where each takes what the one before leaves, their gradients are added to one tensor, and only
    one of them is there at a time.
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
