"""HTML page of the report: sections in order, one template, and a content security policy.

Everything that can be text or SVG is written here, so that the page is complete without a script
and in print; the script (`templates/report.js`) only draws the zoomable timeline. The page's policy
allows exactly this script and this style sheet, by hash, and images in `data:` form; every string
of the trace is escaped.
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

from disttrain_cli.analysis.report import devices, predictions, sections, tables
from disttrain_cli.analysis.report.experts import experts
from disttrain_cli.analysis.report.generated import generated
from disttrain_cli.analysis.report.pictures import Pictures
from disttrain_cli.analysis.result.summary import Analysis
from disttrain_cli.spec.whole import write_whole


def write_report(analysis: Analysis, pictures: Pictures, images: list[Path], out: Path) -> Path:
    """Write the page and return its path.

    Args:
        analysis: results, for traces of any format.
        pictures: what is drawn of the same traces, as far as they contain it.
        images: PNG or JPEG files that the model generated; unreadable or large ones are left out.
        out: the HTML file.

    Raises:
        SpecError: the file cannot be written.
    """
    style, script = _template("report.css"), _template("report.js")
    values = {
        "TITLE": escape(f"{analysis.verdict.headline} · disttrain"),
        "NAME": escape(analysis.job.name),
        "LAYOUT": escape(analysis.job.layout or ""),
        "DATES": escape(sections.dates(analysis.job)),
        "STYLE": style,
        "SCRIPT": script,
        "STYLE_HASH": _sha256(style),
        "SCRIPT_HASH": _sha256(script),
        "BODY": body(analysis, pictures, images),
        "FOOTER": escape(sections.footer(analysis)),
        "DATA": _json({"timelines": pictures.timelines}),
    }
    page = re.sub(r"@@([A-Z_]+)@@", lambda match: values[match.group(1)], _template("report.html"))
    return write_whole(out, page)


def body(analysis: Analysis, pictures: Pictures, images: list[Path]) -> str:
    """Return all sections; those that these traces cannot fill are listed at the end."""
    parts: list[tuple[str, str]] = [  # text, and the reason if it is empty, "" for none
        (sections.rehearsed(analysis.job), ""),
        (sections.verdict(analysis), ""),
        (sections.tiles(analysis), ""),
        (
            sections.timeline(pictures.timelines),
            "Timeline: these traces have no steps and ranks to draw.",
        ),
        (
            sections.time_shares(analysis),
            "Where the ranks’ time goes: these traces do not name units and stages.",
        ),
        (
            sections.losses(analysis),
            "What a step loses: no recorded step was complete enough to be replayed.",
        ),
        (sections.losses_by_step(analysis), ""),
        (predictions.remedies(analysis), ""),
        (
            sections.heat(pictures),
            "Stage × replica: these traces do not record what each replica computed.",
        ),
        (tables.units(analysis), "Units: these traces do not name units."),
        (tables.slowest(analysis), ""),
        (sections.ranks_chart(analysis), ""),
        (tables.hosts(analysis), "Hosts: these traces do not name them."),
        (devices.collective_kinds(analysis), ""),
        (
            tables.collectives(analysis),
            "Collectives: none was matched across ranks." if analysis.format == "kineto" else "",
        ),
        (tables.kernels(analysis), ""),
        (
            devices.operators(analysis),
            "FLOPs by operator: no shapes were recorded (record_shapes=True)."
            if analysis.format == "kineto"
            else "",
        ),
        (devices.critical_path(analysis), ""),
        (devices.launches(analysis), ""),
        (tables.inside(analysis), ""),
        (
            predictions.what_if(analysis),
            "What if: no recorded step was complete enough to be replayed.",
        ),
        (
            predictions.predicted(analysis),
            "Predicted against measured: there is no plan with these traces.",
        ),
        (predictions.operations(analysis), ""),
        (predictions.memory(analysis), "Memory: it was not recorded."),
        (experts(analysis), ""),
        (sections.learned(analysis), ""),
        (
            "",
            "Losses: emulated devices compute none." if analysis.job.rehearsed is not None else "",
        ),
        (
            sections.curves(analysis, pictures.steps),
            "Loss and MFU over steps: these traces do not record them.",
        ),
        (generated(images), ""),
        (sections.warnings(analysis), ""),
        (tables.ranks(analysis), ""),
    ]
    return "\n".join(
        [text for text, _ in parts if text]
        + [sections.left_out([why for text, why in parts if why and not text])]
    )


def _template(name: str) -> str:
    return (
        (resources.files("disttrain_cli") / "templates" / name).read_text(encoding="utf-8").strip()
    )


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(value: Any) -> str:
    """Return JSON that cannot end its script element, for any strings in it."""
    text = json.dumps(value, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text
