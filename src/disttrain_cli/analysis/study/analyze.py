"""Analysis of an operation-level trace."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.graph import Passes
from disttrain_cli.analysis.losses import stragglers_of
from disttrain_cli.analysis.record import Record
from disttrain_cli.analysis.result.rows import RankSummary, Slowest
from disttrain_cli.analysis.result.summary import Analysis, JobSummary
from disttrain_cli.analysis.result.verdicts import Cause, Place, Stragglers, Verdict, WhatIf
from disttrain_cli.analysis.sql import query_text
from disttrain_cli.analysis.study.advice import command_of, explained
from disttrain_cli.analysis.study.graph import NoGraphError, StudyGraph, graph_of
from disttrain_cli.analysis.study.losses import (
    NOT_TOLD,
    UNIT,
    explain_study,
    passes_of,
    split_study,
)
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD
from disttrain_cli.analysis.study.reader import StudyTrace, open_study, read_study
from disttrain_cli.analysis.study.replays import replay
from disttrain_cli.analysis.study.suspects import study_causes
from disttrain_cli.analysis.verdict import judge, rows_of, unknown
from disttrain_cli.analysis.walk import Floats


def analyze_study(files: list[Path]) -> Analysis:
    """Analyse operation-level Parquet files, parts of one job's trace.

    Raises:
        DataError: nothing can be read, or no step or no replica of the job is complete.
    """
    trace = read_study(files)
    stragglers, study = Stragglers(slowdown=None, ideal_s=None, lost_s=None), None
    slowest, causes = list[Slowest](), list[Cause]()
    try:
        graph = graph_of(trace)
        trace = graph.trace
    except NoGraphError as error:
        verdict, waits = unknown(str(error)), {}
        trace.warnings.append(f"the steps cannot be replayed: {error}")
    else:
        stragglers, verdict, causes, study, slowest = _straggle(graph)
        waits = _waits(graph)
    measured = trace.end.max(axis=0) - trace.start.min(axis=0)
    ranks = _ranks(trace, waits)
    span = sum(rank.span_us for rank in ranks)
    compute = sum(rank.compute_us or 0.0 for rank in ranks)
    return Analysis(
        format="operations",
        job=JobSummary(
            run=", ".join(file.name for file in trace.files),
            name=", ".join(file.stem for file in trace.files),
            rehearsed=None,
            layout=_layout(trace),
            ranks=len(ranks),
            steps=trace.steps_recorded,
            steps_measured=len(trace.steps),
            warmup_steps_excluded=0,
            iteration_s=float(measured.mean()),
            iteration_p50_s=float(np.quantile(measured, 0.5)),
            iteration_p95_s=float(np.quantile(measured, 0.95)),
            sequences_per_s=None,
            mfu=None,
            bubble_fraction=1 - compute / (1e6 * float(measured.sum()) * len(ranks)),
            exposed_communication_fraction=None,
            time_shares={
                "compute": compute / span,
                "communication": sum(r.non_compute_us or 0.0 for r in ranks) / span,
                "idle": sum(r.idle_us for r in ranks) / span,
            },
        ),
        units=[],
        stragglers=stragglers,
        verdict=verdict,
        ranks=ranks,
        what_if=study,
        causes=causes,
        predicted_vs_measured=[],
        operations=[],
        drift=[],
        slowest=slowest,
        warnings=list(dict.fromkeys(trace.warnings)),
    )


def _layout(trace: StudyTrace) -> str:
    parts = f", {trace.chunks} parts per stage" if trace.chunks > 1 else ""
    return (
        f"DP {len(trace.replicas)}, PP {int(trace.stage.max()) + 1}{parts},"
        f" {int(trace.slot.max()) + 1} microbatches"
    )


def _straggle(graph: StudyGraph) -> tuple[Stragglers, Verdict, list[Cause], WhatIf, list[Slowest]]:
    replays = replay(graph)
    why = explain_study(graph)
    losses = split_study(graph, replays, why)
    if graph.contradictions:
        graph.trace.warnings.append(
            f"{counted(graph.contradictions, 'transfer')}"
            f" {agree(graph.contradictions, 'ends', 'end')} before all participants have started:"
            " the clocks of the hosts differ"
        )
    places = {
        int(rank): Place(unit=UNIT, stage=int(stage), replica=int(replica), rank=int(rank))
        for rank, stage, replica in zip(graph.rank, graph.stage, graph.replica, strict=True)
    }
    stages, slots = int(graph.stage.max()) + 1, int(graph.seq[graph.optype == FORWARD].max()) + 1
    fill = (stages - 1) / (slots + stages - 1)  # bubble of 1F1B with equal stages
    record = Record(
        losses=losses,
        where=places,
        comparisons=[],
        gpus=len(places),
        kind="operations",
        shares={"warmup": fill / 2, "drain": fill / 2},
        present=graph.trace.present,
    )
    findings = study_causes(graph, why, places)
    verdict = judge(record, findings)
    causes = [
        replace(
            row,
            place=replace(row.place, unit=None),
            places=[replace(one, unit=None) for one in row.places],
            next_command=command_of(row.cause, row.place),
        )
        for row in rows_of(record, findings)
    ]
    return (
        stragglers_of(losses, NOT_TOLD),
        explained(verdict, graph, replays, losses),
        causes,
        replays.what_if,
        _slowest(graph, passes_of(graph)),
    )


def _slowest(graph: StudyGraph, passes: Passes) -> list[Slowest]:
    """Return the slowest stage, replica and slot by the time of a microbatch on one stage.

    Forward and backward count together.
    """
    mask = np.isin(graph.optype, (FORWARD, BACKWARD))
    ms = 1e3 * graph.taken[mask].mean(axis=1)
    rows = []
    for kind, numbers in (
        ("stage", passes.stage),
        ("replica", passes.replica),
        ("slot", passes.slot),
    ):
        means = {
            int(number): _of_a_slot(passes, ms, numbers == number) for number in np.unique(numbers)
        }
        if len(means) > 1:
            slow = max(means, key=lambda number: means[number])
            rows.append(
                Slowest(
                    kind=kind,
                    unit=None,
                    number=slow,
                    mean_ms=means[slow],
                    ratio=means[slow] / _of_a_slot(passes, ms, np.ones_like(numbers, bool)),
                    normalised_ratio=None,
                )
            )
    return rows


def _of_a_slot(passes: Passes, ms: Floats, mask: NDArray[np.bool_]) -> float:
    """Return the time of a microbatch on one rank, mean over the chosen ranks and microbatches."""
    return float(
        ms[mask].sum() / len(np.unique(np.stack([passes.rank[mask], passes.slot[mask]]), axis=1)[0])
    )


def _waits(graph: StudyGraph) -> dict[int, float]:
    """Return, by rank, µs from the start of its transfers to the latest start of their groups."""
    waited = (graph.trace.end - graph.taken - graph.trace.start).clip(0.0)
    return {
        int(rank): 1e6 * float(waited[graph.rank == rank].sum()) for rank in np.unique(graph.rank)
    }


def _ranks(trace: StudyTrace, waits: dict[int, float]) -> list[RankSummary]:
    connection, _ = open_study(trace.files)
    cursor = connection.execute(
        query_text("study/ranks"),
        {"steps": trace.steps.tolist(), "replicas": trace.replicas.tolist()},
    )
    names = [column[0] for column in cursor.description or []]
    rows = [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
    return [RankSummary(**row, collective_wait_us=waits.get(row["rank"])) for row in rows]
