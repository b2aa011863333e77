"""Local search around plans: is a neighbour of the plan faster?

Costs are the frozen ones of `grouping.py`, and for B200 those that its profile computes.

A neighbour has another grouping of modules into units, or of one unit other devices, TP, CP, DP,
PP, recomputing, or another microbatch size; where several choices follow from one, the layout that
uses most devices is one of them. Every neighbour is simulated as finalists are (best delays of
weight gradients, ordering `paper`), and whatever is more than `LEAST` faster than the plan there is
simulated as training orders samples, by which the plan was chosen. `python -m
benchmarks.neighbours` prints a line as each plan is done. Simulated; deterministic.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.common import Tables, table
from benchmarks.grouping import DEVICES, MODELS, PAPERS, frozen
from benchmarks.paper import profiled
from disttrain_cli.costs.memory import fits
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.finalists import faster_zero, grouping
from disttrain_cli.planning.layouts import layout_with
from disttrain_cli.planning.predict import simulated_s
from disttrain_cli.planning.solve import cluster_of, ranked_as, solve
from disttrain_cli.planning.split_backward import timed, whole
from disttrain_cli.planning.units import Cluster, Unit, groupings, holder_of, shape_at
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape

LEAST = 1e-3  # of a step: what a faster neighbour must gain
GPUS = (8, 16, 32, 64, 128, 512)
PAPERS_GPUS = (8, 32, 96, 324, 1296)
Row = dict[str, Any]


def around(profile: Profile, cluster: Cluster, layout: Layout) -> Iterator[Layout]:
    """Yield the neighbours of a layout that fit, each once."""
    seen: set[str] = set()
    for units in groupings(profile, cluster, "auto"):
        for shapes, microbatch in _shapes(units, cluster, layout):
            size = microbatch * shapes[holder_of(units)].dp
            if cluster.batch % size or sum(shape.gpus for shape in shapes) > cluster.gpus:
                continue
            other = layout_with(units, cluster, shapes, size, "auto")
            if other is None or (name := other.model_dump_json()) in seen:
                continue
            seen.add(name)
            if fits(profile, other, cluster.memory_gib):
                yield other


def _shapes(
    units: list[Unit], cluster: Cluster, layout: Layout
) -> Iterator[tuple[list[ParallelShape], int]]:
    """Yield shapes of some units near those of a layout, and microbatch sizes."""
    llm = holder_of(units)
    starts: list[ParallelShape] = []
    for unit in units:
        plan = layout.unit_of(unit.modules[0] if not unit.holds_llm else unit.profile.inputs.llm)
        kept = unit.holds_llm or tuple(plan.modules) == unit.modules
        starts.append(plan.shape if kept else ParallelShape(tp=min(unit.tps)))
    alike = grouping(units) == grouping(layout.units)
    sizes = {layout.microbatch_size, 2 * layout.microbatch_size, layout.microbatch_size // 2} - {0}
    for size in sizes:
        for number, unit in enumerate(units):
            for shape in [starts[number], *_steps(unit, cluster, starts[number])]:
                shapes = [*starts[:number], shape, *starts[number + 1 :]]
                yield shapes, size
                for other in range(len(units)):
                    if other != llm and (other != number or not alike):
                        yield _filled(shapes, other, cluster), size
    if not alike and len(units) > 1:  # shares of the devices that no plan has given yet
        for shape in [starts[llm], *_steps(units[llm], cluster, starts[llm])]:
            for parts in itertools.product(range(1, 8), repeat=len(units) - 1):
                rest = cluster.gpus - shape.gpus
                if sum(parts) != 8 and len(parts) > 1:
                    continue
                counts = iter(rest * part // 8 if len(parts) > 1 else rest for part in parts)
                shapes = [
                    shape
                    if number == llm
                    else replace(start, dp=max(1, next(counts) // start.tp_cp_size), pp=1)
                    for number, start in enumerate(starts)
                ]
                yield shapes, layout.microbatch_size


def _steps(unit: Unit, cluster: Cluster, shape: ParallelShape) -> Iterator[ParallelShape]:
    """Yield shapes that differ in one degree, and in a second one that makes up for its devices."""
    kinds = unit.kinds
    groups = {shape_at(kinds, row) for row in range(len(kinds.tp))}
    for group in groups:
        width = group.tp_cp_size / shape.tp_cp_size
        if group.ep == shape.ep and 0.25 <= width <= 4:
            moved = replace(group, dp=shape.dp, pp=shape.pp)
            yield moved
            for dp in {shape.dp / width, shape.dp / width / 2, 2 * shape.dp / width}:
                if dp >= 1:
                    yield replace(moved, dp=math.floor(dp))
            yield replace(moved, pp=max(1, min(unit.layers, round(shape.pp / width))))
    if unit.holds_llm:
        near = sorted(divisors(cluster.batch), key=lambda dp: abs(math.log(dp / shape.dp)))[:6]
    else:
        near = [shape.dp + step for step in (-8, -4, -2, -1, 1, 2, 4, 8) if shape.dp + step > 0]
    for dp in near:
        full = cluster.gpus // (shape.tp_cp_size * dp)
        for pp in {shape.pp, shape.pp - 1, shape.pp + 1, round(shape.pp * shape.dp / dp), full}:
            if 0 < pp <= unit.layers:
                yield replace(shape, dp=dp, pp=pp)
                if cluster.checkpointing == "auto":
                    yield replace(shape, dp=dp, pp=pp, recompute=not shape.recompute)


def _filled(shapes: Sequence[ParallelShape], number: int, cluster: Cluster) -> list[ParallelShape]:
    """Return the shapes with all remaining devices for one of them."""
    shape = shapes[number]
    left = cluster.gpus - sum(each.gpus for each in shapes) + shape.gpus
    dp = max(1, left // (shape.tp_cp_size * shape.pp))
    return [*shapes[:number], replace(shape, dp=dp), *shapes[number + 1 :]]


def searched(model: str, device: str, gpus: int) -> Row:
    """The plan, its fastest neighbour under `paper`, and as training orders samples."""
    run, profile = profiled(model, device=device) if device == "B200" else frozen(model, device)
    row: Row = {"model": model, "device": device, "devices": gpus}
    try:
        plan = solve(run, profile, gpus=gpus, top=0).plan
    except InfeasibleError:
        return row | {"plan": "nothing fits"}
    trained = cluster_of(run, profile, gpus)
    cluster = ranked_as(trained)
    draws = Draws(profile, cluster)
    plan_s = timed(profile, cluster, whole(plan), draws=draws)[1]

    def either_zero(layout: Layout) -> Layout:
        auto = run.train.zero_stage == "auto"
        return faster_zero(profile, cluster, layout) if auto else layout

    near = [either_zero(one) for one in around(profile, cluster, plan)]
    first = [(simulated_s(profile, one, cluster, range(1), draws=draws), one) for one in near]
    first.sort(key=lambda one: one[0])
    # splitting backwards gains at most a tenth
    found = [
        timed(profile, cluster, one, draws=draws) for time_s, one in first if time_s < 1.1 * plan_s
    ]
    found.sort(key=lambda one: one[1])
    faster = [layout for layout, time_s in found if time_s < plan_s * (1 - LEAST)]
    row |= {
        "plan": f"{plan.describe()} M {plan.microbatch_size}",
        "neighbours": len(near),
        "faster under paper, %": max(0.0, 100 * (1 - found[0][1] / plan_s)) if found else 0.0,
    }
    mine_s, *theirs_s = (
        simulated_s(profile, layout, trained, draws=Draws(profile, trained))
        for layout in (plan, *faster[:4])
    )
    best_s = min(theirs_s, default=math.inf)
    row["faster as trained, %"] = max(0.0, 100 * (1 - best_s / mine_s))
    if best_s < mine_s * (1 - LEAST):
        best = faster[theirs_s.index(best_s)]
        row["neighbour"] = f"{best.describe()} M {best.microbatch_size}"
    return row


def cases() -> list[tuple[str, str, int]]:
    """Models, devices and numbers of them."""
    return [
        *itertools.product(MODELS, (*DEVICES, "B200"), GPUS),
        *itertools.product(PAPERS, ("A800", "B200"), PAPERS_GPUS),
    ]


def measure(small: bool = False) -> Tables:
    """One table."""
    rows = [searched(*case) for case in ([("qwen2.5-vl-7b", "H100", 8)] if small else cases())]
    return {"Neighbours of plans": rows}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="one plan")
    parser.add_argument("--only", metavar="MODEL", help="plans of one model")
    options = parser.parse_args()
    if options.small:
        print("\n\n".join(table(*one) for one in measure(small=True).items()))
    else:
        for case in cases():
            if options.only in (None, case[0]):
                print(json.dumps(searched(*case)), flush=True)
