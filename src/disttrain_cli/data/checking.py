"""Checks of a dataset: every image and clip is decoded once, to leave out unusable samples."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from disttrain_cli.calls import call
from disttrain_cli.data.index.index_checks import MOST_NAMED, shard_label
from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import Skipped
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import ITEMS, TEXT
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.runfile import Run, RunFile

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index

AT_ONCE = 1024  # samples between two progress messages


class Files(Protocol):
    """Source of the bytes of images and clips."""

    def file(self, sample: int, segment: int) -> Any:
        """Return the bytes of a segment; ValueError if they are known to be undecodable."""
        ...

    def file_name(self, sample: int, segment: int) -> str:
        """Return the file name of a segment for messages, "" if it is not known."""
        ...


class Broken(NamedTuple):
    """An image or clip that cannot be decoded.

    Its whole sample is left out of the losses: none of its texts is a label and none of its images
    is learnt, whichever process prepares them. A blank image or silence replaces the file.
    """

    segment: int
    what: Skipped


def try_decoding(
    run: Run, index: Index, files: Files, sample: int, segment: int, decode: Callable[[Any], Any]
) -> list[Broken]:
    """Decode one image or clip; return the failure, if any, as a list of one.

    Raises:
        DataError: the shard changed.
    """
    try:
        decode(files.file(sample, segment))
    except ValueError as error:
        shard = shard_label(run, index.shards[int(index.shard[sample])])
        position = segment - int(index.segment_start[sample])
        name = files.file_name(sample, segment)
        reason = f"segments[{position}]{f', {name}' if name else ''}: {error}"
        return [Broken(segment, Skipped(shard, index.keys[sample], reason))]
    return []


def allowed_broken(run: RunFile, index: Index) -> float:
    """Return the number of images and clips that may be broken, by `data.max_bad_fraction`."""
    return run.data.max_bad_fraction * index.file_count


def check_broken(run: RunFile, broken: Sequence[Skipped], allowed: float) -> None:
    """Raise DataError if more images and clips are broken than `allowed_broken` allows."""
    if len(broken) <= allowed:
        return
    raise DataError(
        f"{len(broken)} images or clips cannot be decoded, more than"
        f" data.max_bad_fraction = {run.data.max_bad_fraction} allows",
        "\n".join(f"  {one.shard}/{one.key}: {one.reason}" for one in broken[:MOST_NAMED]),
        f"See all of them: {call('data_check')}. Repair the shards, or raise"
        " data.max_bad_fraction.",
    )


def broken_in(
    index: Index, sample: int, tried: Callable[[int, Callable[[Any], Any]], list[Broken]]
) -> list[Broken]:
    """Return the failures of a sample's images and clips.

    Args:
        tried: decodes a segment with a decoder and returns its failures.
    """
    segments = range(int(index.segment_start[sample]), int(index.segment_start[sample + 1]))
    return [
        one
        for segment in segments
        if index.files[segment]
        for one in tried(segment, _decoder(index, segment))
    ]


def unchecked(index: Index) -> Ints:
    """Return the samples with images or clips in shards that have not been checked yet."""
    media = index.per_sample((index.kinds != TEXT).astype(np.int64)) > 0
    return np.flatnonzero(media & ~index.checked[index.shard])


def find_broken(run: Run, index: Index, progress: Progress) -> dict[int, Skipped]:
    """Decode all `unchecked` samples on all cores; return those that fail, each with its reason.

    Raises:
        DataError: a shard is gone or changed.
    """
    reader = ShardReader(index, read_tokenizer(run))

    def check(sample: int) -> list[Broken]:
        return broken_in(index, sample, partial(try_decoding, run, index, reader, sample))

    samples, broken = unchecked(index).tolist(), {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), "check") as threads:
        for first in range(0, len(samples), AT_ONCE):
            progress("decode samples", first, len(samples))
            batch = samples[first : first + AT_ONCE]
            for sample, of_sample in zip(batch, threads.map(check, batch), strict=True):
                if of_sample:
                    broken[sample] = of_sample[0].what
    progress("decode samples", len(samples), len(samples))
    return broken


def _decoder(index: Index, segment: int) -> Callable[[bytes], Any]:
    """Return a decoder that raises ValueError if a file is not as its segment was indexed."""
    item = ITEMS[int(index.kinds[segment])]
    head, grid = index.inputs.of(item)[0], tuple(index.grids[segment].tolist())
    return partial(MODALITIES[item].check, head=head, grid=grid)
