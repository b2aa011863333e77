"""Time breakdown of every rank over the measured steps, as HolisticTraceAnalysis defines it.

Columns:

    span         last end − first start
    compute      |union of forward and backward|
    non-compute  the other operations outside compute
    idle         the rest, waiting for data included
    overlap      |communication ∩ compute| ÷ |communication|
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.result.rows import RankSummary

#: Most rows in memory at once.
MOST_ROWS = 2_000_000


def rank_summaries(database: Database) -> list[RankSummary]:
    """Return one row per rank, in their order."""
    unions: dict[int, tuple[float, ...]] = {}
    for first, last in _batches(database):
        rows = database.columns("rank_rows", first=first, last=last)
        computes, communicates = rows["computes"], rows["communicates"]
        kinds = (np.ones_like(computes), computes, communicates, computes | communicates)
        sums = [union_us(rows["rank"], rows["start_ns"], rows["end_ns"], kind) for kind in kinds]
        unions |= {rank: tuple(by_rank.get(rank, 0.0) for by_rank in sums) for rank in sums[0]}
    return [_summary(row, *unions.get(row["rank"], (0.0,) * 4)) for row in database.query("ranks")]


def union_us(
    ranks: NDArray[Any], start_ns: NDArray[Any], end_ns: NDArray[Any], chosen: NDArray[np.bool_]
) -> dict[int, float]:
    """Return the length of the union of the chosen intervals of each rank, in µs.

    Args:
        ranks, start_ns, end_ns: [rows], sorted by rank, then start.
        chosen: [rows] True for rows that count.
    """
    ranks, start_ns, end_ns = ranks[chosen], start_ns[chosen], end_ns[chosen]
    firsts = np.flatnonzero(np.diff(ranks, prepend=-1))
    unions_us = {}
    for first, last in zip(firsts, [*firsts[1:], len(ranks)], strict=True):
        reach_ns = np.maximum.accumulate(end_ns[first:last])
        from_ns = start_ns[first:last].copy()
        from_ns[1:] = np.maximum(from_ns[1:], reach_ns[:-1])
        unions_us[int(ranks[first])] = (
            float(np.maximum(0, end_ns[first:last] - from_ns).sum()) / 1e3
        )
    return unions_us


def _batches(database: Database) -> Iterator[tuple[int, int]]:
    """Yield first and last rank of batches of bounded size."""
    rows = database.sql("SELECT rank, sum(rows) AS rows FROM seen GROUP BY rank ORDER BY rank")
    first, held = None, 0
    for index, row in enumerate(rows):
        first, held = row["rank"] if first is None else first, held + row["rows"]
        if index + 1 == len(rows) or held + rows[index + 1]["rows"] > MOST_ROWS:
            yield first, row["rank"]
            first, held = None, 0


def _summary(
    row: dict[str, Any],
    every_us: float,
    compute_us: float,
    communication_us: float,
    either_us: float,
) -> RankSummary:
    overlap_us = compute_us + communication_us - either_us
    return RankSummary(
        **row,
        idle_us=row["span_us"] - every_us,
        compute_us=compute_us,
        non_compute_us=every_us - compute_us,
        communication_us=communication_us,
        overlap_pct=100 * overlap_us / communication_us if communication_us else None,
    )
