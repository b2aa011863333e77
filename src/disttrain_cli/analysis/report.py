"""The report: one HTML page that needs nothing else, verdict first.

Everything that can be text or SVG is written here, so that the page reads without a script and in print; the
script (`templates/report.js`) only draws the zoomable timeline. The page's policy allows exactly this script and
this style sheet, by hash, and images in `data:` form; every string of the trace is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from disttrain_cli.analysis.charts import line_chart, share_bar
from disttrain_cli.analysis.database import Database
from disttrain_cli.analysis.report_tables import (
    heat_map,
    lost_bars,
    operations_table,
    predicted_table,
    ranks_table,
    table,
    tiles,
    units_table,
)
from disttrain_cli.analysis.result import Analysis, JobSummary
from disttrain_cli.analysis.timeline import drawable, representative_steps
from disttrain_cli.spec.files import write_whole

#: Generated images on the page, and the largest one taken in.
MOST_IMAGES = 24
MOST_IMAGE_BYTES = 512 * 1024
_TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg"}
_SHARES = (
    ("compute", "compute", "Compute"),
    ("load", "data_wait", "Waiting for data"),
    ("unit", "other_unit", "Waiting for another unit"),
    ("stage", "other_stage", "Waiting for another stage"),
    ("warmup", "warmup", "Filling the pipeline"),
    ("drain", "drain", "Draining it"),
    ("send", "transfer", "Handing over tensors"),
    ("step", "update", "Reduction and optimizer"),
    ("gap", "gap", "Held up by the host"),
)
_LEGEND = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("receive", "receive (waiting included)"),
    ("load", "load"),
    ("send", "send"),
    ("reduce", "reduce"),
    ("step", "step"),
)


def write_report(analysis: Analysis, database: Database, images: list[Path], out: Path) -> Path:
    """Write the page; returns its path.

    Args:
        analysis: what was found.
        database: the same traces, open: the timeline and the curves come from there.
        images: PNG or JPEG files that the model generated; unreadable or large ones are left out.
        out: the HTML file.

    Raises:
        SpecError: the file cannot be written.
    """
    style, script = _template("report.css"), _template("report.js")
    timelines = [drawable(database, step, why) for step, why in representative_steps(database)]
    job = analysis.job
    values = {
        "TITLE": escape(f"{analysis.verdict.headline} · disttrain"),
        "LAYOUT": escape(job.layout),
        "STYLE": style,
        "SCRIPT": script,
        "STYLE_HASH": _sha256(style),
        "SCRIPT_HASH": _sha256(script),
        "BODY": "\n".join(
            part
            for part in (
                _rehearsed(job),
                _verdict(analysis),
                tiles(job),
                _timeline(timelines),
                _time(analysis),
                _losses(analysis, database),
                units_table(analysis),
                _slowest(analysis),
                _predicted(analysis),
                _curves(database),
                _images(images),
                _warnings(analysis),
                ranks_table(analysis),
            )
            if part
        ),
        "FOOTER": escape(
            f"Start {job.run}: {job.steps} steps recorded on {job.ranks} ranks; figures are of {job.steps_measured} "
            f"measured steps, {job.warmup_steps_excluded} warm-up step(s) left out."
        ),
        "DATA": _json({"timelines": timelines}),
    }
    page = re.sub(r"@@([A-Z_]+)@@", lambda match: values[match.group(1)], _template("report.html"))
    return write_whole(out, page)


def _template(name: str) -> str:
    return (resources.files("disttrain_cli") / "templates" / name).read_text(encoding="utf-8").strip()


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """JSON that cannot end its script element, whatever strings it holds."""
    text = json.dumps(value, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def _rehearsed(job: JobSummary) -> str:
    return f'<section class="rehearsed">{escape(job.rehearsed)}</section>' if job.rehearsed is not None else ""


def _verdict(analysis: Analysis) -> str:
    verdict = analysis.verdict
    kind = "good" if verdict.cause == "none" else "bad" if verdict.confidence >= 0.5 else "unsure"
    rows = [[escape(row.what), f"{row.value:.4g} {escape(row.unit)}"] for row in verdict.evidence]
    place = ", ".join(
        f"{name} {value}" for name, value in verdict.place.model_dump().items() if value is not None
    )
    return (
        f'<section id="verdict" class="{kind}"><p class="kicker">Verdict{escape(" · " + place if place else "")} · '
        f"confidence {100 * verdict.confidence:.0f} %</p><h1>{escape(verdict.headline)}</h1>"
        f'<p class="advice">{escape(verdict.advice)}</p><p><code '
        f'class="command">{escape(verdict.next_command)}</code></p>'
        f"{table(['Evidence', ''], rows) if rows else ''}</section>"
    )


def _time(analysis: Analysis) -> str:
    shares = analysis.job.time_shares
    bar = share_bar([(kind, name, shares.get(key, 0.0)) for kind, key, name in _SHARES])
    return (
        '<section><h2>Where the ranks’ time goes</h2><p class="note">Shares of ranks × window '
        'of a step, over the measured '
        f"steps. Everything but compute is bubble.</p>{bar}</section>"
    )


def _timeline(timelines: list[dict[str, Any]]) -> str:
    if not timelines:
        return ""
    buttons = "".join(
        f'<button type="button" data-step="{index}" aria-pressed="{str(index == 0).lower()}">Step {item["step"]} '
        f"({escape(item['why'])})</button>"
        for index, item in enumerate(timelines)
    )
    legend = "".join(f'<span><i class="k-{kind}"></i>{escape(name)}</span>' for kind, name in _LEGEND)
    left_out = timelines[0]["lanes_left_out"]
    note = f" {left_out} more ranks are not drawn." if left_out else ""
    return (
        f'<section><h2>Timeline by unit and rank</h2><p class="note">Numbers are slots. Drag to move, double-click or '
        f"<code>Ctrl</code>+wheel to zoom; with the picture focused: <code>+</code> <code>−</code> <code>0</code> "
        f"<code>←</code> <code>→</code>.{note}</p>"
        f'<div class="controls">{buttons}<span class="spacer"></span><button type="button" id="zoom-out" '
        f'aria-label="Zoom out">−</button><button type="button" id="zoom-in" aria-label="Zoom in">+</button>'
        f'<button type="button" id="zoom-all">Whole step</button></div><div id="timeline-box"><div id="lanes"></div>'
        '<div id="canvas-box"><canvas id="timeline" tabindex="0" role="img" '
        'aria-label="Operations of every rank over time; '
        f'the tables hold the same figures"></canvas><div id="tip" hidden></div></div></div>'
        f'<div class="legend">{legend}</div></section>'
    )


def _losses(analysis: Analysis, database: Database) -> str:
    return (
        f'<div class="two">{lost_bars(analysis.stragglers)}<section><h2>Compute per slot, stage × replica</h2>'
        f'<p class="note">Forward and backward in ms; red is slower and blue faster than the unit’s mean.</p>'
        f"{heat_map(database.query('cells'))}</section></div>"
    )


def _slowest(analysis: Analysis) -> str:
    rows = [
        [
            f"{escape(row.kind)} {row.number}",
            escape(row.unit or "all units"),
            f"{row.mean_ms:.3g} ms",
            f"{row.ratio:.3f}",
            "–" if row.normalised_ratio is None else f"{row.normalised_ratio:.3f}",
        ]
        for row in analysis.slowest
    ]
    return (
        '<section><h2>Slowest of their kind</h2><p class="note">The last column divides by '
        'the time that the recorded work '
        f"should take: what stays above 1 is slow hardware or a wrong profile, not heavy data.</p>"
        f"{table(['Slowest', 'Of', 'Compute per slot', '÷ mean', '÷ mean, same work'], rows)}</section>"
    )


def _curves(database: Database) -> str:
    rows = database.query("step_series")

    def points(name: str) -> list[tuple[float, float]]:
        return [(row["step"], row[name]) for row in rows if row[name] is not None and row["step"] is not None]

    charts = [
        line_chart(
            "Losses", [("text", points("loss_text")), ("image", points("loss_image")), ("sum", points("loss"))]
        ),
        line_chart("MFU", [("job", [(x, 100 * y) for x, y in points("mfu")])], " %"),
        line_chart(
            "Step time", [("step", points("iteration_s")), ("waiting for data", points("data_wait_s"))], " s"
        ),
        line_chart("Gradient norm", [("global", points("grad_norm"))]),
    ]
    drawn = "".join(f"<section>{chart}</section>" for chart in charts if chart)
    return f'<div class="two" id="curves">{drawn}</div>' if drawn else ""


def _predicted(analysis: Analysis) -> str:
    rows = [row for row in analysis.predicted_vs_measured if row.unit is None or row.what == "stage_ms"]
    return (predicted_table(rows) if rows else "") + (operations_table(analysis) if analysis.operations else "")


def _images(images: list[Path]) -> str:
    figures = []
    for path in images[:MOST_IMAGES]:
        kind = _TYPES.get(path.suffix.lower())
        try:
            content = path.read_bytes()
        except OSError:
            continue
        if kind is None or not content or len(content) > MOST_IMAGE_BYTES:
            continue
        figures.append(
            f'<figure><img alt="Generated: {escape(path.stem)}" src="data:{kind};base64,'
            f'{base64.b64encode(content).decode()}"><figcaption>{escape(path.stem)}</figcaption></figure>'
        )
    if not figures:
        return ""
    return (
        f'<section id="images"><h2>Generated by the model</h2><p class="note">After the last step of the run.</p>'
        f'<div class="images">{"".join(figures)}</div></section>'
    )


def _warnings(analysis: Analysis) -> str:
    if not analysis.warnings:
        return ""
    items = "".join(f"<li>{escape(warning)}</li>" for warning in analysis.warnings)
    return f'<section class="warnings"><h2>What limits these figures</h2><ul>{items}</ul></section>'
