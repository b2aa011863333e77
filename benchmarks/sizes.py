"""A whole plan at many sizes: CPU time, peak memory, and whether more devices ever plan a slower
step.

    python -m benchmarks.sizes                          9B, 15B, 72B on the costs of `waiting.py`
    python -m benchmarks.sizes --sizes 36 vlm-8b ...    these presets; others' costs computed anew

`plan` is `disttrain plan` with its what-ifs, in a process of its own for each size; "search" the
exact search alone, by the formula. Peak memory is the whole process's, with imports. A dip is how
much slower the step that a plan predicts is than that of a smaller cluster's, at most; sizes are
spread evenly by their logarithm, most of them odd numbers of nodes or devices. CPU time, which
other work on the machine stretches too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.common import Tables, table
from benchmarks.paper import profiled
from benchmarks.waiting import FROZEN_S, costs
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.planning.search import search
from disttrain_cli.planning.sensitivity import sensitivity
from disttrain_cli.planning.solve import cluster_of, solve
from disttrain_cli.planning.units import groupings
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import RunFile

GPUS = (96, 1296, 16384)
SMALLEST, LARGEST, COUNT = 8, 16384, 100
DIP_PCT = 0.5  # allowed
SHOWN = 3  # runners-up, as `disttrain plan` shows

Costs = tuple[RunFile, Profile]


def costs_of(preset: str) -> Costs:
    """Run file and profile of a preset: frozen, or computed for its own device."""
    return costs(preset) if preset in FROZEN_S else profiled(preset)


def whole(preset: str, known: Costs, gpus: int) -> dict[str, Any]:
    """A plan with its what-ifs."""
    run, profile = known
    cluster, clock = cluster_of(run, profile, gpus), [time.process_time()]
    search(groupings(profile, cluster, "disaggregated")[0], cluster)
    clock.append(time.process_time())
    plan = solve(run, profile, gpus=gpus, top=SHOWN)
    clock.append(time.process_time())
    sensitivity(profile, cluster, plan.plan, silent)
    clock.append(time.process_time())
    alone, planned, asked = np.diff(clock).tolist()
    return {
        "model": preset,
        "devices": gpus,
        "search s": alone,
        "plan s": planned,
        "what-ifs s": asked,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "s per step": plan.predicted.iteration_s,
    }


def step_s(known: Costs, gpus: int) -> float | None:
    """Time that a plan predicts for its step; None where nothing fits."""
    try:
        return solve(*known, gpus=gpus, top=SHOWN).predicted.iteration_s
    except InfeasibleError:
        return None


def dips(preset: str, known: Costs, sizes: Sequence[int]) -> dict[str, Any]:
    """The worst dip over some sizes, in ascending order."""
    best_s, best_at, worst, where, over, planned = np.inf, 0, 0.0, "–", 0, 0
    for gpus in sizes:
        seconds = step_s(known, gpus)
        if seconds is None:
            continue
        planned, dip = planned + 1, 100 * (seconds / best_s - 1)
        over += dip > DIP_PCT
        if dip > worst:
            worst, where = dip, f"{gpus} after {best_at}"
        if seconds < best_s:
            best_s, best_at = seconds, gpus
    return {
        "model": preset,
        "sizes planned": planned,
        "worst dip %": worst,
        "at": where,
        f"dips over {DIP_PCT} %": over,
    }


def alone(preset: str, known: Costs, gpus: int) -> dict[str, Any]:
    """`whole` in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(whole, (preset, known, gpus))


def measure(small: bool = False, presets: Sequence[str] = (), count: int = COUNT) -> Tables:
    """Two tables, of the presets on frozen costs if none is named."""
    every = {name: costs_of(name) for name in presets or [*FROZEN_S][: 1 if small else None]}
    spread = np.geomspace(SMALLEST, LARGEST, count).astype(int)
    sizes = [96, 100] if small else np.unique(spread).tolist()
    return {
        "A whole plan": [
            alone(name, known, gpus)
            for name, known in every.items()
            for gpus in (GPUS[:1] if small else GPUS)
        ],
        "More devices": [dips(name, known, sizes) for name, known in every.items()],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("presets", nargs="*", metavar="PRESET")
    parser.add_argument("--sizes", type=int, default=COUNT, help="compared for each preset")
    parser.add_argument(
        "--small", action="store_true", help="smallest form: shows that it runs, measures little"
    )
    options = parser.parse_args()
    tables = measure(options.small, options.presets, options.sizes)
    print("\n\n".join(table(title, rows) for title, rows in tables.items()))
