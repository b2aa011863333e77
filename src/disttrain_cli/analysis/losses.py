"""How much of a step each cause costs: successive replays as the delays return, in a fixed order.

The ideal: every pass takes its unit's mean time for its direction, the units share the GPUs so that all are
equally busy, transfers take the median, nothing waits for data or the host. Then return, one after another:
`unit` the real share of the GPUs · `intra_microbatch` uneven work over the replicas of a slot ·
`inter_microbatch` uneven work over the slots · `stage` uneven stages of a unit · `worker` ranks that are slow
for their work · `communication` real transfers, sends and the update at the end · `data` waits for data ·
`host` moments in which neither work nor rank explains the time. What is then missing from the recorded time is
`unexplained`, so the parts sum to (recorded − ideal). Work is what the profile predicts for the recorded sizes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from disttrain_cli.analysis.replay import Delays, Floats, Graph, Ints, group_mean

CAUSES = (
    "unit",
    "intra_microbatch",
    "inter_microbatch",
    "stage",
    "worker",
    "communication",
    "data",
    "host",
    "unexplained",
)


@dataclass(frozen=True)
class Losses:
    """Seconds per replayed step."""

    ideal: Floats  # [steps]
    measured: Floats  # [steps]
    lost: dict[str, Floats]  # cause → [steps]
    busy: dict[str, float]  # unit → compute seconds of one of its ranks per step
    stage_factor: dict[tuple[str, int], float]  # (unit, stage) → its time over the unit's mean
    rank_factor: dict[int, float]  # rank → its time over what its work and stage explain
    replica_work: dict[
        tuple[str, int], float
    ]  # (unit, replica) → work of its heaviest slot over the slot's mean
    slot_work: dict[tuple[str, int], float]  # (unit, slot) → work over the mean slot
    data_wait: dict[str, float]  # unit → seconds per step that one of its ranks waits for data
    transfer: dict[str, float]  # unit → seconds per step that one of its ranks receives and hands over tensors
    gap: dict[int, float]  # rank → seconds per step that no row covers


def split_losses(graph: Graph) -> Losses:
    """Replay the recorded steps with the delays returning one by one."""
    recorded, still = graph.recorded, graph.without_delays()
    directions = graph.groups("unit", "backward")
    mean = group_mean(recorded.compute, directions)
    work, slot_work = _work(graph, directions)
    with np.errstate(divide="ignore", invalid="ignore"):
        intra = np.where(slot_work > 0, work / slot_work, 1.0)
        explained = mean * work
        stage = _ratio(group_mean(recorded.compute, graph.groups("unit", "backward", "stage")), mean)
        rank_groups = graph.groups("rank", "backward")
        staged = explained * stage
        rank = _ratio(group_mean(recorded.compute, rank_groups), group_mean(staged, rank_groups))

    unit_names = np.asarray(graph.unit)
    ranks = {unit: len(np.unique(graph.rank[unit_names == unit])) for unit in dict.fromkeys(graph.unit)}
    busy = {
        unit: float(recorded.compute[unit_names == unit].sum()) / count / len(graph.steps)
        for unit, count in ranks.items()
    }
    devices = {unit: count * graph.devices[unit] for unit, count in ranks.items()}
    level = sum(busy[unit] * count for unit, count in devices.items()) / sum(devices.values())
    share = np.array([level / busy[unit] if busy[unit] else 1.0 for unit in graph.unit])[:, None]

    computes = [mean * share, mean, mean * intra, explained, staged, staged * rank]
    times = [graph.replay(replace(still, compute=compute)) for compute in computes]
    times[0] = np.minimum(times[0], times[1])  # levelling can lengthen the filling of a pipeline with few slots
    delays: Delays = replace(
        still,
        compute=computes[-1],
        transfer=recorded.transfer,
        handover=recorded.handover,
        update=recorded.update,
    )
    for change in ({}, {"load": recorded.load}, {"gap": recorded.gap, "compute": recorded.compute}):
        delays = replace(delays, **change)
        times.append(graph.replay(delays))
    times.append(graph.window)
    lost = {cause: after - before for cause, before, after in zip(CAUSES, times[:-1], times[1:], strict=True)}
    members = {unit: unit_names == unit for unit in ranks}

    def per_rank(values: Floats, unit: str) -> float:
        return float(values[members[unit]].sum()) / ranks[unit] / len(graph.steps)

    def factor(pick: Any, expected: Floats) -> float:
        return float(recorded.compute[pick].sum() / max(1e-12, expected[pick].sum()))

    def largest(values: Floats, numbers: Ints, statistic: Any) -> dict[tuple[str, int], float]:
        return {
            (unit, int(number)): float(statistic(values[pick & (numbers == number)]))
            for unit, pick in members.items()
            for number in np.unique(numbers[pick])
        }

    return Losses(
        ideal=times[0],
        measured=graph.window,
        lost=lost,
        busy=busy,
        stage_factor={
            (unit, int(s)): factor(pick & (graph.stage == s), mean)
            for unit, pick in members.items()
            for s in np.unique(graph.stage[pick])
        },
        rank_factor={int(r): factor(graph.rank == r, staged) for r in np.unique(graph.rank)},
        replica_work=largest(intra, graph.replica, np.max),
        slot_work=largest(slot_work, graph.slot, np.mean),
        data_wait={unit: per_rank(recorded.load, unit) for unit in ranks},
        transfer={unit: per_rank(recorded.transfer + recorded.handover, unit) for unit in ranks},
        gap={
            int(r): float(recorded.gap[graph.rank == r].sum()) / len(graph.steps) for r in np.unique(graph.rank)
        },
    )


def _work(graph: Graph, directions: Ints) -> tuple[Floats, Floats]:
    """Work of each pass's replica, and of its slot, relative to the mean of the unit; 1 where nothing is predicted."""
    by_replica = _sum(graph.predicted, graph.groups("unit", "backward", "slot", "replica"))
    by_slot = _mean_rows(by_replica, graph.groups("unit", "backward", "slot"))
    mean = group_mean(by_replica, directions)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (np.where(mean > 0, by_replica / mean, 1.0), np.where(mean > 0, by_slot / mean, 1.0))


def _sum(values: Floats, groups: Ints) -> Floats:
    """Sum over each group within a step, given back to every member."""
    totals = np.zeros((groups.max() + 1, values.shape[1]))
    np.add.at(totals, groups, values)
    return totals[groups]


def _mean_rows(values: Floats, groups: Ints) -> Floats:
    return _sum(values, groups) / np.bincount(groups)[groups][:, None]


def _ratio(above: Floats, below: Floats) -> Floats:
    return np.where(below > 0, above / below, 1.0)
