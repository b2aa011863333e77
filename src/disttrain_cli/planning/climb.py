"""Hill climb in the simulator from finalists to better neighbours.

The search's formula ignores gradient reductions, details of messages, skewed data, and the position
of a stage inside a node. So starting from the best finalists, one unit at a time changes by a few
devices, a TP or CP size or a stage, another one takes the remaining devices, one changes its
recomputation, slots are halved or doubled, and the fastest simulated neighbour is the next start,
as long as it is faster. A layer moves to a neighbouring stage if that shortens the estimate:
partitions of layers are found by passes alone, whatever a stage has to reduce.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from disttrain_cli.costs.activations import WHOLE
from disttrain_cli.costs.layout import optimizer_s, reduce_s, stages_of
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.objective import layout_time
from disttrain_cli.planning.split_backward import whole
from disttrain_cli.planning.units import Cluster, Unit, holder_of, shape_at
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.shape import ParallelShape

LEAST_GAIN = 1e-4  # of a step, for which the climb continues
TRIED = 12  # neighbours of a layout that are simulated: the best by `estimate_s`
BEST = 3  # of these, neighbours whose best schedule is searched for (`timed`)
MOST = 8  # steps of a climb


#: Returns the layout of these shapes, in pipeline order, for slots of that many sequences; None if
#: there is none.
Build = Callable[[Sequence[ParallelShape], int], Layout | None]


def climb(
    units: list[Unit],
    cluster: Cluster,
    start: Layout,
    start_s: float,
    build: Build,
    fits: Callable[[Layout], bool],
    simulated_s: Callable[[Layout], float],
    timed: Callable[[Layout], tuple[Layout, float]],
    seen: set[str],
) -> list[tuple[Layout, float]]:
    """Return the improving layouts from `start`, each with its simulated time, the best last.

    Args:
        start_s: simulated time of `start`.
        fits: returns True if a layout fits in memory.
        simulated_s: returns the time of a layout as it is.
        timed: returns a layout with its best schedule, and its simulated time.
        seen: names of layouts already considered; extended by new ones.
    """
    way: list[tuple[Layout, float]] = []
    layout, best_s = start, start_s
    seen.add(_name(start))
    for _ in range(MOST):
        others = [*_built(units, cluster, layout, build), *_shifted(units, cluster, layout)]
        found = {_name(other): other for other in others}
        new = [other for name, other in found.items() if name not in seen]
        seen.update(found)
        new.sort(key=lambda other: estimate_s(cluster, units, other))
        tried = sorted(itertools.islice(filter(fits, new), TRIED), key=simulated_s)[:BEST]
        fastest = min(map(timed, tried), key=lambda one: one[1], default=(layout, best_s))
        if fastest[1] > best_s * (1 - LEAST_GAIN):
            break
        layout, best_s = fastest
        way.append(fastest)
    return way


def _name(layout: Layout) -> str:
    """Return a name that layouts share if they differ in nothing but their schedule."""
    stages = [(unit.layers_per_stage, unit.checkpointing) for unit in layout.units]
    return f"{layout.describe()} M {layout.microbatch_size} {stages}"


def _shifted(units: list[Unit], cluster: Cluster, layout: Layout) -> Iterator[Layout]:
    """Yield the layout with a layer moved between neighbouring stages, if the estimate improves."""
    layout = whole(layout)
    limit_s = estimate_s(cluster, units, layout) * (1 - LEAST_GAIN)
    for number, unit in enumerate(layout.units):
        for layers in shifts(unit.layers_per_stage):
            shifted = unit.model_copy(update={"layers_per_stage": layers})
            both = [*layout.units[:number], shifted, *layout.units[number + 1 :]]
            other = layout.model_copy(update={"units": both})
            if estimate_s(cluster, units, other) < limit_s:
                yield other


def shifts(layers_per_stage: Sequence[int]) -> Iterator[list[int]]:
    """Yield the numbers of layers with one moved between neighbouring stages."""
    for first, second in itertools.permutations(range(len(layers_per_stage)), 2):
        if abs(first - second) == 1 and layers_per_stage[first] > 1:
            layers = list(layers_per_stage)
            layers[first] -= 1
            layers[second] += 1
            yield layers


def _built(units: list[Unit], cluster: Cluster, layout: Layout, build: Build) -> Iterator[Layout]:
    shapes = [unit.shape for unit in layout.units]
    near = neighbours(units, cluster, shapes, layout.microbatch_size)
    whole_groups = ((tuple(map(_with_whole_groups, other)), size) for other, size in near)
    for other, microbatch in dict.fromkeys(whole_groups):
        size = microbatch * other[holder_of(units)].dp
        if cluster.batch % size == 0 and (made := build(other, size)) is not None:
            yield made


def _with_whole_groups(shape: ParallelShape) -> ParallelShape:
    """Return the shape with the largest divisor of its EP degree that divides its ranks."""
    return replace(shape, ep=math.gcd(shape.ep, shape.tp_cp_size * shape.dp))


def neighbours(
    units: list[Unit], cluster: Cluster, shapes: Sequence[ParallelShape], microbatch: int
) -> Iterator[tuple[tuple[ParallelShape, ...], int]]:
    """Yield neighbouring layouts as shapes and microbatch.

    Either one unit changes by a step, with or without another unit (not the LLM's) taking the
    remaining devices, or the microbatch is halved or doubled, where a unit may change its
    recomputation.
    """
    llm, chosen = holder_of(units), tuple(shapes)
    flipped = [
        (
            *chosen[:number],
            replace(shape, recompute=not shape.recompute),
            *chosen[number + 1 :],
        )
        for number, shape in enumerate(chosen)
        if cluster.checkpointing == "auto"
    ]
    yield from ((other, microbatch) for other in flipped)
    for size in {2 * microbatch, microbatch // 2} - {0}:
        yield from ((other, size) for other in (chosen, *flipped))
    for number, unit in enumerate(units):
        for changed in _steps(unit, cluster, shapes[number], microbatch * shapes[llm].dp):
            moved = [*shapes[:number], changed, *shapes[number + 1 :]]
            if sum(shape.gpus for shape in moved) <= cluster.gpus:
                yield tuple(moved), microbatch
            for other in range(len(units)):
                if other not in (number, llm):
                    left = cluster.gpus - sum(
                        shape.gpus for index, shape in enumerate(moved) if index != other
                    )
                    dp = left // (moved[other].tp_cp_size * moved[other].pp)
                    if dp > 0:
                        wider = replace(moved[other], dp=dp)
                        yield (*moved[:other], wider, *moved[other + 1 :]), microbatch


def _steps(
    unit: Unit, cluster: Cluster, shape: ParallelShape, slot_sequences: int
) -> Iterator[ParallelShape]:
    """Yield the unit's shape with slightly changed DP, PP or EP, or with other TP or CP groups.

    Items are not cut: without the LLM, DP also changes to the fewest replicas of which the busiest
    has as many of a slot's items, one more or one less.
    """
    index = unit.eps.index(shape.ep)
    for ep in unit.eps[max(0, index - 1) : index + 2]:
        if ep != shape.ep:
            yield replace(shape, ep=ep)
    if unit.holds_llm:
        microbatch = slot_sequences // shape.dp
        widths = [dp for dp in divisors(cluster.batch) if cluster.batch % (dp * microbatch) == 0]
        place = widths.index(shape.dp)
        dps = widths[max(0, place - 1) : place + 2]
    else:
        per_node = max(1, cluster.gpus_per_node // shape.tp_cp_size)
        dps = [shape.dp + step for step in (-per_node, -2, -1, 1, 2, per_node)]
        dps += [shape.dp // per_node * per_node, -(-shape.dp // per_node) * per_node]
        items = slot_sequences * unit.profile.modules[unit.modules[0]].work_per_sequence.items
        busiest = math.ceil(items / shape.dp - WHOLE)
        dps += [
            math.ceil(items / most - WHOLE) for most in range(busiest - 1, busiest + 2) if most > 0
        ]
    for dp in dps:
        if dp > 0 and dp != shape.dp:
            yield replace(shape, dp=dp)
            for pp in (shape.pp - 1, shape.pp + 1):
                if unit.holds_llm and 0 < pp <= unit.layers:
                    yield replace(shape, dp=dp, pp=pp)
    for pp in (shape.pp - 1, shape.pp + 1):
        if 0 < pp <= unit.layers:
            dp = shape.dp if unit.holds_llm else max(1, shape.dp * shape.pp // pp)
            yield replace(shape, dp=dp, pp=pp)
    for group in _groups(unit):
        tp, cp = group.tp, group.cp
        other = replace(shape, tp=tp, cp=cp, cp_comm_type=group.cp_comm_type)
        if (tp, cp) in ((2 * shape.tp, shape.cp // 2), (shape.tp // 2, 2 * shape.cp)):
            yield other
        if (tp, cp) == (shape.tp, shape.cp) and other != shape:
            yield other
        one_changes = (tp == shape.tp) != (cp == shape.cp)
        width = other.tp_cp_size
        if one_changes and width in (2 * shape.tp_cp_size, shape.tp_cp_size // 2):
            yield other
            yield replace(other, dp=max(1, shape.dp * shape.tp_cp_size // width))
            if unit.holds_llm:
                pp = max(1, min(unit.layers, shape.pp * shape.tp_cp_size // width))
                yield replace(other, pp=pp)


def _groups(unit: Unit) -> list[ParallelShape]:
    """Return TP and CP degrees, with the CP groups' `cp_comm_type`, that may be best."""
    kinds = unit.kinds
    shapes = [shape_at(kinds, variant) for variant in range(len(kinds.tp))]
    return list(dict.fromkeys(replace(shape, recompute=False, ep=1) for shape in shapes))


def estimate_s(cluster: Cluster, units: list[Unit], layout: Layout) -> float:
    """Return the formula's time plus the longest reduction and optimizer step.

    If they overlap with passes, only their exposed part is added. Orders layouts for simulation.
    """
    profile, gpus_per_node = units[0].profile, cluster.gpus_per_node
    stages = stages_of(profile, layout)
    computed_s = layout_time(units, layout).total_ms / 1e3
    if layout.overlap:
        both = hidden(profile, layout, stages, gpus_per_node)
        return computed_s + sum(float(messages.mean_left_s.max()) for messages in both)
    return (
        computed_s
        + max(reduce_s(profile, layout, stage, gpus_per_node) for stage in stages)
        + max(optimizer_s(profile, layout, stage, gpus_per_node) for stage in stages)
    )
