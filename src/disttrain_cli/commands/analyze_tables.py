"""Tables of `disttrain analyze`: those of all formats, and those of each format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain_cli.analysis.figures import counted, seconds
from disttrain_cli.analysis.result.rows import GROWN
from disttrain_cli.commands.common import percent
from disttrain_cli.commands.device_tables import figure, ms, short_name, show_devices
from disttrain_cli.console import Console

if TYPE_CHECKING:
    from disttrain_cli.analysis.result.summary import Analysis

MOST_CHANGE_PCT = 1000
SHOWN_IN_S = 0.1  # shorter steps are shown in ms or µs
LEAST_SHARE = 0.05  # of an operation's time; smaller shares are not listed
MOST_OPERATIONS = 12  # rows shown; --json has all of them
MOST_RANKS, MOST_COLLECTIVES, MOST_KERNELS = 32, 8, 10


def render(console: Console, analysis: Analysis) -> None:
    """Print verdict, evidence and job, then the format's tables, then the figures' limits."""
    for show in (
        _verdict,
        _evidence,
        _causes,
        _job,
        _units,
        _inside,
        _memory,
        _experts,
        _lost,
        _remedies,
    ):
        show(console, analysis)
    if analysis.format == "kineto":
        _kineto(console, analysis)
        show_devices(console, analysis)
    for show in (_slowest, _warnings, _predictions, _operations):
        show(console, analysis)


def _verdict(console: Console, analysis: Analysis) -> None:
    from msgspec.structs import asdict

    verdict = analysis.verdict
    if analysis.job.rehearsed is not None:
        console.say(analysis.job.rehearsed)
    console.say(verdict.headline)
    where = ", ".join(
        f"{'CP rank' if name == 'cp_rank' else name} {value}"
        for name, value in asdict(verdict.place).items()
        if value is not None
    )
    console.say(f"Where       {where}" if where else "Where       the whole job")
    console.say(f"Confidence  {percent(verdict.confidence)}")
    console.say(f"Advice      {verdict.advice}")
    if analysis.learning is not None:
        console.say(
            f"Losses      {analysis.learning.headline}. {analysis.learning.advice}".rstrip()
        )


def _evidence(console: Console, analysis: Analysis) -> None:
    console.table(
        "Evidence",
        ["what", "value", "unit"],
        [
            [row.what, figure(value), unit]
            for row in analysis.verdict.evidence
            for value, unit in [row.shown]
        ],
    )


def _causes(console: Console, analysis: Analysis) -> None:
    console.table(
        "Saved by fixing each cause, one after another (below 5 %, a cause is not a verdict)",
        ["cause", "what", "saved s", "share of step", "alone s", "confidence"],
        [
            [
                row.cause,
                row.sentence + (" (a single event)" if row.one_event else ""),
                figure(row.gain_s),
                percent(row.gain_pct / 100),
                figure(row.alone_s),
                percent(row.confidence),
            ]
            for row in analysis.causes
        ],
    )


def _job(console: Console, analysis: Analysis) -> None:
    job = analysis.job
    console.say(f"\nJob         {job.layout or job.run}")
    took = (
        "no step is marked" if job.iteration_s is None else f"{_seconds(job.iteration_s)} per step"
    )
    console.say(
        f"            {job.steps_measured} of {counted(job.steps, 'step')} measured: {took}, "
        f"MFU {percent(job.mfu)}, {analysis.not_computing} {percent(job.bubble_fraction)}, "
        f"exposed communication {percent(job.exposed_communication_fraction)}"
    )


def _units(console: Console, analysis: Analysis) -> None:
    console.table(
        "Units; seconds per step and rank",
        [
            "unit",
            "devices",
            "DP",
            "PP",
            "MFU",
            "busy",
            "compute s",
            "data wait s",
            "warm-up and drain s",
            "other unit s",
            "other stage s",
            "transfer s",
            "update s",
            "gap s",
        ],
        [
            [
                unit.name,
                unit.gpus,
                unit.dp,
                unit.pp,
                percent(unit.mfu),
                percent(unit.busy_fraction),
                *(
                    f"{value:.3f}"
                    for value in (
                        unit.compute_s,
                        unit.data_wait_s,
                        unit.warmup_drain_s,
                        unit.other_unit_s,
                        unit.other_stage_s,
                        unit.transfer_s,
                        unit.update_s,
                        unit.gap_s,
                    )
                ),
            ]
            for unit in analysis.units
        ],
    )


def _inside(console: Console, analysis: Analysis) -> None:
    console.table(
        "Inside the operations that torch profiled (the report has more)",
        ["location", "operation", "profiled ms", "usual ms", "breakdown"],
        [
            [
                f"{row.unit} stage {row.stage}",
                " ".join(filter(None, (row.operation, row.module))),
                figure(row.profiled_ms),
                figure(row.usual_ms),
                ", ".join(
                    f"{kind} {percent(share)}"
                    for kind, share in row.shares.items()
                    if share >= LEAST_SHARE
                ),
            ]
            for row in analysis.inside[:MOST_OPERATIONS]
        ],
    )


def _experts(console: Console, analysis: Analysis) -> None:
    shown = sorted(analysis.experts, key=lambda row: -row.load)[:MOST_OPERATIONS]
    console.table(
        "Rows by expert, all ranks and per step; layers with the fullest expert first",
        ["module", "layer", "experts", "mean rows", "fullest ÷ mean", "expert", "in use", ""],
        [
            [
                row.module,
                row.layer,
                len(row.rows),
                figure(sum(row.rows) / len(row.rows)),
                f"{row.load:.2f}",
                row.fullest,
                f"{row.in_use:.1f}",
                "collapsed" if row.collapsed else "",
            ]
            for row in shown
        ],
    )


def _memory(console: Console, analysis: Analysis) -> None:
    # measured on CUDA devices alone
    outside = any(row.outside_gib is not None for row in analysis.memory)
    console.table(
        "Peak memory per stage in GiB (rank with most)",
        ["unit", "stage", "peak", "plan, worst case", "limit"]
        + ["outside PyTorch", "plan's reserve"] * outside,
        [
            [
                row.unit,
                row.stage,
                f"{row.measured_gib:.3f}",
                figure(row.predicted_gib),
                figure(row.limit_gib),
                *[figure(row.outside_gib), figure(row.reserve_gib)] * outside,
            ]
            for row in analysis.memory
        ],
    )
    if any(row.of_process for row in analysis.memory):
        console.say(f"            {GROWN}")


def _lost(console: Console, analysis: Analysis) -> None:
    lost = analysis.stragglers
    if lost.lost_s is not None:
        ideal, how = "compute alone", ""
        if analysis.format != "kineto":
            ideal, how = "the ideal", ", replayed from the ideal with one cause after another"
        against = (
            "there is no ideal: nothing was computed"
            if not lost.slowdown or lost.ideal_s is None
            else f"{lost.slowdown:.3f} × {ideal} of {_seconds(lost.ideal_s)}"
        )
        unrecorded = "; –: not in these traces" if lost.not_recorded else ""
        console.table(
            f"Lost per step{how} ({against}{unrecorded})",
            ["cause", "s"],
            [
                [cause, "–" if cause in lost.not_recorded else f"{seconds:.4f}"]
                for cause, seconds in lost.lost_s.items()
            ],
        )


def _remedies(console: Console, analysis: Analysis) -> None:
    console.table(
        "Saved by one change, all else as recorded (savings do not add up; next commands: --json)",
        ["change", "basis", "devices", "step s", "saved s", "share of step"],
        [
            [
                row.change,
                row.basis,
                f"{row.gpus:+d}" if row.gpus else "same",
                figure(row.step_s),
                figure(row.gain_s),
                percent(row.gain_pct / 100),
            ]
            for row in analysis.remedies
            if row.worth
        ],
    )


def _slowest(console: Console, analysis: Analysis) -> None:
    console.table(
        "Slowest stage, replica and slot, relative to the mean",
        ["what", "ms", "÷ mean", "÷ mean, same work"],
        [
            [
                f"{row.kind} {row.number}" + (f" of {row.unit}" if row.unit else ""),
                f"{row.mean_ms:.1f}",
                f"{row.ratio:.2f} ×",
                "–" if row.normalised_ratio is None else f"{row.normalised_ratio:.2f} ×",
            ]
            for row in analysis.slowest
        ],
    )


def _warnings(console: Console, analysis: Analysis) -> None:
    if analysis.warnings:
        console.say("\nWarnings")
    for warning in analysis.warnings:
        console.say(f"- {warning}")


def _predictions(console: Console, analysis: Analysis) -> None:
    console.table(
        "Predicted against measured (the report has more)",
        ["what", "unit", "basis", "predicted", "measured", "in", "error"],
        [
            [
                analysis.not_computing if row.what == "bubble_fraction" else row.what,
                row.unit or "job",
                row.basis,
                figure(row.predicted),
                figure(row.measured),
                row.measure,
                change(row.error_pct),
            ]
            for row in analysis.predicted_vs_measured
            if row.unit is None
        ],
    )


def _operations(console: Console, analysis: Analysis) -> None:
    console.table(
        "By operation in ms, sorted by the error per step",
        [
            "location",
            "operation",
            "plan",
            "profile, same work",
            "measured",
            "error",
            "per step",
            "effect ms",
            "share of step",
        ],
        [
            [
                row.place,
                row.operation,
                figure(row.planned),
                figure(row.predicted),
                figure(row.measured),
                change(row.error_pct),
                f"{row.per_step:.3g}",
                f"{row.effect_ms:+.3f}",
                percent(row.share_of_step),
            ]
            for row in analysis.operations[1 : 1 + MOST_OPERATIONS]
        ],
    )


def _kineto(console: Console, analysis: Analysis) -> None:
    console.table(
        "Ranks; ms over the measured time, as defined by HolisticTraceAnalysis",
        [
            "rank",
            "span",
            "idle",
            "compute",
            "non-compute",
            "overlap",
            "exposed communication",
            "exposed waiting",
            "waits in collectives",
            "joined last",
        ],
        [
            [
                rank.rank,
                *(
                    ms(value)
                    for value in (rank.span_us, rank.idle_us, rank.compute_us, rank.non_compute_us)
                ),
                "–" if rank.overlap_pct is None else f"{rank.overlap_pct:.2f} %",
                ms(rank.exposed_communication_us),
                ms(rank.exposed_wait_us),
                ms(rank.collective_wait_us),
                figure(rank.last_to_arrive),
            ]
            for rank in analysis.ranks[:MOST_RANKS]
        ],
    )
    if len(analysis.ranks) > MOST_RANKS:
        console.say(
            f"and {counted(len(analysis.ranks) - MOST_RANKS, 'more rank')} (--json has all)"
        )
    console.table(
        "Collectives with the longest waiting, ms",
        ["collective", "group", "step", "ranks", "last", "longest wait", "mean wait", "transfer"],
        [
            [
                f"{short_name(row.name)} {row.index}",
                short_name(row.group),
                row.step,
                row.ranks,
                row.last_rank,
                ms(row.longest_wait_us),
                ms(row.mean_wait_us),
                ms(row.transfer_us),
            ]
            for row in analysis.collectives[:MOST_COLLECTIVES]
        ],
    )
    console.table(
        "Kernels with the largest total time, ms",
        ["kernel", "kind", "count", "total", "longest", "share"],
        [
            [
                short_name(row.name),
                row.kind,
                row.count,
                ms(row.total_us),
                ms(row.longest_us),
                percent(row.share),
            ]
            for row in analysis.kernels[:MOST_KERNELS]
        ],
    )


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= SHOWN_IN_S else seconds(value)


def change(pct: float | None) -> str:
    """Format a change in percent, or as a factor where it is far more."""
    if pct is None:
        return "–"
    return f"{pct:+.1f} %" if abs(pct) < MOST_CHANGE_PCT else f"{figure(1 + pct / 100)} ×"
