"""Megatron's virtual pipeline stages (interleaved 1F1B), for layouts of one unit.

A device holds several chunks of layers instead of one stage (Narayanan et al. 2021, arXiv
2104.04473). The layers are cut into PP · v chunks, chunk c on device c mod PP, so that a slot
passes every device v times and the pipeline fills and drains in v times smaller steps: for equal
chunks the bubble is (PP - 1) / (v · n) of the ideal time, for v times as many messages. Slots come
in groups of PP: a device runs its first chunk for all slots of a group, then its second, and
backwards in the reverse order of chunks. Costs are those of chunks as stages (`costs.layout`),
between their actual devices; reductions and gathers overlap with the passes of their chunk, one
chunk's after the other's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.activations import at_worst, kept_share, working_share
from disttrain_cli.costs.layout import CostedStage, amount, optimizer_s, reduce_s, stages_of
from disttrain_cli.costs.memory import GIB, layout_memory
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.partition import most_of_a_slot, split
from disttrain_cli.planning.predict import batches
from disttrain_cli.planning.units import Cluster
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Baseline, Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.train import Ordering
from disttrain_cli.spec.trace import BACKWARD, FORWARD

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CHUNKS = (2, 4, 8)  # chunks per device that are tried
Operation = tuple[int, int, int]  # its index in `COMPUTE`, chunk of the model, slot


def interleaved_s(
    profile: Profile,
    layout: Layout,
    cluster: Cluster,
    draws: Draws,
    chunks: int,
    numbers: Iterable[int] | None = None,
    ordering: Ordering | None = None,
) -> float:
    """Return the mean step time of a layout of one unit with `chunks` chunks per device.

    Over these global batches drawn from the data, or over all, ordered by the policy of the draws
    or by another; with one chunk as `predict.simulated_s`. Inf if there is no such schedule or it
    does not fit: PP is 1, slots are not a multiple of it, chunks exceed layers, or slots in flight
    need more than a device's memory.
    """
    (unit,) = layout.units
    cut = layout if chunks == 1 else cut_into(profile, layout, chunks)
    if cut is None or not fits(profile, layout, cut, cluster.memory_gib):
        return math.inf
    stages, devices = stages_of(profile, cut), stages_of(profile, layout)
    placed = [_placed(stage, devices) for stage in stages]
    whole = [
        _merged(stages[device :: unit.pp], device_of) for device, device_of in enumerate(devices)
    ]
    node = cluster.gpus_per_node
    reduced_s = np.array([reduce_s(profile, layout, device, node) for device in whole])
    updated_s = max(optimizer_s(profile, layout, device, node) for device in whole)
    times_s: list[float] = []
    for number in batches(cluster) if numbers is None else numbers:
        pipeline = pipeline_of(profile, cut, placed, draws.loads(layout, number, ordering), node)
        pipeline = dataclasses.replace(pipeline, step_s=updated_s)
        times_s.append(step_s(pipeline, reduced_s))
    return float(np.mean(times_s))


def with_chunks(
    profile: Profile,
    cluster: Cluster,
    draws: Draws,
    layouts: Sequence[Layout],
    found: Baseline,
) -> Baseline:
    """Return a baseline, or one of these layouts with virtual stages, whichever is faster.

    Training does not run virtual stages. They are chosen by the policy of the draws, and timed by
    the better of that and the cluster's, on the batches of `found`.
    """
    times_s = {
        (interleaved_s(profile, layout, cluster, draws, chunks), number, chunks)
        for number, layout in enumerate(layouts)
        for chunks in CHUNKS
    }
    chosen_s, number, chunks = min(times_s)
    if not math.isfinite(chosen_s):
        return found
    best_s = min(
        interleaved_s(profile, layouts[number], cluster, draws, chunks, ordering=ordering)
        for ordering in (None, cluster.ordering)
    )
    if best_s >= found.iteration_s:
        return found
    layout, faster = layouts[number], found.iteration_s / best_s
    return Baseline(
        iteration_s=best_s,
        sequences_per_s=faster * found.sequences_per_s,
        mfu=faster * found.mfu,
        gpus_used=layout.gpus_used,
        layout=f"{layout.describe()}, M {layout.microbatch_size}, {chunks} chunks per device",
    )


def cut_into(profile: Profile, layout: Layout, chunks: int) -> Layout | None:
    """Return the layout with PP · chunks stages, the slowest of them minimised.

    None if there is no such schedule.
    """
    (unit,) = layout.units
    count = unit.pp * chunks
    if unit.pp == 1 or layout.microbatches % unit.pp or count > sum(unit.layers_per_stage):
        return None
    alone = unit.model_copy(update={"dp": 1})
    times: list[float] = []
    for stage in stages_of(profile, _staged(layout, alone, [1] * sum(unit.layers_per_stage))):
        (cost,) = stage.costs
        work = profile.modules[cost.module].work_per_sequence.scaled(layout.microbatch_size)
        parts = cost.forward_ms + cost.backward_ms
        times.append(float(amount(parts, np.array([[work]]))[0, 0]))
    nothing = np.zeros(len(times))
    layers = split(np.array(times), nothing, nothing, nothing, math.inf, 1, 0, count)
    assert layers is not None, "no memory is computed"
    return _staged(layout, unit, layers)


def _staged(layout: Layout, unit: UnitPlan, layers: list[int]) -> Layout:
    """Return the layout with these layer counts as the stages of its only unit."""
    gpus = unit.tp_cp_size * unit.dp * len(layers)
    update = {"pp": len(layers), "gpus": gpus, "layers_per_stage": layers}
    staged = {"units": [unit.model_copy(update=update)], "gpus_used": gpus}
    return layout.model_copy(update=staged)


def order(devices: int, chunks: int, slots: int, device: int) -> list[Operation]:
    """Return a device's operations: warm-up forwards, alternating passes, remaining backwards."""
    total = chunks * slots

    def operation(what: int, number: int) -> Operation:
        group, place = divmod(number, devices * chunks)
        turn, slot = divmod(place, devices)
        chunk = turn if what == FORWARD else chunks - 1 - turn
        return what, chunk * devices + device, group * devices + slot

    if chunks == 1:
        ahead = devices - 1 - device
        forwards = [(FORWARD, device, slot) for slot in range(slots)]
        backwards = [(BACKWARD, device, slot) for slot in range(slots)]
    else:
        ahead = 2 * (devices - 1 - device) + (chunks - 1) * devices
        forwards = [operation(FORWARD, number) for number in range(total)]
        backwards = [operation(BACKWARD, number) for number in range(total)]
    ahead = min(ahead, total)
    rest = forwards[ahead:]
    turns = [each for pair in zip(rest, backwards, strict=False) for each in pair]
    return [*forwards[:ahead], *turns, *backwards[len(rest) :]]


def step_s(pipeline: Pipeline, reduced_s: Floats) -> float:
    """Return the time of a step whose stages are chunks, the c-th on device c mod PP.

    Args:
        reduced_s: [PP] reduction of all chunks of each device, if not overlapped with passes.
    """
    slots, count, replicas = pipeline.forward_s.shape
    devices = len(reduced_s)
    program = _program(devices, count, slots)
    leads = _leads_s(pipeline, devices)
    # by index in the program; nothing waits for the last row
    times_s = np.stack([pipeline.forward_s, pipeline.backward_s]).transpose(0, 2, 1, 3)
    times_s = times_s.reshape(-1, replicas)[program.numbers]
    least_s = np.zeros_like(times_s)
    least_s[program.places[FORWARD, :, 0]] = leads
    hold_s = np.append(pipeline.transfer_s, 0.0)[program.cuts][:, None]
    ends_s, free = np.zeros((len(times_s) + 1, replicas)), np.zeros((devices, replicas))
    for begin, stop in pairwise(program.turns):
        turn, at = slice(begin, stop), program.devices[begin:stop]
        ready = ends_s.take(program.sources[turn], axis=0)
        ready += hold_s[turn]
        np.maximum(ready, least_s[turn], out=ready)
        np.maximum(ready, free.take(at, axis=0), out=ready)
        ready += times_s[turn]
        free[at] = ends_s[turn] = ready
    if pipeline.reducing is None:
        return float((free + reduced_s[:, None]).max()) + pipeline.closing_s
    left_s = pipeline.reducing.left_s(pipeline.backward_s[-1])
    sent_s = pipeline.reducing.until_s.max(axis=0)
    sent = np.zeros_like(free)  # end of each chunk's messages, queued after those of later chunks
    for chunk in reversed(range(count)):
        device, end_s = chunk % devices, ends_s[program.places[BACKWARD, chunk, -1]]
        sent[device] = np.maximum(sent[device] + sent_s[chunk], end_s + left_s[chunk])
    return float(sent.max()) + pipeline.closing_s


class _Program(NamedTuple):
    """All operations of a step in turns without dependencies inside a turn.

    Numbers are indices in a table [2, chunks of the model, slots].
    """

    numbers: Ints
    devices: Ints
    sources: Ints  # program index of each dependency; the number of all if there is none
    cuts: Ints  # cut crossed by the dependency; -1: none
    turns: list[int]  # first index of each turn, and the number of all
    places: Ints  # [2, chunks of the model, slots]


@lru_cache(maxsize=1)
def _program(devices: int, count: int, slots: int) -> _Program:
    orders = [order(devices, count // devices, slots, device) for device in range(devices)]
    turn_of: dict[Operation, int] = {}
    rows: list[tuple[int, int, int, int, int]] = []  # turn, number, device, number of source, cut
    done, last, every = [0] * devices, [-1] * devices, 2 * count * slots
    while len(rows) < every:
        before = len(rows)
        for device, mine in enumerate(orders):
            while done[device] < len(mine):
                operation = what, chunk, slot = mine[done[device]]
                source, cut = _source(what, chunk, slot, count)
                if source is not None and source not in turn_of:
                    break
                turn = 1 + max(last[device], -1 if source is None else turn_of[source])
                turn_of[operation] = last[device] = turn
                done[device] += 1
                number, awaited = (
                    every if each is None else (each[0] * count + each[1]) * slots + each[2]
                    for each in (operation, source)
                )
                rows.append((turn, number, device, awaited, -1 if cut is None else cut))
        assert len(rows) > before, "the schedule deadlocks"
    turns, numbers, of, sources, cuts = np.array(sorted(rows)).T
    places = np.empty(every + 1, np.int64)
    places[np.append(numbers, every)] = np.arange(every + 1)
    begins = np.flatnonzero(np.diff(turns, prepend=-1, append=turns[-1] + 1)).tolist()
    shape = 2, count, slots
    return _Program(numbers, of, places[sources], cuts, begins, places[:-1].reshape(shape))


def _source(what: int, chunk: int, slot: int, count: int) -> tuple[Operation | None, int | None]:
    """Return the operation that another depends on, and the cut between them."""
    if what == FORWARD:
        return (None, None) if chunk == 0 else ((FORWARD, chunk - 1, slot), chunk - 1)
    if chunk == count - 1:
        return (FORWARD, chunk, slot), None
    return (BACKWARD, chunk + 1, slot), chunk


def _leads_s(pipeline: Pipeline, devices: int) -> Floats:
    """Return [chunks of the model, R] the earliest start of each chunk's first forward.

    A device gathers one chunk's weights after the other's.
    """
    leads = pipeline.lead_s.copy()
    if pipeline.gathering is not None:
        sent_s = pipeline.gathering.until_s.max(axis=0)
        for chunk in range(devices, len(leads)):
            leads[chunk] += sent_s[chunk % devices : chunk : devices].sum()
    return leads


def _placed(stage: CostedStage, devices: Sequence[CostedStage]) -> CostedStage:
    """Return a chunk on its device's ranks; a tied weight's peer keeps the devices' distance."""
    device = devices[stage.number % len(devices)]
    twin = stage.twin
    if twin is not None:
        twin = stage.number + twin % len(devices) - device.number
    return dataclasses.replace(stage, ranks=device.ranks, twin=twin)


def _merged(chunks: Sequence[CostedStage], device: CostedStage) -> CostedStage:
    """Return a device's stage with the layers of all its chunks."""
    return dataclasses.replace(
        device,
        held=[layer for chunk in chunks for layer in chunk.held],
        numbers=[count for chunk in chunks for count in chunk.numbers],
    )


def fits(profile: Profile, layout: Layout, cut: Layout, limit_gib: float) -> bool:
    """Return True if every device has room for its chunks and their slots in flight."""
    (unit,) = layout.units
    chunks = cut.units[0].pp // unit.pp
    stages = layout_memory(profile, cut, limit_gib)
    if chunks == 1:
        return all(stage.peak_gib <= limit_gib for stage in stages)
    kept = at_worst(kept_share, profile, layout, unit)
    running = at_worst(working_share, profile, layout, unit, False, unit.tp_overlap)
    working = np.maximum(kept, running)
    ends = np.cumsum(cut.units[0].layers_per_stage)[:-1]
    kept_of, working_of = np.split(kept, ends), np.split(working, ends)
    keeps = [float(each.sum()) for each in kept_of]
    runs = [
        float(most_of_a_slot(*pair[:, None])[0])
        for pair in map(np.stack, zip(kept_of, working_of, strict=True))
    ]
    waste = profile.device.fragmentation
    for device in range(unit.pp):
        own = stages[device :: unit.pp]
        states = sum(one.weights_gib + one.gradients_gib + one.optimizer_gib for one in own)
        messages = max(one.messages_gib for one in own)
        held = most = 0.0
        for what, chunk, _ in order(unit.pp, chunks, layout.microbatches, device):
            held += keeps[chunk] * (what == FORWARD)
            most = max(most, held - keeps[chunk] + runs[chunk])
            held -= keeps[chunk] * (what == BACKWARD)
        moving = most / GIB + messages
        if states + moving * (1.0 + waste) + own[0].reserve_gib > limit_gib:
            return False
    return True
