"""From lost seconds to a verdict: the cause, its place, how sure, the figures behind it, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from disttrain_cli.analysis.losses import CAUSES, CROWDED, Losses
from disttrain_cli.analysis.next_commands import HOST_GAPS, LEVEL, REMEASURE, SLOWEST_TRANSFERS, slow_rank
from disttrain_cli.analysis.result import LEAST_GAIN_PCT, Comparison, Evidence, Place, Remedy, Verdict

#: A cause that costs less than this share of a step is no straggler.
LEAST_SHARE = 0.05
#: A replica is named that is the heaviest in this share of the slots; else it is now one, now another.
OFTEN = 0.75
#: Causes that lie in the data.
UNEVEN = ("intra_microbatch", "inter_microbatch")
#: Predictions further off than this are measured again before they are planned with.
TRUSTED_ERROR_PCT = 25.0


def judge(
    losses: Losses,
    shares: dict[str, float],
    where: Mapping[int, Place],
    gpus: int,
    comparisons: list[Comparison],
    shared_cores: bool = False,
    remedies: Sequence[Remedy] = (),
) -> Verdict:
    """Name what costs most.

    Args:
        losses: seconds per step by cause.
        shares: where the ranks' time goes, as fractions.
        where: the place of every rank.
        gpus: devices in use.
        comparisons: predictions beside measurements, for the advice.
        shared_cores: the ranks run on one CPU, so a rank that is ready may wait for a core: causes that lie in the
            ranks themselves or between them are half as sure. Passes do not take as long as their work says either:
            uneven data are a cause only where a remedy says that levelling them gains.
        remedies: what single changes would gain; the one that fits the cause is advised with its gain.
    """
    measured = float(losses.measured.mean())
    means = {cause: float(losses.lost[cause].mean()) for cause in CAUSES}
    doubtful = [cause for cause in UNEVEN if shared_cores and remedies and fitting(remedies, cause) is None]
    causes = [cause for cause in CAUSES if cause != "unexplained" and cause not in doubtful]
    cause = max(causes, key=lambda name: means[name])
    per_step = np.stack([losses.lost[name] for name in causes])
    known = max(0.0, 1.0 - abs(means["unexplained"]) / measured)
    known *= 1.0 - 0.5 ** len(losses.measured)  # a few steps may all say the same by chance
    evidence = [
        Evidence(what="step as recorded", value=measured, unit="s"),
        Evidence(
            what="ideal step: GPUs perfectly shared, no delays", value=float(losses.ideal.mean()), unit="s"
        ),
    ]
    if means[cause] < LEAST_SHARE * measured:
        calm = (per_step.max(axis=0) < LEAST_SHARE * losses.measured).mean()
        fill = shares["warmup"] + shares["drain"]
        evidence += [
            Evidence(what=f"largest loss: {cause}", value=means[cause], unit="s"),
            *(Evidence(what=f"{name} by the work of each, which levelling would not regain on shared cores",
                       value=means[name], unit="s") for name in doubtful if means[name] >= LEAST_SHARE * measured),
            Evidence(what="filling and draining the pipeline", value=fill, unit="share of time"),
        ]
        return Verdict(
            cause="none",
            headline=f"No straggler: nothing that can be mended costs more than {100 * LEAST_SHARE:.0f} % of a step.",
            place=Place(),
            lost_s=0.0,
            confidence=round(float(calm * known), 3),
            evidence=evidence,
            **_calm_advice(fill, fitting(remedies, "unit"), measured),
        )
    persistence = (per_step.argmax(axis=0) == causes.index(cause)).mean()
    evidence += [
        Evidence(what=f"lost to {name}", value=means[name], unit="s")
        for name in sorted(causes, key=lambda name: -means[name])[:3]
        if means[name] > 0.005 * measured
    ]
    evidence.append(
        Evidence(
            what="steps in which this is the largest loss", value=float(persistence), unit="share of steps"
        )
    )
    place, told, more, advice, command = _DETAILS[cause](losses, where, gpus, comparisons)
    remedy = fitting(remedies, cause)
    if remedy is not None:
        advice += f" {_gain_of(remedy, measured)}"
        command = remedy.command if cause == "unit" else command
        bought = [one for one in remedies if one.cause == cause and one.gpus > 0 and one.gain_s > remedy.gain_s]
        if bought and remedy.gpus <= 0:
            advice += f" {_gain_of(max(bought, key=lambda one: one.gain_s / one.gpus), measured)}"
    elif cause == "unit" and any(one.cause == "unit" for one in remedies):
        advice += f" None of the layouts tried here would shorten a step by {LEAST_GAIN_PCT:.0f} %."
    elif cause == "unit" and command != REMEASURE:
        advice += (f" If the plan is already the best for {gpus} GPUs, one more shows whether the next whole number "
                   "fits better.")
    if shared_cores and cause in ("worker", "communication", "host"):
        known /= 2
        advice = (
            "The ranks share the cores of one machine: whoever is ready to compute or receive may wait for a core. "
            "Fewer ranks, or one device per rank, show whether that is all."
        )
        more.append(Evidence(what="passes of all ranks ÷ time of the shared cores", value=losses.crowded, unit="ratio"))
        if cause == "host" and losses.crowded > CROWDED:
            place, told = Place(host=place.host), "Ranks that are ready wait for one of the cores that all share"
            more[0] = Evidence(what="transfers above the usual, ranks summed", value=sum(losses.links.values()),
                               unit="s")
        command = f"disttrain plan --gpus {max(1, gpus - 1)}"
    share = 100 * means[cause] / measured
    return Verdict(
        cause=cause,
        headline=f"{told}: {means[cause]:.3g} s of every {measured:.3g} s step ({share:.0f} %).",
        place=place,
        lost_s=means[cause],
        confidence=round(float(persistence * known), 3),
        evidence=evidence + more,
        advice=advice,
        next_command=command,
    )


def fitting(remedies: Sequence[Remedy], cause: str) -> Remedy | None:
    """What mends a cause best: without more devices, by a plan, and not only at most, if there is that; or None."""
    worth = [remedy for remedy in remedies if remedy.cause == cause and remedy.worth]
    return min(worth, key=lambda one: (one.gpus > 0, one.basis != "plan", one.at_most, -one.gain_s), default=None)


def _gain_of(remedy: Remedy, measured_s: float) -> str:
    by = "replay of the recorded steps" if remedy.basis == "replay" else "the planner"
    least = "at least " if remedy.at_most else ""
    return (f"By {by}, a step would take {least}{remedy.step_s:.3g} instead of {measured_s:.3g} s "
            f"({remedy.gain_pct:.0f} %) with {remedy.change}.")


def unknown(reason: str) -> Verdict:
    """The verdict when no step can be replayed."""
    return Verdict(
        cause="unknown",
        headline=f"No verdict: {reason}.",
        place=Place(),
        lost_s=0.0,
        confidence=0.0,
        evidence=[],
        advice="Record a longer trace, of all ranks.",
        next_command="disttrain train --steps 20",
    )


def _calm_advice(fill: float, remedy: Remedy | None, measured_s: float) -> dict[str, str]:
    advice, command = "Nothing to repair; more speed needs more GPUs or faster kernels.", "disttrain plan --top 5"
    if fill > 0.25:
        advice = (f"{100 * fill:.0f} % of the time fills and drains the pipeline: more slots per step shorten it "
                  "(raise train.global_batch_size, or fewer stages).")
        command = "disttrain plan"
    if remedy is not None:
        advice += f" {_gain_of(remedy, measured_s)}"
        if remedy.gpus <= 0 and remedy.gain_pct >= 100 * LEAST_SHARE:
            command = remedy.command
    return {"advice": advice, "next_command": command}


def _unit(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    binding = max(losses.busy, key=lambda unit: losses.busy[unit])
    lightest = min(losses.busy, key=lambda unit: losses.busy[unit])
    evidence = [
        Evidence(what=f"{unit}: compute per rank and step", value=seconds, unit="s")
        for unit, seconds in losses.busy.items()
    ]
    off = [
        row
        for row in comparisons
        if row.basis == "plan" and row.what == "stage_ms" and abs(row.error_pct) > TRUSTED_ERROR_PCT
    ]
    most, least = losses.busy[binding], losses.busy[lightest]
    advice = f"{binding} has too few GPUs for its work, " + (
        f"{most / least:.1f} times as long per rank as {lightest}" if most < 100 * least
        else f"while {lightest} computes next to nothing")
    if off:
        advice += (f"; the plan expected otherwise ({off[0].unit} is {off[0].error_pct:+.0f} % off), so measure and "
                   "plan again.")
        command = REMEASURE
    else:
        advice += "."
        command = f"disttrain plan --gpus {gpus + 1} --top 5"
    return Place(unit=binding), f"GPUs are badly shared: unit {binding} binds", evidence, advice, command


def _intra(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    (unit, heaviest), factor = max(losses.replica_work.items(), key=lambda item: item[1])
    often = losses.heaviest[unit, heaviest]
    replica = heaviest if often >= OFTEN else None
    evidence = [
        Evidence(what=f"{unit}: heaviest replica of a slot over the slot's mean", value=factor, unit="ratio"),
        Evidence(what=f"{unit} replica {heaviest}: slots in which it is the heaviest", value=often,
                 unit="share of slots"),
    ]
    return (
        Place(unit=unit, replica=replica),
        f"Uneven data over the replicas of {unit}",
        evidence,
        "Level the replicas: set train.ordering: best, or raise train.global_batch_size so that there is more to "
        "level with.",
        LEVEL,
    )


def _inter(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    (unit, slot), factor = max(losses.slot_work.items(), key=lambda item: item[1])
    evidence = [Evidence(what=f"{unit}: work of slot {slot} over the mean slot", value=factor, unit="ratio")]
    return (
        Place(unit=unit),
        f"Uneven data over the slots of a step, most in {unit}",
        evidence,
        "Order the slots: set train.ordering: best, or raise train.global_batch_size.",
        LEVEL,
    )


def _stage(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    (unit, stage), factor = max(losses.stage_factor.items(), key=lambda item: item[1])
    evidence = [Evidence(what=f"{unit} stage {stage}: time over the unit's mean", value=factor, unit="ratio")]
    return (
        Place(unit=unit, stage=stage),
        f"Stage {stage} of {unit} is heavier than its other stages",
        evidence,
        f"Move layers away from stage {stage}: edit layers_per_stage of {unit} in plan.yaml, "
        "or measure and plan again.",
        REMEASURE,
    )


def _worker(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    rank, factor = max(losses.rank_factor.items(), key=lambda item: item[1])
    place = where[rank]
    evidence = [
        Evidence(what=f"rank {rank}: time over what its work and stage explain", value=factor, unit="ratio")
    ]
    return (
        place,
        f"Rank {rank} ({place.unit}, stage {place.stage}, replica {place.replica}) is slow for its work",
        evidence,
        f"Look at the device and the other processes of host {place.host}; leave the host out if it stays slow.",
        slow_rank(rank),
    )


def _communication(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    unit, stage = max(losses.links, key=lambda cut: losses.links[cut])
    evidence = [
        Evidence(what=f"{name} stage {number}: transfers to the next stage and back above the usual, ranks summed",
                 value=seconds, unit="s")
        for (name, number), seconds in sorted(losses.links.items(), key=lambda item: -item[1])[:3]
    ]
    return (
        Place(unit=unit, stage=stage),
        f"Transfers are slow or vary, most after stage {stage} of {unit}",
        evidence,
        f"Look at the link between stage {stage} of {unit} and the next; the command lists the slowest transfers.",
        SLOWEST_TRANSFERS,
    )


def _data(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    units: dict[str, dict[int, float]] = {}
    for (name, number), seconds in losses.data_wait.items():
        units.setdefault(name, {})[number] = seconds
    unit = max(units, key=lambda name: max(units[name].values()))
    replica = _alone(units[unit])
    evidence = [
        Evidence(what=f"{name}: waiting for data, mean of its replicas per step",
                 value=sum(own.values()) / len(own), unit="s")
        for name, own in units.items()
    ]
    if replica is not None:
        evidence.append(Evidence(what=f"{unit} replica {replica}: waiting for data, per step",
                                 value=units[unit][replica], unit="s"))
    return (
        Place(unit=unit, replica=replica),
        f"Ranks wait for data, most in {unit}" + ("" if replica is None else f", replica {replica}"),
        evidence,
        "Prepare more ahead: raise preprocess.workers and preprocess.prefetch_slots, or add CPU nodes.",
        LEVEL,
    )


def _host(losses: Losses, where: Mapping[int, Place], gpus: int, comparisons: list[Comparison]) -> Any:
    rank = max(losses.gap, key=lambda r: losses.gap[r])
    place = where[rank]
    alone = _alone(losses.gap) is not None
    evidence = [
        Evidence(what=f"rank {rank}: time covered by no operation, per step", value=losses.gap[rank], unit="s")
    ]
    told = "Ranks are held up between operations, or now and then inside them, by their hosts"
    if alone:
        told = f"Rank {rank} ({place.unit}, stage {place.stage}, replica {place.replica}) is held up by its host"
    return (
        place if alone else Place(unit=place.unit, host=place.host),
        told,
        evidence,
        f"Look for other processes, garbage collection or clock throttling on host {place.host}.",
        HOST_GAPS,
    )


def _alone(seconds: Mapping[int, float]) -> int | None:
    """The one that stands out, with more than twice what the next one has; or None."""
    first, *others = sorted(seconds, key=lambda one: -seconds[one])
    return first if others and seconds[first] > 2 * seconds[others[0]] else None


_DETAILS = {
    "unit": _unit,
    "intra_microbatch": _intra,
    "inter_microbatch": _inter,
    "stage": _stage,
    "worker": _worker,
    "communication": _communication,
    "data": _data,
    "host": _host,
}
