"""Breakdown of an operation's time: torch's profiles of some steps, joined by rank and step.

`train --profile-steps` marks every operation in Kineto's files. A mark's time is attributed to the
kernels that ran meanwhile, or, on a CPU, to the operators of its thread, each without those nested
inside; the rest is idle. Marks and trace rows of the same operations also show whether a rank's
profile and its trace have different clocks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.result.rows import InsideRow, Part
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.trace import COMPUTE, OPERATIONS, WEIGHTS, profile_file, read_mark

if TYPE_CHECKING:
    from disttrain_cli.analysis.kineto.database import KinetoDatabase

#: Most profiles that are read, spread over the stages.
MOST_PROFILES = 16
MOST_PARTS = 8
#: Larger differences of clocks are reported.
TOLD_APART_NS = 5e6
#: Kinds by regular expressions on the name; the first match counts.
_KINDS = [
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (
            "communication",
            r"nccl|rccl|c10d|gloo|all_?reduce|all_?gather|reduce_?scatter|broadcast|sendrecv|record_param_comms",
        ),
        ("attention", r"attention|flash|fmha|sdpa"),
        ("convolution", r"conv|winograd|cudnn"),
        (
            "gemm",
            r"gemm|cutlass|cublas|nvjet|cijk_|::(add|b)?mm\b|::baddbmm|::matmul|::linear|::einsum",
        ),
        ("normalization", r"norm"),
        ("copies", r"memcpy|memset|copy_?|::to\b|::cat\b|::clone|::contiguous|::index|fill_|zero_"),
    )
]


def kind_of(name: str) -> str:
    """Return the kind of a kernel or an operator, by its name."""
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "other")


@dataclass
class _Sum:
    """Sums over operations of one kind on one stage."""

    # rank, step and slot; the modules' remaining weight gradients alternate at the end, with a mark
    # each
    passes: set[tuple[int, int, int]] = field(default_factory=set)
    ns: int = 0
    # name → ns, runs
    parts: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))


def inside(database: Database, progress: Progress = silent) -> list[InsideRow]:
    """Return one row per stage, module and operation of the profiled steps, the busiest first."""
    threads = {row["rank"]: row for row in database.query("chrome_threads")}
    files = _files(database, threads)
    if not files:
        return []
    from disttrain_cli.analysis.kineto.database import open_kineto
    from disttrain_cli.errors import DataError

    try:
        profiles = open_kineto(files, progress)
    except DataError as error:
        database.warnings.append(
            f"torch's profiles of this run are left out: {error.what}: {error.why}"
        )
        return []
    database.warnings += [f"torch's profiles: {warning}" for warning in profiles.warnings]
    marks: dict[int, list[dict[str, Any]]] = {}
    for mark in profiles.query("marks"):
        known = read_mark(mark["name"])
        if known is not None and mark["rank"] in threads and _has_rows(*known):
            marks.setdefault(mark["rank"], []).append(
                mark | dict(zip(("operation", "step", "slot", "module"), known, strict=True))
            )
    sums: dict[tuple[str, int, str, str], _Sum] = defaultdict(_Sum)
    for rank, marked in marks.items():
        thread = threads[rank]
        for mark, parts in zip(marked, _divided(profiles, rank, marked), strict=True):
            total = sums[thread["unit"], thread["stage"], mark["module"], mark["operation"]]
            total.passes.add((rank, mark["step"], mark["slot"]))
            total.ns += mark["end_ns"] - mark["start_ns"]
            for name, (ns, runs) in parts.items():
                total.parts[name][0] += ns
                total.parts[name][1] += runs
    if marks:
        _say(database, marks)
    names = {row["id"]: row["name"] for row in profiles.sql("SELECT id, name FROM names")}
    usual = {
        (row["unit"], row["stage"], row["module"] or "", row["operation"]): row["measured_ms"]
        for row in database.query("operation_means")
    }
    rows = [_row(key, total, names, usual) for key, total in sums.items() if total.ns]
    return sorted(
        rows, key=lambda row: -row.profiled_ms * row.count / row.ranks * (1 - row.shares["idle"])
    )


def _has_rows(operation: str, step: int, slot: int, module: str) -> bool:
    """Return True if the trace has rows for such a mark.

    It has none for what precedes a pass of a module.
    """
    return operation in OPERATIONS and (operation not in COMPUTE or bool(module))


def _files(database: Database, threads: dict[int, dict[str, Any]]) -> list[Path]:
    """Return the profiles of the analysed start, those of different stages first."""
    by_stage: dict[tuple[str, int], list[Path]] = {}
    for path in database.paths:
        traces = path / "traces" if (path / "traces").is_dir() else path
        for rank, thread in threads.items():
            file = profile_file(traces, rank, database.run)
            if file.is_file():
                by_stage.setdefault((thread["unit"], thread["stage"]), []).append(file)
    turns = max((len(files) for files in by_stage.values()), default=0)
    return [
        files[turn] for turn in range(turns) for files in by_stage.values() if turn < len(files)
    ][:MOST_PROFILES]


def _divided(
    profiles: KinetoDatabase, rank: int, marks: list[dict[str, Any]]
) -> list[dict[int, tuple[int, int]]]:
    """Return, by mark: name → (ns, runs).

    Overlapping time counts for the event that began first or, on one thread, for the innermost one.
    """
    rows = profiles.connection.execute(*_asked(rank)).fetchnumpy()
    names, threads, starts, ends = (rows[key] for key in ("name", "thread", "start_ns", "end_ns"))
    threads = np.asarray(threads)
    on_device = bool((threads == -1).any())
    by_thread = {thread: np.flatnonzero(threads == thread) for thread in np.unique(threads)}
    divided = []
    for mark in marks:
        chosen = by_thread.get(-1 if on_device else mark["thread"], np.empty(0, np.int64))
        first, last = np.searchsorted(starts[chosen], [mark["start_ns"], mark["end_ns"]])
        these = chosen[first:last]
        ns = (
            _uncovered(starts[these], np.minimum(ends[these], mark["end_ns"]))
            if on_device
            else _without_inner(starts[these], np.minimum(ends[these], mark["end_ns"]))
        )
        parts: dict[int, tuple[int, int]] = {}
        for name in np.unique(names[these]):
            of = names[these] == name
            parts[int(name)] = int(ns[of].sum()), int(of.sum())
        divided.append(parts)
    return divided


def _asked(rank: int) -> tuple[str, dict[str, Any]]:
    from disttrain_cli.analysis.sql import query_text

    return query_text("kineto/parts"), {"rank": rank}


def _uncovered(starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return what each interval adds beyond the furthest end before it; sorted by start."""
    if not len(starts):
        return starts
    reach = np.maximum.accumulate(ends)
    begins = starts.copy()
    begins[1:] = np.maximum(begins[1:], reach[:-1])
    return np.asarray(np.maximum(0, ends - begins))


def _without_inner(
    starts: np.ndarray[Any, Any], ends: np.ndarray[Any, Any]
) -> np.ndarray[Any, Any]:
    """Return the length of each interval less those directly inside it.

    Intervals are sorted by start, outer ones first. One is inside another if its midpoint is: times
    are rounded.
    """
    self_ns = ends - starts
    open_: list[int] = []
    for index, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        while open_ and 2 * ends[open_[-1]] <= start + end:
            open_.pop()
        if open_:
            self_ns[open_[-1]] -= min(end, int(ends[open_[-1]])) - start
        open_.append(index)
    return np.asarray(np.maximum(0, self_ns))


def _row(
    key: tuple[str, int, str, str],
    total: _Sum,
    names: dict[int, str],
    usual: dict[tuple[str, int, str, str], float],
) -> InsideRow:
    unit, stage, module, operation = key
    shares: dict[str, float] = defaultdict(float)
    parts = []
    count = len(total.passes)
    for number, (ns, runs) in total.parts.items():
        kind = kind_of(names[number])
        shares[kind] += ns / total.ns
        parts.append(Part(name=names[number], kind=kind, count=runs / count, share=ns / total.ns))
    ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
    return InsideRow(
        unit=unit,
        stage=stage,
        module=module or None,
        operation=operation,
        ranks=len({rank for rank, *_ in total.passes}),
        count=count,
        profiled_ms=total.ns / 1e6 / count,
        usual_ms=usual.get(key),
        shares=ordered | {"idle": max(0.0, 1.0 - sum(shares.values()))},
        top=sorted(parts, key=lambda part: -part.share)[:MOST_PARTS],
    )


def _say(database: Database, marks: dict[int, list[dict[str, Any]]]) -> None:
    """Warn about the profiled steps, and about ranks whose two clocks differ unlike the others'."""
    steps = sorted({mark["step"] for marked in marks.values() for mark in marked})
    shown = f"step {steps[0]} was" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} were"
    database.warnings.append(f"{shown} also recorded by torch.profiler, which slows them down")
    rows = database.sql(
        # rows of weight gradients need not begin where their marks do
        "SELECT rank, step, slot, operation, module, start_ns FROM operations WHERE"
        " list_contains($steps, step) AND operation <> $weights",
        {"steps": steps, "weights": COMPUTE[WEIGHTS]},
    )
    recorded = {
        (row["rank"], row["step"], row["slot"], row["operation"], row["module"]): row["start_ns"]
        for row in rows
    }
    apart_ns = {
        rank: float(np.median(differences))
        for rank, marked in marks.items()
        if (
            differences := [
                mark["start_ns"] - recorded[key]
                for mark in marked
                if (key := (rank, mark["step"], mark["slot"], mark["operation"], mark["module"]))
                in recorded
            ]
        )
    }
    usual_ns = float(np.median(list(apart_ns.values()))) if apart_ns else 0.0
    for rank, ns in apart_ns.items():
        if abs(ns - usual_ns) > TOLD_APART_NS:
            database.warnings.append(
                f"rank {rank}: the clock offset between its trace and torch's profile differs from"
                f" that of other ranks by {(ns - usual_ns) / 1e6:+.1f} ms; operations are matched"
                " by their annotations"
            )
