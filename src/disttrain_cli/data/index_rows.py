"""Rows of the index from the samples of one shard: tokens counted, what does not fit named; arrays,
not objects."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import compress, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.documents import pieces
from disttrain_cli.data.duplicates import contents_of
from disttrain_cli.data.index_file import schema
from disttrain_cli.data.parts import counts_of_parts, cutting, first_parts, in_parts
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import OpenShard, Sample, Segment, Skipped, printable
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.spec.heads import Head
from disttrain_cli.spec.index import (
    COLUMNS,
    KINDS,
    OPTIONAL,
    SAMPLE_SPECIALS,
    TARGET,
    TEMPLATED,
    TEXT,
    UNREAD,
    VIDEOS,
)
from disttrain_cli.spec.inputs import ModelInputs

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_SAMPLES = 1024  # tokenized together; no more texts are in memory than theirs
MOST_REASON = 500  # characters of why a sample is left out
LISTS = COLUMNS[4:]


def own_schema() -> pa.Schema:
    """What a shard's rows hold of the index's columns: key and segments."""
    import pyarrow as pa

    return pa.schema([schema().field(name) for name in COLUMNS[3:]])


def shard_rows(
    read: Iterator[Sample | Skipped],
    label: str,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    opened: OpenShard | None = None,
) -> tuple[pa.Table, list[Skipped], dict[str, int]]:
    """(rows of a shard: key and segments; samples that are left out of it; by `UNREAD`, what is
    left out of samples).

    Left out are broken samples, those of which this model reads nothing, those longer than a
    sequence, and those with a clip longer than the model hears. A document longer than a sequence,
    one text and all of it trained, becomes a sample for each of its pieces, all of its name. Files
    that the model's processor cuts become their parts (`data.parts`). Images and clips that the
    model has no module for are no segments, and a text right before an image to be generated, which
    asks for it, is then not trained. `opened`: the shard, where `contents` are asked for.
    """
    import pyarrow as pa

    batches, skipped, unread = [], list[Skipped](), Counter[str]()
    while chunk := list(islice(read, CHUNK_SAMPLES)):
        samples = [one for one in chunk if isinstance(one, Sample)]
        skipped += [one for one in chunk if isinstance(one, Skipped)]
        batches.append(_batch(samples, label, inputs, tokenizer, opened, skipped, unread))
    named = [
        Skipped(one.shard, printable(one.key), printable(one.reason, MOST_REASON))
        for one in skipped
    ]
    return pa.Table.from_batches(batches, own_schema()), named, dict(unread)


def digest(rows: pa.Table) -> str:
    """Of keys, segment sizes, locations and token counts; the same whatever batches the rows came
    in."""
    content = hashlib.sha256(json.dumps(rows.column("key").to_pylist()).encode())
    content.update(counts_of(rows).astype("<i8").tobytes())
    for name in LISTS:
        values = flat(rows, name)
        if name not in OPTIONAL or values.any():
            content.update(values.astype("<i8").tobytes())
    return content.hexdigest()[:16]


def flat(rows: pa.Table, name: str) -> Ints:
    """Values of a list column, of all samples one after the other."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = pc.list_flatten(rows.column(name))
    values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    return np.asarray(values.to_numpy(zero_copy_only=False), dtype=np.int64)


def numbers_of(columns: Mapping[str, Ints], films: bool) -> Ints:
    """[segments, 2] what the headers of files say, or [segments, 4] where there are videos."""
    names = ["widths", "heights", *(("frames", "rates") if films else ())]
    return np.stack([columns[name] for name in names], axis=1)


def specials_of(kinds: Ints, heights: Ints, start: Ints) -> Ints:
    """[N] BOS and EOS of each sample, of segments from `start` [N + 1]: none where a chat template
    wrote it."""
    templated = starts_of(((kinds == TEXT) & (heights == TEMPLATED)).astype(np.int64))[start]
    return np.where(np.diff(templated) > 0, 0, SAMPLE_SPECIALS)


def counts_of(rows: pa.Table) -> Ints:
    """Segments of each sample."""
    import pyarrow.compute as pc

    return np.asarray(pc.list_value_length(rows.column("kinds")).to_numpy(), dtype=np.int64)


def _batch(
    samples: list[Sample],
    label: str,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    opened: OpenShard | None,
    skipped: list[Skipped],
    unread: Counter[str],
) -> pa.RecordBatch:
    import pyarrow as pa

    present = {TEXT} | {kind for item, kind in KINDS.items() if inputs.of(item)}
    films = any(head.video is not None for head in inputs.images)
    unread.update(
        VIDEOS if one.frames else UNREAD[one.kind]
        for sample in samples
        for one in sample.segments
        if one.kind not in present or (one.frames and not films)
    )
    samples = [Sample(sample.key, _read(sample.segments, present, films)) for sample in samples]
    samples, of_texts = _in_pieces(
        _cut(samples, label, inputs, skipped),
        inputs.sequence_length - SAMPLE_SPECIALS,
        tokenizer,
    )
    contents, unreadable = _contents(samples, opened)
    per_sample = [sample.segments for sample in samples]
    counts = np.array([len(segments) for segments in per_sample], dtype=np.int64)
    kinds, locations, _, widths, heights, trained, ended, _, parts, frames, rates = (
        zip(*(s for segments in per_sample for s in segments), strict=True)
        if counts.any()
        else [()] * len(Segment._fields)
    )
    columns = {
        "kinds": np.array(kinds, np.int64),
        "trained": np.array(trained, bool),
        "ended": np.array(ended, bool),
        "widths": np.array(widths, np.int64),
        "heights": np.array(heights, np.int64),
        "parts": np.array(parts, np.int64),
        "frames": np.array(frames, np.int64),
        "rates": np.array(rates, np.int64),
        "contents": np.array(contents or [0] * len(kinds), np.int64),
    }
    for name, values in zip(
        ("offsets", "sizes"), zip(*locations, strict=True) if locations else ((), ()), strict=True
    ):
        columns[name] = np.array(values, np.int64)
    columns["tokens"] = _tokens(columns, of_texts, inputs)
    total = starts_of(columns["tokens"])[starts_of(counts)]
    lengths = np.diff(total) + specials_of(columns["kinds"], columns["heights"], starts_of(counts))
    heads = _heads(inputs)
    misfits = [
        unreadable.get(number) or _misfit(segments, heads)
        for number, segments in enumerate(per_sample)
    ]
    fits = np.array([reason is None for reason in misfits], dtype=bool)
    keep = (counts > 0) & (lengths <= inputs.sequence_length) & fits
    for index in np.flatnonzero(~keep).tolist():
        if not counts[index]:
            reason = "nothing in it that this model reads"
        else:
            too_long = f"too long: {lengths[index]} of at most {inputs.sequence_length} tokens"
            reason = misfits[index] or too_long
        skipped.append(Skipped(label, samples[index].key, reason))
    inside = np.repeat(keep, counts)
    offsets = pa.array(starts_of(counts[keep]), pa.int32())
    keys = [printable(sample.key) for sample in compress(samples, keep.tolist())]
    form = own_schema()
    lists = [
        pa.ListArray.from_arrays(
            offsets, pa.array(columns[name][inside], form.field(name).type.value_type)
        )
        for name in LISTS
    ]
    return pa.RecordBatch.from_arrays([pa.array(keys, pa.string()), *lists], schema=form)


def _contents(samples: list[Sample], opened: OpenShard | None) -> tuple[list[int], dict[int, str]]:
    """(`contents` of all segments, nothing where no shard is opened for them; by number, samples
    whose files cannot be read, and why)."""
    contents, unreadable = list[int](), dict[int, str]()
    for number, sample in enumerate(samples if opened else ()):
        assert opened is not None
        try:
            contents += contents_of(sample, opened)
        except (ValueError, LookupError, OSError) as error:
            contents += [0] * len(sample.segments)
            unreadable[number] = f"its files cannot be read: {error}"
    return contents, unreadable


def _read(segments: list[Segment], present: set[int], films: bool) -> list[Segment]:
    """Segments of the kinds `present`, videos only with `films`; a text that asks for an image that
    nothing here generates is not trained."""
    if TARGET not in present:
        asks = [one.kind == TARGET for one in segments[1:]] + [False]
        segments = [
            one._replace(trained=False) if asking else one
            for one, asking in zip(segments, asks, strict=True)
        ]
    return [one for one in segments if one.kind in present and (films or not one.frames)]


def _cut(
    samples: list[Sample], label: str, inputs: ModelInputs, skipped: list[Skipped]
) -> list[Sample]:
    """The samples with every file in its parts, where this model's processor cuts them."""
    if not cutting(inputs):
        return samples
    made, heads = [], _heads(inputs)
    for sample in samples:
        try:
            if reason := _misfit(sample.segments, heads):
                raise ValueError(reason)
            made.append(Sample(sample.key, in_parts(sample.segments, inputs)))
        except ValueError as error:
            skipped.append(Skipped(label, sample.key, str(error)))
    return made


def _heads(inputs: ModelInputs) -> dict[int, Head]:
    """The head of each kind that this model reads."""
    return {kind: of[0] for item, kind in KINDS.items() if (of := inputs.of(item))}


def _misfit(segments: list[Segment], heads: Mapping[int, Head]) -> str | None:
    """Why the model cannot read an item of a sample, if there is one that it cannot."""
    for one in segments:
        if one.kind != TEXT and (reason := heads[one.kind].misfit(*one.numbers)):
            return reason
    return None


def _in_pieces(
    samples: list[Sample], most: int, tokenizer: Tokenizer
) -> tuple[list[Sample], list[int]]:
    """(samples, of which those longer than `most` tokens are in pieces where they are documents;
    tokens of all texts).
    """
    every = [one for sample in samples for one in sample.segments if one.kind == TEXT]
    of_texts = iter(tokenizer.count([one.text for one in every if one.ids is None]))
    counted = iter([next(of_texts) if one.ids is None else len(one.ids) for one in every])
    parts, tokens = list[Sample](), list[int]()
    for sample in samples:
        texts = [next(counted) for one in sample.segments if one.kind == TEXT]
        first = sample.segments[0] if len(sample.segments) == 1 else None
        if first is not None and first.trained and first.ids is None and texts[:1] > [most]:
            for piece in pieces(first.text, most, tokenizer):
                part = first._replace(width_px=piece.first, height_px=piece.characters)
                parts.append(Sample(sample.key, [part]))
                tokens.append(piece.tokens)
        else:
            parts.append(sample)
            tokens += texts
    return parts, tokens


def _tokens(columns: dict[str, NDArray], of_texts: list[int], inputs: ModelInputs) -> Ints:
    """LLM tokens of each segment."""
    kinds = columns["kinds"]
    tokens = np.zeros(len(kinds), dtype=np.int64)
    tokens[kinds == TEXT] = of_texts
    tokens += columns["ended"]
    sizes = numbers_of(columns, bool(columns["frames"].any()))
    parts = counts_of_parts(first_parts(kinds, columns["parts"]))
    for item, kind in KINDS.items():
        at = np.flatnonzero(kinds == kind)
        if len(at):
            tokens[at] = inputs.of(item)[0].tokens_of(sizes[at], columns["parts"][at], parts[at])
    return tokens
