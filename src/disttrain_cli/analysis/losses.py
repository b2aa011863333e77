"""How much of a step each cause costs: successive replays as the delays return, in a fixed order.

The ideal: every pass takes its unit's mean time for its operation (slow ranks left out), the units
share the GPUs so that all are equally busy, transfers take the median (or what the profile expects,
if less), nothing waits for data or the host. Then return, one after another: `unit` the real share
of the GPUs · `intra_microbatch` uneven work over the replicas of a slot · `inter_microbatch` uneven
work over the slots · `stage` uneven stages of a unit · `worker` ranks that are slow for their work
· `communication` real transfers, sends and the update at the end · `data` waits for data · `host`
moments in which neither work nor rank explains the time. What is then missing from the recorded
time is `unexplained`, waits for ranks without a trace too, so the parts sum to (recorded − ideal).
Work is what the profile predicts for the recorded sizes.

Where ranks share cores and keep them busy, a slow message is a rank that waits for a core: what
transfers take above the usual is then the host's.
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

#: Cores are crowded where the passes of all ranks need this share of them: who is ready may have
#: to wait.
CROWDED = 0.5
#: A rank that is off by this share in a step is slow at times; of fewer passes in a step nothing
#: is said.
AT_TIMES, FEWEST_PASSES = 0.03, 4


@dataclass(frozen=True)
class Losses:
    """Seconds per replayed step."""

    ideal: Floats  # [steps]
    measured: Floats  # [steps]
    lost: dict[str, Floats]  # cause → [steps]
    busy: dict[str, float]  # unit → compute seconds of one of its usual ranks per step
    stage_factor: dict[tuple[str, int], float]  # (unit, stage) → its time over the unit's mean
    rank_factor: dict[int, float]  # rank → its time over what its work and stage explain
    # (unit, replica) → work of its heaviest slot over the slot's mean
    replica_work: dict[tuple[str, int], float]
    # (unit, replica) → share of the slots in which it has most work
    heaviest: dict[tuple[str, int], float]
    slot_work: dict[tuple[str, int], float]  # (unit, slot) → work over the mean slot
    # (unit, replica) → seconds per step that its ranks wait for data at most
    data_wait: dict[tuple[str, int], float]
    # (unit, stage) → seconds of a step lost over the cut after it, ranks summed
    links: dict[tuple[str, int], float]
    gap: dict[int, float]  # rank → seconds per step that no row covers
    steps: Ints  # [steps] their numbers
    # compute of all ranks ÷ time of the cores that they share; 0 where every rank has a device
    crowded: float


@dataclass(frozen=True)
class Explained:
    """How long passes take as what makes them differ returns, [passes, steps], and the factors."""

    mean: Floats  # of the unit and operation, slow ranks left out
    uneven: Floats  # with the replicas' work
    worked: Floats  # and the slots'
    staged: Floats  # and the stages' own times
    # and the ranks' (as the stages', where they differ from step to step, in each of them)
    ranked: Floats
    intra: Floats  # work of a pass's replica over its slot's mean
    slot: Floats  # work of a slot over the mean


def explain(passes: Passes, compute: Floats, predicted: Floats) -> Explained:
    """What of the times of passes their unit, work, stage and rank explain.

    Args:
        compute: seconds of every pass, [passes, steps].
        predicted: work of every pass in any measure, the same shape; 0 where it is not known.
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
        why: `explain` of the recorded passes, where that is known.
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
    # levelling can lengthen the filling of a pipeline with few slots
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


def stragglers_of(losses: Losses, not_told: Sequence[str] = ()) -> Stragglers:
    """The seconds as an analysis gives them: means, and step by step.

    Args:
        not_told: causes of which the traces tell nothing.
    """
    lost = {cause: seconds.tolist() for cause, seconds in losses.lost.items()}
    ideal_s, measured_s = float(losses.ideal.mean()), float(losses.measured.mean())
    return Stragglers(
        slowdown=measured_s / ideal_s,
        ideal_s=ideal_s,
        not_told=list(not_told),
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
    """Seconds by cause of replays in the order of `CAUSES`, from the ideal to the recorded
    steps."""
    return {
        cause: after - before
        for cause, before, after in zip(CAUSES, times[:-1], times[1:], strict=True)
    }


def per_rank(passes: Passes, values: Floats) -> dict[str, float]:
    """By unit, the sum over the passes of one of its ranks in a step."""
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
    """Seconds of a step, of the rank of each replica that has most."""
    ranks, first = np.unique(graph.rank, return_index=True)
    times: dict[tuple[str, int], float] = {}
    for rank, index in zip(ranks, first, strict=True):
        replica = graph.unit[index], int(graph.replica[index])
        times[replica] = max(
            times.get(replica, 0.0), float(values[graph.rank == rank].sum(axis=0).mean())
        )
    return times


def factors(passes: Passes, compute: Floats, why: Explained) -> dict[str, Any]:
    """The factors of `Losses`: by how much stages, ranks, replicas' and slots' work differ."""
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
    """By unit and replica, the share of slots and steps in which it has most work, shared where
    several have."""
    heaviest: dict[tuple[str, int], float] = {}
    for unit in dict.fromkeys(passes.unit):
        passes_of = np.flatnonzero(
            (np.asarray(passes.unit) == unit) & (passes.operation == FORWARD)
        )
        _, first = np.unique(
            np.stack([passes.slot[passes_of], passes.replica[passes_of]]), axis=1, return_index=True
        )
        passes_of = passes_of[first]  # one of the stages and TP ranks of each replica
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
    """Work of each pass's replica, and of its slot, relative to the mean of the unit; 1 where
    nothing is predicted.

    Of a replica counts what its stages have over what they usually have: some of them may have no
    trace.
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
    """Of the ranks' factors, what the ranks of a stage have in common: their (lower) median.

    So one slow rank makes no slow stage, also where a stage has two.
    """
    out = np.empty_like(factor)
    ranks, operations = passes.groups("rank"), passes.groups("unit", "operation", "depth")
    for group in np.unique(operations):
        pick = operations == group
        _, first = np.unique(ranks[pick], return_index=True)
        out[pick] = np.quantile(factor[pick][first, 0], 0.5, method="lower")
    return out


def _at_times(factor: Floats, ranks: Ints, stages: Ints, operations: Ints) -> tuple[Floats, Floats]:
    """By how much a stage, and a rank, is slower or faster in a step than mostly, while others are
    not.

    Those are the other stages of the unit, and the other ranks of the stage. A step counts in which
    the median of the passes is off by `AT_TIMES`, and clearly so: not for one late pass.

    Args:
        factor: time of every pass over what its rank mostly takes for the work, [passes, steps].
        ranks: a number per pass, of its rank, stage and operation.
        stages: of its stage and operation.
        operations: of its unit and operation.
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
    """The lower median of each group in every step, given back to every member."""
    usual = np.empty_like(values)
    for group in np.unique(groups):
        usual[groups == group] = np.quantile(values[groups == group], 0.5, axis=0, method="lower")
    return usual


def _sum(values: Floats, groups: Ints) -> Floats:
    """Sum over each group within a step, given back to every member."""
    totals = np.zeros((groups.max() + 1, values.shape[1]))
    np.add.at(totals, groups, values)
    return totals[groups]


def _mean_rows(values: Floats, groups: Ints) -> Floats:
    return _sum(values, groups) / np.bincount(groups)[groups][:, None]


def ratio(above: Floats, below: Floats) -> Floats:
    """above ÷ below, of the same shape; 1 where there is nothing below."""
    return np.divide(above, below, out=np.ones_like(above), where=below > 0)
