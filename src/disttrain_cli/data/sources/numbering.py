"""Numbered shards, and those missing from their series."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count, islice, pairwise
from pathlib import PurePosixPath
from typing import NamedTuple

MOST_NAMED = 3  # missing shards of a series that a message names
NUMBER = re.compile(r"\d+")
#: A shard's number and their total: train-00002-of-00008.parquet.
OF_ALL = re.compile(r"(?P<number>\d+)-of-(?P<all>\d+)(?!.*\d-of-\d)")


class Gap(NamedTuple):
    """Missing shards of a series.

    Attributes:
        neighbour: name of an existing shard of the series.
        names: of the first missing shards; `missing`: their number.
        certain: True if the names leave no doubt that the shards existed: they state the total
            (`-of-00008`), or count from 0 on with few gaps.
    """

    neighbour: str
    names: list[str]
    missing: int
    certain: bool

    @property
    def shown(self) -> str:
        """The missing shards as shown in messages."""
        more = (
            f" and {self.missing - len(self.names):,} more"
            if self.missing > len(self.names)
            else ""
        )
        return ", ".join(self.names) + more


def series_of(name: str) -> str:
    """Return the common part of a series' names: all but numbers and, after `-of-00008`, hashes."""
    numbered = OF_ALL.search(name)
    return NUMBER.sub("#", name[: numbered.end()] if numbered else name)


def gaps(names: Sequence[str]) -> list[Gap]:
    """Return the shards missing from each series among these names.

    A series whose numbers begin later than 0 or 1, that has every other number, or of which more is
    missing than exists, is assumed to be a deliberate choice.
    """
    found = {gap.names[0]: gap for gap in (*_of_all(names), *_in_between(names))}
    return list(found.values())


def _of_all(names: Sequence[str]) -> Iterator[Gap]:
    series: dict[tuple[str, int], dict[int, re.Match[str]]] = {}
    for numbered in filter(None, map(OF_ALL.search, names)):
        key = numbered.string[: numbered.start()], int(numbered["all"])
        series.setdefault(key, {})[int(numbered["number"])] = numbered
    for (_, all_), own in series.items():
        first = int(all_ in own and 0 not in own)
        lost = all_ - sum(first <= number < first + all_ for number in own)
        if lost > 0:
            one = next(iter(own.values()))
            end = one.string[one.end("number") : one.end()] + PurePosixPath(one.string).suffix
            yield _gap(one.string, one.span("number"), end, own, first, lost, certain=True)


def _in_between(names: Sequence[str]) -> Iterator[Gap]:
    series: dict[tuple[str, str], dict[int, re.Match[str]]] = {}
    for name in names:
        if not OF_ALL.search(name):
            for number in NUMBER.finditer(name, len(name) - len(PurePosixPath(name).name)):
                key = name[: number.start()], name[number.end() :]
                series.setdefault(key, {})[int(number[0])] = number
    for (_, end), own in series.items():
        first = min(own)
        lost = max(own) - first + 1 - len(own)
        steps = {after - before for before, after in pairwise(sorted(own))}
        stride = len(own) > 2 and len(steps) == 1
        if first <= 1 and 0 < lost < len(own) and not stride:
            one = own[first]
            yield _gap(one.string, one.span(), end, own, first, lost, certain=first == 0)


def _gap(
    neighbour: str,
    span: tuple[int, int],
    end: str,
    numbers: dict[int, re.Match[str]],
    first: int,
    lost: int,
    certain: bool,
) -> Gap:
    absent = islice((one for one in count(first) if one not in numbers), min(lost, MOST_NAMED))
    width = span[1] - span[0]
    names = [f"{neighbour[: span[0]]}{one:0{width}d}{end}" for one in absent]
    return Gap(neighbour, names, lost, certain)
