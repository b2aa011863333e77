"""Step times of a run by kind, operation and kernel, from traces of any format.

They are the samples by which two runs are compared. Seconds are means over the ranks (for an
operation of a unit, over the unit's ranks), waiting included. A rank is idle while it runs no
operation or kernel and waits for no data; in Kineto traces it waits for data while only an event
named after the DataLoader runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.analyze import ask
from disttrain_cli.analysis.formats import find_format
from disttrain_cli.analysis.study.operations import COMMUNICATION
from disttrain_cli.errors import DataError
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.rundir import run_folder
from disttrain_cli.spec.trace import COMPUTE

#: A `kind` is compute, communication, data (if the traces have it), idle and, for Kineto, memory.
Measure = Literal["step", "kind", "operation", "kernel"]
Key = tuple[Measure, str]
Amount = tuple[Key, int, float]  # key, step, seconds
Series = dict[Key, NDArray[np.float64]]
WHOLE: Key = ("step", "step")
DATA: Key = ("kind", "data")
IDLE: Key = ("kind", "idle")

#: Kinds of disttrain's operations; evaluation and checkpoints are not part of a step.
KINDS = dict.fromkeys((*COMPUTE, "step"), "compute") | {"load": "data"}
OUTSIDE = ("evaluation", "checkpoint", "memory")

#: One query per format: rows of steps, of what happened in them, and of the number of ranks.
OWN = """
SELECT 'step' AS what, step, '' AS unit, '' AS operation, window_s AS value
FROM windows WHERE measured
UNION ALL
SELECT 'took', step, unit, operation, sum(duration_ns) / 1e9
FROM operations WHERE measured GROUP BY ALL
UNION ALL
SELECT 'covered', step, '', operation,
  sum(greatest(0, least(o.end_ns, w.end_ns) - greatest(o.start_ns, w.start_ns))) / 1e9
FROM operations o JOIN windows w USING (step) WHERE o.measured GROUP BY ALL
UNION ALL
SELECT 'ranks', -1, unit, '', count(DISTINCT rank) FROM operations GROUP BY ALL"""
KINETO = """
SELECT 'step' AS what, step, '' AS kind, '' AS operation, '' AS name, avg(step_ns) / 1e9 AS value
FROM step_times WHERE step IS NOT NULL GROUP BY ALL
UNION ALL
SELECT 'idle', step, '', '', '', avg(idle_ns - idle_data_ns) / 1e9 FROM step_times GROUP BY ALL
UNION ALL
SELECT 'data', step, '', '', '', avg(idle_data_ns) / 1e9 FROM step_times
WHERE (SELECT count(*) FROM events WHERE name ILIKE '%dataloader%') > 0 GROUP BY ALL
UNION ALL
SELECT 'took', step, kind, operation, name, sum(end_ns - start_ns) / 1e9
FROM kernels WHERE measured GROUP BY ALL
UNION ALL
SELECT 'ranks', -1, '', '', '', count(DISTINCT rank) FROM kernels"""
STUDY = """
SELECT 'step' AS what, step, '' AS optype, max(start_ts + duration) - min(start_ts) AS value
FROM operations GROUP BY ALL
UNION ALL
SELECT 'took', step, optype, sum(duration) FROM operations GROUP BY ALL
UNION ALL
SELECT 'ranks', -1, '', count(DISTINCT (dp_rank, stage)) FROM operations
UNION ALL
SELECT 'covered', step, '', sum(greatest(0, end_ts - greatest(start_ts, coalesce(reach, start_ts))))
FROM (SELECT step, start_ts, start_ts + duration AS end_ts,
             max(start_ts + duration) OVER earlier AS reach
      FROM operations
      WINDOW earlier AS (PARTITION BY step, dp_rank, stage ORDER BY start_ts, start_ts + duration
                         ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING))
GROUP BY step"""


class Samples(NamedTuple):
    """Seconds by key, one value per step; 0 in steps without the key."""

    format: str
    series: Series

    @property
    def steps(self) -> int:
        """Number of measured steps."""
        return max((len(values) for values in self.series.values()), default=0)


def samples_of(paths: list[Path], progress: Progress = silent) -> Samples:
    """Return samples of the measured steps; raises DataError as `analyze` does."""
    kind = find_format(paths).format
    read = {"disttrain": _own, "kineto": _kineto, "operations": _study}
    if kind not in read:
        raise DataError(
            "Only traces can be compared",
            f"these are dumps of the {kind}",
            "Pass the traces of two runs.",
        )
    return Samples(kind, read[kind](paths, progress))


def _own(paths: list[Path], progress: Progress) -> Series:
    rows = ask(paths, OWN, progress).rows
    of_unit = {unit: count for what, _, unit, _, count in rows if what == "ranks"}
    ranks = sum(of_unit.values())
    amounts: list[Amount] = []
    for what, step, unit, operation, seconds in rows:
        if what == "step":
            amounts += [(WHOLE, step, seconds), (DATA, step, 0.0), (IDLE, step, seconds)]
        elif what == "covered" and operation not in OUTSIDE:
            amounts.append((IDLE, step, -seconds / ranks))
        elif what == "took" and operation not in OUTSIDE:
            amounts.append((("operation", f"{unit} {operation}"), step, seconds / of_unit[unit]))
            amounts.append((("kind", KINDS.get(operation, "communication")), step, seconds / ranks))
    series = _series(amounts)
    folder = run_folder(paths[0])
    profiles = folder and folder / "traces" / "kineto"
    if profiles and any(profiles.glob("*.json.gz")):  # profiles cover some of the steps
        kernels = _kineto([profiles], progress)
        series |= {key: values for key, values in kernels.items() if key[0] == "kernel"}
    return series


def _kineto(paths: list[Path], progress: Progress) -> Series:
    rows = ask(paths, KINETO, progress).rows
    ((ranks,),) = [[count] for what, *_, count in rows if what == "ranks"]
    amounts: list[Amount] = []
    for what, step, kind, operation, name, seconds in rows:
        number = -1 if step is None else step  # without step marks the whole trace is one step
        if what == "step":
            amounts.append((WHOLE, number, seconds))
        elif what in ("data", "idle"):
            amounts.append((("kind", what), number, seconds))
        elif what == "took":
            amounts.append((("kernel", name), number, seconds / ranks))
            amounts.append((("kind", kind), number, seconds / ranks))
            if kind == "communication" and operation:
                amounts.append((("operation", operation), number, seconds / ranks))
    return _series(amounts)


def _study(paths: list[Path], progress: Progress) -> Series:
    rows = ask(paths, STUDY, progress).rows
    ((ranks,),) = [[count] for what, *_, count in rows if what == "ranks"]
    amounts: list[Amount] = []
    for what, step, optype, seconds in rows:
        if what == "step":
            amounts += [(WHOLE, step, seconds), (IDLE, step, seconds)]
        elif what == "covered":
            amounts.append((IDLE, step, -seconds / ranks))
        elif what == "took":
            kind = "communication" if optype in COMMUNICATION else "compute"
            amounts.append((("operation", optype), step, seconds / ranks))
            amounts.append((("kind", kind), step, seconds / ranks))
    return _series(amounts)


def _series(amounts: Sequence[Amount]) -> Series:
    """Sum the seconds by key and step, in the order of steps; 0 for a step without the key."""
    steps = sorted({step for _, step, _ in amounts})
    place = {step: number for number, step in enumerate(steps)}
    sums: dict[Key, NDArray[np.float64]] = {}
    for key, step, seconds in amounts:
        sums.setdefault(key, np.zeros(len(steps)))[place[step]] += seconds
    if WHOLE in sums:  # operations outside the marked steps are in no step
        marked = sums[WHOLE] > 0
        sums = {key: values[marked] for key, values in sums.items()}
    if IDLE in sums:  # a difference of sums: rounded to the traces' nanoseconds
        sums[IDLE] = sums[IDLE].round(9) + 0.0
    return sums
