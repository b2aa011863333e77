"""Analysis of Kineto traces: the measures of the database, and the verdict."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from disttrain_cli.analysis.confidence import calibrated, known
from disttrain_cli.analysis.figures import agree, counted, name_ranks
from disttrain_cli.analysis.kineto.database import KinetoDatabase
from disttrain_cli.analysis.kineto.late import late_ranks
from disttrain_cli.analysis.kineto.losses import Losses
from disttrain_cli.analysis.kineto.path import critical_path
from disttrain_cli.analysis.kineto.roofline import operators
from disttrain_cli.analysis.kineto.steps import JudgedSteps, judged_steps
from disttrain_cli.analysis.kineto.stragglers import mended
from disttrain_cli.analysis.kineto.unknown import MOST_UNCLASSIFIED, not_understood
from disttrain_cli.analysis.kineto.verdict import judge
from disttrain_cli.analysis.result.devices import CollectiveKind, LaunchRow, QueueRow
from disttrain_cli.analysis.result.rows import CollectiveRow, KernelRow, RankSummary
from disttrain_cli.analysis.result.summary import Analysis, JobSummary, moment
from disttrain_cli.analysis.result.verdicts import Stragglers
from disttrain_cli.errors import DataError

#: Figures of a rank that require compute kernels to be known.
_OF_COMPUTE = (
    "compute_us",
    "non_compute_us",
    "overlap_pct",
    "exposed_communication_us",
    "exposed_wait_us",
)
#: A larger share of unclassified kernel time than this is reported.
TOLD_UNCLASSIFIED = 0.05
#: Factor of the evidence if only the first of several steps, which may be warm-up, is judged.
WARM_UP = 0.5


def analyze_kineto_database(database: KinetoDatabase) -> Analysis:
    """Analyse the Kineto/Chrome JSON of one job.

    Times are of the measured profiler steps, or of the whole recording if none are marked. Lost
    seconds are per judged step (`steps`) and rank; with compute, which is the ideal, they sum to
    the step (`losses` describes each key).

    Raises:
        DataError: nothing was recorded that takes time.
    """
    totals, iterations = database.answer("totals")[0], database.answer("iterations")[0]
    if not totals["span_s"]:
        raise DataError(
            "The trace contains no event with a duration on a device or in an operator",
            "; ".join(database.warnings[:5]),
            "Record with torch.profiler.profile(activities=[ProfilerActivity.CPU,"
            " ProfilerActivity.CUDA])",
        )
    unended = database.sql(
        "SELECT max(step) AS step FROM steps WHERE measured AND until_ns > end_ns"
        " AND start_ns >= ALL (SELECT start_ns FROM steps s WHERE s.rank = steps.rank)"
    )[0]["step"]
    judged = judged_steps(database.sql("SELECT * FROM step_times ORDER BY rank, step"), unended)
    losses = Losses(
        judged=judged,
        blame=database.answer("blame"),
        present=_present(database),
        crowded=database.sql("SELECT max(holds) AS most FROM files WHERE kept")[0]["most"] > 1,
        late=late_ranks(database, judged.played),
        unclassified=totals["unclassified"] or 0.0,
        repaired=totals["repaired"] or 0.0,
    )
    understood = database.sql("SELECT how FROM understood")[0]["how"] != "nothing"
    verdict = judge(losses, database) if understood else not_understood(losses, database)
    if not understood and losses.stragglers:
        verdict = mended(losses, database, verdict.evidence, understood)
    if verdict.cause != "unknown":
        raw = verdict.confidence * known(
            unexplained=losses.lost_s()["unexplained"] / losses.step_s,
            steps=len(judged.steps),
            present=losses.present,
            unclassified=losses.unclassified,
            repaired=losses.repaired,
        )
        if iterations["recorded"] > 1 == iterations["recorded"] - iterations["partial"]:
            raw *= WARM_UP
        # the calibration has hardly any job with missing ranks and a verdict
        confidence = min(calibrated(raw, "kineto"), losses.present)
        verdict = replace(verdict, confidence=round(confidence, 3))
    if verdict.cause != "unknown" or verdict.lost_s:
        verdict = replace(verdict, lost_fraction=verdict.lost_s / losses.step_s)
    compute_s = losses.ideal_s()
    return Analysis(
        format="kineto",
        job=_job(database, losses, totals, iterations, understood),
        units=[],
        stragglers=(
            Stragglers(
                slowdown=losses.step_s / compute_s if compute_s else None,
                ideal_s=compute_s,
                lost_s=losses.lost_s(),
                not_recorded=_not_recorded(database),
            )
            if understood
            else Stragglers(slowdown=None, ideal_s=None, lost_s=None)
        ),
        verdict=verdict,
        ranks=_ranks(database, totals["unclassified"] or 0.0),
        what_if=None,
        predicted_vs_measured=[],
        operations=[],
        drift=[],
        slowest=[],
        collectives=[CollectiveRow(**row) for row in database.answer("collectives")],
        kernels=[KernelRow(**row) for row in database.answer("top")],
        collective_kinds=[CollectiveKind(**row) for row in database.answer("collective_kinds")],
        operators=operators(database),
        launches=[LaunchRow(**row) for row in database.answer("launch_rows")],
        queues=[QueueRow(**row) for row in database.answer("queue_rows")],
        critical_path=critical_path(database),
        warnings=[*database.warnings, *_limits(database, judged, totals, iterations, understood)],
    )


def _ranks(database: KinetoDatabase, unclassified: float) -> list[RankSummary]:
    """Return the times of the ranks, without those of compute if most kernels are unclassified."""
    unknown = dict.fromkeys(_OF_COMPUTE) if unclassified > MOST_UNCLASSIFIED else {}
    return [
        RankSummary(**row | unknown, host=None, unit=None, stage=None, replica=None)
        for row in database.answer("ranks")
    ]


def _not_recorded(database: KinetoDatabase) -> list[str]:
    """Return the causes that these traces contain nothing about.

    Data is one of them if no annotation or operator names a loader.
    """
    loads = database.sql("SELECT count(*) AS n FROM busy WHERE what = 'data'")[0]["n"]
    return ["unit", "intra_microbatch", "inter_microbatch", "stage", *([] if loads else ["data"])]


def _present(database: KinetoDatabase) -> float:
    """Return the share of the job's ranks that recorded something; 1 for an unknown job size."""
    row = database.sql(
        "SELECT sum(holds) FILTER (rank IN (SELECT rank FROM times)) AS seen,"
        " max(world_size) AS size FROM files WHERE kept"
    )[0]
    return row["seen"] / max(row["seen"], row["size"] or 0)


def _job(
    database: KinetoDatabase,
    losses: Losses,
    totals: dict[str, Any],
    iterations: dict[str, Any],
    understood: bool,
) -> JobSummary:
    """Summarise the job, without times of the devices if none of their work is `understood`."""
    step_s = losses.step_s or 1.0

    def share(*columns: str) -> float:
        return sum(losses.mean(column) for column in columns) / step_s

    return JobSummary(
        run=database.run,
        name=database.run,
        recorded_at=moment(
            database.sql("SELECT min(first_ns) AS ns FROM files WHERE kept")[0]["ns"]
        ),
        rehearsed=None,
        layout=None,
        ranks=database.sql("SELECT count(*) AS n FROM times")[0]["n"],
        steps=iterations["recorded"] or 1,
        steps_measured=iterations["measured"] or 1,
        warmup_steps_excluded=max(
            0, iterations["recorded"] - iterations["measured"] - iterations["partial"]
        ),
        iteration_s=iterations["mean_s"],
        iteration_p50_s=iterations["p50_s"],
        iteration_p95_s=iterations["p95_s"],
        sequences_per_s=None,
        mfu=None,
        bubble_fraction=1 - share("compute_ns") if understood else None,
        exposed_communication_fraction=(
            share("exposed_ns") - share("exposed_wait_ns") if understood else None
        ),
        time_shares=(
            {
                "compute": share("compute_ns"),
                "waiting": share("exposed_wait_ns", "idle_host_wait_ns"),
                "transfer": share("exposed_ns") - share("exposed_wait_ns"),
                "copies": share("memory_ns"),
                "data_wait": share("idle_data_ns"),
                "gap": share("idle_cpu_ns", "idle_late_ns"),
                "idle": share("idle_queued_ns", "idle_unrecorded_ns"),
            }
            if understood
            else {}
        ),
        unclassified_fraction=totals["unclassified"] if understood else None,
    )


def _limits(
    database: KinetoDatabase,
    judged: JudgedSteps,
    totals: dict[str, Any],
    iterations: dict[str, Any],
    understood: bool,
) -> list[str]:
    """Return the limits of the figures, in addition to warnings from reading."""
    said, common = [], iterations["recorded"] - iterations["partial"]
    if not iterations["recorded"]:
        said.append(
            "no step is marked (by prof.step(), or a name that matches a step line of"
            " kernel_patterns.txt): all that was recorded counts as one step"
        )
    elif iterations["recorded"] == 1:
        said.append("only one step was recorded, so its warm-up could not be left out")
    elif not common:
        said.append(
            f"none of {iterations['recorded']} steps is marked on every rank: the whole recording"
            " counts as one step"
        )
    elif common == 1:
        said.append(
            f"only step {judged.steps[0]} of {iterations['recorded']} is marked on every rank: it"
            " is analysed, although as the first it would count as warm-up and be left out, which"
            " lowers the confidence"
        )
    else:
        marked = " that every rank marks" if iterations["partial"] else ""
        said.append(f"the first of {common} steps{marked} counts as warm-up and is left out")
    silent_ranks = database.sql(
        "SELECT rank FROM files WHERE kept AND rank NOT IN (SELECT rank FROM times) ORDER BY 1"
    )
    if silent_ranks:
        said.append(
            f"{name_ranks([row['rank'] for row in silent_ranks])} recorded nothing measurable"
        )
    if judged.incomplete is not None:
        said.append(
            f"step {judged.incomplete}, the last one, was not recorded to its end (a rank lacks"
            " most of its kernels, or no further mark ends it): it is left out of the verdict"
        )
    if iterations["partial"] and common > 1:
        said.append(
            f"{counted(iterations['partial'], 'step')}"
            f" {agree(iterations['partial'], 'is', 'are')} not marked on every rank and left out"
        )
    if iterations["recorded"] and iterations["unmarked"]:
        said.append(
            f"{counted(iterations['unmarked'], 'rank')}"
            f" {agree(iterations['unmarked'], 'marks', 'mark')} no step: all that was recorded"
            " there is measured"
        )
    if lent := iterations["lent_ranks"]:
        said.append(
            f"{counted(lent, 'rank')} {agree(lent, 'marks', 'mark')} no step: the marks of the"
            " first rank that does are used"
        )
    if totals["unmatched"]:
        count = totals["unmatched"]
        said.append(
            f"{counted(count, 'collective')} {agree(count, 'does', 'do')} not occur equally often"
            f" on the ranks that join {agree(count, 'it', 'them')}, so waiting there is unknown"
        )
    if totals["lone_messages"] and database.sql("SELECT count(*) AS n FROM times")[0]["n"] > 1:
        count = totals["lone_messages"]
        said.append(
            f"{count} {agree(count, 'send or receive', 'sends and receives')},"
            f" {100 * totals['lone_messages_share']:.0f} % of the time of communication,"
            f" {agree(count, 'is', 'are')} not matched (the arguments name no peer, or its trace"
            " lacks the other end), so waiting there is unknown"
        )
    if totals["matched"] > totals["waited"]:
        strays = totals["matched"] - totals["waited"]
        said.append(
            f"{counted(strays, 'collective')} {agree(strays, 'names', 'name')} no group and"
            f" {agree(strays, 'ends', 'end')} at different times on different ranks, so it is not"
            f" known which ranks joined {agree(strays, 'it', 'them')}"
        )
    repaired = database.sql(
        "SELECT rank, ahead_ns, spread_ns FROM clocks WHERE repaired ORDER BY abs(ahead_ns) DESC"
    )
    if repaired:
        worst = repaired[0]
        said.append(
            f"the {agree(len(repaired), 'clock', 'clocks')} of {counted(len(repaired), 'rank')}"
            f" {agree(len(repaired), 'is', 'are')} corrected by the ends of collectives, most for"
            f" rank {worst['rank']}: {worst['ahead_ns'] / 1e6:+.3f} ms ±"
            f" {worst['spread_ns'] / 1e6:.3f} ms"
        )
    if understood and (totals["unclassified"] or 0.0) > TOLD_UNCLASSIFIED:
        said.append(
            f"{100 * totals['unclassified']:.0f} % of the kernels' time is classified neither as"
            " compute nor as communication and counts as compute; add such kernels to"
            " kernel_patterns.txt"
        )
    return said
