"""Ulysses context parallelism: ranks that share rows exchange them for heads in attention.

DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509; applied to sequences, images and clips.
Each rank of a CP group has a run of the rows (`division.own_rows`), with all heads. After the
all-to-all each has all rows of its share of the heads, and attends as without a group. Documents,
images, windows and kernels are the same, and the work is balanced whatever their lengths. The
reverse exchange also carries the gradient. Messages have equal parts: if the last runs are shorter,
they are padded with zeros, which are dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from disttrain_cli.models.group import Group, padded


def to_heads(
    query_RHD: Tensor, key_RGD: Tensor, value_RGD: Tensor, rows: int, cp: Group
) -> list[Tensor]:
    """Exchange local rows of all heads for all `rows` rows of local heads, in one message.

    If the group has more ranks than there are heads of keys and values, several ranks have the same
    ones.
    """
    again = max(1, cp.size // key_RGD.shape[1])
    if again > 1:
        key_RGD, value_RGD = (rows.repeat_interleave(again, 1) for rows in (key_RGD, value_RGD))
    of_rank = [
        rows.unflatten(1, (cp.size, -1)) for rows in (query_RHD, key_RGD, value_RGD)
    ]  # [R, C, H / C, D]
    made = _ToHeads.apply(torch.cat(of_rank, 2).flatten(1, 2), rows, cp)
    return list(made.split([rows.shape[2] for rows in of_rank], 1))


def to_rows(made_RHD: Tensor, own: int, cp: Group) -> Tensor:
    """Exchange all rows of local heads for the rank's `own` local rows of all heads."""
    return _ToRows.apply(made_RHD, own, cp)


def _exchanged(given: Tensor, cp: Group) -> Tensor:
    """Exchange [C, ...] all-to-all: one part to and from every rank, as a new tensor."""
    sent = given.to(cp.wire(given)).contiguous()
    taken = sent.new_empty(sent.shape)
    cp.all_to_all(taken, sent)
    return taken.to(given.device)


def _heads(own_RHD: Tensor, rows: int, cp: Group) -> Tensor:
    """Exchange local rows of all heads for all rows of local heads."""
    by_rank = padded(own_RHD, -(-rows // cp.size)).unflatten(1, (cp.size, -1)).transpose(0, 1)
    return _exchanged(by_rank, cp).flatten(0, 1)[:rows]


def _rows(heads_RHD: Tensor, own: int, cp: Group) -> Tensor:
    """Exchange all rows of local heads for local rows of all heads."""
    each = -(-len(heads_RHD) // cp.size)
    by_rank = _exchanged(padded(heads_RHD, cp.size * each).unflatten(0, (cp.size, each)), cp)
    return by_rank.transpose(0, 1).flatten(1, 2)[:own]


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, own_RHD: Tensor, rows: int, cp: Group) -> Tensor:
        ctx.own, ctx.cp = len(own_RHD), cp
        return _heads(own_RHD, rows, cp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _rows(gradient, ctx.own, ctx.cp), None, None


class _ToRows(Function):
    @staticmethod
    def forward(ctx: Any, heads_RHD: Tensor, own: int, cp: Group) -> Tensor:
        ctx.rows, ctx.cp = len(heads_RHD), cp
        return _rows(heads_RHD, own, cp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _heads(gradient, ctx.rows, ctx.cp), None, None
