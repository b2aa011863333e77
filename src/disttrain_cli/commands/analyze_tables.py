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
    for show in (_verdict, _evidence, _causes, _job, _units, _inside, _memory, _experts, _lost):
        show(console, analysis)
    _remedies(console, analysis)
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
    console.grid(
        "Saved by fixing each cause, one after another (below 5 %, a cause is not a verdict)",
        analysis.causes,
        [
            ("cause", lambda row: row.cause),
            ("what", lambda row: row.sentence + (" (a single event)" if row.one_event else "")),
            ("saved s", lambda row: figure(row.gain_s)),
            ("share of step", lambda row: percent(row.gain_pct / 100)),
            ("alone s", lambda row: figure(row.alone_s)),
            ("confidence", lambda row: percent(row.confidence)),
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
    console.grid(
        "Units; seconds per step and rank",
        analysis.units,
        [
            ("unit", lambda unit: unit.name),
            ("devices", lambda unit: unit.gpus),
            ("DP", lambda unit: unit.dp),
            ("PP", lambda unit: unit.pp),
            ("MFU", lambda unit: percent(unit.mfu)),
            ("busy", lambda unit: percent(unit.busy_fraction)),
            ("compute s", lambda unit: f"{unit.compute_s:.3f}"),
            ("data wait s", lambda unit: f"{unit.data_wait_s:.3f}"),
            ("warm-up and drain s", lambda unit: f"{unit.warmup_drain_s:.3f}"),
            ("other unit s", lambda unit: f"{unit.other_unit_s:.3f}"),
            ("other stage s", lambda unit: f"{unit.other_stage_s:.3f}"),
            ("transfer s", lambda unit: f"{unit.transfer_s:.3f}"),
            ("update s", lambda unit: f"{unit.update_s:.3f}"),
            ("gap s", lambda unit: f"{unit.gap_s:.3f}"),
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
    console.grid(
        "Rows by expert, all ranks and per step; layers with the fullest expert first",
        shown,
        [
            ("module", lambda row: row.module),
            ("layer", lambda row: row.layer),
            ("experts", lambda row: len(row.rows)),
            ("mean rows", lambda row: figure(sum(row.rows) / len(row.rows))),
            ("fullest ÷ mean", lambda row: f"{row.load:.2f}"),
            ("expert", lambda row: row.fullest),
            ("in use", lambda row: f"{row.in_use:.1f}"),
            ("", lambda row: "collapsed" if row.collapsed else ""),
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
    console.grid(
        "Saved by one change, all else as recorded (savings do not add up; next commands: --json)",
        [row for row in analysis.remedies if row.worth],
        [
            ("change", lambda row: row.change),
            ("basis", lambda row: row.basis),
            ("devices", lambda row: f"{row.gpus:+d}" if row.gpus else "same"),
            ("step s", lambda row: figure(row.step_s)),
            ("saved s", lambda row: figure(row.gain_s)),
            ("share of step", lambda row: percent(row.gain_pct / 100)),
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
    console.grid(
        "Predicted against measured (the report has more)",
        [row for row in analysis.predicted_vs_measured if row.unit is None],
        [
            (
                "what",
                lambda row: analysis.not_computing if row.what == "bubble_fraction" else row.what,
            ),
            ("unit", lambda row: row.unit or "job"),
            ("basis", lambda row: row.basis),
            ("predicted", lambda row: figure(row.predicted)),
            ("measured", lambda row: figure(row.measured)),
            ("in", lambda row: row.measure),
            ("error", lambda row: change(row.error_pct)),
        ],
    )


def _operations(console: Console, analysis: Analysis) -> None:
    console.grid(
        "By operation in ms, sorted by the error per step",
        analysis.operations[1 : 1 + MOST_OPERATIONS],
        [
            ("location", lambda row: row.place),
            ("operation", lambda row: row.operation),
            ("plan", lambda row: figure(row.planned)),
            ("profile, same work", lambda row: figure(row.predicted)),
            ("measured", lambda row: figure(row.measured)),
            ("error", lambda row: change(row.error_pct)),
            ("per step", lambda row: f"{row.per_step:.3g}"),
            ("effect ms", lambda row: f"{row.effect_ms:+.3f}"),
            ("share of step", lambda row: percent(row.share_of_step)),
        ],
    )


def _kineto(console: Console, analysis: Analysis) -> None:
    console.grid(
        "Ranks; ms over the measured time, as defined by HolisticTraceAnalysis",
        analysis.ranks[:MOST_RANKS],
        [
            ("rank", lambda rank: rank.rank),
            ("span", lambda rank: ms(rank.span_us)),
            ("idle", lambda rank: ms(rank.idle_us)),
            ("compute", lambda rank: ms(rank.compute_us)),
            ("non-compute", lambda rank: ms(rank.non_compute_us)),
            (
                "overlap",
                lambda rank: "–" if rank.overlap_pct is None else f"{rank.overlap_pct:.2f} %",
            ),
            ("exposed communication", lambda rank: ms(rank.exposed_communication_us)),
            ("exposed waiting", lambda rank: ms(rank.exposed_wait_us)),
            ("waits in collectives", lambda rank: ms(rank.collective_wait_us)),
            ("joined last", lambda rank: figure(rank.last_to_arrive)),
        ],
    )
    if len(analysis.ranks) > MOST_RANKS:
        console.say(
            f"and {counted(len(analysis.ranks) - MOST_RANKS, 'more rank')} (--json has all)"
        )
    console.grid(
        "Collectives with the longest waiting, ms",
        analysis.collectives[:MOST_COLLECTIVES],
        [
            ("collective", lambda row: f"{short_name(row.name)} {row.index}"),
            ("group", lambda row: short_name(row.group)),
            ("step", lambda row: row.step),
            ("ranks", lambda row: row.ranks),
            ("last", lambda row: row.last_rank),
            ("longest wait", lambda row: ms(row.longest_wait_us)),
            ("mean wait", lambda row: ms(row.mean_wait_us)),
            ("transfer", lambda row: ms(row.transfer_us)),
        ],
    )
    console.grid(
        "Kernels with the largest total time, ms",
        analysis.kernels[:MOST_KERNELS],
        [
            ("kernel", lambda row: short_name(row.name)),
            ("kind", lambda row: row.kind),
            ("count", lambda row: row.count),
            ("total", lambda row: ms(row.total_us)),
            ("longest", lambda row: ms(row.longest_us)),
            ("share", lambda row: percent(row.share)),
        ],
    )


def _seconds(value: float) -> str:
    return f"{value:.3f} s" if value >= SHOWN_IN_S else seconds(value)


def change(pct: float | None) -> str:
    """Format a change in percent, or as a factor where it is far more."""
    if pct is None:
        return "–"
    return f"{pct:+.1f} %" if abs(pct) < MOST_CHANGE_PCT else f"{figure(1 + pct / 100)} ×"
