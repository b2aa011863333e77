"""Index rows of one shard's samples: token counts, and skipped samples with the reason.

Samples are processed as arrays, not as objects.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, compress, islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.duplicates import contents_of
from disttrain_cli.data.index.index_file import schema
from disttrain_cli.data.index.row_arrays import counts_of, flat, numbers_of, specials_of
from disttrain_cli.data.indexing.documents import pieces
from disttrain_cli.data.parts import counts_of_parts, cutting, first_parts, in_parts
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import Compact, OpenShard, Sample, Segment, Skipped, printable
from disttrain_cli.data.sources.samples import ENDED, KIND, LONG, TRAINED
from disttrain_cli.data.tokenizer import NONE, Tokenizer
from disttrain_cli.data.unread_keys import merged
from disttrain_cli.spec.heads import Head
from disttrain_cli.spec.index import (
    COLUMNS,
    KINDS,
    OPTIONAL,
    SAMPLE_SPECIALS,
    TARGET,
    TEXT,
    UNREAD,
    VIDEOS,
)
from disttrain_cli.spec.inputs import ModelInputs

if TYPE_CHECKING:
    import pyarrow as pa

CHUNK_SAMPLES = 1024  # tokenized together; texts of no more samples are in memory
MOST_REASON = 500  # characters of the reason for which a sample is skipped
LISTS = COLUMNS[4:]
#: Columns from the fields of a `Segment`.
OF_SEGMENTS = (
    *("kinds", "trained", "ended", "widths", "heights"),
    *("offsets", "sizes", "parts", "frames", "rates"),
)
Samples = list[Sample | Compact]
Chunk = list[Sample | Compact | Skipped]
#: Bytes of a `Compact.form` that are texts.
TEXTS = bytes(TEXT | trained | ended for trained in (0, TRAINED) for ended in (0, ENDED))


def own_schema() -> pa.Schema:
    """Return the columns of the index in a shard's rows: key and segments."""
    import pyarrow as pa

    return pa.schema([schema().field(name) for name in COLUMNS[3:]])


def shard_rows(
    read: Iterator[Sample | Compact | Skipped],
    label: str,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    opened: OpenShard | None = None,
) -> tuple[pa.Table, list[Skipped], dict[str, int], dict[str, int]]:
    """Build a shard's rows of the index.

    Samples are skipped if they are broken, if this model reads nothing of them, if they are longer
    than a sequence, and if they have a clip longer than the model's limit. A document longer than a
    sequence, which is one text that is trained as a whole, becomes a sample for each of its pieces,
    all with its name. Files that the model's processor cuts become their parts (`data.parts`).
    Images and clips for which the model has no module are no segments. Without a generator, a text
    right before an image to generate, its prompt, is not trained.

    Args:
        opened: the shard, if `contents` are to be hashed.

    Returns:
        (rows: key and segments; skipped samples; by `UNREAD`, the number of files left out of
        samples; samples by key of their records that no reader reads).
    """
    import pyarrow as pa

    batches, skipped, unread = [], list[Skipped](), Counter[str]()
    unread_keys = dict[str, int]()
    whole = _taken_whole(inputs) if opened is None else frozenset[int]()
    for chunk in _chunks(read):
        samples, left_out = Samples(), list[Skipped]()
        unread_keys = merged([unread_keys, _unread_keys(chunk)])
        for one in chunk:
            if isinstance(one, Skipped):
                left_out.append(one)
            elif isinstance(one, Sample) or whole.issuperset(one.form):
                samples.append(one)
            else:
                samples += one.samples
        batches.append(_batch(samples, label, inputs, tokenizer, opened, left_out, unread))
        skipped += _in_order(left_out, chunk)
    named = [
        one._replace(key=printable(one.key), reason=printable(one.reason, MOST_REASON))
        for one in skipped
    ]
    return pa.Table.from_batches(batches, own_schema()), named, dict(unread), unread_keys


def _unread_keys(chunk: Chunk) -> Counter[str]:
    """Count the samples by key of their records that no reader reads."""
    together = Counter[tuple[str, ...]]()
    for one in chunk:
        if not isinstance(one, Skipped) and one.unread:
            together[one.unread] += len(_keys(one))
    counts = Counter[str]()
    for names, count in together.items():
        for name in names:
            counts[name] += count
    return counts


def _chunks(read: Iterator[Sample | Compact | Skipped]) -> Iterator[Chunk]:
    """Yield chunks of `CHUNK_SAMPLES` samples, or more, as a `Compact` is not divided."""
    chunk, count = Chunk(), 0
    for one in read:
        chunk.append(one)
        count += len(one.keys) if isinstance(one, Compact) else 1
        if count >= CHUNK_SAMPLES:
            yield chunk
            chunk, count = Chunk(), 0
    if chunk:
        yield chunk


def _in_order(left_out: list[Skipped], chunk: Chunk) -> list[Skipped]:
    """Return the skipped samples of a chunk, in the chunk's order."""
    if len(left_out) < 2:
        return left_out
    keys = chain.from_iterable(map(_keys, chunk))
    place = {key: place for place, key in enumerate(keys)}
    return sorted(left_out, key=lambda one: place[one.key])


def digest(rows: pa.Table) -> str:
    """Hash keys, segment sizes, locations and token counts, independently of batch boundaries."""
    content = hashlib.sha256(json.dumps(rows.column("key").to_pylist()).encode())
    content.update(counts_of(rows).astype("<i8").tobytes())
    for name in LISTS:
        values = flat(rows, name)
        if name not in OPTIONAL or values.any():
            content.update(values.astype("<i8").tobytes())
    return content.hexdigest()[:16]


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
    films = inputs.reads_videos
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
        for sample in _without_placeholders(samples, label, tokenizer, skipped)
    ]
    samples, of_texts = _in_pieces(
        _cut(_budgeted(samples, label, inputs, skipped), label, inputs, skipped),
        inputs.sequence_length - SAMPLE_SPECIALS,
        tokenizer,
    )
    contents, unreadable = _contents(samples, opened)
    counts, columns = _columns(samples)
    keys = [key for one in samples for key in _keys(one)]
    if contents:
        columns["contents"][:] = contents
    columns["tokens"] = _tokens(columns, of_texts, inputs)
    total = starts_of(columns["tokens"])[starts_of(counts)]
    lengths = np.diff(total) + specials_of(columns["kinds"], columns["heights"], starts_of(counts))
    misfits = _misfits(columns, counts, _heads(inputs)) | unreadable
    keep = (counts > 0) & (lengths <= inputs.sequence_length)
    keep[list(misfits)] = False
    for index in np.flatnonzero(~keep).tolist():
        if not counts[index]:
            reason = "contains nothing that this model reads"
        else:
            too_long = f"too long: {lengths[index]} of at most {inputs.sequence_length} tokens"
            reason = misfits.get(index, too_long)
        skipped.append(Skipped(label, keys[index], reason))
    inside = np.repeat(keep, counts)
    offsets = pa.array(starts_of(counts[keep]), pa.int32())
    kept = [printable(key) for key in compress(keys, keep.tolist())]
    form = own_schema()
    lists = [
        pa.ListArray.from_arrays(
            offsets, pa.array(columns[name][inside], form.field(name).type.value_type)
        )
        for name in LISTS
    ]
    return pa.RecordBatch.from_arrays([pa.array(kept, pa.string()), *lists], schema=form)


def _without_placeholders(
    samples: Samples, label: str, tokenizer: Tokenizer, skipped: list[Skipped]
) -> Samples:
    """Return the samples whose texts contain no placeholder of an image or video."""
    ids = {tokenizer.image, tokenizer.video} - {NONE}
    placeholders = [token for id_ in sorted(ids) if (token := tokenizer.token(id_))]
    if not placeholders:
        return samples
    kept, inside = Samples(), re.compile("|".join(map(re.escape, placeholders)))
    for one in samples:
        if isinstance(one, Compact) and not any(map(inside.search, one.texts)):
            kept.append(one)
            continue
        for sample in one.samples if isinstance(one, Compact) else [one]:
            texts = (own.text for own in sample.segments if own.kind == TEXT)
            if found := next(filter(None, map(inside.search, texts)), None):
                reason = f"a text contains {found[0]}, the placeholder of an image or a video"
                skipped.append(Skipped(label, sample.key, reason))
            else:
                kept.append(sample)
    return kept


def _taken_whole(inputs: ModelInputs) -> frozenset[int]:
    """Return the bytes of `Compact.form` whose segments are indexed unchanged.

    Their segments are not left out, cut into parts, or surrounded by texts.
    """
    if cutting(inputs):
        return frozenset()
    return frozenset((*TEXTS, *_present(inputs)))


def _present(inputs: ModelInputs) -> set[int]:
    """Return the kinds of segments that this model reads."""
    return {TEXT} | {kind for item, kind in KINDS.items() if inputs.of(item)}


def _columns(samples: Samples) -> tuple[Ints, dict[str, NDArray]]:
    """Return (number of segments of each sample, columns of all segments but tokens)."""
    compact = [one for one in samples if isinstance(one, Compact)]
    others = [one for sample in samples if isinstance(sample, Sample) for one in sample.segments]
    together = np.array([len(_keys(one)) for one in samples], np.int64)
    of_each = [len(one.form if isinstance(one, Compact) else one.segments) for one in samples]
    counts = np.repeat(np.array(of_each, np.int64), together)
    briefly = np.repeat(np.array([isinstance(one, Compact) for one in samples], bool), together)
    inside = np.repeat(briefly, counts)
    columns: dict[str, NDArray] = {
        name: np.zeros(len(inside), bool if name in ("trained", "ended") else np.int64)
        for name in LISTS
        if name != "tokens"
    }

    form = np.frombuffer(b"".join(one.form * len(one.keys) for one in compact), np.uint8)
    records = _joined((one.records for one in compact), 2)
    places = np.flatnonzero(inside)
    columns["kinds"][places] = form & KIND
    columns["trained"][places] = form & TRAINED > 0
    columns["ended"][places] = form & ENDED > 0
    for name, values in zip(("offsets", "sizes"), records.T, strict=True):
        columns[name][places] = np.repeat(values, counts[briefly])
    files = _joined((one.files for one in compact), 4)
    at = places[form & KIND != TEXT]
    for name, values in zip(("offsets", "sizes", "widths", "heights"), files.T, strict=True):
        columns[name][at] = values

    if others:
        kinds, locations, _, widths, heights, trained, ended, _, parts, frames, rates, _ = zip(
            *others, strict=True
        )
        offsets, sizes = zip(*locations, strict=True)
        of_objects = (kinds, trained, ended, widths, heights, offsets, sizes, parts, frames, rates)
        for name, of_all in zip(OF_SEGMENTS, of_objects, strict=True):
            columns[name][~inside] = of_all
    return counts, columns


def _keys(one: Sample | Compact | Skipped) -> list[str]:
    return one.keys if isinstance(one, Compact) else [one.key]


def _joined(arrays: Iterable[array[int]], width: int) -> Ints:
    """Return rows of `width` numbers from concatenated arrays."""
    numbers = array(LONG)
    for one in arrays:
        numbers.extend(one)
    return np.frombuffer(numbers, np.int64).reshape(-1, width)


def _contents(samples: Samples, opened: OpenShard | None) -> tuple[list[int], dict[int, str]]:
    """Hash the contents of all segments, if the shard is open.

    Returns:
        (`contents`, empty without a shard; by number, samples whose files cannot be read, and why).
    """
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
    """Return the segments of the kinds `present`, videos only with `films`.

    The text before an image to generate, its prompt, is not trained if the model generates no
    images.
    """
    if segments and TARGET not in present:
        asks = [one.kind == TARGET for one in segments[1:]] + [False]
        segments = [
            one._replace(trained=False) if asking else one
            for one, asking in zip(segments, asks, strict=True)
        ]
    return [one for one in segments if one.kind in present and (films or not one.frames)]


def _budgeted(samples: Samples, label: str, inputs: ModelInputs, skipped: list[Skipped]) -> Samples:
    """Set the size of images whose records state a pixel budget.

    Samples whose images do not fit it are skipped.
    """
    made, heads = Samples(), _heads(inputs)
    for sample in samples:
        if isinstance(sample, Sample) and any(one.budget for one in sample.segments):
            try:
                segments = [_with_budget(one, heads) for one in sample.segments]
            except ValueError as error:
                skipped.append(Skipped(label, sample.key, str(error)))
                continue
            sample = sample._replace(segments=segments)
        made.append(sample)
    return made


def _with_budget(one: Segment, heads: Mapping[int, Head]) -> Segment:
    if one.budget is None:
        return one
    width, height = heads[one.kind].budgeted(one.numbers, one.budget)
    return one._replace(width_px=width, height_px=height, budget=None)


def _cut(samples: Samples, label: str, inputs: ModelInputs, skipped: list[Skipped]) -> Samples:
    """Cut every file into its parts if this model's processor does so."""
    if not cutting(inputs):
        return samples
    made, heads = Samples(), _heads(inputs)
    for sample in samples:
        assert isinstance(sample, Sample)  # `_taken_whole`
        try:
            if reason := _misfit(sample, heads):
                raise ValueError(reason)
            made.append(Sample(sample.key, in_parts(sample.segments, inputs)))
        except ValueError as error:
            skipped.append(Skipped(label, sample.key, str(error)))
    return made


def _heads(inputs: ModelInputs) -> dict[int, Head]:
    """Return the modality's specification (`Head`) by kind, of those that this model reads."""
    return {kind: of[0] for item, kind in KINDS.items() if (of := inputs.of(item))}


def _misfit(sample: Sample, heads: Mapping[int, Head]) -> str | None:
    """Return the reason why the model cannot read a file of a sample; None if it can read all."""
    files = (one for one in sample.segments if one.kind != TEXT)
    reasons = (heads[one.kind].misfit(*one.numbers) for one in files)
    return next(filter(None, reasons), None)


def _misfits(
    columns: Mapping[str, Ints], counts: Ints, heads: Mapping[int, Head]
) -> dict[int, str]:
    """Return the reasons by number of sample, of all samples with a file that does not fit."""
    files = np.flatnonzero(columns["kinds"] != TEXT)
    of_sample = np.repeat(np.arange(len(counts)), counts)[files].tolist()
    kinds = columns["kinds"][files].tolist()
    misfits = dict[int, str]()
    for sample, kind, numbers in zip(
        of_sample, kinds, numbers_of(columns, films=True)[files].tolist(), strict=True
    ):
        film = numbers[2] > 0
        if reason := heads[kind].misfit(*(numbers if film else numbers[:2])):
            misfits.setdefault(sample, reason)
    return misfits


def _in_pieces(samples: Samples, most: int, tokenizer: Tokenizer) -> tuple[Samples, list[int]]:
    """Cut documents longer than `most` tokens into pieces.

    Returns:
        (samples, tokens of all texts).
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
    """Return the LLM tokens of each segment."""
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
