"""Replacements of diffusers' attention, which attend as in `attention`.

The layers themselves are unchanged: their processors are replaced or, in a model that runs whole,
PyTorch's function that they call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from disttrain_cli.models.attention import Segments, attend, equal_segments


def with_own_attention(layer: nn.Module) -> nn.Module:
    """Replace the processors of diffusers' attention in a layer, and return the layer."""
    from diffusers.models.attention_processor import (
        Attention,
        AttnProcessor2_0,
        JointAttnProcessor2_0,
    )
    from diffusers.models.transformers.transformer_flux import FluxAttention, FluxAttnProcessor
    from diffusers.models.transformers.transformer_lumina2 import Lumina2AttnProcessor2_0
    from diffusers.models.transformers.transformer_qwenimage import QwenDoubleStreamAttnProcessor2_0

    ours = {
        AttnProcessor2_0: _Processor,
        JointAttnProcessor2_0: _JointProcessor,
        FluxAttnProcessor: _TurningProcessor,
        Lumina2AttnProcessor2_0: _TurningProcessor,
        QwenDoubleStreamAttnProcessor2_0: _TurningProcessor,
    }
    for part in layer.modules():
        if isinstance(part, (Attention, FluxAttention)):
            part.set_processor(ours[type(part.processor)]())
    return layer


class OwnAttention(TorchFunctionMode):
    """Replaces `scaled_dot_product_attention` in a library's forward.

    Each item's rows [N, H, L, D] attend to all of its rows, or to all of another tensor's: a mask
    of booleans is that of the conditioning, of which no token is padding.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return _all_to_all(*args, **kwargs)
        return func(*args, **kwargs)


def _all_to_all(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    masked = attn_mask is not None and attn_mask.dtype != torch.bool
    assert not (masked or dropout_p or is_causal or scale is not None), "attention of another kind"
    if query.ndim == 3:  # of one head
        return _all_to_all(query[:, None], key[:, None], value[:, None]).squeeze(1)
    heads = query.shape[1]
    query, key, value = (one.transpose(1, 2) for one in (query, key, value))
    to = equal_segments(*key.shape[:2], key.device)
    return _attended(query, key, value, to).unflatten(-1, (heads, -1)).transpose(1, 2)


class _Processor:
    """Replacement of diffusers' AttnProcessor2_0.

    Rows [N, L, D] or an image [N, D, H, W] attend to themselves or to [N, S, D'].
    """

    def __call__(
        self,
        attention: Any,
        hidden: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        assert (
            attention_mask is None and attention.spatial_norm is None and not attention.norm_cross
        )
        given = hidden
        if given.ndim == 4:
            hidden = hidden.flatten(2).transpose(1, 2)
        if attention.group_norm is not None:
            hidden = attention.group_norm(hidden.transpose(1, 2)).transpose(1, 2)
        other = hidden if encoder_hidden_states is None else encoder_hidden_states
        a = attention
        (query,) = _heads(a, hidden, (a.to_q, a.norm_q))
        key, value = _heads(a, other, (a.to_k, a.norm_k), (a.to_v, None))
        to = equal_segments(*other.shape[:2], other.device)
        made = _out(attention, _attended(query, key, value, to))
        if given.ndim == 4:
            made = made.transpose(1, 2).reshape(given.shape)
        made = made + given if attention.residual_connection else made
        return (
            made
            if attention.rescale_output_factor == 1.0
            else made / attention.rescale_output_factor
        )


class _JointProcessor:
    """Replacement of diffusers' JointAttnProcessor2_0.

    Rows [N, L, D] attend to themselves and to others [N, S, D], which have weights of their own and
    attend to all rows, too.
    """

    def __call__(
        self,
        attention: Any,
        hidden: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        assert attention_mask is None
        a, others, rows = attention, encoder_hidden_states, _own_heads(attention, hidden)
        if others is None:
            return _out(a, _attended(*rows))
        rows = [torch.cat(pair, dim=1) for pair in zip(rows, _added(a, others), strict=True)]
        made, of_others = _attended(*rows).split([hidden.shape[1], others.shape[1]], dim=1)
        of_others = of_others if a.context_pre_only else a.to_add_out(of_others)
        return _out(a, made), of_others


class _TurningProcessor:
    """Replacement of diffusers' processors of Flux, Lumina 2 and Qwen-Image.

    As `_JointProcessor`, but the others come first, and queries and keys are rotated by position.
    """

    def __call__(
        self,
        attention: Any,
        hidden: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        encoder_hidden_states_mask: None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        from diffusers.models.embeddings import apply_rotary_emb

        assert attention_mask is None and encoder_hidden_states_mask is None
        assert image_rotary_emb is not None
        a, rows = attention, _own_heads(attention, hidden)
        others = None if a.added_kv_proj_dim is None else encoder_hidden_states
        if others is not None:
            rows = [torch.cat(pair, dim=1) for pair in zip(_added(a, others), rows, strict=True)]
        query, key = (apply_rotary_emb(one, image_rotary_emb, sequence_dim=1) for one in rows[:2])
        made = _attended(query, key, rows[2])
        if others is None:
            return made if a.pre_only else _out(a, made)
        of_others, made = made.split([others.shape[1], hidden.shape[1]], dim=1)
        return _out(a, made), a.to_add_out(of_others)


def _own_heads(attention: Any, rows_NLD: Tensor) -> list[Tensor]:
    a = attention
    return _heads(a, rows_NLD, (a.to_q, a.norm_q), (a.to_k, a.norm_k), (a.to_v, None))


def _added(attention: Any, rows_NLD: Tensor) -> list[Tensor]:
    a = attention
    norms = (a.norm_added_q, a.norm_added_k, None)
    return _heads(a, rows_NLD, *zip((a.add_q_proj, a.add_k_proj, a.add_v_proj), norms, strict=True))


def _heads(attention: Any, rows_NLD: Tensor, *linears: tuple[Any, Any]) -> list[Tensor]:
    """Return queries, keys and values [N, L, H, D'], each by its linear and optional norm.

    Keys and values may have fewer heads.
    """
    heads, width = [], attention.to_q.out_features // attention.heads
    for linear, norm in linears:
        made = linear(rows_NLD).unflatten(-1, (-1, width))
        heads.append(made if norm is None else norm(made))
    return heads


def _attended(
    query_NLHD: Tensor, key_NSHD: Tensor, value_NSHD: Tensor, to: Segments | None = None
) -> Tensor:
    """Return attention [N, L, H·D] of every item's rows to all of its rows, or to those of `to`."""
    within = equal_segments(*query_NLHD.shape[:2], query_NLHD.device)
    query, key, value = (one.flatten(0, 1) for one in (query_NLHD, key_NSHD, value_NSHD))
    return attend(query, key, value, within, to).flatten(1).unflatten(0, (len(query_NLHD), -1))


def _out(attention: Any, rows_NLD: Tensor) -> Tensor:
    """Apply the linear after attention, and dropout."""
    linear, dropout = attention.to_out
    return dropout(linear(rows_NLD))
