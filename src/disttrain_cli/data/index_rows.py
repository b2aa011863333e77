"""Rows of the index from the samples of one shard: tokens counted, what does not fit named; arrays,
not objects."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
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
from disttrain_cli.data.sources import Compact, OpenShard, Sample, Segment, Skipped, printable
from disttrain_cli.data.sources.samples import ENDED, KIND, TRAINED
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.spec.heads import Head, Numbers
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
#: Columns of a `Segment`.
OF_SEGMENTS = (
    *("kinds", "trained", "ended", "widths", "heights"),
    *("offsets", "sizes", "parts", "frames", "rates"),
)
Samples = list[Sample | Compact]
#: Bytes of a `Compact.form` that are texts.
TEXTS = bytes(TEXT | trained | ended for trained in (0, TRAINED) for ended in (0, ENDED))


def own_schema() -> pa.Schema:
    """What a shard's rows hold of the index's columns: key and segments."""
    import pyarrow as pa

    return pa.schema([schema().field(name) for name in COLUMNS[3:]])


def shard_rows(
    read: Iterator[Sample | Compact | Skipped],
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
    whole = _taken_whole(inputs) if opened is None else frozenset[int]()
    while chunk := list(islice(read, CHUNK_SAMPLES)):
        samples = [
            one
            if isinstance(one, Sample) or whole.issuperset(one.form)
            else Sample(one.key, one.segments)
            for one in chunk
            if not isinstance(one, Skipped)
        ]
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
    samples: Samples,
    label: str,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    opened: OpenShard | None,
    skipped: list[Skipped],
    unread: Counter[str],
) -> pa.RecordBatch:
    import pyarrow as pa

    present = _present(inputs)
    films = any(head.video is not None for head in inputs.images)
    unread.update(
        VIDEOS if one.frames else UNREAD[one.kind]
        for sample in samples
        if isinstance(sample, Sample)
        for one in sample.segments
        if one.kind not in present or (one.frames and not films)
    )
    samples = [
        Sample(sample.key, _read(sample.segments, present, films))
        if isinstance(sample, Sample)
        else sample
        for sample in samples
    ]
    samples, of_texts = _in_pieces(
        _cut(samples, label, inputs, skipped),
        inputs.sequence_length - SAMPLE_SPECIALS,
        tokenizer,
    )
    contents, unreadable = _contents(samples, opened)
    counts, columns = _columns(samples)
    if contents:
        columns["contents"][:] = contents
    columns["tokens"] = _tokens(columns, of_texts, inputs)
    total = starts_of(columns["tokens"])[starts_of(counts)]
    lengths = np.diff(total) + specials_of(columns["kinds"], columns["heights"], starts_of(counts))
    heads = _heads(inputs)
    misfits = [
        unreadable.get(number) or _misfit(sample, heads) for number, sample in enumerate(samples)
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


def _taken_whole(inputs: ModelInputs) -> frozenset[int]:
    """Bytes of a `Compact.form` of which nothing has to be left out, cut or written around."""
    if cutting(inputs):
        return frozenset()
    return frozenset((*TEXTS, *_present(inputs)))


def _present(inputs: ModelInputs) -> set[int]:
    """Kinds of segments that this model reads."""
    return {TEXT} | {kind for item, kind in KINDS.items() if inputs.of(item)}


def _columns(samples: Samples) -> tuple[Ints, dict[str, NDArray]]:
    """(segments of each sample, columns of all segments but tokens)."""
    compact = [one for one in samples if isinstance(one, Compact)]
    others = [one for sample in samples if isinstance(sample, Sample) for one in sample.segments]
    of_each = [len(one.form if isinstance(one, Compact) else one.segments) for one in samples]
    counts = np.array(of_each, np.int64)
    briefly = np.array([isinstance(one, Compact) for one in samples], bool)
    inside = np.repeat(briefly, counts)
    columns: dict[str, NDArray] = {
        name: np.zeros(len(inside), bool if name in ("trained", "ended") else np.int64)
        for name in LISTS
        if name != "tokens"
    }

    form = np.frombuffer(b"".join(one.form for one in compact), np.uint8)
    records = np.array([one.record for one in compact], np.int64).reshape(-1, 2)
    places = np.flatnonzero(inside)
    columns["kinds"][places] = form & KIND
    columns["trained"][places] = form & TRAINED > 0
    columns["ended"][places] = form & ENDED > 0
    for name, values in zip(("offsets", "sizes"), records.T, strict=True):
        columns[name][places] = np.repeat(values, counts[briefly])
    files = [file for one in compact for file in one.files]
    at = places[form & KIND != TEXT]
    for name, values in zip(
        ("offsets", "sizes", "widths", "heights"),
        np.array(files, np.int64).reshape(-1, 4).T,
        strict=True,
    ):
        columns[name][at] = values

    if others:
        kinds, locations, _, widths, heights, trained, ended, _, parts, frames, rates = zip(
            *others, strict=True
        )
        offsets, sizes = zip(*locations, strict=True)
        of_objects = (kinds, trained, ended, widths, heights, offsets, sizes, parts, frames, rates)
        for name, of_all in zip(OF_SEGMENTS, of_objects, strict=True):
            columns[name][~inside] = of_all
    return counts, columns


def _contents(samples: Samples, opened: OpenShard | None) -> tuple[list[int], dict[int, str]]:
    """(`contents` of all segments, nothing where no shard is opened for them; by number, samples
    whose files cannot be read, and why)."""
    contents, unreadable = list[int](), dict[int, str]()
    for number, sample in enumerate(samples if opened else ()):
        assert opened is not None and isinstance(sample, Sample)
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


def _cut(samples: Samples, label: str, inputs: ModelInputs, skipped: list[Skipped]) -> Samples:
    """The samples with every file in its parts, where this model's processor cuts them."""
    if not cutting(inputs):
        return samples
    made, heads = Samples(), _heads(inputs)
    for sample in samples:
        try:
            if reason := _misfit(sample, heads):
                raise ValueError(reason)
            made.append(Sample(sample.key, in_parts(sample.segments, inputs)))
        except ValueError as error:
            skipped.append(Skipped(label, sample.key, str(error)))
    return made


def _heads(inputs: ModelInputs) -> dict[int, Head]:
    """The head of each kind that this model reads."""
    return {kind: of[0] for item, kind in KINDS.items() if (of := inputs.of(item))}


def _misfit(sample: Sample | Compact, heads: Mapping[int, Head]) -> str | None:
    """Why the model cannot read a file of a sample, if there is one that it cannot."""
    files: Iterable[tuple[int, Numbers]]
    if isinstance(sample, Compact):
        kinds = sample.form.translate(None, TEXTS)  # of files no bit is set beside the kind
        files = zip(kinds, [file[2:] for file in sample.files], strict=True)
    else:
        files = ((one.kind, one.numbers) for one in sample.segments if one.kind != TEXT)
    for kind, numbers in files:
        if reason := heads[kind].misfit(*numbers):
            return reason
    return None


def _in_pieces(samples: Samples, most: int, tokenizer: Tokenizer) -> tuple[Samples, list[int]]:
    """(samples, of which those longer than `most` tokens are in pieces where they are documents;
    tokens of all texts).
    """
    texts = list[str]()
    for sample in samples:
        if isinstance(sample, Compact):
            texts += sample.texts
        else:
            texts += [one.text for one in sample.segments if one.kind == TEXT and one.ids is None]
    counted = iter(tokenizer.count(texts))
    parts, tokens = Samples(), list[int]()
    for sample in samples:
        if isinstance(sample, Compact):
            parts.append(sample)
            tokens += islice(counted, len(sample.texts))
            continue
        own = [
            next(counted) if one.ids is None else len(one.ids)
            for one in sample.segments
            if one.kind == TEXT
        ]
        first = sample.segments[0] if len(sample.segments) == 1 else None
        if first is not None and first.trained and first.ids is None and own[:1] > [most]:
            for piece in pieces(first.text, most, tokenizer):
                part = first._replace(width_px=piece.first, height_px=piece.characters)
                parts.append(Sample(sample.key, [part]))
                tokens.append(piece.tokens)
        else:
            parts.append(sample)
            tokens += own
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
