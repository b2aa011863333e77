"""Recorded steps with other numbers of replicas, such as one more encoder GPU.

Every pass of a unit is done by fewer or more replicas, so its time changes with its share of the
work: the profile's constant part stays, the rest scales with the work of the busiest replica; an
image cannot be cut (`planning.objective.busiest_load`). What else the profile predicts to change
(transfers, reduction, optimizer) changes by as much as predicted. All delays stay as recorded: slow
ranks, waits for data, uneven work.

The LLM's replicas share the sequences of a step evenly, so with more of them a step has fewer
slots, or smaller microbatches. Fewer slots are replayed on the first slots of the recorded steps,
each taking the mean of all.

Not modelled: data are more uneven over more replicas than over few, and an ordering for the new
layout may level them better or worse than the recorded one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from disttrain_cli.analysis.graph import Delays, Graph
from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.graph import expected_transfers, update_s
from disttrain_cli.analysis.job.recorded import recorded_loads
from disttrain_cli.analysis.walk import Floats, Ints, walk_of
from disttrain_cli.costs.layout import CostedStage, stages_of
from disttrain_cli.costs.memoised import memoised
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.prediction import StageMemory
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import Job


@dataclass(frozen=True)
class Record:
    """Recorded steps of a job on separate devices, with its stages and work."""

    graph: Graph
    job: Job
    stages: list[CostedStage]
    # by unit [slots, steps]: sequences (of the LLM) or images of all replicas together
    items: dict[str, Floats]


def record_of(database: Database, graph: Graph) -> Record | None:
    """Return the record on which other replicas can be replayed.

    It is None if ranks share cores, or a profile or ranks are missing.
    """
    job = database.job
    if job is None or not database.stages or shares_cores(job):
        return None
    replicas = {
        (unit, int(replica)) for unit, replica in zip(graph.unit, graph.replica, strict=True)
    }
    if len(replicas) < sum(unit.dp for unit in job.layout.units):
        return None
    steps, loads = recorded_loads(database)
    kept = np.isin(steps, graph.steps)
    return Record(
        graph,
        job,
        database.stages,
        {
            unit.name: loads[_counted(job, unit)][kept, :, :, 0].sum(axis=2).T
            for unit in job.layout.units
        },
    )


def _counted(job: Job, unit: UnitPlan) -> str:
    """Return the module of a unit whose items its replicas share."""
    llm = job.profile.inputs.llm
    return llm if llm in unit.modules else unit.modules[0]


def one_more(job: Job, name: str) -> Layout | None:
    """Return the layout with one replica more of a unit.

    The LLM gets as many more as are needed to divide the global batch.
    """
    llm = name == job.layout.unit_of(job.profile.inputs.llm).name
    dp = next(unit.dp for unit in job.layout.units if unit.name == name)
    batch = job.layout.global_batch_size
    wanted = (
        next((more for more in range(dp + 1, batch + 1) if batch % more == 0), None)
        if llm
        else dp + 1
    )
    return None if wanted is None else with_replicas(job, {name: wanted})


def moved(job: Job, giver: str, taker: str) -> Layout | None:
    """Return the layout with one replica more of a unit, on devices taken from another one.

    It is None if the other unit has too few.
    """
    more = one_more(job, taker)
    unit = next(unit for unit in job.layout.units if unit.name == giver)
    if more is None:
        return None
    left = unit.dp - -(-(more.gpus_used - job.layout.gpus_used) // (unit.tp_cp_size * unit.pp))
    if job.profile.inputs.llm in unit.modules:
        left = next(
            (fewer for fewer in range(left, 0, -1) if job.layout.global_batch_size % fewer == 0), 0
        )
    taken = next(unit.dp for unit in more.units if unit.name == taker)
    return with_replicas(job, {giver: left, taker: taken}) if left > 0 else None


def with_replicas(job: Job, replicas: dict[str, int]) -> Layout | None:
    """Return the layout with other replicas of some units; None if batch or memory do not allow it.

    It has as many slots as the recorded one, or the most below that which divide the global batch
    (of several stages on a rank, a multiple of PP).
    No stage may need more memory than there is, or, if the recorded job did too by the profile,
    more than that.
    """
    layout, llm = job.layout, job.profile.inputs.llm
    units = []
    for unit in layout.units:
        dp = replicas.get(unit.name, unit.dp)
        ranks = unit.tp_cp_size * dp
        ep = math.gcd(unit.ep, ranks)
        changes = {"ep": ep, "ep_overlap": unit.ep_overlap and ep > 1}
        units.append(unit.model_copy(update=changes | {"dp": dp, "gpus": ranks * unit.pp}))
    trunk = units[layout.index_of(llm)]
    dp, fewer = trunk.dp, trunk.pp if trunk.chunks > 1 else 1
    possible = range(layout.microbatches, 0, -fewer)
    slots = next((n for n in possible if layout.global_batch_size % (dp * n) == 0), 0)
    if not slots:
        return None
    changed = layout.model_copy(
        update={
            "units": units,
            "gpus_used": sum(unit.gpus for unit in units),
            "microbatches": slots,
            "microbatch_size": layout.global_batch_size // (dp * slots),
        }
    )
    now, then = (
        _memory(job.profile, choice.model_dump_json(), memory_gib(job))
        for choice in (layout, changed)
    )
    fits = all(
        there.peak_gib <= max(here.peak_gib, here.limit_gib)
        for here, there in zip(now, then, strict=True)
    )
    return changed if fits else None


@memoised
def _memory(profile: Profile, layout: str, limit_gib: float) -> list[StageMemory]:
    """Return `layout_memory` of a layout in JSON: an analysis tries each several times."""
    return layout_memory(profile, Layout.model_validate_json(layout), limit_gib)


def memory_gib(job: Job) -> float:
    """Return the memory of a device that the plan was made for."""
    return min(
        (stage.limit_gib for stage in job.predicted.memory), default=job.profile.device.memory_gib
    )


def seconds_with(record: Record, layout: Layout) -> Floats:
    """Return the seconds of every step [steps] with the replicas of another layout.

    Everything else is as recorded.
    """
    graph, job, recorded = record.graph, record.job, record.graph.recorded
    stages = stages_of(job.profile, layout)
    then = expected_transfers(job, layout, stages, graph.operation, graph.depth)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(
            (graph.expected > 0) & np.isfinite(graph.expected), then / graph.expected, 1.0
        )
    more_s = update_s(job, layout, stages) - update_s(job, job.layout, record.stages)
    delays = replace(
        recorded,
        compute=recorded.compute * _times(record, layout),
        transfer=recorded.transfer * ratio[:, None],
        update=np.maximum(0.0, recorded.update + more_s),
    )
    if layout.microbatches < job.layout.microbatches:
        graph, delays = _first_slots(graph, delays, layout.microbatches)
    return graph.replay(delays)


def _times(record: Record, layout: Layout) -> Floats:
    """Return the factor by which every pass takes longer, [passes, steps]."""
    graph, job = record.graph, record.job
    fixed_ms = np.array(
        [
            [
                sum(float(times[0]) for times in part)
                for part in zip(*(cost.parts_ms for cost in stage.costs), strict=True)
            ]
            for stage in record.stages
        ]
    )
    fixed = np.clip(fixed_ms[graph.depth, graph.operation][:, None] / 1e3, 0.0, graph.predicted)
    share, names = np.ones_like(graph.predicted), np.asarray(graph.unit)
    merged = job.layout.microbatches / layout.microbatches
    for before, after in zip(job.layout.units, layout.units, strict=True):
        mask = names == before.name
        items = record.items[before.name][graph.slot[mask]]
        busiest = _busiest(items, dp=before.dp)
        with np.errstate(divide="ignore", invalid="ignore"):
            share[mask] = np.where(
                busiest > 0,
                _busiest(merged * items, dp=after.dp) / busiest,
                merged * before.dp / after.dp,
            )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(
            graph.predicted > 0,
            (fixed + (graph.predicted - fixed) * share) / graph.predicted,
            share,
        )


def _busiest(items: Floats, *, dp: int) -> Floats:
    """Return the items of the busiest of `dp` replicas.

    If only the mean is known, every remainder is assumed equally likely.
    """
    known = np.abs(items - np.round(items)) < 1e-6
    return np.where(known, np.ceil(np.round(items) / dp), items / dp + (dp - 1) / (2 * dp))


def _first_slots(graph: Graph, delays: Delays, slots: int) -> tuple[Graph, Delays]:
    """Return the steps with their first slots only, whose passes take the mean of all slots.

    A 1F1B schedule without its last slots is the 1F1B schedule of the others.
    """
    kept = np.flatnonzero(graph.slot < slots)
    number = np.full(len(graph.slot), -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    near: list[int] = []  # by pass, the last remaining one on its rank up to it, by new index
    for node, before in enumerate(graph.walk.previous.tolist()):
        near.append(int(number[node]) if number[node] >= 0 else near[before] if before >= 0 else -1)
    before = graph.walk.previous[kept]
    previous: Ints = np.where(before >= 0, np.array([*near, -1])[before], -1)
    walk = walk_of(
        previous,
        [number[graph.walk.sources[node]] for node in kept],
        graph.walk.feeds and [graph.walk.feeds[node] for node in kept],
    )
    assert walk is not None, "a part of a graph without circles has none"
    nodes = kept[walk.node]
    usual = _mean_over_slots(graph, delays.compute, graph.slot >= 0)[nodes]
    short = _mean_over_slots(graph, delays.compute, graph.slot < slots)[nodes]
    compute = delays.compute[nodes] * np.divide(
        usual, short, out=np.ones_like(short), where=short > 0
    )
    shorter = replace(
        graph,
        walk=walk,
        rank=graph.rank[nodes],
        slot=graph.slot[nodes],
        operation=graph.operation[nodes],
        unit=[graph.unit[node] for node in nodes],
        stage=graph.stage[nodes],
        replica=graph.replica[nodes],
        depth=graph.depth[nodes],
        predicted=graph.predicted[nodes],
        expected=graph.expected[nodes],
        unheard=graph.unheard[nodes],
        late=graph.late[nodes],
        recorded=_at(graph.recorded, nodes),
    )
    return shorter, replace(_at(delays, nodes), compute=compute)


def _at(delays: Delays, nodes: Ints) -> Delays:
    return Delays(
        delays.compute[nodes],
        delays.transfer[nodes],
        delays.handover[nodes],
        delays.load[nodes],
        delays.gap[nodes],
        delays.update,
    )


def _mean_over_slots(graph: Graph, values: Floats, pick: np.ndarray) -> Floats:
    """Return, by pass and step, the mean over the picked passes of its rank and operation."""
    groups = graph.groups("rank", "operation")
    sums = np.zeros((groups.max() + 1, values.shape[1]))
    np.add.at(sums, groups[pick], values[pick])
    return (sums / np.bincount(groups[pick], minlength=len(sums))[:, None])[groups]
