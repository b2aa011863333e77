"""Limits of figures from disttrain's traces: incomplete steps, missing ranks, shared cores."""

from __future__ import annotations

from typing import Any

from disttrain_cli.analysis.explanations import MOST_PLACES
from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.result.summary import JobSummary


def say_limits(database: Database, times: dict[str, Any], summary: JobSummary) -> None:
    """Warn about incomplete steps, missing ranks, contradictions and shared cores."""
    warn, job = database.warnings.append, database.job
    if times["warmup"] == 0:
        warn("only one step was recorded, so its warm-up could not be left out")
    if times["incomplete"]:
        short = short_ranks(database)
        warn(
            f"{counted(times['incomplete'], 'step')} without rows of some rank"
            f" {agree(times['incomplete'], 'is', 'are')} left out{short and f': {short}'}"
        )
    if job is not None:
        world_size = expected_ranks(database)
        if summary.ranks < world_size:
            warn(
                f"the trace contains {summary.ranks} of {world_size} ranks: figures cover only"
                f" {agree(summary.ranks, 'that one', 'those')}{_missing(database)}"
            )
    expected = times["last_step"] - times["first_step"] + 1
    if gone := expected - times["recorded"]:
        warn(
            f"{counted(gone, 'step')} between {times['first_step']} and {times['last_step']}"
            f" {agree(gone, 'is', 'are')} missing"
        )
    if silent := times["measured"] - times["reported"]:
        warn(
            f"{counted(silent, 'measured step')} {agree(silent, 'has', 'have')} no reported loss"
            " and time"
        )
    if summary.mfu is not None and summary.mfu > 1:
        warn(
            f"an MFU of {100 * summary.mfu:.0f} % is impossible: the peak of the device or the"
            " FLOPs are wrong"
        )
    if (summary.iteration_s or 0.0) > 1.1 * times["covered_s"]:
        warn(
            f"steps took {summary.iteration_s:.3g} s, of which the trace covers"
            f" {times['covered_s']:.3g} s"
        )
    if job is not None and shares_cores(job) and summary.ranks > 1:
        warn(
            f"all {summary.ranks} ranks share the {counted(job.profile.device.cores, 'core')} of a"
            " CPU: a rank is slower while others compute, so which unit or rank is slow is less"
            " certain than on separate devices"
        )


def expected_ranks(database: Database) -> int:
    """Return the number of ranks that a complete trace has rows of.

    It is all of the plan's ranks, or one of each replica of a stage if no other rank has any rows.
    """
    job = database.job
    if job is None:
        return round(
            sum(row["n"] for row in database.sql("SELECT gpus / devices_per_rank AS n FROM units"))
        )
    others = (
        job.rehearsed is None
        and database.sql("SELECT max(cp_rank + tp_rank) AS most FROM seen")[0]["most"] > 0
    )
    return sum(unit.gpus if others else unit.gpus // unit.tp_cp_size for unit in job.layout.units)


def short_ranks(database: Database) -> str:
    """Name the ranks whose traces end before those of the others; empty if all end together."""
    last = {
        row["rank"]: row["step"]
        for row in database.sql(
            "SELECT rank, max(step) AS step FROM seen WHERE computed > 0 GROUP BY rank ORDER BY"
            " rank"
        )
    }
    names = [f"{rank} (at step {step})" for rank, step in last.items() if step < max(last.values())]
    more = f" and {len(names) - MOST_PLACES} more" if len(names) > MOST_PLACES else ""
    of = agree(len(names), "the trace of rank", "the traces of ranks")
    end = agree(len(names), "ends", "end")
    return f"{of} {', '.join(names[:MOST_PLACES])}{more} {end} early" if names else ""


def _missing(database: Database) -> str:
    """Name the replicas of stages without any trace."""
    there = {
        (row["unit"], row["stage"], row["replica"])
        for row in database.sql("SELECT DISTINCT unit, stage, replica FROM seen")
    }
    lost = [
        f"{stage.name} replica {replica}"
        for stage in database.stages
        for replica in range(stage.unit.dp)
        if (stage.unit.name, stage.index, replica) not in there
    ]
    more = f" and {len(lost) - MOST_PLACES} more" if len(lost) > MOST_PLACES else ""
    return f"; missing: {', '.join(lost[:MOST_PLACES])}{more}" if lost else ""
