"""Split backward: the delay of weight gradients (W) on each stage of a layout.

See zero bubble, Qi et al. 2024, arXiv 2401.10241. Input gradients (B) go to the previous stage at
once; weight gradients may be deferred by some slots, which shortens the first slots' backward path
through the pipeline and fills its end. The delay is chosen for every stage in the simulator, within
the available memory: first among delays that grow with the number of preceding stages, as later
stages have gaps later, then one stage at a time. Stages without memory for it, or without a gain,
compute both parts together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.units import Cluster
from disttrain_cli.schedule.one_f_one_b import inputs
from disttrain_cli.simulation.makespan import Delayed, steps_s
from disttrain_cli.simulation.step import pipelines_of
from disttrain_cli.simulation.timeline import Floats, Pipeline
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import BACKWARD, FORWARD, WEIGHTS

Delay = int | None
LEAST_GAIN = 1e-3  # of a step, for which backwards are split
LEAST_STEP = 1e-4  # of a step, for which the search continues
TRIED = 16  # neighbours of delays that are simulated with all replicas
SLOTS_PER_STAGE = 8  # simulated in the search, at most: the middle slots repeat
MOST_PASSES = 1 << 15  # slots of all stages that are simulated in the search, if that is enough
AT_ONCE = 1 << 20  # passes of all ranks in steps that are simulated together
MOST_BLOCKS = 32  # of neighbouring stages whose delays are changed together
SLOPES = (0.0, 0.5, 1.0, 1.5, 2.0)  # slots per preceding stage, initial values of the search


def timed(
    profile: Profile,
    cluster: Cluster,
    layout: Layout,
    numbers: Sequence[int] = (0,),
    draws: Draws | None = None,
    thorough: bool = False,
) -> tuple[Layout, float]:
    """Return the layout with the best delays, and the mean time of its steps over some batches.

    Without split backwards in the cluster, or with several stages on a rank, the layout is
    unchanged.

    Args:
        layout: with unsplit backwards, which it keeps if the split gains less than `LEAST_GAIN`.
        numbers: indices of the batches.
        draws: the batches; None = new ones.
        thorough: continue the search with all replicas, at ten times the time; use several batches,
            as delays that are best for one small batch may be bad for others. Not for steps of more
            than `MOST_PASSES`.
    """
    draws = draws or Draws(profile, cluster)
    alike = draws.alike(layout), cluster.splits, tuple(numbers), thorough
    if alike not in draws.timed:
        draws.timed[alike] = _timed(profile, cluster, layout, numbers, draws, thorough)
    found, found_s = draws.timed[alike]
    return found.model_copy(update={"strategy": layout.strategy}), found_s


def _timed(
    profile: Profile,
    cluster: Cluster,
    layout: Layout,
    numbers: Sequence[int],
    draws: Draws,
    thorough: bool,
) -> tuple[Layout, float]:
    loads = [draws.loads(layout, number) for number in numbers]

    def pipelines(layout: Layout, loads: Sequence[dict[str, Floats]]) -> list[Pipeline]:
        stages = stages_of(profile, layout)
        return pipelines_of(profile, layout, stages, loads, cluster.gpus_per_node)

    def mean_s(layout: Layout) -> float:
        passes = layout.microbatches * sum(unit.pp * unit.dp for unit in layout.units)
        size = max(1, AT_ONCE // passes)
        parts = [loads[begin : begin + size] for begin in range(0, len(loads), size)]
        return float(np.concatenate([steps_s(pipelines(layout, part)) for part in parts]).mean())

    whole_s = mean_s(layout)
    splits = cluster.splits and all(unit.chunks == 1 for unit in layout.units)
    most = most_delays(profile, layout, cluster.memory_gib) if splits else [None]
    if all(delay is None for delay in most):
        return layout, whole_s
    unsplit = with_delays(layout, [None if m is None else 0 for m in most])
    split_steps = pipelines(unsplit, loads)
    delays, split_s = _best(split_steps, [m or 0 for m in most], thorough)
    if split_s > whole_s * (1 - LEAST_GAIN):
        return layout, whole_s
    waits = inputs(split_steps[0].cuts)
    chosen = [
        # nothing waits for the gradients of a first stage's inputs
        None if m is None or (not delay and (FORWARD, stage) not in waits) else delay
        for stage, (m, delay) in enumerate(zip(most, delays, strict=True))
    ]
    split = with_delays(layout, chosen)
    # a stage whose backward is not split after all overlaps its reductions differently
    return split, split_s if chosen == delays else mean_s(split)


def most_delays(profile: Profile, layout: Layout, limit_gib: float) -> list[Delay]:
    """Return by stage the most slots by which weight gradients can be deferred within memory.

    None if a stage has no weight gradients, or no room.
    """
    count = sum(unit.pp for unit in layout.units)
    # peaks grow by the same bytes for every slot
    at_once, later = (
        layout_memory(profile, with_delays(layout, [delay] * count), limit_gib) for delay in (0, 1)
    )
    stages = stages_of(profile, with_delays(layout, [0] * count))
    most: list[Delay] = []
    for stage, first, second in zip(stages, at_once, later, strict=True):
        room_gib, slot_gib = limit_gib - first.peak_gib, second.peak_gib - first.peak_gib
        if room_gib < 0 or not any(cost.weight_ms.any() for cost in stage.costs):
            most.append(None)
        else:
            slots = room_gib / slot_gib if slot_gib > 0 else np.inf
            most.append(int(min(layout.microbatches - 1, slots)))
    return most


def with_delays(layout: Layout, delays: Sequence[Delay]) -> Layout:
    """Return the layout with these delays by stage; units that recompute activations have none."""
    units, left = [], iter(delays)
    for unit in layout.units:
        mine = [next(left) for _ in range(unit.pp)]
        none = unit.checkpointing or all(delay is None for delay in mine)
        units.append(unit.model_copy(update={"weight_delay": None if none else mine}))
    return layout.model_copy(update={"units": units})


def whole(layout: Layout) -> Layout:
    """Return the layout with unsplit backwards."""
    return with_delays(layout, [None] * sum(unit.pp for unit in layout.units))


def _best(pipelines: list[Pipeline], most: list[int], thorough: bool) -> tuple[list[int], float]:
    """Return the best delays found by stage, none above `most`, and the mean time of the steps.

    The search uses one replica per stage and the first and last slots, which takes a hundredth of
    the time: with mean durations, and with the longest, as units wait for all replicas of others.
    """
    depth = pipelines[0].to_end.max() - pipelines[0].to_end
    starts = np.unique(
        [
            np.minimum(most, (slope * depth).astype(int) + more)
            for slope in SLOPES
            for more in (0, 1)
        ],
        axis=0,
    )
    present = np.broadcast_to(pipelines[0].present, pipelines[0].forward_s.shape)
    found: list[list[int]] = []
    for summary in (
        lambda part_s: np.mean(part_s, axis=2, where=present),
        lambda part_s: np.max(part_s, axis=2, where=present, initial=0.0),
    ):
        ones = [Delayed(_of_one(pipeline, summary)) for pipeline in pipelines]
        times_s = _means_s(ones, starts)
        place = np.lexsort((starts.sum(axis=1), times_s))[0]
        found.append(_climbed(ones, most, float(times_s[place]), starts[place].tolist())[1])
    every = list(map(Delayed, pipelines))
    times_s = _means_s(every, np.array(found))
    best_s, delays = min(zip(times_s.tolist(), found, strict=True))
    slots, stages, _ = pipelines[0].forward_s.shape
    if thorough and slots * stages <= MOST_PASSES:
        # only for neighbours that are fast with the longest durations, the last of `ones`
        best_s, delays = _climbed(every, most, best_s, delays, ones)
    return delays, best_s


def _means_s(steps: list[Delayed], delays: NDArray[np.int64]) -> Floats:
    """Return [K] mean times of the steps for each of some delays [K, S]."""
    return np.mean([step.times_s(delays) for step in steps], axis=0)


def _of_one(pipeline: Pipeline, summary: Callable[[Floats], Floats]) -> Pipeline:
    """Return the pipeline with one replica per stage and only the first and last of many slots.

    Its times are a summary [n, S] of all replicas' times.
    """
    slots, stages, _ = pipeline.forward_s.shape
    ends = min(slots, SLOTS_PER_STAGE * stages, max(2 * stages, MOST_PASSES // stages))
    kept = np.r_[: ends // 2, slots - (ends - ends // 2) : slots]
    times_s = [summary(part_s)[kept, :, None] for part_s in pipeline.parts_s]
    return replace(
        pipeline,
        replicas=np.ones_like(pipeline.replicas),
        forward_s=times_s[FORWARD],
        backward_s=times_s[BACKWARD],
        weight_s=times_s[WEIGHTS],
    )


def _climbed(
    steps: list[Delayed],
    most: list[int],
    best_s: float,
    delays: list[int],
    quick: list[Delayed] | None = None,
) -> tuple[float, list[int]]:
    """Return better delays, changing one block of stages or all stages at a time.

    Among equal times the smallest sum wins.

    Args:
        quick: cheaper steps, by which the `TRIED` fastest neighbours are preselected; None = all
            are tried.
    """
    while True:
        tried = np.unique([*_changed(delays, most)], axis=0) if any(most) else np.array([delays])
        if quick is not None:
            order = np.lexsort((tried.sum(axis=1), _means_s(quick, tried)))
            tried = tried[order[:TRIED]]
        times_s = _means_s(steps, tried)
        place = np.lexsort((tried.sum(axis=1), times_s))[0]
        if times_s[place] > best_s * (1 - LEAST_STEP):
            return best_s, delays
        best_s, delays = float(times_s[place]), tried[place].tolist()


def _changed(delays: list[int], most: list[int]) -> Iterator[list[int]]:
    """Yield neighbours of some delays within `most`."""
    now, tops = np.array(delays), np.array(most)
    for block in np.array_split(np.arange(len(now)), min(len(now), MOST_BLOCKS)):
        for other in (0 * now, now - 1, now + 1, now + 2, 2 * now, tops):
            changed = now.copy()
            changed[block] = np.clip(other, 0, tops)[block]
            yield changed.tolist()
    for more in (-1, 1):
        yield np.clip(now + more, 0, tops).tolist()
