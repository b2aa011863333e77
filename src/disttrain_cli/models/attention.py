"""Attention inside segments of packed rows: samples of a sequence, images, windows of an image.

No mask exists anywhere, so memory grows with the rows, not with their square. `kernel_for` says
which kernel does the mathematics, for training and for what plans price alike:

- `varlen`: one flash-attention call for all segments (Dao 2023, arXiv 2307.08691).
- `efficient`: on a GPU, where flash attention does not take the numbers or the heads:
  memory-efficient attention (Rabe
  and Staats 2021, arXiv 2112.05682) over all segments of a length at once.
- `grouped`: anywhere; PyTorch's scaled_dot_product_attention over all segments of a length at once.

transformers' layers call it where their configuration says so (`packed`), with the segments in the
mask's place; diffusers' by their processors (`processors`). Where a CP group shares the
rows, each rank attends with a share of the heads (`ulysses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from disttrain_cli.models.group import Group, padded
from disttrain_cli.models.host import to_device
from disttrain_cli.models.torch_versions import varlen_attn
from disttrain_cli.models.ulysses import to_heads, to_rows

PACKED = "packed"

Kernel = Literal["varlen", "efficient", "grouped"]
#: What flash attention takes (torch 2.11 to 2.13): the widest head, in steps of, and the oldest
#: compute capability.
WIDEST_HEAD, HEAD_STEP, CAPABILITY = 256, 8, (8, 0)
#: Memory-efficient attention takes heads of any width in steps of as many bytes.
HEAD_STEP_BYTES = 16


def kernel_for(device: torch.device, dtype: torch.dtype, head_width: int) -> Kernel:
    """The kernel that attention runs with on a device; "meta" stands for a GPU that is recent
    enough."""
    if device.type not in ("cuda", "meta"):
        return "grouped"
    recent = device.type == "meta" or torch.cuda.get_device_capability(device) >= CAPABILITY
    half = dtype in (torch.bfloat16, torch.float16)
    if recent and half and head_width <= WIDEST_HEAD and head_width % HEAD_STEP == 0:
        return "varlen"
    known = dtype in (torch.float32, torch.float16) or (recent and half)
    return (
        "efficient" if known and head_width * dtype.itemsize % HEAD_STEP_BYTES == 0 else "grouped"
    )


class Segments:
    """Consecutive rows that attend each other, of all rows of a slot; `cp` is the group that shares
    these rows, if any: `attend` is given and gives those of this rank."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, cp: Group | None = None
    ) -> None:
        self.lengths, self.longest, self._device, self.cp = lengths, max(lengths), device, cp

    @cached_property
    def starts(self) -> Tensor:
        """[S + 1] int32: the first row of every segment, and the end of the last; with their values
        also on meta."""
        device = torch.device("cpu") if self._device.type == "meta" else self._device
        return to_device([0, *accumulate(self.lengths)], device, torch.int32)

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """(segments, their length) of neighbours of equal length, in the order of `order`."""
        if self._together:
            return [(len(list(run)), length) for length, run in groupby(self.lengths)]
        return [(self.lengths.count(length), length) for length in sorted(set(self.lengths))]

    @cached_property
    def order(self) -> tuple[Tensor, Tensor] | None:
        """[R] rows by the length of their segment, and the way back; None where they stay as they
        are."""
        if self._together:
            return None
        with torch.device("cpu"):
            lengths = torch.tensor(self.lengths)
            sizes = lengths.repeat_interleave(lengths, output_size=sum(self.lengths))
        rows = torch.argsort(sizes, stable=True)
        return to_device(rows, self._device), to_device(torch.argsort(rows), self._device)

    @cached_property
    def _together(self) -> bool:
        """Whether ordering the rows by length would not even halve the number of groups."""
        return len(list(groupby(self.lengths))) < 2 * len(set(self.lengths))


def segments_of(
    cache: dict[str, Any],
    name: str,
    lengths: Callable[[], Sequence[int]],
    like: Tensor,
    cp: Group | None = None,
) -> Segments:
    """Segments of this name on the device of `like`, made once per batch (`Batch.cache`)."""
    if name not in cache:
        cache[name] = Segments(lengths(), like.device, cp)
    return cache[name]


@lru_cache(maxsize=256)
def equal_segments(count: int, length: int, device: torch.device) -> Segments:
    """As many segments of one length."""
    return Segments([length] * count, device)


class _Rows(NamedTuple):
    query: Tensor  # [R, H, D]
    key: Tensor  # [R, G, D], each of the G heads for H / G of the query's
    value: Tensor


def attend(
    query_RHD: Tensor,
    key_RGD: Tensor,
    value_RGD: Tensor,
    within: Segments,
    to: Segments | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """Attention of every row to the rows of its own segment: [R, H, D].

    Args:
        key_RGD, value_RGD: of G heads, each of which serves H / G heads of the query.
        within: the query's segments,
        to: and those of keys and values, where they are others; all of either are equally long
            then.
        scale: of the scores; 1 / √D if None.
        causal: to itself and the rows before it only,
        window: and of those to the last `window`, itself among them.
    """
    rows = _Rows(query_RHD, key_RGD, value_RGD)
    if (cp := within.cp) is not None:
        rows = _Rows(*to_heads(*rows, sum(within.lengths), cp))
    made = _attended_rows(rows, within, to, scale, causal, window)
    return made if cp is None else to_rows(made, len(query_RHD), cp)


def not_empty(attention: Callable[[Tensor], Tensor], own_RD: Tensor) -> Tensor:
    """What a library's attention makes of own rows [R, D], of which it wants at least one: where a
    CP group has fewer rows than ranks some have none, and give one that nobody reads."""
    return attention(own_RD) if len(own_RD) else attention(padded(own_RD, 1))[:0]


def _attended_rows(
    rows: _Rows,
    within: Segments,
    to: Segments | None,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    if window is not None and window >= within.longest:
        window = None
    kernel = kernel_for(rows.query.device, rows.query.dtype, rows.query.shape[-1])
    if kernel == "varlen":
        return _varlen(rows, within, to or within, scale, causal, window)
    if to is not None:
        query, key, value = (
            tensor.unflatten(0, (len(within.lengths), -1)).transpose(1, 2) for tensor in rows
        )
        return _dense(kernel, query, key, value, causal, scale).transpose(1, 2).flatten(0, 1)
    return _grouped(kernel, rows, within, scale, causal, window)


def _varlen(
    rows: _Rows,
    within: Segments,
    to: Segments,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    before = -1 if window is None else window - 1  # flash attention does not count the row itself
    return varlen_attn(
        *rows,
        within.starts,
        to.starts,
        within.longest,
        to.longest,
        scale=scale,
        window_size=(before, 0) if causal else (-1, -1),
        enable_gqa=rows.query.shape[1] != rows.key.shape[1],
    )


def _dense(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """Attention [N, H, L, D] without a mask."""
    if kernel == "grouped":
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale
        )
    kept = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    made: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, kept, 0.0, causal, scale=scale
    )[0]
    return made


def _grouped(
    kernel: Kernel,
    rows: _Rows,
    within: Segments,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    each = rows.query.shape[1] // rows.key.shape[1]
    if each > 1:
        rows = rows._replace(
            key=rows.key.repeat_interleave(each, 1), value=rows.value.repeat_interleave(each, 1)
        )
    if within.order is not None:
        rows = _Rows(*(tensor.index_select(0, within.order[0]) for tensor in rows))
    sizes = [count * length for count, length in within.groups]
    parts = []
    for (count, length), *part in zip(
        within.groups, *(tensor.split(sizes) for tensor in rows), strict=True
    ):
        query, key, value = (
            tensor.unflatten(0, (count, length)).transpose(1, 2) for tensor in part
        )  # [N, H, L, D]
        # model FLOPs know no window (`flops`)
        if window is None or length <= window or query.is_meta:
            made = _dense(kernel, query, key, value, causal, scale)
        else:
            made = _windowed(query, key, value, scale, window)
        parts.append(made.transpose(1, 2).flatten(0, 1))
    made = parts[0] if len(parts) == 1 else torch.cat(parts)
    return made if within.order is None else made.index_select(0, within.order[1])


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int
) -> Tensor:
    """Causal attention [N, H, L, D] to the last `window` rows, by blocks of as many queries:
    2·window² scores each."""
    made = []
    for start in range(0, query.shape[2], window):
        first, end = max(0, start - window + 1), min(start + window, query.shape[2])
        back = torch.arange(start, end, device=query.device)[:, None] - torch.arange(
            first, end, device=query.device
        )
        made.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:end],
                key[:, :, first:end],
                value[:, :, first:end],
                attn_mask=(back >= 0) & (back < window),
                scale=scale,
            )
        )
    return torch.cat(made, dim=2)


def packed(config: Any) -> Any:
    """The configuration of a transformers class, whose layers now attend inside segments."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, _attend)
    config._attn_implementation = PACKED
    return config


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Segments,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers' layers call it, with heads before rows: [N, H, L, D] → [N, L, H, D]."""
    assert not dropout
    rows = _Rows(*(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)))
    # a result is laid out as its queries: heads before rows, it would be copied, and kept twice
    rows = rows._replace(query=rows.query.contiguous())
    made = attend(
        rows.query,
        rows.key,
        rows.value,
        attention_mask,
        scale=scaling,
        causal=module.is_causal,
        window=sliding_window,
    )
    return made.unflatten(0, (len(query), -1)), None
