"""Attention inside segments of packed rows: samples of a sequence, images, windows of an image.

No mask exists anywhere, so memory grows with the rows, not with their square. Two kernels do the same mathematics:

- `varlen`: one flash-attention call for all segments (Dao 2023, arXiv 2307.08691), where a GPU has it (`kernel_for`).
- `grouped`: anywhere; PyTorch's scaled_dot_product_attention over all segments of a length at once.

transformers' layers call it where their configuration says so (`packed`), with the segments in the mask's place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from disttrain_cli.models.host import to_device
from disttrain_cli.models.torch_versions import varlen_attn

if TYPE_CHECKING:
    from disttrain_cli.models.layer import Batch

PACKED = "packed"

Kernel = Literal["varlen", "grouped"]
#: What flash attention takes (torch 2.11 to 2.13): the widest head, in steps of, and the oldest compute capability.
WIDEST_HEAD, HEAD_STEP, CAPABILITY = 256, 8, (8, 0)


def kernel_for(device: torch.device, dtype: torch.dtype, head_width: int) -> Kernel:
    """The kernel that attention runs with on a device; "meta" stands for a GPU that is recent enough."""
    fits = dtype in (torch.bfloat16, torch.float16) and head_width <= WIDEST_HEAD and head_width % HEAD_STEP == 0
    if device.type == "cuda" and fits:
        return "varlen" if torch.cuda.get_device_capability(device) >= CAPABILITY else "grouped"
    return "varlen" if device.type == "meta" and fits else "grouped"


class Segments:
    """Consecutive rows that attend each other, of all rows of a slot."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths, self.longest, self._device = lengths, max(lengths), device

    @cached_property
    def starts(self) -> Tensor:
        """[S + 1] int32: the first row of every segment, and the end of the last; with their values also on meta."""
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
        """[R] rows by the length of their segment, and the way back; None where they stay as they are."""
        if self._together:
            return None
        with torch.device("cpu"):
            sizes = torch.tensor(self.lengths).repeat_interleave(torch.tensor(self.lengths))
        rows = torch.argsort(sizes, stable=True)
        return to_device(rows, self._device), to_device(torch.argsort(rows), self._device)

    @cached_property
    def _together(self) -> bool:
        """Whether ordering the rows by length would not even halve the number of groups."""
        return len(list(groupby(self.lengths))) < 2 * len(set(self.lengths))


def segments_of(batch: Batch, name: str, lengths: Callable[[], Sequence[int]], like: Tensor) -> Segments:
    """Segments of this name, made once per stage and batch, on the device of `like`."""
    if name not in batch.cache:
        batch.cache[name] = Segments(lengths(), like.device)
    return batch.cache[name]


class _Rows(NamedTuple):
    query: Tensor  # [R, H, D]
    key: Tensor  # [R, G, D], each of the G heads for H / G of the query's
    value: Tensor


def attend(query_RHD: Tensor, key_RGD: Tensor, value_RGD: Tensor, within: Segments, *, scale: float | None = None,
           causal: bool = False, window: int | None = None) -> Tensor:
    """Attention of every row to the rows of its own segment: [R, H, D].

    Args:
        key_RGD, value_RGD: of G heads, each of which serves H / G heads of the query.
        scale: of the scores; 1 / √D if None.
        causal: to itself and the rows before it only,
        window: and of those to the last `window`, itself among them.
    """
    rows = _Rows(query_RHD, key_RGD, value_RGD)
    if window is not None and window >= within.longest:
        window = None
    if kernel_for(query_RHD.device, query_RHD.dtype, query_RHD.shape[-1]) == "varlen":
        return _varlen(rows, within, scale, causal, window)
    return _grouped(rows, within, scale, causal, window)


def _varlen(rows: _Rows, within: Segments, scale: float | None, causal: bool, window: int | None) -> Tensor:
    before = -1 if window is None else window - 1  # flash attention does not count the row itself
    return varlen_attn(*rows, within.starts, within.starts, within.longest, within.longest, scale=scale,
                       window_size=(before, 0) if causal else (-1, -1),
                       enable_gqa=rows.query.shape[1] != rows.key.shape[1])


def _grouped(rows: _Rows, within: Segments, scale: float | None, causal: bool, window: int | None) -> Tensor:
    each = rows.query.shape[1] // rows.key.shape[1]
    if each > 1:
        rows = rows._replace(key=rows.key.repeat_interleave(each, 1), value=rows.value.repeat_interleave(each, 1))
    if within.order is not None:
        rows = _Rows(*(tensor.index_select(0, within.order[0]) for tensor in rows))
    sizes = [count * length for count, length in within.groups]
    parts = []
    for (count, length), *part in zip(within.groups, *(tensor.split(sizes) for tensor in rows), strict=True):
        query, key, value = (tensor.unflatten(0, (count, length)).transpose(1, 2) for tensor in part)  # [N, H, L, D]
        if window is None or length <= window or query.is_meta:  # model FLOPs know no window (`flops`)
            made = functional.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
        else:
            made = _windowed(query, key, value, scale, window)
        parts.append(made.transpose(1, 2).flatten(0, 1))
    made = parts[0] if len(parts) == 1 else torch.cat(parts)
    return made if within.order is None else made.index_select(0, within.order[1])


def _windowed(query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int) -> Tensor:
    """Causal attention [N, H, L, D] to the last `window` rows, by blocks of as many queries: 2·window² scores each."""
    made = []
    for start in range(0, query.shape[2], window):
        first, end = max(0, start - window + 1), min(start + window, query.shape[2])
        back = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
        made.append(functional.scaled_dot_product_attention(
            query[:, :, start:end], key[:, :, first:end], value[:, :, first:end],
            attn_mask=(back >= 0) & (back < window), scale=scale))
    return torch.cat(made, dim=2)


def packed(config: Any) -> Any:
    """The configuration of a transformers class, whose layers now attend inside segments."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, _attend)
    config._attn_implementation = PACKED
    return config


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Segments,
                        dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
                        **_: Any) -> tuple[Tensor, None]:
    """As transformers' layers call it, with heads before rows: [N, H, L, D] → [N, L, H, D]."""
    assert not dropout
    query_RHD, *others = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    made = attend(query_RHD, others[0], others[1], attention_mask, scale=scaling, causal=module.is_causal,
                  window=sliding_window)
    return made.unflatten(0, (len(query), -1)), None
