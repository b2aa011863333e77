"""The library's masks, read as rules of segments instead of computed for all pairs of rows.

A model of transformers composes its masks from functions of two rows (`masking_utils`) and passes
them to each layer by its type. Inside `within` they become the batch's segments under a `Rule`, by
reading the composition itself, so a family needs no entry here. Any function that leaves a row
other than consecutive keys, or that is not the library's, is refused by name.

How families compose them (transformers 5.23), with [i − w + 1, i] for windows of w rows:

    full attention               causal                            keys [0, i]
    sliding window               causal ∧ window                   [i − w + 1, i]
    chunks (Llama 4)             causal ∧ same chunk               segments cut every c rows
    bidirectional (use_bidirectional_attention: "all")             [0, end)
    blocks of one image:
      Gemma 3, full layers       causal ∨ same block               [0, end of the block)
      Gemma 3, sliding layers    (causal ∨ same block) ∧ window    [i − w + 1, end of the block)
      Gemma 4, full layers       causal: blocks are ignored there
      Gemma 4, sliding layers    as Gemma 3
    prefix (PaliGemma, HRM):
      full layers                causal ∨ same block               [0, end of the prefix)
      sliding layers             (causal ∧ window) ∨ same block    [min(i − w + 1, 0), end)

A block is named by an id per row (`block_sequence_ids`, −1 = none); an image of Gemma is a run of
rows with `token_type_ids` 1 (Gemma 3) or `mm_token_type_ids` 1 or 2 (Gemma 4), a prefix the rows
with `token_type_ids` 0. Molmo 2 gives all images of a sample one id, so that they see each other
across the text between them: no consecutive keys, refused. The library's own composition lets
blocks of one id in several packed samples see each other, and looks ids of sliding layers up by
position; here a block ends with its sample, and is looked up by row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models.attention import Rule, Segments

_segments: ContextVar[Segments | None] = ContextVar("segments", default=None)


@contextmanager
def within(segments: Segments) -> Iterator[None]:
    """Make masks that the library's models compute inside rules of these segments.

    Their input is the rows of all segments, and their `attention_mask` None. The library does not
    look for packed samples itself, for which the host would wait for the positions.
    """
    _leave_packing_to_us()
    token = _segments.set(segments)
    try:
        yield
    finally:
        _segments.reset(token)


@cache
def _leave_packing_to_us() -> None:
    from transformers import masking_utils as library

    find = library.find_packed_sequence_indices

    def found(positions: Tensor) -> Tensor | None:
        return find(positions) if _segments.get() is None else None

    library.find_packed_sequence_indices = found


def mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Any = None,
    **_: Any,
) -> Segments | None:
    """Return what a layer attends within, for `AttentionMaskInterface`; None outside of `within`.

    Raises:
        SpecError: the mask is not one of segments.
    """
    segments = _segments.get()
    if segments is None:
        return None
    own = segments.cp is not None  # of this rank's rows
    packed = own or batch_size * q_length == sum(segments.lengths)
    if attention_mask is not None or q_length != kv_length or not packed:
        raise _refused("a mask of padding, of a cache or of other rows than the packed ones")
    return seen_by(mask_function, segments)


def seen_by(mask_function: Callable[..., Any], segments: Segments) -> Segments:
    """Return segments under the rule that a function of `masking_utils` computes.

    Raises:
        SpecError: it is another function, or leaves rows other than consecutive keys.
    """
    read = _read(mask_function)
    if read.causal is None:
        raise _refused("blocks alone")
    if not read.causal and read.window is not None:
        raise _refused("a window of later rows")
    spans = () if read.blocks is None else spans_of(read.blocks, segments.lengths)
    if not read.causal:
        spans = ()  # all rows see each other already
    if spans and read.chunk is not None:
        raise _refused("blocks in chunks")
    return segments.under(Rule(read.causal, read.window, spans, read.hides), read.chunk)


def spans_of(blocks: Tensor, lengths: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs of rows with one id; blocks end with their segments.

    Args:
        blocks: an id per row on the host, −1 = none; on the meta device there are no spans.

    Raises:
        SpecError: rows of one id do not follow each other within a segment.
    """
    if blocks.is_meta:
        return ()
    ids = blocks.detach().cpu().flatten().numpy()
    if len(ids) != sum(lengths):
        raise _refused(f"blocks of {len(ids)} rows, of {sum(lengths)}")
    spans: list[tuple[int, int]] = []
    for end, length in zip(accumulate(lengths), lengths, strict=True):
        own = ids[end - length : end]
        cuts = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), length]
        runs = [(a, b) for a, b in pairwise(cuts) if a < b and own[a] >= 0]
        if len({int(own[a]) for a, _ in runs}) < len(runs):
            raise _refused("blocks of rows that do not follow each other")
        spans += [(end - length + a, end - length + b) for a, b in runs]
    return tuple(spans)


@dataclass(frozen=True)
class _Read:
    """Composition of the library's functions; causal is None of blocks alone."""

    causal: bool | None = False
    window: int | None = None
    chunk: int | None = None
    blocks: Tensor | None = None
    hides: bool = True


def _read(function: Callable[..., Any]) -> _Read:
    outer = getattr(function, "__qualname__", type(function).__name__).partition(".")[0]
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        raise _refused(f"{getattr(function, '__module__', '?')}.{outer}")
    inside = inspect.getclosurevars(function).nonlocals
    match outer:
        case "causal_mask_function":
            return _Read(causal=True)
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return _Read()
        case "remap_positions_for_packed_sequence" | "add_offsets_to_mask_function":
            return _read(inside["mask_function"])
        case "sliding_window_overlay":
            return _Read(window=inside["sliding_window"])
        case "chunked_overlay":
            return _Read(chunk=inside["chunk_size"])
        case "blockwise_overlay":
            return _Read(causal=None, blocks=inside["block_sequence_ids"])
        case "and_masks":
            made = _Read()
            for part in inside["mask_functions"]:
                made = _both(made, _read(part))
            return made
        case "or_masks":
            made, *others = map(_read, inside["mask_functions"])
            for other in others:
                made = _either(made, other)
            return made
    raise _refused(f"masking_utils.{outer}")


def _both(one: _Read, other: _Read) -> _Read:
    if one.blocks is not None and other.blocks is None:
        one, other = other, one
    if None in (one.causal, other.causal) or one.blocks is not None:
        raise _refused("an intersection of blocks")
    if other.blocks is not None:  # what hides rows of `one` hides those of blocks, too
        if one.causal or one.chunk is not None or (one.window and other.window):
            raise _refused("an intersection with blocks")
        hides = other.hides or one.window is not None
        return replace(other, window=one.window or other.window, hides=hides)
    if one.chunk and other.chunk:
        raise _refused("chunks in chunks")
    windows = [each.window for each in (one, other) if each.window is not None]
    return _Read(
        causal=bool(one.causal or other.causal),
        window=min(windows, default=None),
        chunk=one.chunk or other.chunk,
    )


def _either(one: _Read, other: _Read) -> _Read:
    if one.causal is None:
        one, other = other, one
    if other.causal is not None or one.causal is None or one.blocks is not None:
        raise _refused("a union of other masks than blocks")
    return replace(one, blocks=other.blocks, hides=False)


def _refused(what: str) -> SpecError:
    return SpecError(
        "A mask of this model is not one of packed samples",
        f"it is composed of {what}",
        "Choose another model family.",
    )
