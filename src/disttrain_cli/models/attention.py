"""Attention within segments of packed rows: samples of a sequence, images, windows of an image.

No mask is materialised, so memory grows with the rows, not with their square. `kernel_for` selects
the kernel, both for training and for planning:

- `varlen`: one flash-attention call for all segments (Dao 2023, arXiv 2307.08691), by torch's
  kernels or those of `flash4`.
- `efficient`: on a GPU, where flash attention does not support the dtype or the head width:
  memory-efficient attention (Rabe and Staats 2021, arXiv 2112.05682) over all segments of a length
  at once.
- `grouped`: on any device; PyTorch's scaled_dot_product_attention over all segments of a length at
  once.

transformers' layers call it if their configuration selects it (`packed`), with the segments passed
as the mask; diffusers' layers call it through their processors (`processors`). In a CP group each
rank attends with a share of the heads (`ulysses`), or with its local rows (`gathered`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from disttrain_cli.models import flash4
from disttrain_cli.models.gathered import gathered, taken
from disttrain_cli.models.group import Group, padded
from disttrain_cli.models.host import to_device
from disttrain_cli.models.levelling import numbers_of, runs_of, seen_by
from disttrain_cli.models.torch_versions import varlen_attn
from disttrain_cli.models.ulysses import to_heads, to_rows

PACKED = "packed"

Kernel = Literal["varlen", "efficient", "grouped"]
#: Limits of flash attention (torch 2.11 to 2.13): widest head, step of head widths, minimum compute
#: capability.
WIDEST_HEAD, HEAD_STEP, CAPABILITY = 256, 8, (8, 0)
#: Queries per block that are masked at once.
BLOCK = 1024
#: Memory-efficient attention supports heads of any width that is a multiple of this many bytes.
HEAD_STEP_BYTES = 16


def kernel_for(device: torch.device, dtype: torch.dtype, head_width: int) -> Kernel:
    """Return the attention kernel for a device; "meta" stands for a recent GPU."""
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


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors in nested containers and segments.

    Lists of numbers are passed over whole, as they may have an entry for each row of a batch.
    """
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Segments):
            yield from value.tensors()
        elif isinstance(value, dict):
            yield from tensors_in(value.values())
        elif isinstance(value, (list, tuple)) and value and not isinstance(value[0], int):
            yield from tensors_in(value)


class Segments:
    """Consecutive rows that attend to each other, covering all rows of a slot.

    `cp` is the CP group that shares these rows, if any: `attend` then receives and returns only the
    local rows of this rank.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device, cp: Group | None = None
    ) -> None:
        self.lengths, self.longest, self._device, self.cp = lengths, max(lengths), device, cp
        self._shares: dict[bool, Shares] = {}

    @cached_property
    def starts(self) -> Tensor:
        """First row of every segment, and the end of the last: [S + 1] int32.

        Has real values on meta, too.
        """
        device = torch.device("cpu") if self._device.type == "meta" else self._device
        return to_device([0, *accumulate(self.lengths)], device, torch.int32)

    @cached_property
    def borders(self) -> dict[str, Tensor]:
        """The same as kernels of recurrent mixers take it, by argument (`recurrent`)."""
        starts = self.starts.long()
        of_rows = torch.arange(len(self.lengths), dtype=torch.int32, device=starts.device)
        of_rows = of_rows.repeat_interleave(starts.diff(), output_size=sum(self.lengths))
        return {"cu_seq_lens_q": starts, "cu_seqlens": starts, "seq_idx": of_rows[None]}

    @cached_property
    def groups(self) -> list[tuple[int, int]]:
        """(segments, their length) of consecutive segments of equal length, in `order`."""
        if self._together:
            return [(len(list(run)), length) for length, run in groupby(self.lengths)]
        return [(self.lengths.count(length), length) for length in sorted(set(self.lengths))]

    @cached_property
    def order(self) -> tuple[Tensor, Tensor] | None:
        """Row indices [R] sorted by segment length, and their inverse; None if already in order."""
        if self._together:
            return None
        with torch.device("cpu"):
            lengths = torch.tensor(self.lengths)
            sizes = lengths.repeat_interleave(lengths, output_size=sum(self.lengths))
        rows = torch.argsort(sizes, stable=True)
        return to_device(rows, self._device), to_device(torch.argsort(rows), self._device)

    def tensors(self) -> list[Tensor]:
        """Return all tensors cached in this object so far."""
        return list(tensors_in(vars(self).values()))

    def shares(self, causal: bool) -> Shares:
        """Return the rows of each rank for attention with gathered keys and values (`gathered`)."""
        if causal not in self._shares:
            assert self.cp is not None
            runs = runs_of(self.lengths, self.cp.size, causal)
            order = numbers_of([run for own in runs for run in own])
            moved = None
            if (np.diff(order) != 1).any():
                rows, back = (torch.from_numpy(one) for one in (order, np.argsort(order)))
                moved = to_device(rows, self._device), to_device(back, self._device)
            parts, own = list[Part](), 0
            for run in runs[self.cp.rank]:
                queries, seen, keys = seen_by(self.lengths, run, causal)
                within, to = (Segments(of or [0], self._device) for of in (queries, seen))
                parts.append(Part(slice(own, own + run[1] - run[0]), slice(*keys), within, to))
                own = parts[-1].rows.stop
            self._shares[causal] = Shares(moved, parts)
        return self._shares[causal]

    @cached_property
    def _together(self) -> bool:
        """True if sorting the rows by length would not even halve the number of groups."""
        return len(list(groupby(self.lengths))) < 2 * len(set(self.lengths))


class Part(NamedTuple):
    """Run of a rank's local rows, and the rows whose keys and values it needs."""

    rows: slice
    keys: slice
    within: Segments
    to: Segments


class Shares(NamedTuple):
    """Distribution of rows for attention in a CP group that gathers keys and values."""

    order: tuple[Tensor, Tensor] | None  # permutation of the gathered rows (`gathered`)
    parts: list[Part]  # parts of this rank


def segments_of(
    cache: dict[str, Any],
    name: str,
    lengths: Callable[[], Sequence[int]],
    like: Tensor,
    cp: Group | None = None,
) -> Segments:
    """Return the named segments on `like`'s device, created once per batch (`Batch.cache`)."""
    if name not in cache:
        cache[name] = Segments(lengths(), like.device, cp)
    return cache[name]


@lru_cache(maxsize=256)
def equal_segments(count: int, length: int, device: torch.device) -> Segments:
    """Return `count` segments of one length."""
    return Segments([length] * count, device)


class _Rows(NamedTuple):
    query: Tensor  # [R, H, D]
    key: Tensor  # [R, G, D], each of the G heads serves H / G query heads
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
    """Return attention of every row to the rows of its own segment: [R, H, D].

    Args:
        query_RHD: queries of the (local) rows.
        key_RGD, value_RGD: of G heads, each of which serves H / G heads of the query.
        within: the query's segments.
        to: segments of keys and values if they differ from the query's; not supported in a CP
            group.
        scale: of the scores; 1 / √D if None.
        causal: each row attends to itself and earlier rows only.
        window: if causal, each row attends to the last `window` rows only, itself included.
    """
    rows = _Rows(query_RHD, key_RGD, value_RGD)
    if (cp := within.cp) is not None:
        if cp.gathers:
            return _attended_parts(rows, within, cp, scale, causal, window)
        rows = _Rows(*to_heads(*rows, sum(within.lengths), cp))
    made = _attended_rows(rows, within, to, scale, causal, window)
    return made if cp is None else to_rows(made, len(query_RHD), cp)


def _attended_parts(
    rows: _Rows, within: Segments, cp: Group, scale: float | None, causal: bool, window: int | None
) -> Tensor:
    order, parts = within.shares(causal)
    whole = gathered(rows.key, rows.value, sum(within.lengths), order, cp)
    made = []
    for part in parts:
        key, value, whole = taken(whole, part.keys)
        some = _Rows(rows.query[part.rows], key, value)
        if len(some.query):
            made.append(_attended_rows(some, part.within, part.to, scale, causal, window))
        else:  # a rank without rows still joins the group's collectives
            made.append(some.query + (key.sum() + value.sum()))
    return made[0] if len(made) == 1 else torch.cat(made)


def not_empty(attention: Callable[[Tensor], Tensor], own_RD: Tensor) -> Tensor:
    """Apply a library's attention to local rows [R, D], padded to one row if there are none.

    The libraries require at least one row; in a CP group with fewer rows than ranks some ranks have
    none.
    """
    return attention(own_RD) if len(own_RD) else attention(padded(own_RD, 1))[:0]


def _attended_rows(
    rows: _Rows,
    within: Segments,
    to: Segments | None,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    to = to or within
    if window is not None and window >= to.longest:
        window = None
    kernel = kernel_for(rows.query.device, rows.query.dtype, rows.query.shape[-1])
    if kernel == "varlen":
        return _varlen(rows, within, to, scale, causal, window)
    if to is within:
        return _grouped(kernel, rows, within, scale, causal, window)
    if not causal and len(set(within.lengths)) == len(set(to.lengths)) == 1:
        query, key, value = (
            tensor.unflatten(0, (len(within.lengths), -1)).transpose(1, 2) for tensor in rows
        )
        return _dense(kernel, query, key, value, causal, scale).transpose(1, 2).flatten(0, 1)
    return _one_by_one(kernel, rows, within, to, scale, causal, window)


def _varlen(
    rows: _Rows,
    within: Segments,
    to: Segments,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    before = -1 if window is None else window - 1  # flash attention does not count the row itself
    seen = (before, 0) if causal else (-1, -1)
    if flash4.computes(rows.query):
        starts, longest = (within.starts, to.starts), (within.longest, to.longest)
        return flash4.attended(*rows, starts, longest, scale, seen)
    return varlen_attn(
        *rows,
        within.starts,
        to.starts,
        within.longest,
        to.longest,
        scale=scale,
        window_size=seen,
        enable_gqa=rows.query.shape[1] != rows.key.shape[1],
    )


def _dense(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """Return attention [N, H, L, D] without a mask."""
    if kernel == "grouped":
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=causal, scale=scale
        )
    kept = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    made: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, kept, 0.0, causal, scale=scale
    )[0]
    return made


def _one_by_one(
    kernel: Kernel,
    rows: _Rows,
    within: Segments,
    to: Segments,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    """Return attention segment by segment, where key segments may be longer than query segments.

    With `causal` the last query of each segment sees all of its keys.
    """
    rows, made = _for_every_head(rows), []
    queries = rows.query.split(list(within.lengths))
    for query, key, value in zip(
        queries, *(tensor.split(list(to.lengths)) for tensor in rows[1:]), strict=True
    ):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        part = _masked(q, k, v, scale, window) if causal else _dense(kernel, q, k, v, causal, scale)
        made.append(part[0].transpose(0, 1))
    return torch.cat(made)


def _for_every_head(rows: _Rows) -> _Rows:
    each = rows.query.shape[1] // rows.key.shape[1]
    if each == 1:
        return rows
    key, value = (tensor.repeat_interleave(each, 1) for tensor in rows[1:])
    return rows._replace(key=key, value=value)


def _grouped(
    kernel: Kernel,
    rows: _Rows,
    within: Segments,
    scale: float | None,
    causal: bool,
    window: int | None,
) -> Tensor:
    rows = _for_every_head(rows)
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
        # model FLOPs ignore windows (`flops`)
        if window is None or length <= window or query.is_meta:
            made = _dense(kernel, query, key, value, causal, scale)
        else:
            made = _masked(query, key, value, scale, window)
        parts.append(made.transpose(1, 2).flatten(0, 1))
    made = parts[0] if len(parts) == 1 else torch.cat(parts)
    return made if within.order is None else made.index_select(0, within.order[1])


def _masked(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Return causal attention [N, H, L, D] of the last L key rows, each to its last `window` rows.

    Computed by blocks of queries: at most 2 · window² scores per block if there is a window.
    """
    made, before, size = [], key.shape[2] - query.shape[2], window or BLOCK
    for start in range(0, query.shape[2], size):
        stop = min(start + size, query.shape[2])
        first = 0 if window is None else max(0, before + start - window + 1)
        back = torch.arange(before + start, before + stop, device=query.device)[
            :, None
        ] - torch.arange(first, before + stop, device=query.device)
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        made.append(
            functional.scaled_dot_product_attention(
                query[:, :, start:stop],
                key[:, :, first : before + stop],
                value[:, :, first : before + stop],
                attn_mask=seen,
                scale=scale,
            )
        )
    return torch.cat(made, dim=2)


def packed(config: Any) -> Any:
    """Make a transformers configuration use attention within segments, and return it."""
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
    """Compute attention for transformers' layers, heads first: [N, H, L, D] → [N, L, H, D]."""
    assert not dropout
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
        causal=module.is_causal,
        window=sliding_window,
    )
    return made.unflatten(0, (len(query), -1)), None
