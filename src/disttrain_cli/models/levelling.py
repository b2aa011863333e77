"""Load balancing of rows in a CP group whose ranks attend with local queries (`gathered`).

Rows that see all of their segment are divided into equal runs, one per rank. With causal attention,
later rows of a sample see more, so equal runs would not be equal work. There the rows of a slot are
cut into equal chunks, equally many per rank, assigned by work: the heaviest first, each to the rank
with the least (Llama 3, arXiv 2407.21783, section 3.3.2, pairs a head with a tail chunk, which is
balanced for one sample only). The number of chunks grows until the busiest rank's work is at most
`LEVEL` times the mean, or chunks would be shorter than `LEAST_CHUNK`.
A row's work is the number of rows it sees; sliding windows are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.models.division import own_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: [start, stop) of consecutive rows.
Run = tuple[int, int]

#: Highest accepted ratio of the busiest rank's work to the mean.
LEVEL = 1.05
#: Chunks per rank, in the order tried, and the minimum rows of a chunk after the first try: several
#: times a kernel's tile of 128 rows.
CHUNKS, LEAST_CHUNK = (2, 3, 4, 6, 8, 12, 16), 512


def runs_of(lengths: Sequence[int], ranks: int, causal: bool) -> list[list[Run]]:
    """Return the runs of rows of each rank, in ascending order, for segments of these lengths."""
    if causal:
        return _levelled(tuple(lengths), ranks)
    return [[own_rows(sum(lengths), ranks, rank)] for rank in range(ranks)]


def numbers_of(runs: Sequence[Run]) -> Ints:
    """Return [R] the row indices of runs, in their order."""
    return np.concatenate([np.arange(*run) for run in runs])


@lru_cache(maxsize=256)
def _levelled(lengths: tuple[int, ...], ranks: int) -> list[list[Run]]:
    rows = sum(lengths)
    tried: list[tuple[float, list[list[int]], int]] = []
    for each in CHUNKS:
        size, rest = divmod(rows, ranks * each)
        if rest or not size or (tried and size < LEAST_CHUNK):
            continue
        work = np.diff(_seen_before(np.asarray(lengths), np.arange(0, rows + 1, size)))
        tried.append((*_dealt(work, ranks, each), size))
        if tried[-1][0] <= LEVEL:
            break
    if not tried:
        return [[own_rows(rows, ranks, rank)] for rank in range(ranks)]
    _, chunks, size = min(tried, key=lambda one: (max(one[0], LEVEL), -one[2]))
    return [_joined(sorted(own), size) for own in chunks]


def _seen_before(lengths: Ints, ends: Ints) -> Floats:
    """Return the pairs of rows in causal attention of all rows before each of `ends`."""
    stops = np.cumsum(lengths)
    segment = np.minimum(np.searchsorted(stops, ends, "right"), len(lengths) - 1)
    whole = np.concatenate([[0.0], np.cumsum(lengths * (lengths + 1.0) / 2.0)])
    inside = ends - (stops - lengths)[segment]
    return np.asarray(whole[segment] + inside * (inside + 1.0) / 2.0)


def _dealt(work: Floats, ranks: int, each: int) -> tuple[float, list[list[int]]]:
    """Return the busiest rank's work over the mean, and the chunks of every rank."""
    chunks, sums = [list[int]() for _ in range(ranks)], np.zeros(ranks)
    for chunk in np.argsort(-work, kind="stable").tolist():
        rank = min(
            (rank for rank in range(ranks) if len(chunks[rank]) < each), key=sums.__getitem__
        )
        chunks[rank].append(chunk)
        sums[rank] += work[chunk]
    return float(sums.max() / sums.mean()), chunks


def _joined(chunks: Sequence[int], size: int) -> list[Run]:
    """Return the runs of ascending chunks, adjacent ones merged."""
    firsts = [chunk for chunk in chunks if chunk - 1 not in chunks]
    lasts = [chunk for chunk in chunks if chunk + 1 not in chunks]
    return [(first * size, (last + 1) * size) for first, last in zip(firsts, lasts, strict=True)]


def seen_by(lengths: Sequence[int], run: Run, causal: bool) -> tuple[list[int], list[int], Run]:
    """Return the query and key counts per segment of a run of rows, and the key rows.

    For each segment that the run overlaps: its rows in the run, and the rows that its last one
    sees; the third value is the (start, stop) of all key rows.
    """
    stops = np.cumsum(lengths)
    starts = stops - np.asarray(lengths)
    some = (starts < run[1]) & (stops > run[0])
    starts, stops = starts[some], stops[some]
    ends = np.minimum(stops, run[1])
    queries, seen = ends - np.maximum(starts, run[0]), (ends if causal else stops) - starts
    first = int(starts[0]) if some.any() else run[0]
    return queries.tolist(), seen.tolist(), (first, first + int(seen.sum()))
