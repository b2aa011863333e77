"""Analysis of disttrain's traces: run the queries, replay the steps, name the cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from disttrain_cli.analysis.causes import (
    LEAST_LIMIT_SHARE,
    LEAST_SHARE,
    Finding,
    State,
    Suspect,
    find_causes,
    mend,
)
from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.graph import Delays, Graph
from disttrain_cli.analysis.job.comparisons import compare_sums
from disttrain_cli.analysis.job.costing import peak_of, shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.device_clocks import slow_clocks
from disttrain_cli.analysis.job.experts import expert_rows, named, rank_loads
from disttrain_cli.analysis.job.files import recorded_steps
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.job.inside import inside
from disttrain_cli.analysis.job.limits import expected_ranks, say_limits, short_ranks
from disttrain_cli.analysis.job.operations import compare_operations
from disttrain_cli.analysis.job.rank_times import rank_summaries
from disttrain_cli.analysis.job.remedies.groups import held_up, share_waited_for
from disttrain_cli.analysis.job.remedies.leaving import left_out
from disttrain_cli.analysis.job.remedies.remedies import (
    Layouts,
    other_layouts,
    remedies,
    with_layouts,
)
from disttrain_cli.analysis.job.remedies.reordering import best_share
from disttrain_cli.analysis.job.remedies.replanning import can_replan
from disttrain_cli.analysis.job.remedies.replicas import record_of
from disttrain_cli.analysis.job.remedies.suspects import is_split, own_suspects, replayed, state_of
from disttrain_cli.analysis.job.staleness import moved_data, stale
from disttrain_cli.analysis.learning import learning
from disttrain_cli.analysis.losses import explain, split_losses, stragglers_of
from disttrain_cli.analysis.record import Record
from disttrain_cli.analysis.result.rows import (
    Comparison,
    MemoryRow,
    OperationRow,
    RankSummary,
    Slowest,
)
from disttrain_cli.analysis.result.summary import Analysis, JobSummary, UnitSummary, moment
from disttrain_cli.analysis.result.verdicts import Cause, Place, Remedy, Stragglers, Verdict, WhatIf
from disttrain_cli.analysis.verdict import UNEVEN, judge, rows_of, unknown
from disttrain_cli.analysis.what_if import what_if
from disttrain_cli.calls import call
from disttrain_cli.errors import DataError
from disttrain_cli.spec.learning import Learning
from disttrain_cli.spec.trace import Job


def analyze_database(database: Database, layouts: Layouts = other_layouts) -> Analysis:
    """Analyse an open database of disttrain's traces (the report queries it again).

    Args:
        database: open traces.
        layouts: function that returns the savings of other layouts, if they are known already.

    Raises:
        DataError: no complete step was recorded.
    """
    times = database.query("iterations")[0]
    if not times["measured"]:
        short = short_ranks(database)
        raise DataError(
            "The trace contains no complete step",
            f"it has {counted(times['recorded'], 'step')}; a measured step needs forward and"
            f" backward of every rank, and the first one is warm-up{short and f'; {short}'}",
            (
                "Analyse without the folders of these ranks (rank-*), or record more:"
                f" {call('train', steps=5)}"
                if short
                else f"Record more: {call('train', steps=5)}"
            ),
        )
    database.ask_ahead("exposed_communication", "cells", "slots", "memory")
    shares = database.query("idle_totals")[0]
    job, iteration_s = database.job, times["iteration_s"]
    sequences = times["sequences_per_step"] if job is None else job.layout.global_batch_size
    units = _units(database, iteration_s)
    mfu = _job_mfu(database, units, iteration_s)
    operations = compare_operations(database)
    comparisons = compare_sums(database, times, operations, 1 - shares["compute"], mfu)
    moved = moved_data(database)
    ranks, experts = rank_summaries(database), expert_rows(database)
    stragglers, verdict, causes, study, helps = _straggle(
        database,
        shares,
        ranks,
        comparisons,
        operations,
        bool(moved),
        layouts,
        rank_loads(database, experts),
    )
    summary = JobSummary(
        run=database.run,
        name=database.name,
        recorded_at=moment(times["first_ns"]),
        rehearsed=None if job is None else _rehearsed(job),
        layout=(
            job.layout.describe()
            if job is not None
            else " → ".join(f"{unit.name} (DP {unit.dp} PP {unit.pp})" for unit in units)
        ),
        ranks=len(ranks),
        steps=times["recorded"],
        steps_measured=times["measured"],
        warmup_steps_excluded=times["warmup"],
        iteration_s=iteration_s,
        iteration_p50_s=times["p50_s"],
        iteration_p95_s=times["p95_s"],
        sequences_per_s=None if sequences is None else sequences / iteration_s,
        mfu=mfu,
        bubble_fraction=1 - shares["compute"],
        exposed_communication_fraction=database.query("exposed_communication")[0]["fraction"],
        time_shares={name: share for name, share in shares.items() if name != "data_wait_s"},
    )
    say_limits(database, times, summary)
    profiled = inside(database)
    if moved:
        verdict = stale(database, moved, operations, verdict)
    return Analysis(
        format="disttrain",
        job=summary,
        units=units,
        stragglers=stragglers,
        verdict=verdict,
        ranks=ranks,
        what_if=study,
        causes=causes,
        remedies=helps,
        predicted_vs_measured=comparisons,
        operations=operations,
        drift=moved,
        slowest=_slowest(database),
        clocks=database.clocks,
        inside=profiled,
        memory=_memory(database),
        experts=experts,
        learning=_learning(database),
        warnings=list(dict.fromkeys(database.warnings)),
    )


def _learning(database: Database) -> Learning | None:
    """Evaluate the losses of all steps in the run's folder, also of steps without traces."""
    job = database.job
    traces = [path / "traces" if (path / "traces").is_dir() else path for path in database.paths]
    rows = [row for folder in traces for row in recorded_steps(folder)]
    if job is None or job.rehearsed is not None or not rows:
        return None
    return learning(rows, job.profile, job.layout.global_batch_size)


def _rehearsed(job: Job) -> str | None:
    """Return a sentence on how emulated devices represented the cluster; None for real ones."""
    how = job.rehearsed
    if how is None:
        return None
    parts = [
        f"slow {fault.slow} ({fault.unit if fault.node is None else fault.node}"
        + (f" stage {fault.stage}" if fault.slow not in ("worker", "node") else "")
        + ("" if fault.replica is None else f" replica {fault.replica}")
        + ("" if fault.cp_rank is None else f" CP rank {fault.cp_rank}")
        + f", × {fault.factor:g}"
        + (f" from step {fault.from_step}" if fault.from_step else "")
        + ")"
        for fault in how.faults
    ]
    parts += [f"noise of {100 * how.noise:g} %"] if how.noise else []
    parts += [f"data of {how.distribution}"] if how.distribution else []
    return (
        f"Rehearsal: {how.processes} processes emulated {job.layout.gpus_used} GPUs; times are"
        " those"
        " of the cluster" + (f". Injected: {'; '.join(parts)}." if parts else ".")
    )


def _units(database: Database, iteration_s: float) -> list[UnitSummary]:
    """Return the summaries of the units; MFU is model FLOPs ÷ (step time × share of the peak).

    On CUDA that share is the peak of the unit's devices. A CPU is one device for all: every unit
    gets the part of the machine's peak that its ranks are of all ranks, though it may use more
    while others wait.
    """
    units = []
    total = sum(row["gpus"] for row in database.sql("SELECT gpus FROM units"))
    for row in database.query("units"):
        flops = row.pop("flops_per_step")
        mfu = None
        if flops is not None and database.job is not None:
            mfu = flops / (iteration_s * 1e12 * peak_of(database.job, total) * row["gpus"] / total)
        units.append(
            UnitSummary(
                **row, mfu=mfu, model_tflop_per_step=None if flops is None else flops / 1e12
            )
        )
    return units


def _job_mfu(database: Database, units: list[UnitSummary], iteration_s: float) -> float | None:
    """Return model FLOPs of all units ÷ (step time × peak), or None if a unit's are unknown."""
    if database.job is None:
        return None
    tflop = 0.0
    for unit in units:
        if unit.model_tflop_per_step is None:
            return None
        tflop += unit.model_tflop_per_step
    return tflop / (iteration_s * peak_of(database.job, sum(unit.gpus for unit in units)))


def _straggle(
    database: Database,
    shares: dict[str, float],
    ranks: list[RankSummary],
    comparisons: list[Comparison],
    operations: list[OperationRow],
    moved_on: bool,
    gains: Layouts,
    loads: Mapping[int, float],
) -> tuple[Stragglers, Verdict, list[Cause], WhatIf | None, list[Remedy]]:
    graph, job = build_graph(database), database.job
    if graph is None:
        return (
            Stragglers(slowdown=None, ideal_s=None, lost_s=None),
            unknown("no recorded step is complete enough to replay"),
            [],
            None,
            [],
        )
    why = explain(graph, graph.recorded.compute, graph.predicted)
    where = {
        rank.rank: Place(
            unit=rank.unit,
            stage=rank.stage,
            replica=rank.replica,
            cp_rank=rank.cp_rank,
            rank=rank.rank,
            host=rank.host,
        )
        for rank in ranks
    }
    losses, suspects = split_losses(graph, why), own_suspects(graph, why, where)
    planned = job is not None and not moved_on and can_replan(record_of(database, graph))
    layouts = gains(database, graph, why, moved_on)
    waited = share_waited_for(graph, held_up(graph))
    findings, state = _causes(graph, suspects, job, planned)
    findings = named(findings, loads, waited)
    helps = remedies(database, graph, suspects, layouts, [one for one in findings if one.regained])
    if planned:
        leaving = left_out(database, graph, why, findings, where)
        helps = sorted([*helps, *leaving], key=lambda one: -one.gain_s)
    measured_s = float(losses.measured.mean())
    present = min(1.0, len(ranks) / expected_ranks(database))
    unexplained = abs(float(losses.lost["unexplained"].mean())) / measured_s
    if unexplained > 0.05:
        database.warnings.append(
            f"the replay leaves {100 * unexplained:.0f} % of a step unexplained"
        )
    record = Record(
        losses=losses,
        where=where,
        comparisons=comparisons,
        shares=shares,
        kind="disttrain",
        remedies=helps,
        gpus=len(ranks) if job is None else job.layout.gpus_used,
        present=present,
        shared_cores=job is not None and shares_cores(job) and len(ranks) > 1,
        core_wait_s=database.sql(
            "SELECT avg(core_wait_s) AS waited FROM steps JOIN windows USING (step) WHERE measured"
        )[0]["waited"],
        operations=operations,
        waited_for=waited,
        expert_loads=loads,
        clocks_s=max((one.error_us or 0.0 for one in database.clocks if one.applied), default=0.0)
        / 1e6,
        steps_measured=database.query("iterations")[0]["measured"],
        slow_clocks=slow_clocks(database),
    )
    if findings:
        mended = replace(graph, recorded=Delays(*state))
        layouts = gains(database, mended, explain(mended, state[0], graph.predicted), moved_on)
    findings = with_layouts(
        findings,
        layouts,
        losses,
        lambda some: replayed(graph, state) - replayed(graph, mend(state, some)),
        [one for one in suspects if planned and is_split(one)],
    )
    return (
        stragglers_of(losses),
        judge(record, findings),
        rows_of(record, findings),
        what_if(graph),
        helps,
    )


def _causes(
    graph: Graph, suspects: list[Suspect], job: Job | None, planned: bool
) -> tuple[list[Finding], State]:
    """Return the causes that slow the steps, and the steps without all of them.

    Uneven data come last, and claim no more than another ordering saves; the remainder, and uneven
    data for which no other ordering is known, are a limit.

    Args:
        graph: recorded steps.
        suspects: possible faults.
        job: the recorded job, None if unknown.
        planned: the planner can predict other plans: the layers of the plan's stages are then no
            fault, but part of what another plan saves.
    """
    ordered = job is not None and job.predicted.ordering in ("paper", "best")
    uneven = [one for one in suspects if one.cause in UNEVEN and (planned or ordered)]
    others = [one for one in suspects if one not in uneven and not (planned and is_split(one))]
    findings, state = find_causes(
        lambda times: replayed(graph, times), state_of(graph.recorded), others
    )
    left, level = find_causes(
        lambda times: replayed(graph, times),
        state,
        uneven,
        LEAST_LIMIT_SHARE if ordered else LEAST_SHARE,
    )
    gained_s, step_s = sum(float(one.gain_s.mean()) for one in left), float(graph.window.mean())
    share = (
        best_share(job)
        if job is not None and planned and gained_s >= LEAST_SHARE * step_s
        else None
    )
    if share is None:
        return [*findings, *(replace(one, limit=True) for one in left)], level
    regained = min(1.0, share * step_s / gained_s)
    return [*findings, *(replace(one.claiming(regained), limit=ordered) for one in left)], level


def _memory(database: Database) -> list[MemoryRow]:
    """Return the recorded and planned memory of every stage."""
    planned = (
        {}
        if database.job is None
        else {(stage.unit, stage.stage): stage for stage in database.job.predicted.memory}
    )
    rows = []
    for row in database.query("memory"):
        stage = planned.get((row["unit"], row["stage"]))
        rows.append(
            MemoryRow(
                **row,
                predicted_gib=stage.peak_gib if stage else None,
                limit_gib=stage.limit_gib if stage else None,
                reserve_gib=stage.reserve_gib if stage else None,
                of_process=database.job is not None and shares_cores(database.job),
            )
        )
    return rows


def _slowest(database: Database) -> list[Slowest]:
    """Return the slowest stage, replica and slot."""
    cells = database.query("cells")
    rows = []
    for kind in ("stage", "replica"):
        groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for cell in cells:
            groups.setdefault((cell["unit"], cell[kind]), []).append(cell)
        slowest = []
        for (unit, number), members in groups.items():
            if sum(1 for other, _ in groups if other == unit) < 2:
                continue
            normal = [cell["normalised"] for cell in members if cell["normalised"] is not None]
            slowest.append(
                Slowest(
                    kind=kind,
                    unit=unit,
                    number=number,
                    mean_ms=_mean(members, "mean_ms"),
                    ratio=_mean(members, "ratio"),
                    normalised_ratio=sum(normal) / len(normal) if normal else None,
                )
            )
        if slowest:
            rows.append(max(slowest, key=lambda row: row.ratio))
    slot = max(database.query("slots"), key=lambda row: row["ms"])
    work = slot["work_ratio"]
    rows.append(
        Slowest(
            kind="slot",
            unit=None,
            number=slot["slot"],
            mean_ms=slot["ms"],
            ratio=slot["ratio"],
            normalised_ratio=slot["ratio"] / work if work else None,
        )
    )
    return rows


def _mean(rows: list[dict[str, Any]], key: str) -> float:
    return sum(row[key] or 0.0 for row in rows) / len(rows)
