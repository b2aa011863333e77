"""Modules grouped into units: plans on frozen costs beside the best co-located layout, a unit for
each module and FSDP (docs/when-to-disaggregate.md), and those of published vision-language models
beside plans from before groupings were searched.

`benchmarks/costs/MODEL-DEVICE.json.gz` holds run file and profile of each preset as `disttrain init
--preset` and `disttrain profile --device analytic:DEVICE` wrote them on 2026-11-26, and
`before_s.json` the steps in seconds that the planner of that day gave on them. They stay as they
are; costs of the paper's models are those of `waiting.py`. Simulated; nothing here was measured on
a GPU. Deterministic but for the seconds of planning.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Tables, table
from benchmarks.waiting import COSTS, costs, read
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.planning.solve import solve
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

MODELS = ("qwen2.5-vl-7b", "internvl3-8b", "qwen3-vl-8b", "qwen3-vl-32b")
DEVICES = ("H100", "A800")
GPUS = (4, 8, 16, 32, 64, 128, 256, 512)
PAPERS = ("mllm-9b", "mllm-72b")  # models, on the A800 of their presets
PAPERS_GPUS = (8, 32, 128, 512, 1296)
Row = dict[str, Any]
# Lines of the page's figure: model, device, their name, colour
LINES = (
    ("qwen2.5-vl-7b", "H100", "Qwen2.5-VL 7B, H100", "#2563eb"),
    ("qwen3-vl-32b", "H100", "Qwen3-VL 32B, H100", "#0891b2"),
    ("mllm-9b", "A800", "mllm-9b (draws), A800", "#d97706"),
    ("mllm-72b", "A800", "mllm-72b (draws), A800", "#dc2626"),
)


def frozen(model: str, device: str) -> tuple[RunFile, Profile]:
    """Run file and profile of a model, as they were frozen."""
    if model in PAPERS:
        return costs(model)
    return read(json.loads(gzip.decompress((COSTS / f"{model}-{device}.json.gz").read_bytes())))


def cases(small: bool) -> Iterator[tuple[str, str, list[int]]]:
    """Models, devices and sizes of clusters."""
    for device in DEVICES[: 1 if small else None]:
        for model in MODELS[: 1 if small else None]:
            yield model, device, [8] if small else [*GPUS]
    for model in () if small else PAPERS:
        yield model, "A800", [*PAPERS_GPUS]


def planned(model: str, device: str, sizes: list[int]) -> Iterator[Row]:
    """A plan for each size beside the one of before."""
    run, profile = frozen(model, device)
    before_s = json.loads((COSTS / "before_s.json").read_text())
    for gpus in sizes:
        begin, then_s = time.process_time(), before_s.get(f"{model} {device} {gpus}")
        row: Row = {"model": model, "device": device, "devices": gpus, "before, s": then_s}
        try:
            plan = solve(run, profile, gpus=gpus, top=0)
        except InfeasibleError:
            yield row | {"s per step": None}
            continue
        seconds = plan.predicted.iteration_s
        ends = {"one unit": "megatron", "a unit for each module": "disaggregated", "FSDP": "fsdp"}
        others = {what: plan.baselines[name] for what, name in ends.items()}
        yield row | {
            "s per step": seconds,
            "more sequences/s, %": then_s and 100 * (then_s / seconds - 1),
            **{f"{what}, s": other and other.iteration_s for what, other in others.items()},
            "layout": f"{plan.plan.describe()} M {plan.plan.microbatch_size}",
            "CPU s": time.process_time() - begin,
        }


def figure(rows: Sequence[Row]) -> str:
    """SVG of the best one unit's sequences per second over those of a unit for each module."""

    def x(devices: int) -> float:
        return 64 + 68.94 * (math.log2(devices) - 3)

    def y(percent: float) -> float:
        return 215.7 - 4.543 * percent

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 400" font-family="sans-serif"'
        ' font-size="12">',
        '<rect width="760" height="400" fill="#fff"/>',
        '<text x="64" y="18" font-weight="bold">'
        "Sequences per second of one unit (best) over units for each module, %</text>",
        '<text x="317" y="390" text-anchor="middle">devices</text>',
        '<text x="70" y="48" fill="#555">one unit is faster</text>',
        '<text x="70" y="346" fill="#555">disaggregation is faster</text>',
    ]
    for percent in range(-30, 50, 10):
        line, at = "#ddd" if percent else "#555", y(percent)
        parts += [
            f'<line x1="64" x2="570" y1="{at:.1f}" y2="{at:.1f}" stroke="{line}"/>',
            f'<text x="56" y="{at + 4:.1f}" text-anchor="end">{percent:+d}</text>',
        ]
    for devices in (8, 16, 32, 64, 128, 256, 512, 1024):
        parts.append(f'<text x="{x(devices):.1f}" y="370" text-anchor="middle">{devices:,}</text>')
    for model, device, name, colour in LINES:
        points = [
            (x(row["devices"]), y(100 * (apart_s / unit_s - 1)))
            for row in sorted(rows, key=lambda row: int(row["devices"]))
            if (row["model"], row["device"]) == (model, device)
            and (apart_s := row.get("a unit for each module, s"))
            and (unit_s := row.get("one unit, s"))
        ]
        if points:
            path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
            parts += [
                f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>',
                *(
                    f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>'
                    for across, down in points
                ),
                f'<text x="580" y="{points[-1][1] + 4:.1f}" fill="{colour}">{name}</text>',
            ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def measure(small: bool = False) -> Tables:
    """One table."""
    rows = [row for case in cases(small) for row in planned(*case)]
    return {"Grouped units over a unit for each module": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="smallest form: shows that it runs, measures little"
    )
    parser.add_argument("--figure", type=Path, metavar="FILE", help="SVG to draw")
    options = parser.parse_args()
    if options.figure:
        sizes = {"H100": [8, 32, 128, 512], "A800": [*PAPERS_GPUS]}
        chosen = [row for line in LINES for row in planned(*line[:2], sizes[line[1]])]
        options.figure.write_text(figure(chosen))
        tables = {"One unit and a unit for each module": chosen}
    else:
        tables = measure(options.small)
    print("\n\n".join(table(title, rows) for title, rows in tables.items()))
