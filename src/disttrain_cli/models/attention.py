"""Attention within segments of packed rows: samples of a sequence, images, windows of an image.

No mask is materialised, so memory grows with the rows, not with their square: whatever the rule
(`Rule`), the keys that a row sees are consecutive. `kernel_for` selects the kernel, both for
training and for planning:

- `varlen`: one flash-attention call for all segments (Dao 2023, arXiv 2307.08691), by torch's
  kernels or those of `flash4`. Attention sinks, and spans of rows that see each other, by torch's
  (`merged`).
- `efficient`: on a GPU, where flash attention does not support the dtype or the head width:
  memory-efficient attention (Rabe and Staats 2021, arXiv 2112.05682) over all segments of a length
  at once.
- `grouped`: on any device; PyTorch's scaled_dot_product_attention over all segments of a length at
  once.
- `scored`: on any device; the scores of one block of queries at a time (`scored`). It serves soft
  caps, which no other kernel has, and sinks and spans where `varlen` does not run. Neither
  FlashAttention 4 (no heads wider than 128, as Gemma 2 has) nor a compiled `flex_attention` (its
  compilation for every shape, its kernels unknown to planning) takes its place.

Values of another width than the keys (multi-head latent attention) are padded with zeros for
`varlen` and `grouped`, as transformers does for flash attention; the others take them as they are.

transformers' layers call it through `library_attention`, with the segments passed
as the mask (`masks`); diffusers' layers call it through their processors (`processors`). In a CP
group each rank attends with a share of the heads (`ulysses`), or with its local rows (`gathered`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from disttrain_cli.errors import SpecError
from disttrain_cli.models import flash4
from disttrain_cli.models.gathered import gathered, taken
from disttrain_cli.models.group import Group, padded
from disttrain_cli.models.host import to_device
from disttrain_cli.models.levelling import numbers_of, runs_of, seen_by
from disttrain_cli.models.merged import CAUSAL, Call, Later, merged
from disttrain_cli.models.scored import Capped, Seen, scored
from disttrain_cli.models.torch_versions import varlen_attn
from disttrain_cli.models.ulysses import to_heads, to_rows

Kernel = Literal["varlen", "efficient", "grouped", "scored"]
#: Limits of flash attention (torch 2.11 to 2.13): widest head, step of head widths, minimum compute
#: capability.
WIDEST_HEAD, HEAD_STEP, CAPABILITY = 256, 8, (8, 0)
#: Queries per block that are masked at once.
BLOCK = 1024
#: Memory-efficient attention supports heads of any width that is a multiple of this many bytes.
HEAD_STEP_BYTES = 16


def kernel_for(
    device: torch.device,
    dtype: torch.dtype,
    head_width: int,
    softcap: bool = False,
    merged: bool = False,
) -> Kernel:
    """Return the attention kernel for a device; "meta" stands for a recent GPU.

    Args:
        softcap: the scores have a soft cap.
        merged: the softmax has a sink, or rows of spans see later ones.
    """
    if softcap:
        return "scored"
    if merged:
        kernel = kernel_for(device, dtype, head_width)
        return kernel if kernel == "varlen" else "scored"
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


class Rule(NamedTuple):
    """Rows of its segment that a row sees; always consecutive ones.

    Spans are [start, stop) rows of the slot, each within a segment, disjoint and ascending. Their
    rows see each other: vision tokens of an image, the prefix of a prefix LM.
    """

    causal: bool = True  # no later rows, but a span's
    window: int | None = None  # if causal: the last so many rows only, itself included
    spans: tuple[tuple[int, int], ...] = ()
    #: The window hides a span's earlier rows, too (Gemma 3), or none of a span's (PaliGemma).
    window_hides_spans: bool = True


class MaskError(SpecError, AttributeError):
    """A layer reads its mask as a tensor, as indexers of sparse attention do."""

    def __init__(self, use: str) -> None:
        super().__init__(
            "A layer of this model cannot attend within packed samples",
            f"it computes with its attention mask ({use}), which is no tensor on packed rows",
            "Choose another model family.",
        )


class Segments:
    """Consecutive rows that attend to each other, covering all rows of a slot.

    `cp` is the CP group that shares these rows, if any: `attend` then receives and returns only the
    local rows of this rank. A `rule` takes the place of `attend`'s arguments. `parts` are segments
    in smaller ones of which rows attend to each other, without regard to the rest.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        cp: Group | None = None,
        rule: Rule | None = None,
        parts: Sequence[int] | None = None,
    ) -> None:
        self.lengths = lengths if parts is None else parts
        self.longest, self._device, self.cp = max(self.lengths), device, cp
        self.rule, self._dealt = rule, lengths
        self._shares: dict[bool, Shares] = {}
        self._views: dict[tuple[Rule, int | None], Segments] = {}
        self._seen: dict[tuple[bool, int | None, tuple[int, ...]], list[Seen]] = {}
        _check_spans(rule.spans if rule else (), self.lengths)

    def under(self, rule: Rule, chunk: int | None = None) -> Segments:
        """Return these segments with a rule, cached; cut every `chunk` rows (Llama 4)."""
        if (rule, chunk) not in self._views:
            parts = [
                min(chunk or length, length - start)
                for length in self.lengths
                for start in range(0, max(1, length), chunk or max(1, length))
            ]
            self._views[rule, chunk] = Segments(self._dealt, self._device, self.cp, rule, parts)
        return self._views[rule, chunk]

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

    def by_length(self, rows: _Rows) -> _Rows:
        """Return rows in the order of `groups`."""
        if self.order is None:
            return rows
        return _Rows(*(tensor.index_select(0, self.order[0]) for tensor in rows))

    def as_before(self, rows: Tensor) -> Tensor:
        """Return rows in the order of `groups` in their own order again."""
        return rows if self.order is None else rows.index_select(0, self.order[1])

    def tensors(self) -> list[Tensor]:
        """Return all tensors cached in this object so far."""
        return list(tensors_in(vars(self).values()))

    def shares(self, causal: bool) -> Shares:
        """Return the rows of each rank for attention with gathered keys and values (`gathered`)."""
        if causal not in self._shares:
            assert self.cp is not None
            runs = runs_of(self._dealt, self.cp.size, causal)
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
    def later(self) -> Later | None:
        """Rows of the rule's spans for attention to each span's later rows (`merged`), if any."""
        spans = [span for span in (self.rule.spans if self.rule else ()) if span[1] - span[0] > 1]
        if not spans:
            return None
        queries, keys = (
            to_device(torch.from_numpy(np.concatenate(rows)), self._device)
            for rows in (
                [np.arange(stop - 2, start - 1, -1) for start, stop in spans],
                [np.arange(stop - 1, start, -1) for start, stop in spans],
            )
        )
        lengths = [stop - start - 1 for start, stop in spans]
        within = Segments(lengths, self._device)
        call = Call((within.starts,) * 2, (within.longest,) * 2, CAUSAL)
        return Later(queries, keys, call)

    def seen(self, rule: Rule, to: Segments) -> list[Seen]:
        """Return the keys that each row sees, by group of equal lengths or else by segment.

        The last row of a segment is its last key's if there are more keys. On the meta device
        windows are ignored, as in all counts.
        """
        window = None if self._device.type == "meta" else rule.window
        key = rule.causal, window, tuple(to.lengths)
        if (found := self._seen.get(key)) is None:
            if to is self and not rule.spans:
                pairs = [(length, length) for _, length in self.groups]
            else:
                pairs = list(zip(self.lengths, to.lengths, strict=True))
            made = [_interval(*pair, rule.causal, window) for pair in pairs]
            offset = np.cumsum([0, *self.lengths])
            for span in rule.spans:
                number = int(np.searchsorted(offset, span[0], "right")) - 1
                start, stop = (end - int(offset[number]) for end in span)
                first, last = (ends[0, start:stop] for ends in made[number])
                last[:] = stop - 1
                if not rule.window_hides_spans:
                    np.minimum(first, start, out=first)
            found = self._seen[key] = [
                Seen(*ends, to_device(torch.from_numpy(np.stack(ends)), self._device))
                for ends in made
            ]
        return found

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise MaskError(f".{name}")

        def __getitem__(self, index: Any) -> Segments:
            rows = sum(self.lengths)
            for part in index if isinstance(index, tuple) else (index,):
                if not isinstance(part, slice) or part.indices(rows) != (0, rows, 1):
                    raise MaskError("a part of it")
            return self

        def __radd__(self, scores: Any) -> Any:
            raise MaskError("a sum with scores")

    @cached_property
    def _together(self) -> bool:
        """True if sorting the rows by length would not even halve the number of groups."""
        return len(list(groupby(self.lengths))) < 2 * len(set(self.lengths))


def _interval(
    rows: int, keys: int, causal: bool, window: int | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first and the last key [1, rows] that each of the last rows sees."""
    own = np.arange(keys - rows, keys)[None]
    if not causal:
        return np.zeros_like(own), np.full_like(own, keys - 1)
    return np.zeros_like(own) if window is None else np.maximum(0, own - window + 1), own


def _check_spans(spans: Sequence[tuple[int, int]], lengths: Sequence[int]) -> None:
    """Raise ValueError unless spans are disjoint, ascending and each within a segment."""
    ends, before = list(accumulate(lengths)), 0
    for start, stop in spans:
        segment = int(np.searchsorted(ends, start, "right"))
        if not before <= start < stop or segment == len(ends) or stop > ends[segment]:
            raise ValueError(f"rows {start} to {stop} are no span of one of the segments {lengths}")
        before = stop


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


class _How(NamedTuple):
    """Rule and scores of an attention."""

    rule: Rule
    scale: float | None
    softcap: float | None
    sinks: Tensor | None


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
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return attention of every row to the rows of its own segment: [R, H, width of values].

    Args:
        query_RHD: queries of the (local) rows.
        key_RGD, value_RGD: of G heads, each of which serves H / G heads of the query.
        within: the query's segments; if they have a rule, causal and window are not read.
        to: segments of keys and values if they differ from the query's; not supported in a CP
            group.
        scale: of the scores; 1 / √D if None.
        causal: each row attends to itself and earlier rows only.
        window: if causal, each row attends to the last `window` rows only, itself included.
        softcap: scores are bent to ± this by tanh.
        sinks_H: a score of each head that takes part in the softmax without a value.
    """
    rows = _Rows(query_RHD, key_RGD, value_RGD)
    how = _How(within.rule or Rule(causal, window), scale, softcap, sinks_H)
    width, cp = value_RGD.shape[-1], within.cp
    if _pads(rows, how, cp):
        widest = max(tensor.shape[-1] for tensor in rows)
        rows = _Rows(*(_of_width(tensor, widest) for tensor in rows))
        how = how._replace(scale=query_RHD.shape[-1] ** -0.5 if scale is None else scale)
    if cp is None:
        made = _attended_rows(rows, within, to, how)
    elif cp.gathers:
        made = _attended_parts(rows, within, cp, how)
    else:
        rows = _Rows(*to_heads(*rows, sum(within.lengths), cp))
        if sinks_H is not None:
            how = how._replace(sinks=sinks_H.unflatten(0, (cp.size, -1))[cp.rank])
        made = to_rows(_attended_rows(rows, within, to, how), len(query_RHD), cp)
    return made if made.shape[-1] == width else made[..., :width]


_unpadded = False


@contextmanager
def unpadded() -> Iterator[None]:
    """Count model FLOPs inside: values of another width than the keys are not padded on meta."""
    global _unpadded
    _unpadded = True
    try:
        yield
    finally:
        _unpadded = False


def _pads(rows: _Rows, how: _How, cp: Group | None) -> bool:
    """Return True if keys and values are padded to one width: for the kernel, or one message."""
    widths = {tensor.shape[-1] for tensor in rows}
    if len(widths) == 1 or (_unpadded and rows.query.is_meta):
        return False
    kernel = _kernel(rows.query, max(widths), how, rule_fits=True)
    return cp is not None or kernel in ("varlen", "grouped")


def _of_width(rows: Tensor, width: int) -> Tensor:
    more = width - rows.shape[-1]
    return functional.pad(rows, (0, more)) if more else rows


def _kernel(query: Tensor, width: int, how: _How, rule_fits: bool) -> Kernel:
    merges = how.sinks is not None or bool(how.rule.spans)
    if merges and not rule_fits:
        return "scored"
    return kernel_for(query.device, query.dtype, width, how.softcap is not None, merges)


def unsupported_in_cp(spans: bool, cp_comm_type: str) -> str | None:
    """Return why a CP group cannot attend so, None if it can.

    Args:
        spans: rows of spans see each other, or attention is not causal though rows are dealt as
            for causal attention.
    """
    if spans and cp_comm_type == "all_gather":
        return (
            "with gathered keys and values (cp_comm_type: all_gather) a rank's rows see no later"
            " ones, as vision tokens of an image or the rows of a prefix do here"
        )
    return None


def _attended_parts(rows: _Rows, within: Segments, cp: Group, how: _How) -> Tensor:
    if within.rule is not None:
        beyond = bool(within.rule.spans) or not within.rule.causal
        if (why := unsupported_in_cp(beyond, "all_gather")) is not None:
            raise SpecError(
                "This attention does not run in its CP group",
                why,
                "Set cp_comm_type: a2a, or cp: 1",
            )
    causal = how.rule.causal
    order, parts = within.shares(causal)
    whole = gathered(rows.key, rows.value, sum(within.lengths), order, cp)
    made = []
    for part in parts:
        key, value, whole = taken(whole, part.keys)
        some = _Rows(rows.query[part.rows], key, value)
        if len(some.query):
            made.append(_attended_rows(some, part.within, part.to, how))
        else:  # a rank without rows still joins the group's collectives
            made.append(some.query + (key.sum() + value.sum()))
    return made[0] if len(made) == 1 else torch.cat(made)


def not_empty(attention: Callable[[Tensor], Tensor], own_RD: Tensor) -> Tensor:
    """Apply a library's attention to local rows [R, D], padded to one row if there are none.

    The libraries require at least one row; in a CP group with fewer rows than ranks some ranks have
    none.
    """
    return attention(own_RD) if len(own_RD) else attention(padded(own_RD, 1))[:0]


def _attended_rows(rows: _Rows, within: Segments, to: Segments | None, how: _How) -> Tensor:
    to, rule, longest = to or within, how.rule, 0
    if rule.window is not None:
        if rule.window >= to.longest:
            rule = rule._replace(window=None)
            how = how._replace(rule=rule)
        elif not rule.window_hides_spans:
            longest = max((stop - start for start, stop in rule.spans), default=0)
    fits = not rule.window or longest <= rule.window
    widths = rows.query.shape[-1], rows.value.shape[-1]
    if widths[0] != widths[1] and _unpadded and rows.query.is_meta and how.softcap is None:
        kernel: Kernel = "efficient"  # its count takes both widths
    else:
        kernel = _kernel(rows.query, max(widths), how, fits)
    if kernel == "varlen":
        return _varlen(rows, within, to, how)
    if kernel == "scored":
        return _scored(rows, within, to, how)
    if to is within:
        return _grouped(kernel, rows, within, how)
    if not rule.causal and len(set(within.lengths)) == len(set(to.lengths)) == 1:
        query, key, value = (
            tensor.unflatten(0, (len(within.lengths), -1)).transpose(1, 2) for tensor in rows
        )
        return _dense(kernel, query, key, value, how).transpose(1, 2).flatten(0, 1)
    return _one_by_one(kernel, rows, within, to, how)


def _varlen(rows: _Rows, within: Segments, to: Segments, how: _How) -> Tensor:
    window = how.rule.window
    before = -1 if window is None else window - 1  # flash attention does not count the row itself
    seen = (before, 0) if how.rule.causal else (-1, -1)
    starts, longest = (within.starts, to.starts), (within.longest, to.longest)
    if how.sinks is not None or how.rule.spans:
        return merged(*rows, how.sinks, Call(starts, longest, seen), within.later, how.scale)
    if flash4.computes(rows.query):
        return flash4.attended(*rows, starts, longest, how.scale, seen)
    return varlen_attn(
        *rows,
        *starts,
        *longest,
        scale=how.scale,
        window_size=seen,
        enable_gqa=rows.query.shape[1] != rows.key.shape[1],
    )


def _scored(rows: _Rows, within: Segments, to: Segments, how: _How) -> Tensor:
    scale = rows.query.shape[-1] ** -0.5 if how.scale is None else how.scale
    seen, capped = within.seen(how.rule, to), Capped(scale, how.softcap)
    together = to is within and not how.rule.spans
    if together:
        rows, shapes = within.by_length(rows), [within.groups] * 3
    else:
        shapes = [[(1, length) for length in each.lengths] for each in (within, to, to)]
    parts = [
        [part.unflatten(0, shape) for part, shape in zip(one.split(sizes), each, strict=True)]
        for one, each in zip(rows, shapes, strict=True)
        for sizes in [[count * length for count, length in each]]
    ]
    made = torch.cat(
        [
            scored(query, key, value, how.sinks, keys, capped).flatten(0, 1)
            for query, key, value, keys in zip(*parts, seen, strict=True)
        ]
    )
    return within.as_before(made) if together else made


def _dense(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """Return attention [N, H, L, D] without a mask."""
    if kernel == "grouped":
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=how.rule.causal, scale=how.scale
        )
    kept = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    made: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, None, kept, 0.0, how.rule.causal, scale=how.scale
    )[0]
    return made


def _one_by_one(kernel: Kernel, rows: _Rows, within: Segments, to: Segments, how: _How) -> Tensor:
    """Return attention segment by segment, where key segments may be longer than query segments.

    With `causal` the last query of each segment sees all of its keys.
    """
    rows, made = _for_every_head(rows), []
    queries = rows.query.split(list(within.lengths))
    for query, key, value in zip(
        queries, *(tensor.split(list(to.lengths)) for tensor in rows[1:]), strict=True
    ):
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        part = _masked(q, k, v, how) if how.rule.causal else _dense(kernel, q, k, v, how)
        made.append(part[0].transpose(0, 1))
    return torch.cat(made)


def _for_every_head(rows: _Rows) -> _Rows:
    each = rows.query.shape[1] // rows.key.shape[1]
    if each == 1:
        return rows
    key, value = (tensor.repeat_interleave(each, 1) for tensor in rows[1:])
    return rows._replace(key=key, value=value)


def _grouped(kernel: Kernel, rows: _Rows, within: Segments, how: _How) -> Tensor:
    rows, window = within.by_length(_for_every_head(rows)), how.rule.window
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
            made = _dense(kernel, query, key, value, how)
        else:
            made = _masked(query, key, value, how)
        parts.append(made.transpose(1, 2).flatten(0, 1))
    return within.as_before(parts[0] if len(parts) == 1 else torch.cat(parts))


def _masked(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """Return causal attention [N, H, L, D] of the last L key rows, each to its last `window` rows.

    Computed by blocks of queries: at most 2 · window² scores per block if there is a window.
    """
    window = how.rule.window
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
                scale=how.scale,
            )
        )
    return torch.cat(made, dim=2)
