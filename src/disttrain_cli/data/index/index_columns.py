"""The index as flat columns that every process of a host memory-maps.

A rank reads only the pages of its samples. Parquet is the exchange format of the index; the columns
lie in the run's folder, too, written once from the Parquet file and again when it changes. They
hold the Parquet columns, properties derived from them for every sample or segment, and counts over
all samples. Numbers are as narrow as in Parquet.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.columns import Columns, ColumnWriter, alone, open_columns, writing_columns
from disttrain_cli.data.duplicates import of_samples, repeated
from disttrain_cli.data.held_out import bytes_of, chosen
from disttrain_cli.data.index.index_file import Stored, read_stored, stored_of
from disttrain_cli.data.index.row_arrays import counts_of, flat, numbers_of, specials_of
from disttrain_cli.data.parts import cutting
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import Shard
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.index import IMAGE, INDEX_VERSION, KINDS, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import is_url

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = 3
NARROW = {  # storage types of columns whose values are computed with in 64 bits
    "kinds": np.int8,
    "tokens": np.int32,
    "grids": np.int32,
    "pieces": np.int32,
    "part": np.int32,
    "lengths": np.int32,
    "label_tokens": np.int32,
    "parts": np.int32,
    "frames": np.int32,
}
#: From fields that are columns, and a number of samples: further columns, and counts to be summed
#: over all samples.
Derive = Callable[[dict[str, Any], int], tuple[dict[str, NDArray[Any]], dict[str, int]]]


def stored_index(run: Run, inputs: ModelInputs) -> Stored:
    """Open the index on disk: its columns if they exist, else its Parquet file.

    Raises:
        DataError, MismatchError: as `read_stored`.
    """
    path = run.dir.index
    opened = open_columns(run.dir.columns / _name(run, inputs)) if path.is_file() else None
    if opened is None:
        return read_stored(path)
    header, columns = opened
    return stored_of(path, header["stored"])._replace(flat=(header, columns))


def columns_of(
    run: Run,
    inputs: ModelInputs,
    stored: Stored,
    shards: list[tuple[int, Shard]],
    derive: Derive,
    progress: Progress,
) -> tuple[dict[str, Any], Columns]:
    """Return (header with the counts over all samples, columns by name).

    The columns are written if they do not exist yet.

    Args:
        shards: (source, shard) of every shard of the index, in its order.

    Raises:
        SpecError: they cannot be written (missing permission, disk full).
    """
    if stored.flat is not None:
        return stored.flat
    folder = run.dir.columns / _name(run, inputs)
    with alone(run.dir.columns / "lock", "the columns of the index", progress):
        if (opened := open_columns(folder)) is None:
            with writing_columns(folder) as writer:
                _write(run, inputs, stored, shards, derive, writer, progress)
            for other in run.dir.columns.glob("[0-9a-f]*"):
                if other != folder:
                    shutil.rmtree(other, ignore_errors=True)
            opened = open_columns(folder)
    assert opened is not None
    return opened


def _name(run: Run, inputs: ModelInputs) -> str:
    """Return the folder name of an index in its current state on disk."""
    there = run.dir.index.stat()
    file = [there.st_size, there.st_mtime_ns, there.st_ino]
    drawn = [run.file.data.held_out, run.file.data.deduplicate]
    return fingerprint([VERSION, *file, inputs.fingerprint(), *drawn])


def _write(
    run: Run,
    inputs: ModelInputs,
    stored: Stored,
    shards: list[tuple[int, Shard]],
    derive: Derive,
    writer: ColumnWriter,
    progress: Progress,
) -> None:
    fraction, has = run.file.data.held_out, _looked_through(stored)
    counts = Counter[str]()
    again = _repeated(stored) if run.file.data.deduplicate else None
    any_held = any(indexed.held_out for indexed in stored.files)
    first, names = 0, first_names(shards)
    for number, (indexed, rows, _) in enumerate(stored.by_shard()):
        progress("columns of the index", number, len(stored.files))
        arrays = arrays_of(inputs, rows, has)
        if fraction:
            pieces = arrays["pieces"][:, 0] > 0 if has["pieces"] else np.zeros(len(rows), bool)
            arrays["drawn"] = ~chosen(rows.column("key"), *names[number], fraction, pieces)
        elif any_held:
            arrays["drawn"] = np.full(len(rows), not indexed.held_out)
        if again is not None:
            arrays["repeated"] = again[first : (first := first + len(rows))]
        derived, counted = derive(arrays, len(rows))
        counts.update(counted)
        counts[f"drawn {indexed.source}"] += int(_used(arrays, len(rows)).sum())
        counts["scaled_down"] += _scaled_down(inputs, rows)
        if "file" in derived:
            derived["file"] = derived["file"] + writer.ends.get("segment_start", 0)
        arrays |= derived
        arrays["source"] = np.full(len(rows), indexed.source, np.int32)
        arrays["shard"] = np.full(len(rows), number, np.int32)
        arrays["keys"], key_start = _keys(rows)
        writer.add_starts("segment_start", arrays.pop("segment_start"))
        writer.add_starts("key_start", key_start)
        for name, values in arrays.items():
            writer.add(name, values.astype(NARROW.get(name, values.dtype), copy=False))
    progress("columns of the index", len(stored.files), len(stored.files))
    described = {"stored": stored.described(), "sources": _sources(run, stored)}
    writer.close({**described, "counts": counts})


def first_names(shards: list[tuple[int, Shard]]) -> list[tuple[int, str]]:
    """Return (source, name) of every shard, or those of the first shard that is the same file.

    A sample that two sources read is thus held out of both, or of neither.
    """
    first: dict[str, tuple[int, str]] = {}
    files = [
        shard.path if is_url(shard.path) else os.path.realpath(shard.path) for _, shard in shards
    ]
    return [
        first.setdefault(file, (source, shard.name))
        for file, (source, shard) in zip(files, shards, strict=True)
    ]


def _sources(run: Run, stored: Stored) -> list[str]:
    """Return `Index.of_sources`."""
    data, shards = run.file.data, list[list[Any]]([] for _ in run.file.data.sources)
    for indexed in stored.files:
        if not indexed.held_out:
            shards[indexed.source].append([indexed.name, indexed.size, indexed.digest])
    alike = [INDEX_VERSION, stored.inputs["tokenizer"], data.held_out, data.deduplicate]
    return [fingerprint([*alike, own]) for own in shards]


def _used(arrays: dict[str, Any], samples: int) -> NDArray[np.bool_]:
    """Return a mask [N] of the samples for training."""
    kept = arrays.get("drawn", np.ones(samples, dtype=bool))
    return kept & ~arrays["repeated"] if "repeated" in arrays else kept


def _repeated(stored: Stored) -> NDArray[np.bool_]:
    """Return a mask [N] of the samples of the index that repeat an earlier one."""
    names = ("kinds", "contents")
    hashes = [
        of_samples(starts_of(counts_of(rows)), *(flat(rows, name) for name in names))
        for _, rows, _ in stored.by_shard(list(names))
    ]
    return repeated(np.concatenate(hashes))


def _looked_through(stored: Stored) -> dict[str, bool]:
    """Return, by name, True for each optional column of this index; most indexes have none."""
    has = dict.fromkeys(("pieces", "templated", "frames"), False)
    for _, rows, _ in stored.by_shard(["kinds", "heights", "frames"]):
        of_texts = flat(rows, "heights")[flat(rows, "kinds") == TEXT]
        has["pieces"] |= bool((of_texts > 0).any())
        has["templated"] |= bool((of_texts < 0).any())
        has["frames"] |= bool(flat(rows, "frames").any())
    return has


def arrays_of(inputs: ModelInputs, rows: pa.Table, has: dict[str, bool]) -> dict[str, Any]:
    """Return the fields of `Index` that follow from rows of its Parquet file."""
    files = {name: flat(rows, name) for name in ("widths", "heights", "frames", "rates")}
    kinds, start = flat(rows, "kinds"), starts_of(counts_of(rows))
    numbers = numbers_of(files, has["frames"])
    arrays: dict[str, Any] = {
        "segment_start": start,
        "kinds": kinds,
        "tokens": flat(rows, "tokens"),
        "trained": flat(rows, "trained").astype(bool),
        "ended": flat(rows, "ended").astype(bool),
        "offsets": flat(rows, "offsets"),
        "sizes": flat(rows, "sizes"),
        "grids": _grids(inputs, kinds, numbers),
    }
    if has["pieces"]:
        arrays["pieces"] = _pieces(start, kinds, numbers)
    if has["templated"]:
        arrays["templated"] = specials_of(kinds, files["heights"], start) == 0
    if cutting(inputs):
        arrays |= {"part": flat(rows, "parts"), "numbers": numbers}
    return arrays


def _pieces(segment_start: Ints, kinds: Ints, numbers: Ints) -> Ints:
    """Return `Index.pieces`; a sample that is a piece has one segment."""
    pieces = np.zeros((len(segment_start) - 1, 2), dtype=np.int64)
    own = np.flatnonzero(np.diff(segment_start))
    first = segment_start[own]
    texts = (kinds[first] == TEXT) & (numbers[first, 1] > 0)
    pieces[own[texts]] = numbers[first[texts], :2]
    return pieces


def _grids(inputs: ModelInputs, kinds: Ints, sizes: Ints) -> Ints:
    """Return the grids [segments, 2] of items from the sizes in their files' headers."""
    grids = np.zeros((len(kinds), 2), dtype=np.int64)
    for item, kind in KINDS.items():
        indices = np.flatnonzero(kinds == kind)
        if len(indices):
            grids[indices] = inputs.of(item)[0].grids(sizes[indices])
    return grids


def _scaled_down(inputs: ModelInputs, rows: pa.Table) -> int:
    """Return the number of images read that have more pixels than the model's budget.

    Frames of videos, and images whose records state a pixel budget, are not counted.
    """
    names = ("kinds", "parts", "frames", "widths", "heights")
    kinds, parts, frames, widths, heights = (flat(rows, name) for name in names)
    budget = inputs.image.max_pixels if inputs.image else 0
    images = (kinds == IMAGE) & (parts == 0) & (frames == 0) & (widths > 0)
    return int((images & (widths * heights > budget)).sum())


def _keys(rows: pa.Table) -> tuple[NDArray[np.uint8], Ints]:
    """Return (names of samples as bytes, offset of each)."""
    contents, counts = [np.zeros(0, np.uint8)], [np.zeros(0, np.int64)]
    for chunk in rows.column("key").chunks:
        offsets, content = bytes_of(chunk)
        contents.append(content[offsets[0] : offsets[-1]])
        counts.append(np.diff(offsets))
    return np.concatenate(contents), starts_of(np.concatenate(counts))
