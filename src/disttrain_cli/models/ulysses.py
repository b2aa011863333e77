"""Tokens for heads: how ranks that share the tokens of sequences attend over all of them
(DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509).

Each rank of a CP group has an equal run of the tokens, with all heads. For attention they exchange
these: each then has all tokens of its share of the heads, and attends as without a group.
Documents, windows and kernels are the same, and the work is level however long the documents are.
The exchange back is the gradient's way, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from disttrain_cli.models.group import Group


def to_heads(query_RHD: Tensor, key_RGD: Tensor, value_RGD: Tensor, cp: Group) -> list[Tensor]:
    """Own tokens of all heads → all tokens of own heads, in one message.

    Where the group has more ranks than there are heads of keys and values, several ranks have the
    same of these.
    """
    again = max(1, cp.size // key_RGD.shape[1])
    if again > 1:
        key_RGD, value_RGD = (rows.repeat_interleave(again, 1) for rows in (key_RGD, value_RGD))
    of_rank = [
        rows.unflatten(1, (cp.size, -1)) for rows in (query_RHD, key_RGD, value_RGD)
    ]  # [R, C, H / C, D]
    made = _ToHeads.apply(torch.cat(of_rank, 2).flatten(1, 2), cp)
    return list(made.split([rows.shape[2] for rows in of_rank], 1))


def to_tokens(made_RHD: Tensor, cp: Group) -> Tensor:
    """All tokens of own heads → own tokens of all heads."""
    return _ToTokens.apply(made_RHD, cp)


def _exchanged(given: Tensor, cp: Group) -> Tensor:
    """[C, ...]: a part for every rank → one from each of them, as a new tensor."""
    sent = given.to(cp.wire(given)).contiguous()
    taken = sent.new_empty(sent.shape)
    cp.all_to_all(taken, sent)
    return taken.to(given.device)


def _heads(tokens_RHD: Tensor, cp: Group) -> Tensor:
    """Own tokens of all heads → all tokens of own heads."""
    by_rank = tokens_RHD.unflatten(1, (cp.size, -1)).transpose(0, 1)
    return _exchanged(by_rank, cp).flatten(0, 1)


def _tokens(heads_RHD: Tensor, cp: Group) -> Tensor:
    """All tokens of own heads → own tokens of all heads."""
    by_rank = _exchanged(heads_RHD.unflatten(0, (cp.size, -1)), cp)
    return by_rank.transpose(0, 1).flatten(1, 2)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx: Any, tokens_RHD: Tensor, cp: Group) -> Tensor:
        ctx.cp = cp
        return _heads(tokens_RHD, cp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _tokens(gradient, ctx.cp), None


class _ToTokens(Function):
    @staticmethod
    def forward(ctx: Any, heads_RHD: Tensor, cp: Group) -> Tensor:
        ctx.cp = cp
        return _tokens(heads_RHD, cp)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _heads(gradient, ctx.cp), None
