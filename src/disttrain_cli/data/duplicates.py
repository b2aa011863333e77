"""Detection of duplicate samples by 64 bits of BLAKE2b of every text and file.

The index stores these hashes if `data.deduplicate` is set. Among a hundred million distinct
samples, a false duplicate has a probability of 0.03 %.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import Location, OpenShard, Sample, Segment
from disttrain_cli.spec.index import AROUND, ITEMS, TEXT

NO_RECORD = Location(-1, 0)


def contents_of(sample: Sample, opened: OpenShard) -> list[int]:
    """Hash the content of each segment of a sample.

    Raises:
        ValueError, LookupError, OSError, DataError: as `OpenShard.file`.
    """
    own = (one for one in sample.segments if one.kind == TEXT and one.part != AROUND)
    record = next((one.location for one in own), NO_RECORD)
    known: dict[tuple[int, Location], int] = {}  # by kind, as a file may be cut into parts
    contents = []
    for one in sample.segments:
        if one.kind == TEXT:
            contents.append(_hash(_text(one)))
            continue
        file = one.kind, one.location
        if file not in known:
            media = "video" if one.frames else MODALITIES[ITEMS[one.kind]].media.name
            known[file] = _hash(opened.file(media, one.location, record))
        size = f"{one.numbers}" if one.width_px < 0 else ""  # of a pixel budget
        contents.append(known[file] ^ _hash(size.encode()) if size else known[file])
    return contents


def of_samples(start: Ints, kinds: Ints, contents: Ints) -> NDArray[np.uint64]:
    """Hash each sample [N]: the kinds and contents of its segments, in order.

    Args:
        start: [N + 1] first segment of each sample.
    """
    place = np.arange(len(kinds)) - np.repeat(start[:-1], np.diff(start))
    total = np.zeros(len(kinds) + 1, np.uint64)
    np.cumsum(mix(place, kinds, contents) if len(kinds) else [], out=total[1:], dtype=np.uint64)
    return np.asarray(total[start[1:]] - total[start[:-1]])


def repeated(hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return a mask [N] of the samples that repeat an earlier one."""
    again = np.ones(len(hashes), dtype=bool)
    again[np.unique(hashes, return_index=True)[1]] = False
    return again


def _text(one: Segment) -> bytes:
    """Return a text as bytes, with its extent in the document and its flags `trained`, `ended`."""
    how = [one.trained, one.ended, one.width_px, one.height_px]
    said = one.text if one.ids is None else repr(one.ids)
    return f"{how}{said}".encode("utf-8", "surrogatepass")


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)
