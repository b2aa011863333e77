"""The sample index: one pass over the sources that reads sizes only, stored as Parquet (see `spec.index`).

Everything after it (packing, ordering, planning) works on these numbers; only the loader opens shards again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.data.arrays import image_grids, starts_of
from disttrain_cli.data.distribution import draw
from disttrain_cli.data.index_checks import (
    REINDEX,
    check_bad,
    check_files,
    check_same,
    check_sources,
    check_text,
    checked_tokenizer,
    file_states,
    list_shards,
    made_for,
    shard_label,
)
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import Sample, Segment, Skipped, read_shard
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.errors import DataError, MismatchError
from disttrain_cli.spec.files import write_whole
from disttrain_cli.spec.index import IMAGE, INDEX_VERSION, SAMPLE_SPECIALS, TARGET, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import DistributionSpec, Run


@dataclass(frozen=True)
class Index:
    """Sizes of every sample; segments of all samples lie one after the other."""

    fingerprint: str
    inputs: ModelInputs
    weights: list[float]  # per source
    shards: list[Path]
    skipped: list[Skipped]
    source: Ints  # [N samples]
    shard: Ints  # [N] place in `shards`, which is empty where the sizes were drawn
    keys: list[str]  # [N]
    segment_start: Ints  # [N + 1]
    kinds: Ints  # [segments] TEXT, IMAGE, TARGET or AUDIO
    tokens: Ints  # [segments]
    offsets: Ints  # [segments] bytes
    sizes: Ints  # [segments] bytes
    grids: Ints  # [segments, 2] patches (rows, columns) of images read, else 0

    def __len__(self) -> int:
        return len(self.keys)

    def per_sample(self, values: Ints) -> Ints:
        """Sums over the segments of each sample."""
        total = starts_of(values)
        return total[self.segment_start[1:]] - total[self.segment_start[:-1]]

    @cached_property
    def lengths(self) -> Ints:
        """[N] tokens of each sample, BOS and EOS included."""
        return self.per_sample(self.tokens) + SAMPLE_SPECIALS

    @cached_property
    def label_tokens(self) -> Ints:
        """[N] trained tokens of each sample: its text and EOS."""
        return self.per_sample(np.where(self.kinds == TEXT, self.tokens, 0)) + 1


def open_index(run: Run, inputs: ModelInputs, progress: Progress = silent) -> Index:
    """The index of the run's data: drawn from its distribution, else read, and built where none fits the data.

    Raises:
        DataError: a source is missing or empty, has too many bad samples, or no text at all.
        SpecError: the tokenizer does not fit the model, or the images of the distribution not its sequences.
    """
    if run.file.data.distribution is not None:
        return _drawn_index(run.file.data.distribution, inputs)
    try:
        return read_index(run, inputs)
    except (DataError, MismatchError):
        return build_index(run, inputs, progress)


def _drawn_index(spec: DistributionSpec, inputs: ModelInputs) -> Index:
    """An index without files: documents that are drawn."""
    drawn = draw(spec, inputs)
    nowhere, source = np.zeros(len(drawn.kinds), dtype=np.int64), np.zeros(spec.sequences, dtype=np.int64)
    return Index(
        fingerprint=drawn.fingerprint,
        inputs=inputs,
        weights=[1.0],
        shards=[],
        skipped=[],
        source=source,
        shard=source,
        keys=[str(number) for number in range(spec.sequences)],
        segment_start=drawn.segment_start,
        kinds=drawn.kinds,
        tokens=drawn.tokens,
        offsets=nowhere,
        sizes=nowhere,
        grids=drawn.grids,
    )


def build_index(run: Run, inputs: ModelInputs, progress: Progress = silent) -> Index:
    """Read the sizes of every sample and write the index of the run, whole or not at all.

    Samples that are broken or longer than a sequence are skipped, counted and named in `Index.skipped`.

    Raises:
        DataError: a source is missing or empty, more than `data.max_bad_fraction` of the samples are bad, or none
            has any text.
        SpecError: the tokenizer does not fit the model, or the index cannot be written.
    """
    check_sources(run)
    tokenizer = checked_tokenizer(run, inputs)
    shards = list_shards(run)
    files = file_states(shards)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("source", "shard", "key", "kinds", "tokens", "widths", "heights", "offsets", "sizes")
    }
    skipped: list[Skipped] = []
    for number, (source, name, path) in enumerate(shards):
        progress("index shards", number, len(shards))
        label = shard_label(run, path)
        for sample in read_shard(path, label):
            if isinstance(sample, Skipped):
                skipped.append(sample)
                continue
            row = _row(sample, inputs, tokenizer)
            length = sum(row["tokens"]) + SAMPLE_SPECIALS
            if not row["kinds"]:
                skipped.append(Skipped(label, sample.key, "nothing in it that this model reads"))
                continue
            if length > inputs.sequence_length:
                skipped.append(
                    Skipped(label, sample.key, f"too long: {length} of at most {inputs.sequence_length} tokens")
                )
                continue
            row.update(source=source, shard=name, key=sample.key)
            for column, value in row.items():
                columns[column].append(value)
    progress("index shards", len(shards), len(shards))
    check_bad(run, len(columns["key"]), skipped)
    check_text(columns["kinds"], columns["tokens"])
    _write(run, inputs, tokenizer, columns, files, skipped)
    return read_index(run, inputs)


def read_index(run: Run, inputs: ModelInputs) -> Index:
    """The index of the run, checked against the files on disk (names, sizes, times).

    Raises:
        DataError: there is no index, it cannot be read, or the run has a distribution instead of data.
        MismatchError: it was made for another model, tokenizer or list of sources, or a shard changed since.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    check_sources(run)
    path = run.dir.index
    if not path.is_file():
        raise DataError(f"There is no sample index at {path}", next_step="Make one with: disttrain profile")
    try:
        table = pq.read_table(path)
        stored: dict[str, Any] = {
            key.decode(): json.loads(value)
            for key, value in table.schema.metadata.items()
            if not key.startswith(b"ARROW")
        }
        before, files, skipped = stored["inputs"], stored["files"], [Skipped(*entry) for entry in stored["skipped"]]
    except (pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise DataError(f"Cannot read the sample index {path}", str(error), REINDEX) from None
    if stored["version"] != INDEX_VERSION:
        raise MismatchError(
            f"The sample index {path} has another version",
            f"index: {stored['version']}, this program: {INDEX_VERSION}",
            REINDEX,
        )
    tokenizer = checked_tokenizer(run, inputs)
    check_same(path, before, made_for(run, inputs, tokenizer))
    shards = list_shards(run)
    check_files(path, files, file_states(shards))

    def flat(name: str) -> Ints:
        return table.column(name).combine_chunks().flatten().to_numpy(zero_copy_only=False).astype(np.int64)

    place = {(source, name): number for number, (source, name, _) in enumerate(shards)}
    sources, names = table.column("source").to_pylist(), table.column("shard").to_pylist()
    counts = np.array([len(kinds) for kinds in table.column("kinds")], dtype=np.int64)
    return Index(
        fingerprint=stored["fingerprint"],
        inputs=inputs,
        weights=[source.weight for source in run.file.data.sources],
        shards=[shard for _, _, shard in shards],
        skipped=skipped,
        source=np.array(sources, dtype=np.int64),
        shard=np.array([place[key] for key in zip(sources, names, strict=True)], dtype=np.int64),
        keys=table.column("key").to_pylist(),
        segment_start=starts_of(counts),
        kinds=flat("kinds"),
        tokens=flat("tokens"),
        offsets=flat("offsets"),
        sizes=flat("sizes"),
        grids=_grids(inputs, flat("kinds"), flat("widths"), flat("heights")),
    )


def _row(sample: Sample, inputs: ModelInputs, tokenizer: Tokenizer) -> dict[str, Any]:
    """Columns of one sample; images that the model has no module for are left out."""
    present = {TEXT: True, IMAGE: inputs.image is not None, TARGET: inputs.target is not None}
    segments = [segment for segment in sample.segments if present[segment.kind]]
    return {
        "kinds": [s.kind for s in segments],
        "tokens": [_segment_tokens(s, inputs, tokenizer) for s in segments],
        "widths": [s.width_px for s in segments],
        "heights": [s.height_px for s in segments],
        "offsets": [s.member.offset for s in segments],
        "sizes": [s.member.size for s in segments],
    }


def _segment_tokens(segment: Segment, inputs: ModelInputs, tokenizer: Tokenizer) -> int:
    if segment.kind == TEXT:
        return len(tokenizer.encode(segment.text))
    if segment.kind == IMAGE:
        assert inputs.image is not None
        return inputs.image.tokens(segment.width_px, segment.height_px)
    assert inputs.target is not None
    return inputs.target.context_tokens


def _grids(inputs: ModelInputs, kinds: Ints, widths: Ints, heights: Ints) -> Ints:
    """Patch grids [segments, 2]."""
    grids = np.zeros((len(kinds), 2), dtype=np.int64)
    images = np.flatnonzero(kinds == IMAGE)
    if len(images):
        assert inputs.image is not None
        grids[images] = image_grids(inputs.image, np.stack([widths[images], heights[images]], axis=1))
    return grids


def _write(
    run: Run,
    inputs: ModelInputs,
    tokenizer: Tokenizer,
    columns: dict[str, list[Any]],
    files: list[list[Any]],
    skipped: list[Skipped],
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {
        "source": pa.int32(),
        "shard": pa.string(),
        "key": pa.string(),
        "kinds": pa.list_(pa.int8()),
        "tokens": pa.list_(pa.int32()),
        "widths": pa.list_(pa.int32()),
        "heights": pa.list_(pa.int32()),
        "offsets": pa.list_(pa.int64()),
        "sizes": pa.list_(pa.int64()),
    }
    arrays = {"sample": pa.array(range(len(columns["key"])), pa.int64())}
    arrays |= {name: pa.array(columns[name], kind) for name, kind in types.items()}
    metadata = {
        "version": INDEX_VERSION,
        "fingerprint": _content_fingerprint(run, tokenizer, columns, files),
        "inputs": made_for(run, inputs, tokenizer),
        "files": files,
        "skipped": skipped,
    }
    table = pa.table(arrays).replace_schema_metadata({key: json.dumps(value) for key, value in metadata.items()})
    buffer = pa.BufferOutputStream()
    pq.write_table(table, buffer, compression="zstd")
    write_whole(run.dir.index, buffer.getvalue().to_pybytes())


def _content_fingerprint(run: Run, tokenizer: Tokenizer, columns: dict[str, list[Any]], files: list[list[Any]]) -> str:
    """Over shard names and sizes, weights, keys, segment sizes and tokenization; not over times or folders."""
    digest = hashlib.sha256()
    weights = [source.weight for source in run.file.data.sources]
    digest.update(json.dumps([INDEX_VERSION, tokenizer.fingerprint, weights, [state[:3] for state in files]]).encode())
    digest.update(json.dumps([columns["source"], columns["shard"], columns["key"]]).encode())
    for name in ("kinds", "tokens", "widths", "heights", "offsets", "sizes"):
        values = columns[name]
        digest.update(np.array([len(row) for row in values], dtype="<i8").tobytes())
        digest.update(np.array([value for row in values for value in row], dtype="<i8").tobytes())
    return digest.hexdigest()[:16]
