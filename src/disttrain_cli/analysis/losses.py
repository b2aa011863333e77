"""Seconds of a step that each cause costs: replays in which the delays return in a fixed order.

In the ideal step every pass takes its unit's mean time for its operation (slow ranks left out), the
units share the GPUs so that all are equally busy, transfers take the median (or what the profile
predicts, if less), and nothing waits for data or the host. Then the delays return one after
another:

    unit              the real partition of the GPUs
    intra_microbatch  uneven work over the replicas of a slot
    inter_microbatch  uneven work over the slots
    stage             uneven stages of a unit
    worker            ranks that are slow for their work
    communication     real transfers, sends and the update at the end
    data              waits for data
    host              time that neither work nor rank explains

The remaining difference to the recorded time is `unexplained`, which includes waits for ranks
without a trace, so the parts sum to (recorded − ideal). Work is what the profile predicts for the
recorded sizes.

If ranks share cores and keep them busy, a slow message is a rank that waits for a core: transfer
time above the usual then counts as `host`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from disttrain_cli.analysis.graph import Delays, Graph, Passes, group_mean
from disttrain_cli.analysis.result.verdicts import StepLosses, Stragglers
from disttrain_cli.analysis.walk import Floats, Ints
from disttrain_cli.spec.trace import FORWARD

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

#: Cores are oversubscribed if the passes of all ranks need this share of them: a ready rank may
#: have to wait.
CROWDED = 0.5
#: A rank that deviates by this share in a step is intermittently slow; with fewer passes in a step
#: the deviation is ignored.
AT_TIMES, FEWEST_PASSES = 0.03, 4


@dataclass(frozen=True)
class Losses:
    """Losses of the replayed steps, in seconds, and the factors that explain them."""

    ideal: Floats  # [steps]
    measured: Floats  # [steps]
    lost: dict[str, Floats]  # cause → [steps]
    busy: dict[str, float]  # unit → compute seconds per step of one of its typical ranks
    stage_factor: dict[tuple[str, int], float]  # (unit, stage) → its time over the unit's mean
    rank_factor: dict[int, float]  # rank → its time over what its work and stage explain
    # (unit, replica) → work of its heaviest slot over the slot's mean
    replica_work: dict[tuple[str, int], float]
    # (unit, replica) → share of the slots in which its work is largest
    heaviest: dict[tuple[str, int], float]
    slot_work: dict[tuple[str, int], float]  # (unit, slot) → work over the mean slot
    # (unit, replica) → longest wait for data of any of its ranks, seconds per step
    data_wait: dict[tuple[str, int], float]
    # (unit, stage) → seconds of a step lost in transfers over the cut after it, summed over ranks
    links: dict[tuple[str, int], float]
    gap: dict[int, float]  # rank → seconds per step that no row covers
    steps: Ints  # [steps] numbers of the steps
    # compute of all ranks ÷ time of the cores that they share; 0 if every rank has a device
    crowded: float


@dataclass(frozen=True)
class Explained:
    """Times of passes as their differences return one by one, [passes, steps], and the factors."""

    mean: Floats  # mean of the unit and operation, slow ranks left out
    uneven: Floats  # and the work of the replicas
    worked: Floats  # and the work of the slots
    staged: Floats  # and the factors of the stages
    # and the factors of the ranks (in single steps, if stages or ranks deviate in them)
    ranked: Floats
    intra: Floats  # work of a pass's replica over its slot's mean
    slot: Floats  # work of a slot over the mean


def explain(passes: Passes, compute: Floats, predicted: Floats) -> Explained:
    """Attribute the times of passes to their unit, work, stage and rank.

    Args:
        passes: passes of a step.
        compute: seconds of every pass, [passes, steps].
        predicted: work of every pass in any measure, the same shape; 0 if unknown.
    """
    operations = passes.groups("unit", "operation")
    mean = group_mean(compute, operations)
    work, slot = _work(passes, predicted, operations)
    with np.errstate(divide="ignore", invalid="ignore"):
        intra = np.where(slot > 0, work / slot, 1.0)
        worked = mean * work
        ranks = passes.groups("rank", "depth", "operation")
        compute_ms = group_mean(compute, ranks)
        staged = worked * _shared(ratio(compute_ms, group_mean(worked, ranks)), passes)
        ranked = staged * ratio(compute_ms, group_mean(staged, ranks))
        stages_at, ranks_at = _at_times(
            ratio(compute, ranked), ranks, passes.groups("unit", "operation", "depth"), operations
        )
        staged, ranked = staged * stages_at, ranked * stages_at * ranks_at
        usual = ratio(group_mean(staged, operations), group_mean(worked, operations))
    return Explained(
        mean * usual, mean * intra * usual, worked * usual, staged, ranked, intra, slot
    )


def split_losses(graph: Graph, why: Explained | None = None) -> Losses:
    """Replay the recorded steps with the delays returning one by one.

    Args:
        graph: passes of a step with their recorded times.
        why: `explain` of the recorded passes, if it is computed already.
    """
    recorded, undelayed = graph.recorded, graph.without_delays()
    why = why or explain(graph, recorded.compute, graph.predicted)

    busy = per_rank(graph, why.staged)
    ranks = {unit: len(np.unique(graph.rank[np.asarray(graph.unit) == unit])) for unit in busy}
    devices = {unit: count * graph.devices[unit] for unit, count in ranks.items()}
    level = sum(busy[unit] * count for unit, count in devices.items()) / sum(devices.values())
    share = np.array([level / busy[unit] if busy[unit] else 1.0 for unit in graph.unit])[:, None]

    computes = [why.mean * share, why.mean, why.uneven, why.worked, why.staged, why.ranked]
    times = [graph.replay(replace(undelayed, compute=compute)) for compute in computes]
    # equally busy units can lengthen the warm-up of a pipeline with few slots
    times[0] = np.minimum(times[0], times[1])
    usual = undelayed.transfer
    heard = np.where(
        (graph.unheard < 0)[:, None], recorded.transfer, np.minimum(recorded.transfer, usual)
    )
    moved = np.minimum(recorded.transfer, usual) if graph.crowded > CROWDED else heard
    delays: Delays = replace(
        undelayed,
        compute=computes[-1],
        transfer=moved,
        handover=recorded.handover,
        update=recorded.update,
    )
    for change in (
        {},
        {"load": recorded.load},
        {"gap": recorded.gap, "compute": recorded.compute, "transfer": heard},
    ):
        delays = replace(delays, **change)
        times.append(graph.replay(delays))
    times.append(graph.window)
    return Losses(
        ideal=times[0],
        measured=graph.window,
        lost=successive(times),
        busy=busy,
        data_wait=_by_replica(graph, recorded.load),
        links=graph.links((heard - usual).clip(0.0)),
        gap={
            int(r): float((recorded.gap - graph.late)[graph.rank == r].sum()) / len(graph.steps)
            for r in np.unique(graph.rank)
        },
        crowded=graph.crowded,
        steps=graph.steps,
        **factors(graph, recorded.compute, why),
    )


def stragglers_of(losses: Losses, not_recorded: Sequence[str] = ()) -> Stragglers:
    """Convert losses to an analysis' rows: means, and step by step.

    Args:
        losses: seconds per replayed step.
        not_recorded: causes that the traces contain nothing about.
    """
    lost = {cause: seconds.tolist() for cause, seconds in losses.lost.items()}
    ideal_s, measured_s = float(losses.ideal.mean()), float(losses.measured.mean())
    return Stragglers(
        slowdown=measured_s / ideal_s,
        ideal_s=ideal_s,
        not_recorded=list(not_recorded),
        lost_s={cause: round(float(seconds.mean()), 12) for cause, seconds in losses.lost.items()},
        by_step=[
            StepLosses(
                step=int(step),
                ideal_s=float(losses.ideal[index]),
                step_s=float(losses.measured[index]),
                lost_s={cause: seconds[index] for cause, seconds in lost.items()},
            )
            for index, step in enumerate(losses.steps)
        ],
    )


def successive(times: list[Floats]) -> dict[str, Floats]:
    """Return the seconds of each cause, from replays in the order of `CAUSES`.

    Args:
        times: the ideal steps, then one replay per cause; the last are the recorded steps.
    """
    return {
        cause: after - before
        for cause, before, after in zip(CAUSES, times[:-1], times[1:], strict=True)
    }


def per_rank(passes: Passes, values: Floats) -> dict[str, float]:
    """Return, by unit, the mean per rank and step of the sum over passes."""
    units = np.asarray(passes.unit)
    return {
        unit: (
            float(values[units == unit].sum())
            / len(np.unique(passes.rank[units == unit]))
            / values.shape[1]
        )
        for unit in dict.fromkeys(passes.unit)
    }


def _by_replica(graph: Graph, values: Floats) -> dict[tuple[str, int], float]:
    """Return, by replica, the seconds per step of its rank that has most."""
    ranks, first = np.unique(graph.rank, return_index=True)
    times: dict[tuple[str, int], float] = {}
    for rank, index in zip(ranks, first, strict=True):
        replica = graph.unit[index], int(graph.replica[index])
        times[replica] = max(
            times.get(replica, 0.0), float(values[graph.rank == rank].sum(axis=0).mean())
        )
    return times


def factors(passes: Passes, compute: Floats, why: Explained) -> dict[str, Any]:
    """Return the factors of `Losses`: how much stages, ranks, replicas' and slots' work differ."""
    units = np.asarray(passes.unit)
    members = {unit: units == unit for unit in dict.fromkeys(passes.unit)}

    def factor(pick: Any, took: Floats, expected: Floats) -> float:
        return float(took[pick].sum() / max(1e-12, expected[pick].sum()))

    def largest(values: Floats, numbers: Ints, statistic: Any) -> dict[tuple[str, int], float]:
        return {
            (unit, int(number)): float(statistic(values[pick & (numbers == number)]))
            for unit, pick in members.items()
            for number in np.unique(numbers[pick])
        }

    return {
        "stage_factor": {
            (unit, int(s)): factor(pick & (passes.stage == s), why.staged, why.worked)
            for unit, pick in members.items()
            for s in np.unique(passes.stage[pick])
        },
        "rank_factor": {
            int(r): factor(passes.rank == r, compute, why.staged) for r in np.unique(passes.rank)
        },
        "replica_work": largest(why.intra, passes.replica, np.max),
        "heaviest": _heaviest(passes, why.intra),
        "slot_work": largest(why.slot, passes.slot, np.mean),
    }


def _heaviest(passes: Passes, intra: Floats) -> dict[tuple[str, int], float]:
    """Return, by unit and replica, the share of slots and steps in which its work is largest.

    Replicas with equal work share the slot.
    """
    heaviest: dict[tuple[str, int], float] = {}
    for unit in dict.fromkeys(passes.unit):
        passes_of = np.flatnonzero(
            (np.asarray(passes.unit) == unit) & (passes.operation == FORWARD)
        )
        _, first = np.unique(
            np.stack([passes.slot[passes_of], passes.replica[passes_of]]), axis=1, return_index=True
        )
        passes_of = passes_of[first]  # one stage and TP rank of each replica
        slots, slot = np.unique(passes.slot[passes_of], return_inverse=True)
        best, many = np.zeros((len(slots), intra.shape[1])), np.zeros((len(slots), intra.shape[1]))
        np.maximum.at(best, slot, intra[passes_of])
        most = intra[passes_of] >= best[slot] - 1e-9
        np.add.at(many, slot, most)
        share = (most / many[slot]).mean(axis=1)
        heaviest |= {
            (unit, int(replica)): float(share[passes.replica[passes_of] == replica].mean())
            for replica in np.unique(passes.replica[passes_of])
        }
    return heaviest


def _work(passes: Passes, predicted: Floats, operations: Ints) -> tuple[Floats, Floats]:
    """Return the work of each pass's replica, and of its slot, over the unit's mean.

    Both are 1 where nothing is predicted. A replica's work counts relative to what its stages
    usually have, as some of its stages may have no trace.
    """
    replicas = passes.groups("unit", "operation", "slot", "replica")
    usual = group_mean(predicted, passes.groups("unit", "stage", "operation"))
    by_replica = ratio(_sum(predicted, replicas), _sum(usual, replicas)) * (
        _sum(predicted, operations) > 0
    )
    by_slot = _mean_rows(by_replica, passes.groups("unit", "operation", "slot"))
    mean = group_mean(by_replica, operations)
    with np.errstate(divide="ignore", invalid="ignore"):
        return (np.where(mean > 0, by_replica / mean, 1.0), np.where(mean > 0, by_slot / mean, 1.0))


def _shared(factor: Floats, passes: Passes) -> Floats:
    """Return the factor that the ranks of a stage have in common: their (lower) median.

    So one slow rank makes no slow stage, also if a stage has two ranks.
    """
    out = np.empty_like(factor)
    ranks, operations = passes.groups("rank"), passes.groups("unit", "operation", "depth")
    for group in np.unique(operations):
        pick = operations == group
        _, first = np.unique(ranks[pick], return_index=True)
        out[pick] = np.quantile(factor[pick][first, 0], 0.5, method="lower")
    return out


def _at_times(factor: Floats, ranks: Ints, stages: Ints, operations: Ints) -> tuple[Floats, Floats]:
    """Return the factors of stages, and of ranks, that deviate in single steps while others do not.

    The others are the other stages of the unit, and the other ranks of the stage. A step counts if
    the median of the passes deviates by `AT_TIMES` and by three standard errors, so that one slow
    pass does not suffice.

    Args:
        factor: time of every pass over the usual time of its rank for the work, [passes, steps].
        ranks: a number per pass, of its rank, stage and operation.
        stages: a number per pass, of its stage and operation.
        operations: a number per pass, of its unit and operation.
    """
    order = np.argsort(ranks, kind="stable")
    firsts = np.flatnonzero(np.diff(ranks[order], prepend=-1))
    members = np.split(order, firsts[1:])
    median = np.stack([np.median(factor[indices], axis=0) for indices in members])  # [ranks, steps]
    error = np.stack(
        [factor[indices].std(axis=0) / max(1, len(indices) - 1) ** 0.5 for indices in members]
    )
    error[[len(indices) < FEWEST_PASSES for indices in members]] = np.inf
    of_stage = _usual_of(median, stages[order[firsts]])
    intervals = [
        ratio(of_stage, _usual_of(of_stage, operations[order[firsts]])),
        ratio(median, of_stage),
    ]
    back = np.repeat(np.arange(len(members)), [len(indices) for indices in members])[
        np.argsort(order)
    ]
    by_stage, by_rank = (
        np.where(np.abs(off - 1) > np.maximum(AT_TIMES, 3 * error), off, 1.0)[back]
        for off in intervals
    )
    return _usual_of(by_stage, stages), by_rank


def _usual_of(values: Floats, groups: Ints) -> Floats:
    """Return the lower median of each group in every step, broadcast to every member."""
    usual = np.empty_like(values)
    for group in np.unique(groups):
        usual[groups == group] = np.quantile(values[groups == group], 0.5, axis=0, method="lower")
    return usual


def _sum(values: Floats, groups: Ints) -> Floats:
    """Return the sum over each group within a step, broadcast to every member."""
    totals = np.zeros((groups.max() + 1, values.shape[1]))
    np.add.at(totals, groups, values)
    return totals[groups]


def _mean_rows(values: Floats, groups: Ints) -> Floats:
    return _sum(values, groups) / np.bincount(groups)[groups][:, None]


def ratio(above: Floats, below: Floats) -> Floats:
    """Return above ÷ below, elementwise; 1 where `below` is not positive."""
    return np.divide(above, below, out=np.ones_like(above), where=below > 0)
