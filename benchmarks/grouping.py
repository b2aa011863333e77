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
import time
from collections.abc import Iterator
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
    options = parser.parse_args()
    tables = measure(options.small)
    print("\n\n".join(table(title, rows) for title, rows in tables.items()))
