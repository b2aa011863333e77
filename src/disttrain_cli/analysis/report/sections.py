"""Sections of the page with drawings or text; empty text if an analysis has nothing for them."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from html import escape
from typing import Any

from msgspec.structs import asdict

from disttrain_cli import __version__
from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.analysis.report.charts import line_chart, share_bar, stacked_rows, waterfall
from disttrain_cli.analysis.report.heat import heat_maps
from disttrain_cli.analysis.report.pictures import Pictures
from disttrain_cli.analysis.report.words import (
    CAUSES,
    figure,
    folded,
    percent,
    place,
    prose,
    seconds,
    section,
    table,
)
from disttrain_cli.analysis.result.summary import Analysis, JobSummary

#: Most ranks with a bar.
MOST_BARS = 64
MOST_EVIDENCE = 6  # rows that are not folded
MOST_CURVES = 5
LOSSES = ("loss_text", "loss_image")
_SHARES = (
    ("compute", "compute", "Compute"),
    ("load", "data_wait", "Waiting for data"),
    ("unit", "other_unit", "Waiting for another unit"),
    ("stage", "other_stage", "Waiting for another stage"),
    ("warmup", "warmup", "Pipeline warm-up"),
    ("drain", "drain", "Pipeline drain"),
    ("stage", "waiting", "Waiting in collectives"),
    ("send", "transfer", "Sending tensors"),
    ("memory", "copies", "Copies"),
    ("step", "update", "Reduction and optimizer"),
    ("gap", "gap", "Host-side delays"),
    ("communication", "communication", "Communication, waiting included"),
    ("idle", "idle", "Idle"),
)
_KINDS = {
    "forward": "forward",
    "backward": "backward",
    "weights": "weight gradients",
    "receive": "receive (waiting included)",
    "load": "load",
    "send": "send",
    "reduce": "reduce",
    "step": "step",
    "compute": "compute",
    "communication": "communication",
    "memory": "memory",
    "host": "host (operators and calls)",
    "other": "other",
}


def dates(job: JobSummary) -> str:
    """Format the time of the recording, the program's version, and the time of the report."""
    recorded = [f"recorded {job.recorded_at}"] if job.recorded_at is not None else []
    return " · ".join(
        [*recorded, f"disttrain {__version__}", f"report of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"]
    )


def rehearsed(job: JobSummary) -> str:
    if job.rehearsed is not None:
        return f'<section class="rehearsed">{escape(job.rehearsed)}</section>'
    return ""


def verdict(analysis: Analysis) -> str:
    """Show the cause that slows the job, the confidence, the advice, and the evidence."""
    judged = analysis.verdict
    kind = "good" if judged.cause == "none" else "bad" if judged.confidence >= 0.5 else "unsure"
    where = place(**asdict(judged.place))
    rows = [
        [
            escape(row.what),
            seconds(row.value) if row.unit == "s" else f"{figure(value, 4)} {escape(unit)}",
        ]
        for row in judged.evidence
        for value, unit in [row.shown]
    ]
    evidence = table(["Evidence", "Measured"], rows[:MOST_EVIDENCE], narrow=True) if rows else ""
    if len(rows) > MOST_EVIDENCE:
        evidence += folded(
            f"{len(rows) - MOST_EVIDENCE} more",
            table(["Evidence", "Measured"], rows[MOST_EVIDENCE:], narrow=True),
        )
    return (
        f'<section id="verdict" class="{kind}"><p'
        f' class="kicker">Verdict{" · " + where if where else ""} · confidence'
        f" {100 * judged.confidence:.0f} %</p><h1>{prose(judged.headline)}</h1><p"
        f' class="advice">{prose(judged.advice)}</p><p><code'
        f' class="command">{escape(judged.next_command)}</code></p>{evidence}</section>'
    )


def tiles(analysis: Analysis) -> str:
    """Show the job's figures, large; those that the traces contain."""
    job = analysis.job
    steps = f" · {counted(job.steps_measured, 'step')} measured" if job.steps_measured else ""
    values = [
        (None if job.iteration_s is None else seconds(job.iteration_s), "mean step"),
        (None if job.mfu is None else percent(job.mfu), "MFU"),
        (
            None if job.bubble_fraction is None else percent(job.bubble_fraction),
            analysis.not_computing,
        ),
        (
            (
                None
                if job.exposed_communication_fraction is None
                else percent(job.exposed_communication_fraction)
            ),
            "exposed communication",
        ),
        (
            None if job.sequences_per_s is None else figure(job.sequences_per_s),
            "sequences per second",
        ),
        (f"{job.ranks}", f"{agree(job.ranks, 'rank', 'ranks')}{steps}"),
    ]
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="tile"><b>{value}</b><span>{name}</span></div>'
            for value, name in values
            if value is not None
        )
        + "</div>"
    )


def timeline(timelines: list[dict[str, Any]]) -> str:
    """Return the frame of the timeline, which the script fills."""
    if not timelines:
        return ""
    buttons = "".join(
        f'<button type="button" data-step="{index}"'
        f' aria-pressed="{str(index == 0).lower()}">{escape(item["title"])}'
        f" <small>{escape(item['why'])}</small></button>"
        for index, item in enumerate(timelines)
    )
    used = {kind for item in timelines for _, kind in item["names"]}
    legend = "".join(
        f'<span><i class="k-{kind}"></i>{escape(name)}</span>'
        for kind, name in _KINDS.items()
        if kind in used
    )
    slots = (
        "Numbers are slots. "
        if any(slot >= 0 for item in timelines for slot in item["bars"]["slot"])
        else ""
    )
    return section(
        "Timeline by unit and rank",
        f'{slots}<span class="how">Drag to move; <kbd>Shift</kbd> and drag, double-click, or the'
        " wheel with <kbd>Ctrl</kbd> to zoom. With the picture focused: <kbd>+</kbd> <kbd>−</kbd>"
        " <kbd>0</kbd> zoom, <kbd>←</kbd> <kbd>→</kbd> move, <kbd>↑</kbd> <kbd>↓</kbd> choose a"
        " rank, <kbd>N</kbd> <kbd>P</kbd> its next and previous operation. </span><span"
        ' id="timeline-note"></span>',
        '<div class="controls" role="group" aria-label="Timeline"><span'
        f' class="steps">{buttons}</span><span class="spacer"></span><button type="button"'
        ' id="zoom-out" aria-label="Zoom out">−</button><button type="button" id="zoom-in"'
        ' aria-label="Zoom in">+</button><button type="button" id="zoom-all">Whole'
        ' step</button></div><div id="timeline-box"><div id="corner">busy ranks</div><div'
        ' id="strip-box"><canvas id="strip" aria-hidden="true"></canvas></div><div id="lanes"'
        ' aria-hidden="true"></div><div id="canvas-box"><canvas id="timeline" tabindex="0"'
        ' role="application" aria-label="Timeline: operations of every rank over time. The tables'
        ' below contain the figures." aria-describedby="said"></canvas><div id="tip"'
        ' hidden></div></div></div><p id="said" class="unseen" aria-live="polite"></p><div'
        f' class="legend">{legend}</div><noscript><p class="note">The timeline needs this page’s'
        " script; everything else does not.</p></noscript>",
    )


def time_shares(analysis: Analysis) -> str:
    """Show the ranks' activities over a step as one bar."""
    shares = analysis.job.time_shares
    if not shares:
        return ""
    names = {"transfer": "Exposed communication"} if analysis.format == "kineto" else {}
    parts = [
        (kind, names.get(key, name), shares[key])
        for kind, key, name in _SHARES
        if key in shares and not (key == "data_wait" and "data" in analysis.stragglers.not_recorded)
    ]
    known = {key for _, key, _ in _SHARES}
    parts += [
        ("other", key.replace("_", " "), share) for key, share in shares.items() if key not in known
    ]
    return section(
        "Where the ranks’ time goes",
        "Shares of ranks × window of a step, over the measured steps."
        + (" Everything but compute is bubble." if analysis.pipelined else ""),
        share_bar(parts),
        "shares",
    )


def losses(analysis: Analysis) -> str:
    """Show the time from the ideal step to the measured one, cause by cause."""
    lost = analysis.stragglers
    if lost.lost_s is None or lost.slowdown is None or lost.ideal_s is None:
        return ""
    kineto, marked = analysis.format == "kineto", analysis.job.iteration_s is not None
    parts = [("total", "compute alone" if kineto else "ideal step", lost.ideal_s)]
    parts += [
        ("lost" if value > 0 else "gain", CAUSES.get(cause, cause), value)
        for cause, value in lost.lost_s.items()
        if cause not in lost.not_recorded
    ]
    parts += [
        (
            "total",
            "recorded step" if marked else "first kernel to last",
            lost.ideal_s * lost.slowdown,
        )
    ]
    ideal = (
        "compute alone; mean over ranks, per step"
        + ("" if marked else ", from the first kernel to the last")
        if kineto
        else (
            "the ideal step (work balanced within each unit, GPUs perfectly shared, no delays),"
            " replayed with one cause after another; mean over"
            f" {counted(len(lost.by_step), 'replayed step')}"
        )
    )
    names = ", ".join(CAUSES.get(cause, cause) for cause in lost.not_recorded)
    unrecorded = f" Not in these traces: {names}." if names else ""
    return section(
        "What a step loses",
        f"Slowdown {lost.slowdown:.3f} against {ideal}.{unrecorded}",
        waterfall(
            parts,
            "Lost seconds by cause, from the ideal step to the recorded one: "
            + ", ".join(f"{name} {seconds(value)}" for _, name, value in parts),
        ),
        "losses",
    )


def losses_by_step(analysis: Analysis) -> str:
    """Show the causes that cost most, step by step."""
    steps = analysis.stragglers.by_step
    if len(steps) < 2:
        return ""
    means = analysis.stragglers.lost_s or {}
    most = sorted(
        (cause for cause in means if cause not in analysis.stragglers.not_recorded),
        key=lambda cause: -means[cause],
    )[:MOST_CURVES]
    chart = line_chart(
        "Lost by step",
        [
            (CAUSES.get(cause, cause), [(one.step, one.lost_s[cause]) for one in steps])
            for cause in most
        ],
        " s",
        last="mean",
    )
    return f'<section id="losses-by-step">{chart}</section>'


def heat(pictures: Pictures) -> str:
    drawn = heat_maps(pictures.cells)
    both = (
        " Red in both maps means slow hardware or a wrong profile; red in only the first means"
        " heavy data."
        if any(cell["normalised"] is not None for cell in pictures.cells)
        else ""
    )
    if drawn:
        return section(
            "Stage × replica",
            "All passes of a slot, mean over the measured steps. Red is slower "
            f"than the unit’s mean, striped blue faster.{both}",
            drawn,
            "heat",
        )
    return ""


def ranks_chart(analysis: Analysis) -> str:
    """Show a bar per rank: compute, other operations outside of compute, and idle time.

    Of many ranks, those active longest are shown.
    """
    ranks = sorted(
        sorted(analysis.ranks, key=lambda rank: -rank.span_us)[:MOST_BARS],
        key=lambda rank: rank.rank,
    )
    if (
        len(ranks) < 2
        or analysis.format == "disttrain"
        or any(rank.compute_us is None for rank in ranks)
    ):
        return ""  # the timeline of disttrain's traces shows them
    more = (
        f" The {len(ranks)} of {len(analysis.ranks)} ranks that were active longest."
        if len(ranks) < len(analysis.ranks)
        else ""
    )
    rows = [
        (
            f"rank {rank.rank}" + (f" · {rank.unit[:12]}" if rank.unit else ""),
            [
                ("compute", rank.compute_us or 0.0),
                ("communication", rank.non_compute_us or 0.0),
                ("idle", rank.idle_us),
            ],
        )
        for rank in ranks
    ]
    legend = "".join(
        f'<span><i class="k-{kind}"></i>{name}</span>'
        for kind, name in (
            ("compute", "compute"),
            ("communication", "other operations outside compute"),
            ("idle", "idle"),
        )
    )
    return section(
        "Time by rank",
        f"From the first to the last operation of each rank over the measured steps.{more} "
        "The figures are in the table of ranks below.",
        stacked_rows(rows, "Compute, other operations and idle time of every rank")
        + f'<div class="legend">{legend}</div>',
        "by-rank",
    )


def curves(analysis: Analysis, rows: list[dict[str, Any]]) -> str:
    """Show losses, MFU, time, tokens, gradient norm and learning rate over steps, and the plan."""

    def points(name: str) -> list[tuple[float, float]]:
        return [
            (row["step"], row[name])
            for row in rows
            if row["step"] is not None
            and row.get(name) is not None
            and math.isfinite(row[name])
            and (row[name] or name not in LOSSES)  # 0: the batch had nothing to compute a loss from
        ]

    plan = {
        row.what: row.predicted
        for row in analysis.predicted_vs_measured
        if row.unit is None and row.basis == "plan"
    }
    learns = analysis.job.rehearsed is None  # emulated devices compute no loss
    charts = [
        (
            line_chart(
                "Losses",
                [
                    ("text", points("loss_text")),
                    ("image", points("loss_image")),
                    ("sum", points("loss")),
                    ("text, held out", points("evaluation_loss_text")),
                    ("image, held out", points("evaluation_loss_image")),
                ],
                log=True,
            )
            if learns
            else ""
        ),
        line_chart(
            "MFU",
            [("job", [(x, 100 * y) for x, y in points("mfu")])],
            " %",
            100 * plan["mfu"] if "mfu" in plan else None,
        ),
        line_chart(
            "Step time",
            [("step", points("iteration_s")), ("waiting for data", points("data_wait_s"))],
            " s",
            plan.get("iteration_s"),
        ),
        line_chart("Tokens per second", [("job", points("tokens_per_s"))]),
        *(
            [
                line_chart("Gradient norm", [("global", points("grad_norm"))], log=True),
                line_chart("Learning rate", [("rate", points("learning_rate"))]),
            ]
            if learns
            else []
        ),
    ]
    drawn = "".join(f"<section>{chart}</section>" for chart in charts if chart)
    return f'<div class="two" id="curves">{drawn}</div>' if drawn else ""


def learned(analysis: Analysis) -> str:
    """Show the verdict on what the run learns, loss by loss."""
    judged = analysis.learning
    if judged is None:
        return ""
    rows = [
        [
            escape(one.loss),
            escape(one.verdict),
            figure(one.first, 4),
            figure(one.last, 4),
            "–" if one.error is None else f"± {figure(one.error, 2)}",
            "–" if one.to_beat is None else f"{figure(one.to_beat, 4)} ({escape(one.basis)})",
            figure(one.held_out[-1][1], 4) if one.held_out else "–",
            figure(min(loss for _, loss in one.held_out), 4) if one.held_out else "–",
        ]
        for one in judged.losses
    ]
    head = ["Loss", "Verdict", "First steps", "Last steps", "Noise of the change"]
    head += ["To beat", "Held out", "Best held out"]
    return section(
        f"Does it learn? {escape(judged.verdict.capitalize())}",
        escape(judged.advice or f"Medians of the first and last of {judged.steps:,} steps."),
        table(head, rows) if rows else "",
        "learning",
    )


def warnings(analysis: Analysis) -> str:
    if not analysis.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in analysis.warnings)
    return f'<section class="warnings"><h2>What limits these figures</h2><ul>{items}</ul></section>'


def left_out(reasons: list[str]) -> str:
    """Show the reasons why these traces cannot fill some sections."""
    if not reasons:
        return ""
    items = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
    return f'<section class="absent"><h2>Not on this page</h2><ul>{items}</ul></section>'


def footer(analysis: Analysis) -> str:
    """Describe the recording that the figures are from."""
    job = analysis.job
    origin = {
        "disttrain": f"Start {job.run}",
        "kineto": "Kineto or Chrome JSON",
        "operations": "Recorded operations",
    }
    steps = counted(job.steps, "step") if job.steps else "no marked steps"
    measured = (
        f"; figures cover {counted(job.steps_measured, 'measured step')},"
        f" {counted(job.warmup_steps_excluded, 'warm-up step')} left out"
        if job.steps_measured
        else ""
    )
    ranks = counted(job.ranks, "rank")
    return f"{origin[analysis.format]}: {steps} recorded on {ranks}{measured}."
