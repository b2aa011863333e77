"""Samples lost with damaged, truncated, empty and missing shards.

Their number is estimated if a reader cannot count them. Shards of one export hold about as many
samples each. A shard whose end is missing is assumed to have held the median of its series: the
shards of the same source whose names differ only in numbers or, for tars and tables, all complete
shards of the source. Bytes after a damage count by the bytes per sample of the shard itself.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from disttrain_cli.data.sources import Shard, Skipped
from disttrain_cli.data.sources.files import open_file
from disttrain_cli.data.sources.numbering import gaps, series_of
from disttrain_cli.errors import DataError

NO_SHARD = -1  # index of entries of no shard: computed again whenever shards are added
STATS_BYTES = 1024 * 1024  # read at most of img2dataset's NUMBER_stats.json


class ReadShard(NamedTuple):
    """A shard, the number of its samples in the index, and its skipped samples.

    Attributes:
        size: bytes; None if a server does not report it.
        alone: True if the run file names this very file, and no folder.
    """

    source: int
    shard: Shard
    label: str
    size: int | None
    samples: int
    skipped: Sequence[Skipped]
    alone: bool = False

    @property
    def held(self) -> int:
        """Number of samples known to have been in it."""
        return self.samples + sum(one.samples or 0 for one in self.skipped)

    @property
    def of(self) -> tuple[int, bool]:
        """Source and split."""
        return self.source, self.shard.held_out


def lost_samples(shards: Sequence[ReadShard]) -> list[tuple[int, Skipped]]:
    """Return all skipped entries with the index of their shard, in order, with estimated counts.

    Empty and missing shards follow, with the index `NO_SHARD`. The number of samples is None if
    nothing indicates it.
    """
    whole = _Whole(shards)
    lost, others = list[tuple[int, Skipped]](), list[Skipped]()
    for place, shard in enumerate(shards):
        for one in shard.skipped:
            known = one.samples is not None
            lost.append((place, one if known else _counted(one, _lost(one, shard, whole))))
        if not shard.held and not shard.skipped and _stated(shard.shard) != 0:
            empty = Skipped(shard.label, "", "it contains no sample", None, cut=True)
            if shard.size and shard.shard.form != "tar":  # a complete table or list without rows
                others.append(empty._replace(samples=0, cut=False))
            else:
                others.append(_counted(empty, _lost(empty, shard, whole)))
    others += _missing(shards, whole)
    return [*lost, *((NO_SHARD, one) for one in others)]


class _Whole:
    """Shards whose number of samples is known completely, by source, split and series."""

    def __init__(self, shards: Sequence[ReadShard]) -> None:
        self._shards: dict[Hashable, list[ReadShard]] = {}
        for shard in shards:
            if shard.held and all(one.samples is not None for one in shard.skipped):
                for key in ((*shard.of, series_of(shard.shard.name)), shard.of):
                    self._shards.setdefault(key, []).append(shard)

    def like(self, shard: ReadShard) -> list[ReadShard]:
        """Return shards that indicate how many samples a shard held.

        JSON files that are no series have nothing in common.
        """
        series = self._shards.get((*shard.of, series_of(shard.shard.name)), [])
        return series or ([] if shard.shard.form == "llava" else self._shards.get(shard.of, []))


def _counted(one: Skipped, lost: int | None) -> Skipped:
    """Add the number of samples to an entry and to its reason."""
    if lost is None:
        return one
    reason = f"{one.reason.rstrip('.')}: about {lost:,} samples are lost"
    return one._replace(samples=lost, reason=reason)


def _lost(one: Skipped, shard: ReadShard, whole: _Whole) -> int | None:
    """Return the number of samples lost with a shard's damage; None if nothing indicates it."""
    stated = _stated(shard.shard)
    if stated is not None:
        return max(1, stated - shard.held)
    like = whole.like(shard)
    by_bytes = _by_bytes(one, shard, like)
    if by_bytes and not one.cut:
        return by_bytes
    lacking = _lacking(shard.held, like)
    return None if lacking is None else max(lacking, by_bytes)


def _by_bytes(one: Skipped, shard: ReadShard, like: Sequence[ReadShard]) -> int:
    """Return the number of samples in the bytes after a damage; 0 if nothing indicates it.

    It follows from the bytes per sample before the damage or, without samples there, of other
    shards.
    """
    unread = sum(other.unread_bytes for other in shard.skipped)
    size, samples = (shard.size or 0) - unread, shard.held
    if not samples:
        size, samples = sum(other.size or 0 for other in like), sum(other.held for other in like)
    return -(-one.unread_bytes * samples // size) if size > 0 else 0


def _lacking(held: int, like: Sequence[ReadShard]) -> int | None:
    """Return the number of samples that a shard lacks to the median of others.

    If it holds more than the median, the largest other is the reference; None if it holds more than
    any.
    """
    others = sorted(other.held for other in like)
    expected = [*others[len(others) // 2 :][:1], *others[-1:]]
    return next((max(1, number - held) for number in expected if number >= held), None)


def _stated(shard: Shard) -> int | None:
    """Return the number of samples in a tar by img2dataset's NUMBER_stats.json, if there is one."""
    if shard.form != "tar":
        return None
    try:
        stats = open_file(f"{shard.path.removesuffix('.tar')}_stats.json")
        successes = json.loads(stats.read(0, STATS_BYTES))["successes"]
    except (OSError, DataError, ValueError, LookupError, TypeError):
        return None
    return successes if isinstance(successes, int) and successes >= 0 else None


def _missing(shards: Sequence[ReadShard], whole: _Whole) -> Iterator[Skipped]:
    """Yield the shards that are certainly missing from a folder, one entry per series."""
    by_split: dict[Hashable, dict[str, ReadShard]] = {}
    for shard in shards:
        if not shard.alone:
            by_split.setdefault(shard.of, {})[shard.shard.name] = shard
    for own in by_split.values():
        for gap in gaps(list(own)):
            neighbour = own[gap.neighbour]
            each = _lacking(0, whole.like(neighbour))
            if gap.certain:
                folder = neighbour.label.removesuffix(gap.neighbour)
                others = gap._replace(names=gap.names[1:], missing=gap.missing - 1)
                also = f", and so {'is' if others.missing == 1 else 'are'} {others.shown}"
                reason = f"the shard is missing{also if others.missing else ''}"
                one = Skipped(folder + gap.names[0], "", reason, None, cut=True)
                yield _counted(one, None if each is None else each * gap.missing)
