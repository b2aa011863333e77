"""Reader of operation-level Parquet: one row per operation of a rank; complete steps and replicas.

A row's rank is a worker: its coordinates (dp_rank, stage). `seq_id` counts the operations of one
type of a worker in a step; `mc` is the part of a stage that it works on if stages are interleaved
(the model's part mc × stages + stage), and else 0, or -1 if that does not apply. It is part of an
operation's identity, so steps whose passes go through the parts in another order than usual count
as incomplete.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.sql import connect, literals, no_glob
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD, KNOWN, TRANSFERS
from disttrain_cli.analysis.walk import Floats, Ints
from disttrain_cli.errors import DataError

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

COLUMNS = {
    "dp_rank": "BIGINT",
    "stage": "BIGINT",
    "rank": "BIGINT",
    "step": "BIGINT",
    "optype": "VARCHAR",
    "start_ts": "DOUBLE",
    "duration": "DOUBLE",
    "seq_id": "BIGINT",
    "mc": "BIGINT",
    "mb_id": "BIGINT",
    "gmc": "BIGINT",
}
TIMES = ("start_ts", "duration")
#: Longest pass over a microbatch. If the median pass is longer, the times are not in seconds: by
#: unit, the number per second, and the longest median pass for which the times have this unit.
LONGEST_PASS_S = 100
_UNITS = (("s", 1, LONGEST_PASS_S), ("ms", 10**3, 10**3), ("µs", 10**6, 10**7))
#: Most steps that are read, spread evenly, so that memory does not grow with the length of a job.
MOST_STEPS = 64
#: An operation in a smaller share of the steps, on every replica, is not part of a usual step.
USUAL_SHARE = 0.5


@dataclass(frozen=True)
class StudyTrace:
    """Operations of the selected steps, one block per replica, with the same operations in each."""

    files: list[Path]
    steps: Ints
    steps_recorded: int
    optype: NDArray[np.str_]  # by operation of a replica [n]
    stage: Ints
    seq: Ints
    chunk: Ints  # part of the stage, -1: none
    slot: Ints  # microbatch of a pass, or of a transfer if stages have one part; -1: none
    replicas: Ints  # dp_rank of every block
    rank: Ints  # [replicas, n]
    origin: Floats  # [steps] start of each step, in seconds of the trace's clock
    start: Floats  # [replicas × n, steps] seconds from the start of the step
    end: Floats
    chunks: int  # parts of a stage
    present: float = 1.0  # share of the job's replicas that are complete, by their highest number
    warnings: list[str] = field(default_factory=list)


def open_study(files: list[Path]) -> tuple[DuckDBPyConnection, list[str]]:
    """Return a connection with the view `operations` over the readable files, and warnings.

    Raises:
        DataError: no file can be read, or none has the study's columns.
    """
    connection = connect()
    warnings: list[str] = []
    read: list[Path] = []
    for file in files:
        problem = _problem(connection, file, read)
        if problem is None:
            read.append(file)
        else:
            warnings.append(f"{file}: {problem}; left out")
    if not read:
        raise DataError(
            "No operation-level trace can be read",
            "; ".join(warnings[:5]),
            f"A Parquet file with the columns {', '.join(COLUMNS)} is needed.",
        )
    unit, per_s = _unit(connection, read)
    if per_s > 1:
        warnings.append(
            f"a pass would take over {LONGEST_PASS_S} s if times were seconds: they are read as"
            f" {unit}"
        )
    casts = ", ".join(
        f"CAST({column} AS {kind}){f' / {per_s}' * (column in TIMES)} AS {column}"
        for column, kind in COLUMNS.items()
    )
    connection.execute(
        f"CREATE VIEW operations AS SELECT {casts} FROM read_parquet({_quoted(read)})"
    )
    readable = literals((file.resolve() for file in read), str, no_glob)
    connection.execute(f"SET allowed_paths = {readable}")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection, warnings


def _problem(connection: DuckDBPyConnection, file: Path, before: list[Path]) -> str | None:
    """Return why a file cannot be read together with those before it, or None."""
    import duckdb

    try:
        row = connection.execute(
            f"DESCRIBE SELECT * FROM read_parquet({_quoted([file])})"
        ).fetchall()
        missing = [column for column in COLUMNS if column not in {name for name, *_ in row}]
        if missing:
            return f"lacks the column(s) {', '.join(missing)}"
        ours = f"(SELECT DISTINCT rank, step FROM read_parquet({_quoted([file])}))"
        if not connection.execute(f"SELECT count(*) FROM {ours}").fetchall()[0][0]:
            return "has no rows"
        if (
            before
            and connection.execute(
                f"SELECT count(*) FROM {ours} JOIN (SELECT DISTINCT rank, step FROM"
                f" read_parquet({_quoted(before)})) USING (rank, step)"
            ).fetchall()[0][0]
        ):
            return "contains ranks and steps again, so it belongs to another job"
    except duckdb.Error:
        return "is damaged or half-written"
    return None


def _unit(connection: DuckDBPyConnection, files: list[Path]) -> tuple[str, int]:
    """Return the unit of the times, and the number per second, judged by the median pass.

    A pass takes 1 ms to 100 s.
    """
    import duckdb

    try:
        usual = connection.execute(
            f"SELECT median(CAST(duration AS DOUBLE)) FROM read_parquet({_quoted(files)}) "
            "WHERE list_contains($passes, optype)",
            {"passes": [FORWARD, BACKWARD]},
        ).fetchall()[0][0]
    except duckdb.Error:  # errors are reported when the rows are read
        return "s", 1
    return next(
        ((unit, per_s) for unit, per_s, longest in _UNITS if (usual or 0.0) <= longest),
        ("ns", 10**9),
    )


def _quoted(files: list[Path]) -> str:
    return literals((file.resolve() for file in files), no_glob)


def read_study(files: list[Path]) -> StudyTrace:
    """Read the complete steps and replicas of a job.

    Raises:
        DataError: nothing can be read, or no step or no replica is complete; the message names
            missing ranks and operations.
    """
    import duckdb

    connection, warnings = open_study(files)
    try:
        numbers = [
            row[0]
            for row in connection.execute(
                "SELECT DISTINCT step FROM operations WHERE step IS NOT NULL ORDER BY step"
            ).fetchall()
        ]
        chosen = (
            numbers
            if len(numbers) <= MOST_STEPS
            else [
                numbers[index] for index in np.linspace(0, len(numbers) - 1, MOST_STEPS).astype(int)
            ]
        )
        if len(chosen) < len(numbers):
            warnings.append(f"{len(chosen)} of {len(numbers)} steps are analysed, spread evenly")
        bad = connection.execute(
            f"SELECT count(*) FROM operations WHERE NOT ({_SOUND})"
        ).fetchall()[0][0]
        if bad:
            warnings.append(
                f"{bad} row(s) lack coordinates or a time, or have a negative duration; left out"
            )
        unknown = [
            row[0]
            for row in connection.execute(
                "SELECT DISTINCT optype FROM operations WHERE NOT list_contains($known, optype)"
                " ORDER BY 1",
                {"known": list(KNOWN)},
            ).fetchall()
        ]
        if unknown:
            warnings.append(
                f"operations of unknown types are left out: {', '.join(map(repr, unknown[:5]))}"
            )
        columns = connection.execute(
            "SELECT * REPLACE (greatest(coalesce(mc, -1), -1) AS mc) FROM operations "
            f"WHERE list_contains($steps, step) AND list_contains($known, optype) AND {_SOUND}",
            {"steps": chosen, "known": list(KNOWN)},
        ).fetchnumpy()
    except duckdb.Error as error:
        raise DataError(
            "The trace cannot be read", str(error).splitlines()[0], "Delete the damaged file."
        ) from None
    if not len(columns["step"]):
        raise DataError(
            "The trace contains no operation with rank coordinates and a time",
            "; ".join(warnings[:5]),
            "Record the job again.",
        )
    return _whole(
        {name: np.asarray(values) for name, values in columns.items()},
        files,
        len(numbers),
        warnings,
    )


_SOUND = (
    "coalesce(dp_rank >= 0 AND stage >= 0 AND rank >= 0 AND seq_id >= 0 AND duration >= 0 "
    "AND isfinite(start_ts) AND isfinite(duration) AND optype IS NOT NULL, false)"
)


def _whole(
    columns: dict[str, Any], files: list[Path], recorded: int, warnings: list[str]
) -> StudyTrace:
    """Arrange the rows by replica, operation and step; leave out incomplete ones, with warnings."""
    steps, step = np.unique(columns["step"], return_inverse=True)
    names, kind = np.unique(columns["optype"].astype(str), return_inverse=True)
    replicas, replica = np.unique(columns["dp_rank"], return_inverse=True)
    stages = int(columns["stage"].max()) + 1
    chunks = max(1, int(columns["mc"].max()) + 1)
    keys = (columns["stage"] * len(names) + kind) * (chunks + 1) + columns["mc"] + 1
    keys = keys * (int(columns["seq_id"].max()) + 1) + columns["seq_id"]
    _, first, operation = np.unique(keys, return_index=True, return_inverse=True)
    count = len(first)
    start = np.full((len(replicas), count, len(steps)), np.nan)
    end = start.copy()
    if len(np.unique((replica * count + operation) * len(steps) + step)) < len(step):
        warnings.append("some operations are recorded twice; the last row of each is used")
    start[replica, operation, step] = columns["start_ts"]
    end[replica, operation, step] = columns["start_ts"] + columns["duration"]
    rank = np.full((len(replicas), count), -1, dtype=np.int64)
    rank[replica, operation] = columns["rank"]

    there = ~np.isnan(start)
    usual = there.mean(axis=2).max(axis=0) >= USUAL_SHARE
    present = np.unique(columns["stage"][first][usual])
    if len(present) < stages:
        raise DataError(
            f"The trace has no rows of stage {_missing(present, stages)[0]}",
            f"the last stage is {stages - 1}; operations of {len(present)} are there",
            "Record all ranks.",
        )
    kept = [
        index
        for index in range(len(replicas))
        if _replica_is_whole(
            index, replicas, there[:, usual], columns["stage"][first][usual], warnings
        )
    ]
    gone = _missing(replicas, int(replicas.max()) + 1)
    if gone:
        warnings.append(
            f"replica(s) {_listed(gone)} are not in the trace: figures are of the others"
        )
    if not kept:
        raise DataError(
            "No replica is complete: each lacks ranks",
            "; ".join(warnings[-5:]),
            "Record all ranks.",
        )
    there = there[kept][:, usual]
    complete = there.all(axis=(0, 1))
    if not complete.all():
        lacking = steps[~complete].tolist()
        warnings.append(
            f"{len(lacking)} step(s) lack operations that the others have and are left out: "
            f"{_listed(lacking)}"
        )
    if not complete.any():
        raise DataError(
            "No step is complete: each lacks operations",
            "; ".join(warnings[-5:]),
            "Record the job again.",
        )
    if not usual.all():
        warnings.append(
            f"{int((~usual).sum())} operation(s) occur in only a few steps and are left out"
        )
    start, end, rank = (values[kept][:, usual] for values in (start, end, rank))
    start, end = start[..., complete], end[..., complete]
    origin = start.min(axis=(0, 1))
    start, end = ((values - origin).reshape(-1, len(origin)) for values in (start, end))
    stage, seq, chunk = (
        columns[name][first][usual].astype(np.int64) for name in ("stage", "seq_id", "mc")
    )
    optype = names[kind[first][usual]]
    return StudyTrace(
        files=files,
        steps=steps[complete].astype(np.int64),
        steps_recorded=recorded,
        optype=optype,
        stage=stage,
        seq=seq,
        chunk=chunk,
        slot=_slots(optype, stage, chunk, seq, chunks),
        replicas=replicas[kept].astype(np.int64),
        rank=rank,
        origin=origin,
        start=start,
        end=end,
        chunks=chunks,
        present=len(kept) / (int(replicas.max()) + 1),
        warnings=warnings,
    )


def _slots(optype: NDArray[np.str_], stage: Ints, chunk: Ints, seq: Ints, chunks: int) -> Ints:
    """Return the microbatch of every operation, in order within a part of a stage; -1 for none."""
    passes = np.isin(optype, (FORWARD, BACKWARD))
    slot = np.where(passes | (np.isin(optype, TRANSFERS) & (chunks == 1)), seq, -1)
    _, part = np.unique(np.stack([stage, chunk, optype == FORWARD]), axis=1, return_inverse=True)
    for number in np.unique(part) if chunks > 1 else ():
        nodes = np.flatnonzero(passes & (part.reshape(-1) == number))
        slot[nodes[np.argsort(seq[nodes])]] = np.arange(len(nodes))
    return slot


def _replica_is_whole(
    index: int, replicas: Ints, there: NDArray[np.bool_], stages: Ints, warnings: list[str]
) -> bool:
    """Return True if a replica has every usual operation in most steps; else add a warning."""
    lacks = there[index].mean(axis=1) < USUAL_SHARE
    if lacks.any():
        without_ranks = [int(stage) for stage in np.unique(stages) if lacks[stages == stage].all()]
        what = (
            f"stage(s) {_listed(without_ranks)} (ranks are missing)"
            if without_ranks
            else f"{int(lacks.sum())} operation(s)"
        )
        warnings.append(
            f"replica {replicas[index]} lacks {what} and is left out: figures are of the others"
        )
    return not lacks.any()


def _missing(numbers: Ints, count: int) -> list[int]:
    """Return the first of 0 … count − 1 that are not among the numbers, at most as many."""
    return np.setdiff1d(np.arange(min(count, 2 * len(numbers))), numbers).tolist()


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (
        f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
    )
