"""Attention of transformers' models within segments: their attention and mask interfaces.

A layer of the library calls `_attend` if its configuration selects it (`packed`), with segments as
its mask; a tower that attends to whole images calls `_attend_images` (`for_images`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.attention import Segments, _Rows, attend, equal_segments
from disttrain_cli.models.masks import mask

PACKED, IMAGES = "packed", "images"
#: Keyword arguments that transformers' layers pass to attention and that change nothing here.
IGNORED = {
    "position_ids": "rotary factors are applied before; the segments say where samples begin",
    "cache_position": "rows are those of whole samples, without a cache",
    "past_key_values": "the layer has added to the cache before",
    "use_cache": "the layer has added to the cache before",
    "cu_seq_lens_q": "for flash attention: borders, which the segments are",
    "cu_seq_lens_k": "for flash attention: borders, which the segments are",
    "max_length_q": "for flash attention: the longest segment",
    "max_length_k": "for flash attention: the longest segment",
    "deterministic": "for flash attention: the order in which it sums gradients",
    "position_embeddings": "rotary factors are applied before",
    "output_hidden_states": "read by the model, not by attention",
    "output_router_logits": "read by the model, not by attention",
    "return_dict": "read by the model, not by attention",
    "num_items_in_batch": "read by the loss, not by attention",
}


def packed(config: Any) -> Any:
    """Make a transformers configuration use attention within segments, and return it.

    What the library's models pass as masks to their layers are then segments (`masks.within`).
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED, _attend)
    AttentionMaskInterface.register(PACKED, mask)
    config._attn_implementation = PACKED
    return config


def for_images(model: nn.Module) -> None:
    """Make a tower attend by the kernels of all other towers, where its classes allow others.

    Without it the library's `sdpa` runs, which on meta and fake devices is not a GPU's kernel but
    products with all scores in memory.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(IMAGES, _attend_images)
    AttentionMaskInterface.register(IMAGES, sdpa_mask)
    configs: list[Any] = [getattr(part, "config", None) for part in model.modules()]
    before = [getattr(config, "_attn_implementation", None) for config in configs]
    for config, own in zip(configs, before, strict=True):  # a whole one's is set in its parts, too
        if own is not None:
            config._attn_implementation = IMAGES if own == "sdpa" else own


def _attend_images(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention of all rows of images to each other: [N, H, L, D] → [N, L, H, D].

    With a mask, or to other rows (a resampler's), the library's own runs; without a GPU's kernels
    (meta, fake devices) memory-efficient attention stands for them, which takes a mask, too.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal &= attention_mask is None  # else the mask says it
    with torch._C.DisableTorchFunction():  # segments' numbers stay on the host
        if attention_mask is None and not (dropout or causal) and key.shape[2] == query.shape[2]:
            images = equal_segments(len(query), query.shape[2], query.device)
            return _attend(module, query, key, value, images, scaling=scaling, is_causal=False)
        if not (query.is_meta or isinstance(query, FakeTensor)) or dropout or causal:
            return sdpa_attention_forward(
                module, query, key, value, attention_mask, dropout, scaling, is_causal, **more
            )
        each = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(each, 1) for tensor in (key, value))
        bias = attention_mask
        if bias is not None:
            shape = (*query.shape[:3], key.shape[2])
            bias = query.new_empty(bias.shape).expand(shape)
        made = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, torch.is_grad_enabled(), scale=scaling
        )[0]
        return made.transpose(1, 2), None


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Segments,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Compute attention for transformers' layers, heads first: [N, H, L, D] → [N, L, H, D].

    Raises:
        SpecError: the layer asks for what is not computed here; never is a part left out.
    """
    refused = [name for name, value in more.items() if value is not None and value is not False]
    refused = [name for name in refused if name not in IGNORED]
    if dropout:
        refused.append("dropout")
    if not isinstance(attention_mask, Segments):
        refused.append(f"a mask of its own ({type(attention_mask).__name__})")
    elif key.shape[2] != query.shape[2]:
        refused.append(f"{key.shape[2]} keys for {query.shape[2]} queries")
    elif attention_mask.rule is is_causal is None and not hasattr(module, "is_causal"):
        refused.append("a mask of which nothing says whether it is causal")
    elif s_aux is not None and s_aux.shape != query.shape[1:2]:
        refused.append(f"s_aux of shape {list(s_aux.shape)} for {query.shape[1]} heads")
    if refused:
        raise SpecError(
            f"{type(module).__name__} cannot attend within packed samples",
            f"it asks attention for {', '.join(refused)}, which is not computed on packed rows",
            "Choose another model family.",
        )
    rows = _Rows(*(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)))
    # The result has the layout of its queries: with heads before rows it would be copied and saved
    # twice.
    rows = rows._replace(query=rows.query.contiguous())
    made = attend(
        rows.query,
        rows.key,
        rows.value,
        attention_mask,
        scale=scaling,
        causal=bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        window=sliding_window,
        softcap=softcap,
        sinks_H=s_aux,
    )
    return made.unflatten(0, (len(query), -1)), None
