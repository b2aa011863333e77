"""Samples that damaged, cut, empty and missing shards lose, estimated where a reader cannot count
them.

Shards of one export hold about as many samples each. A shard whose end is missing is taken to have
held as many as the median of its series: the shards of the same source whose names differ in
numbers alone or, of tars and tables, of all whole shards of the source. Bytes behind a damage count
by the bytes per sample of the shard itself.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from disttrain_cli.data.sources import Shard, Skipped
from disttrain_cli.data.sources.files import open_file
from disttrain_cli.data.sources.numbering import gaps, series_of
from disttrain_cli.errors import DataError

NO_SHARD = -1  # place of what is no shard's own: found again whenever shards are added
STATS_BYTES = 1024 * 1024  # of img2dataset's NUMBER_stats.json that are read, at most


class ReadShard(NamedTuple):
    """A shard, how many samples the index has of it, and what is left out.

    Attributes:
        size: None where a server does not say it.
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
        """Samples that are known to have been in it."""
        return self.samples + sum(one.samples or 0 for one in self.skipped)

    @property
    def of(self) -> tuple[int, bool]:
        """Source and split."""
        return self.source, self.shard.held_out


def lost_samples(shards: Sequence[ReadShard]) -> list[tuple[int, Skipped]]:
    """All that is left out with the place of its shard, in order, and with the number of samples
    wherever anything tells it; then, at `NO_SHARD`, empty and missing shards."""
    whole = _Whole(shards)
    lost, others = list[tuple[int, Skipped]](), list[Skipped]()
    for place, shard in enumerate(shards):
        for one in shard.skipped:
            known = one.samples is not None
            lost.append((place, one if known else _counted(one, _lost(one, shard, whole))))
        if not shard.held and not shard.skipped and _stated(shard.shard) != 0:
            empty = Skipped(shard.label, "", "it holds no sample", None, cut=True)
            if shard.size and shard.shard.form != "tar":  # a whole table or list that has no row
                others.append(empty._replace(samples=0, cut=False))
            else:
                others.append(_counted(empty, _lost(empty, shard, whole)))
    others += _missing(shards, whole)
    return [*lost, *((NO_SHARD, one) for one in others)]


class _Whole:
    """Shards of which all that they held is known."""

    def __init__(self, shards: Sequence[ReadShard]) -> None:
        self._shards: dict[Hashable, list[ReadShard]] = {}
        for shard in shards:
            if shard.held and all(one.samples is not None for one in shard.skipped):
                for key in ((*shard.of, series_of(shard.shard.name)), shard.of):
                    self._shards.setdefault(key, []).append(shard)

    def like(self, shard: ReadShard) -> list[ReadShard]:
        """Shards that tell how many samples a shard held: files of JSON that are no series have
        nothing in common."""
        series = self._shards.get((*shard.of, series_of(shard.shard.name)), [])
        return series or ([] if shard.shard.form == "llava" else self._shards.get(shard.of, []))


def _counted(one: Skipped, lost: int | None) -> Skipped:
    """With the number of samples, and that said in the reason."""
    if lost is None:
        return one
    reason = f"{one.reason.rstrip('.')}: about {lost:,} samples are lost"
    return one._replace(samples=lost, reason=reason)


def _lost(one: Skipped, shard: ReadShard, whole: _Whole) -> int | None:
    """Samples that a shard's damage loses; None where nothing tells."""
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
    """Samples in the bytes behind a damage, by the bytes per sample before it or, where there is
    none before it, in other shards; 0 where nothing tells."""
    unread = sum(other.unread_bytes for other in shard.skipped)
    size, samples = (shard.size or 0) - unread, shard.held
    if not samples:
        size, samples = sum(other.size or 0 for other in like), sum(other.held for other in like)
    return -(-one.unread_bytes * samples // size) if size > 0 else 0


def _lacking(held: int, like: Sequence[ReadShard]) -> int | None:
    """Samples that a shard lacks of the median of others or, where it holds more than that, of the
    largest; None where it holds more than any."""
    others = sorted(other.held for other in like)
    expected = [*others[len(others) // 2 :][:1], *others[-1:]]
    return next((max(1, number - held) for number in expected if number >= held), None)


def _stated(shard: Shard) -> int | None:
    """Samples that img2dataset wrote into a tar, as its NUMBER_stats.json says; None where there
    is none."""
    if shard.form != "tar":
        return None
    try:
        stats = open_file(f"{shard.path.removesuffix('.tar')}_stats.json")
        successes = json.loads(stats.read(0, STATS_BYTES))["successes"]
    except (OSError, DataError, ValueError, LookupError, TypeError):
        return None
    return successes if isinstance(successes, int) and successes >= 0 else None


def _missing(shards: Sequence[ReadShard], whole: _Whole) -> Iterator[Skipped]:
    """Shards that are certain to be missing from a folder, a series at a time."""
    by_split: dict[Hashable, dict[str, ReadShard]] = {}
    for shard in shards:
        if not shard.alone:
            by_split.setdefault(shard.of, {})[shard.shard.name] = shard
    for own in by_split.values():
        for gap in gaps(list(own)):
            beside = own[gap.beside]
            each = _lacking(0, whole.like(beside))
            if gap.certain:
                folder = beside.label.removesuffix(gap.beside)
                others = gap._replace(names=gap.names[1:], missing=gap.missing - 1)
                also = f", and so {'is' if others.missing == 1 else 'are'} {others.shown}"
                reason = f"the shard is missing{also if others.missing else ''}"
                one = Skipped(folder + gap.names[0], "", reason, None, cut=True)
                yield _counted(one, None if each is None else each * gap.missing)
