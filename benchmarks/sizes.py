"""A whole plan at many sizes: CPU time, peak memory, and whether more devices ever plan a slower
step.

`plan` is `disttrain plan` with its what-ifs, on the frozen costs of `waiting.py`, in a process of
its own for each size; "search" the exact search alone, by the formula. Peak memory is the whole
process's, with imports. A dip is how much slower a step is than that of a smaller cluster, at most;
sizes are spread evenly by their logarithm, most of them odd numbers of nodes or devices. CPU time,
which other work on the machine stretches too.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from benchmarks.common import Tables, main
from benchmarks.waiting import costs
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.planning.search import search
from disttrain_cli.planning.sensitivity import sensitivity
from disttrain_cli.planning.solve import cluster_of, ranking, solve
from disttrain_cli.planning.units import group
from disttrain_cli.spec.progress import silent

MODELS = ("mllm-9b", "mllm-15b", "mllm-72b")
GPUS = (96, 1296, 16384)
SMALLEST, LARGEST, COUNT = 8, 16384, 100

T = TypeVar("T")


def whole(name: str, gpus: int) -> dict[str, Any]:
    """A plan with its what-ifs."""
    run, profile = costs(name)
    cluster, clock = cluster_of(run, profile, gpus), [time.process_time()]
    search(group(profile, cluster, "disaggregated"), cluster)
    clock.append(time.process_time())
    plan = solve(run, profile, gpus=gpus, top=3)
    clock.append(time.process_time())
    sensitivity(profile, cluster, plan.plan, silent)
    clock.append(time.process_time())
    alone, planned, asked = np.diff(clock).tolist()
    return {
        "model": name,
        "devices": gpus,
        "search s": alone,
        "plan s": planned,
        "what-ifs s": asked,
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "s per step": plan.predicted.iteration_s,
    }


def step_s(name: str, gpus: int) -> float | None:
    """Time of the best plan's step, as plans are ranked; None where nothing fits."""
    run, profile = costs(name)
    try:
        ranked, _, _ = ranking(profile, cluster_of(run, profile, gpus), "disaggregated")
    except InfeasibleError:
        return None
    return ranked[0].iteration_s if ranked else None


def dips(name: str, sizes: list[int]) -> dict[str, Any]:
    """The worst dip over some sizes."""
    best_s, worst, where, over, planned = np.inf, 0.0, "–", 0, 0
    best_at = 0
    for gpus in sizes:
        seconds = alone(step_s, name, gpus)
        if seconds is None:
            continue
        planned, dip = planned + 1, 100 * (seconds / best_s - 1)
        over += dip > 0.5
        if dip > worst:
            worst, where = dip, f"{gpus} after {best_at}"
        if seconds < best_s:
            best_s, best_at = seconds, gpus
    return {
        "model": name,
        "sizes planned": planned,
        "worst dip %": worst,
        "at": where,
        "dips over 0.5 %": over,
    }


def alone(call: Callable[[str, int], T], name: str, gpus: int) -> T:
    """The call in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(call, (name, gpus))


def measure(small: bool = False) -> Tables:
    """Two tables."""
    models, gpus = (MODELS[:1], GPUS[:1]) if small else (MODELS, GPUS)
    spread = np.geomspace(SMALLEST, LARGEST, COUNT).astype(int)
    sizes = [96, 100] if small else np.unique(spread).tolist()
    return {
        "A whole plan": [alone(whole, name, count) for name in models for count in gpus],
        "More devices": [dips(name, sizes) for name in models],
    }


if __name__ == "__main__":
    main(__doc__, measure)
