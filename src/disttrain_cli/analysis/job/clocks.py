"""Correction of hosts' clocks by causality: no message arrives before it was sent.

A host's clock shows offset more than the reference's (the host of the lowest rank). A message from
A to B bounds offset(B) − offset(A) from above by (end of the receive − start of the send), one from
B to A from below; a collective of all ranks bounds both, since no rank leaves before the last has
joined. The tightest bounds over any number of hosts are shortest paths. Every step gives an
interval for each host, and a line through the intervals with the largest margin gives its offset
and drift; the error is half the width of what remains. Clocks that no message contradicts are left
unchanged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.result.rows import HostClock
from disttrain_cli.analysis.sql import query_text
from disttrain_cli.analysis.walk import Floats

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

#: Upper bound of the drift between two clocks; used if messages of one step contradict each other.
MOST_DRIFT_PPM = 200.0
#: Offsets above this are reported in a warning, in µs.
TOLD_US = 1e3


@dataclass(frozen=True)
class Bound:
    """Bound offset(after) − offset(before) ≤ at_most_ns, in one step.

    Either side is a host or a meeting: a moment that all ranks share.
    """

    step: int
    before: str
    after: str
    at_most_ns: int


def bounds_of(
    messages: Iterable[tuple[int, str, str, int]], meetings: Iterable[tuple[int, str, int, int]]
) -> list[Bound]:
    """Return the bounds of the rows of `queries/clock_messages.sql` and `clock_meetings.sql`."""
    bounds = [Bound(step, sender, receiver, least) for step, sender, receiver, least in messages]
    for step, host, came_ns, left_ns in meetings:  # joined − offset ≤ moment ≤ left − offset
        bounds += [Bound(step, host, MEETING, -came_ns), Bound(step, MEETING, host, left_ns)]
    return bounds


MEETING = "\0meeting"  # no host has this name


def clocks_of(hosts: list[str], bounds: list[Bound], at_ns: dict[int, int]) -> list[HostClock]:
    """Return the clock of every host relative to the first one's.

    Args:
        hosts: the reference first.
        bounds: bounds of any steps.
        at_ns: beginning of each step, for the drift.
    """
    number_of = {name: number for number, name in enumerate([*hosts, MEETING])}
    by_step: dict[int, list[Bound]] = {}
    for bound in bounds:
        by_step.setdefault(bound.step, []).append(bound)
    steps = sorted(by_step)
    longest_ns = max(
        (later - one for one, later in itertools.pairwise(sorted(at_ns.values()))), default=0
    )
    for slack_ns in (0, int(longest_ns * MOST_DRIFT_PPM / 1e6)):
        intervals = [_intervals(by_step[step], number_of, slack_ns) for step in steps]
        lower, upper = (
            np.array([interval[side] for interval in intervals]).reshape(len(steps), len(number_of))
            for side in (0, 1)
        )
        if (lower <= upper).all():
            break
    since_s = (
        (np.array([at_ns[step] for step in steps], dtype=np.int64) - at_ns[steps[0]]) / 1e9
        if steps
        else None
    )
    return [
        HostClock(host=hosts[0], offset_us=0.0, drift_ppm=0.0, error_us=0.0, applied=False),
        *(
            _clock(name, since_s, lower[:, number], upper[:, number])
            for number, name in enumerate(hosts)
            if number
        ),
    ]


def _intervals(
    bounds: list[Bound], number_of: dict[str, int], slack_ns: int
) -> tuple[Floats, Floats]:
    """Return the interval of every host's offset by the bounds of one step, in ns."""
    before, after = (
        np.array([number_of[getattr(bound, side)] for bound in bounds])
        for side in ("before", "after")
    )
    # float64 represents the ns of a wall clock to 256 only: those of a meeting are counted from the
    # first rank that left
    origin = min((bound.at_most_ns for bound in bounds if bound.before == MEETING), default=0)
    most = np.array(
        [
            slack_ns
            + bound.at_most_ns
            + origin * ((bound.after == MEETING) - (bound.before == MEETING))
            for bound in bounds
        ],
        dtype=np.float64,
    )
    return -_shortest(after, before, most, len(number_of)), _shortest(
        before, after, most, len(number_of)
    )


def _shortest(before: np.ndarray, after: np.ndarray, most: Floats, count: int) -> Floats:
    """Return least upper bounds from the first host to all (Bellman-Ford); infinite for none."""
    shortest = np.full(count, np.inf)
    shortest[0] = 0.0
    for _ in range(count):
        better = shortest.copy()
        np.minimum.at(better, after, shortest[before] + most)
        if (better == shortest).all():
            break
        shortest = better
    return shortest


def _clock(host: str, since_s: Floats | None, lower: Floats, upper: Floats) -> HostClock:
    tied = np.isfinite(lower) & np.isfinite(upper) & (lower <= upper)
    if since_s is None or not tied.any():
        return HostClock(host=host, offset_us=None, drift_ppm=None, error_us=None, applied=False)
    low, high, at_s = lower[tied], upper[tied], since_s[tied]
    least, most = low.max(), high.min()
    if least <= most:
        offset, drift, error = (least + most) / 2, 0.0, (most - least) / 2
    else:
        offset, drift, margin = _line(at_s, low, high)
        error = (
            float(np.median(high - low)) / 2
            if margin >= 0
            else float(np.median(high - low)) / 2 - margin
        )
    # Clocks that agree with every message are assumed to be right: those of most clusters are, to
    # less than the error.
    explained = bool((low <= 0.0).all() and (high >= 0.0).all())
    return HostClock(
        host=host,
        offset_us=offset / 1e3,
        drift_ppm=drift / 1e3,
        error_us=error / 1e3,
        applied=not explained,
    )


def _line(at_s: Floats, low: Floats, high: Floats) -> tuple[float, float, float]:
    """Return offset (ns), drift (ns per s) and margin (ns) of the line deepest in all intervals."""
    from scipy.optimize import linprog

    scale = max(1.0, float(np.abs([low, high]).max()))
    span_s = max(1e-9, float(at_s.max()))
    rows = np.concatenate(
        [
            np.stack([np.ones_like(at_s), at_s / span_s, np.ones_like(at_s)], axis=1),
            np.stack([-np.ones_like(at_s), -at_s / span_s, np.ones_like(at_s)], axis=1),
        ]
    )
    line = (
        linprog(
            [0.0, 0.0, -1.0],
            A_ub=rows,
            b_ub=np.concatenate([high, -low]) / scale,
            bounds=[(None, None)] * 3,
        ).x
        * scale
    )
    return float(line[0]), float(line[1]) / span_s, float(line[2])


def repair_clocks(connection: DuckDBPyConnection, warnings: list[str]) -> list[HostClock]:
    """Create the view `trace` of `recorded`, with times on one clock, and the table `clocks`.

    The times in `seen` are corrected too.

    Returns:
        A row per host; none if there is only one host.
    """
    connection.execute(
        "CREATE TABLE clocks (host VARCHAR, offset_us DOUBLE, drift_ppm DOUBLE, error_us DOUBLE, "
        "applied BOOLEAN)"
    )
    hosts = [
        str(row[0])
        for row in connection.execute(
            "SELECT host FROM seen JOIN kept USING (step, run) GROUP BY host ORDER BY min(rank),"
            " host"
        ).fetchall()
    ]
    if len(hosts) < 2:
        connection.execute("CREATE VIEW trace AS SELECT * FROM recorded")
        return []
    at_ns = dict(
        connection.execute(
            "SELECT step, min(first_ns) FROM seen JOIN kept USING (step, run) WHERE host = $host"
            " GROUP BY step",
            {"host": hosts[0]},
        ).fetchall()
    )
    bounds = [
        bound
        for bound in bounds_of(
            connection.execute(query_text("clock_messages")).fetchall(),
            connection.execute(query_text("clock_meetings")).fetchall(),
        )
        if bound.step in at_ns
    ]
    clocks = clocks_of(hosts, bounds, at_ns)
    connection.executemany(
        "INSERT INTO clocks VALUES (?, ?, ?, ?, ?)",
        [
            [clock.host, clock.offset_us, clock.drift_ppm, clock.error_us, clock.applied]
            for clock in clocks
        ],
    )
    if any(clock.applied for clock in clocks):
        connection.execute(
            "CREATE MACRO clock_shift(ns, offset_us, drift_ppm) AS CAST(1e3 * offset_us "
            f"+ (ns - 1e3 * offset_us - {min(at_ns.values())}) * drift_ppm / 1e6 AS BIGINT)"
        )
        connection.execute(query_text("trace_repaired"))
    else:
        connection.execute("CREATE VIEW trace AS SELECT * FROM recorded")
    warnings += _described(clocks)
    return clocks


def _described(clocks: list[HostClock]) -> list[str]:
    """Return warnings about the clocks."""
    reference = clocks[0].host
    loose = [clock.host for clock in clocks if clock.offset_us is None]
    notes = [
        f"no message ties the clock of host {host!r} to that of {reference!r}: its times may be"
        " shifted"
        for host in loose[:3]
    ]
    if len(loose) > 3:
        more = len(loose) - 3
        notes.append(
            f"the {agree(more, 'clock', 'clocks')} of {counted(more, 'more host')} cannot be tied"
            " to the others"
        )
    wrong = sorted(
        (clock for clock in clocks if clock.applied and abs(clock.offset_us or 0.0) >= TOLD_US),
        key=lambda clock: -abs(clock.offset_us or 0.0),
    )
    if wrong:
        far = wrong[0]
        assert far.offset_us is not None and far.error_us is not None
        notes.append(
            f"the {agree(len(wrong), 'clock', 'clocks')} of {counted(len(wrong), 'host')}"
            f" {agree(len(wrong), 'was', 'were')} corrected by messages; the furthest, of host"
            f" {far.host!r}, was {_duration(abs(far.offset_us))}"
            f" {'ahead' if far.offset_us > 0 else 'behind'} (± {_duration(far.error_us)})"
        )
    return notes


def _duration(us: float) -> str:
    for size, name in ((60e6, "min"), (1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:.3g} {name}"
    return f"{us:.3g} µs"
