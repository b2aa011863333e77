"""Explanations of causes: location, evidence, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from disttrain_cli.analysis.causes import SMALLEST_SHARE, Finding
from disttrain_cli.analysis.next_commands import (
    AGAIN,
    AGAIN_REHEARSED,
    EXPERT_LOAD,
    HOST_GAPS,
    LEVEL,
    REMEASURE,
    SLOWEST_LINKS,
    SLOWEST_TRANSFERS,
    slow_rank,
)
from disttrain_cli.analysis.record import Record
from disttrain_cli.analysis.result.verdicts import Evidence, Place
from disttrain_cli.analysis.suspects import common

Name = TypeVar("Name")
#: A replica is named only if it is the heaviest in this share of the slots.
OFTEN = 0.75
#: If a prediction is further off than this, the profile is measured again before planning.
TRUSTED_ERROR_PCT = 25.0
#: Operations at the end of a step.
_UPDATES = {"reduce": "gradient reduction", "step": "optimizer step"}
#: Most locations that are named individually.
MOST_PLACES = 8


class Explanation(NamedTuple):
    """Explanation of a cause: a sentence, its evidence, advice and next command."""

    place: Place
    sentence: str
    evidence: list[Evidence]
    advice: str
    command: str


def explain(record: Record, finding: Finding) -> Explanation:
    """Explain a cause."""
    return _DETAILS[finding.cause](record, finding)


def _unit(record: Record, finding: Finding) -> Explanation:
    losses, gpus, comparisons = record.losses, record.gpus, record.comparisons
    if finding.places[0].unit is not None:
        return _slow_unit(record, finding.places[0])
    binding = max(losses.busy, key=lambda unit: losses.busy[unit])
    lightest = min(losses.busy, key=lambda unit: losses.busy[unit])
    evidence = [
        Evidence(f"{unit}: compute per rank and step", seconds, "s")
        for unit, seconds in losses.busy.items()
    ]
    off = [
        row
        for row in comparisons
        if row.basis == "plan" and row.what == "stage_ms" and abs(row.error_pct) > TRUSTED_ERROR_PCT
    ]
    most, least = losses.busy[binding], losses.busy[lightest]
    advice = f"{binding} has too few GPUs for its work: " + (
        f"its ranks compute {most / least:.1f} times as long as those of {lightest}"
        if most < 100 * least
        else f"{lightest} computes next to nothing"
    )
    if off:
        advice += (
            f"; the plan predicted otherwise ({off[0].unit} is {off[0].error_pct:+.0f} % off), so"
            " measure and plan again."
        )
        command = REMEASURE
    else:
        advice += "."
        command = f"disttrain plan --gpus {gpus + 1} --top 5"
    sentence = f"GPUs are shared unevenly between the units: unit {binding} is the bottleneck"
    return Explanation(Place(unit=binding), sentence, evidence, advice, command)


def _slow_unit(record: Record, place: Place) -> Explanation:
    return Explanation(
        place,
        f"All devices of {place.unit} are slower than their work explains"
        + clocks_of(record, [one for one in record.where.values() if one.unit == place.unit]),
        [
            Evidence(
                f"{place.unit}: compute per rank and step", record.losses.busy[str(place.unit)], "s"
            )
        ],
        f"{place.unit} takes longer than its profile predicts, and the other units do not: check"
        " its devices (clocks, temperature, other kernels); if they cannot run faster, measure and"
        " plan again.",
        REMEASURE,
    )


def _intra(record: Record, finding: Finding) -> Explanation:
    losses, unit = record.losses, str(finding.places[0].unit)
    heaviest, factor = max(
        ((replica, work) for (name, replica), work in losses.replica_work.items() if name == unit),
        key=lambda item: item[1],
    )
    often = losses.heaviest[unit, heaviest]
    replica = heaviest if often >= OFTEN else None
    evidence = [
        Evidence(
            f"{unit}: work of the heaviest replica of a slot ÷ mean of the slot", factor, "ratio"
        ),
        Evidence(
            f"{unit} replica {heaviest}: slots in which it is the heaviest", often, "share of slots"
        ),
    ]
    return Explanation(
        Place(unit=unit, replica=replica),
        f"Uneven data across the replicas of {unit}",
        evidence,
        "Balance the replicas: set train.ordering: best, or raise train.global_batch_size, which"
        " gives more samples to balance them with.",
        LEVEL,
    )


def _inter(record: Record, finding: Finding) -> Explanation:
    unit = str(finding.places[0].unit)
    slot, factor = max(
        ((slot, work) for (name, slot), work in record.losses.slot_work.items() if name == unit),
        key=lambda item: item[1],
    )
    evidence = [Evidence(f"{unit}: work of slot {slot} ÷ mean of the slots", factor, "ratio")]
    return Explanation(
        Place(unit=unit),
        f"Uneven data across the slots of a step, mostly in {unit}",
        evidence,
        "Reorder the slots: set train.ordering: best, or raise train.global_batch_size.",
        LEVEL,
    )


def _stage(record: Record, finding: Finding) -> Explanation:
    place = finding.places[0]
    unit = str(place.unit)
    if place.stage is not None:
        return Explanation(
            place,
            f"Stage {place.stage} of {unit} "
            + (
                "takes longer than its other stages"
                if record.kind == "operations"
                else "is slower than its work explains"
            )
            + clocks_of(
                record,
                [
                    one
                    for one in record.where.values()
                    if (one.unit, one.stage) == (place.unit, place.stage)
                ],
            ),
            [
                Evidence(
                    f"stage {place.stage} of {unit}: time ÷ mean of the stages",
                    record.losses.stage_factor[unit, place.stage],
                    "ratio",
                )
            ],
            "Its ranks take longer for their work than those of the other stages: check their"
            f" devices; if they cannot run faster, move layers away from stage {place.stage}"
            " (layers_per_stage in plan.yaml), or measure and plan again.",
            REMEASURE,
        )
    stage, factor = max(
        (
            (stage, took)
            for (name, stage), took in record.losses.stage_factor.items()
            if name == unit
        ),
        key=lambda item: item[1],
    )
    evidence = [Evidence(f"stage {stage} of {unit}: time ÷ mean of the stages", factor, "ratio")]
    return Explanation(
        Place(unit=unit, stage=stage),
        f"Stage {stage} of {unit} is heavier than its other stages",
        evidence,
        f"Move layers away from stage {stage}: edit layers_per_stage of {unit} in plan.yaml, "
        "or measure and plan again.",
        REMEASURE,
    )


def _worker(record: Record, finding: Finding) -> Explanation:
    named = [one for one in finding.places if one.rank is not None]
    if not named:
        return Explanation(
            finding.places[0],
            "Many ranks are slower than their work explains",
            [],
            "No rank stands out: check what they share, and how much the times of passes vary.",
            REMEASURE,
        )
    place = named[0]
    sentence = f"Rank {place.rank} ({place.named}) is slower than its work explains"
    clock = record.slow_clocks.get(int(place.rank or 0))
    advice = (
        f"Check the device and the other processes on host {place.host}; run without that host if"
        " it stays slow."
    )
    if clock is not None:
        sentence += f": {clock.clause}"
        advice = f"On host {place.host}, {clock.advice}; run without that host if it stays slow."
    waited = record.waited_for.get(int(place.rank or 0), 0.0) if len(finding.places) == 1 else 0.0
    evidence = []
    if waited >= SMALLEST_SHARE:
        sentence += ", and the other ranks of its group wait for it in communication"
        evidence.append(
            Evidence(
                f"rank {place.rank}: passes in which the other ranks of its group wait for it",
                waited,
                "share of their time",
            )
        )
    if len(finding.places) > 1:
        sentence = (
            f"{_ranks(finding.places)} are slower than their work explains; fixing any one of them"
            f" alone does not help{clocks_of(record, named)}"
        )
        replica = common(finding.places)
        if None not in (replica.unit, replica.stage, replica.replica):
            place = replica
            sentence = (
                f"{_ranks(finding.places)} ({place.named}), which wait for each other inside every"
                " layer, are slower than their work explains"
            )
            advice = (
                "Ranks that share a replica's work take equally long whichever of them is slow:"
                " record some steps with disttrain train --profile-steps A:B; disttrain analyze"
                " TRACES/kineto then shows which rank joins their collectives last."
            )
    return Explanation(
        place,
        sentence,
        evidence
        + [
            Evidence(
                f"rank {one.rank}: time ÷ time that its work and stage explain",
                record.losses.rank_factor[int(one.rank or 0)],
                "ratio",
            )
            for one in named[:MOST_PLACES]
        ]
        + [
            Evidence(f"rank {one.rank}: SM clock of its GPU", low.mhz, "MHz")
            for one in named[:MOST_PLACES]
            if (low := record.slow_clocks.get(int(one.rank or 0))) is not None
        ],
        advice,
        slow_rank(int(named[0].rank or 0)),
    )


def _experts(record: Record, finding: Finding) -> Explanation:
    places, place = finding.places[:MOST_PLACES], finding.places[0]
    loads = [record.expert_loads[int(one.rank or 0)] for one in places]
    who = f"rank {place.rank}" if len(places) == 1 else _ranks(places).lower()
    return Explanation(
        place,
        f"Expert load: the experts of {who} ({place.named}) get {max(loads):.2f} times the mean"
        " rows of their EP group, which waits for them",
        [
            *(
                Evidence(
                    f"rank {one.rank}: rows of its experts ÷ mean of its EP group", load, "ratio"
                )
                for one, load in zip(places, loads, strict=True)
            ),
            Evidence(
                f"rank {place.rank}: passes in which the other ranks of its group wait for it",
                record.waited_for[int(place.rank or 0)],
                "share of their time",
            ),
        ],
        "No device is slow: balance the router (auxiliary loss, bias), or set a lower ep, whose"
        " ranks have more experts to even out.",
        EXPERT_LOAD,
    )


def clocks_of(record: Record, places: Sequence[Place]) -> str:
    """Return "; …" on the clocks of the GPUs of all these ranks; empty unless all are low."""
    clocks = [record.slow_clocks.get(int(one.rank or 0)) for one in places]
    low = [one for one in clocks if one is not None]
    if not low or len(low) < len(clocks):
        return ""
    reasons = dict.fromkeys(reason for one in low for reason in one.reasons)
    least, most = (pick(one.mhz / one.usual_mhz for one in low) for pick in (min, max))
    return (
        f"; the clocks of their GPUs are at {100 * least:.0f} to {100 * most:.0f} % of what is"
        f" usual ({', '.join(reasons)})"
    )


def _communication(record: Record, finding: Finding) -> Explanation:
    links = record.losses.links
    slow = {
        (str(one.unit), int(one.stage))
        for one in finding.places
        if one.unit is not None and one.stage is not None
    }
    if not slow:
        return _update(record, finding)
    unit, stage = max(slow, key=lambda cut: links.get(cut, 0.0))
    evidence = [
        Evidence(
            f"{name} stage {number}: excess time of transfers to and from the next stage,"
            " summed over ranks",
            seconds,
            "s",
        )
        for (name, number), seconds in sorted(links.items(), key=lambda item: -item[1])[:3]
    ]
    return Explanation(
        Place(unit=unit, stage=stage),
        f"Transfers are slow or vary, mostly after stage {stage} of {unit}",
        evidence,
        f"Check the link between stage {stage} of {unit} and the next; the command lists the ranks"
        " whose messages are slowest.",
        SLOWEST_LINKS,
    )


def _update(record: Record, finding: Finding) -> Explanation:
    """Explain a slow end of a step.

    It is named by the operation that exceeds the profile most, if that explains half of the saving.
    """
    rows = [row for row in record.operations if row.operation in _UPDATES]
    row = max(rows, key=lambda one: one.effect_ms, default=None)
    if row is None or row.effect_ms < 500 * finding.gain_s.mean():
        return Explanation(
            Place(),
            "The end of a step, after its last pass, takes longer than the profile predicts or than"
            " usual",
            [
                Evidence(f"{one.place}: {_UPDATES[one.operation]}", one.measured, "ms")
                for one in rows[:3]
            ],
            "Check what the ranks do at the end of a step, and which links they use.",
            SLOWEST_TRANSFERS,
        )
    what = _UPDATES[row.operation]
    return Explanation(
        Place(unit=row.unit, stage=row.stage),
        f"The {what} of {row.unit} stage {row.stage} is slow",
        [
            Evidence(f"{row.place}: {what}", row.measured, "ms"),
            Evidence(f"{row.place}: {what}, predicted by the profile", row.predicted, "ms"),
        ],
        (
            f"Check the links between the replicas of stage {row.stage} of {row.unit}."
            if row.operation == "reduce"
            else (
                f"Check the devices of stage {row.stage} of {row.unit}, where its optimizer states"
                " are held, and the links over which its weights are gathered."
            )
        ),
        SLOWEST_TRANSFERS,
    )


def _unknown(record: Record, finding: Finding) -> Explanation:
    emulating = next((place for place in finding.places if place.host is not None), None)
    return _unheard(finding) if emulating is None else _busy(emulating)


def _busy(place: Place) -> Explanation:
    return Explanation(
        place,
        f"Host {place.host} was too busy to run the rehearsal in time",
        [],
        "Messages arrived later than the emulated links deliver them because this host delayed"
        " them: stop other processes there, or raise rehearse.time_scale, and rehearse again.",
        AGAIN_REHEARSED,
    )


def _unheard(finding: Finding) -> Explanation:
    whole_stages = {(one.unit, one.stage) for one in finding.places if one.replica is None}
    names = [f"{unit} stage {stage}" for unit, stage in sorted(whole_stages)] + [
        f"{one.unit} stage {one.stage} replica {one.replica}"
        for one in finding.places
        if (one.unit, one.stage) not in whole_stages
    ]
    return Explanation(
        common(finding.places),
        f"Ranks wait for ranks whose traces are missing ({', '.join(names[:MOST_PLACES])})",
        [],
        "These traces do not show whether those ranks, their hosts or their links are slow: add"
        " their traces and analyse again.",
        AGAIN,
    )


def _data(record: Record, finding: Finding) -> Explanation:
    units: dict[str, dict[int, float]] = {}
    for (name, number), seconds in record.losses.data_wait.items():
        units.setdefault(name, {})[number] = seconds
    unit = str(finding.places[0].unit)
    replica = _alone(units[unit])
    evidence = [
        Evidence(
            f"{name}: waiting for data, mean of its replicas per step",
            sum(waits.values()) / len(waits),
            "s",
        )
        for name, waits in units.items()
    ]
    if replica is not None:
        evidence.append(
            Evidence(
                f"{unit} replica {replica}: waiting for data, per step", units[unit][replica], "s"
            )
        )
    return Explanation(
        Place(unit=unit, replica=replica),
        f"Ranks wait for data, mostly in {unit}"
        + ("" if replica is None else f", replica {replica}"),
        evidence,
        "Prefetch more: raise preprocess.workers and preprocess.prefetch_slots, or add CPU nodes.",
        LEVEL,
    )


def _host(record: Record, finding: Finding) -> Explanation:
    gap, place = record.losses.gap, finding.places[0]
    rank = place.rank if place.rank is not None else max(gap, key=lambda one: gap[one])
    alone = len(finding.places) == 1 and place.rank is not None
    place = record.where.get(rank, place)
    host = place.host if alone else _late_host(record)
    sentence = "Host-side delays between operations, and occasionally inside them"
    if alone:
        sentence = f"Rank {rank} ({place.named}) is delayed by its host"
    return Explanation(
        place if alone else Place(unit=place.unit, host=host),
        sentence,
        [Evidence(f"rank {rank}: time not covered by any operation, per step", gap[rank], "s")],
        "Look for other processes, garbage collection or clock throttling on"
        f" {f'host {host}' if host else 'the hosts of all ranks'}.",
        HOST_GAPS,
    )


def _late_host(record: Record) -> str | None:
    """Return the host whose ranks are delayed; None if several are alike."""
    of_host: dict[str, float] = {}
    for rank, seconds in record.losses.gap.items():
        if (where := record.where.get(rank)) is not None and where.host is not None:
            of_host[where.host] = of_host.get(where.host, 0.0) + seconds
    return _alone(of_host) if len(of_host) > 1 else next(iter(of_host), None)


def _ranks(places: list[Place]) -> str:
    """Format "Ranks … and …" of the locations that have a rank."""
    names = [f"{one.rank}" for one in places if one.rank is not None]
    shown = names[:MOST_PLACES] + (
        [f"{len(places) - MOST_PLACES} more"] if len(places) > MOST_PLACES else []
    )
    if len(shown) > 1:
        return f"Ranks {', '.join(shown[:-1])} and {shown[-1]}"
    return f"Rank {shown[0]} and others"


def _alone(seconds: Mapping[Name, float]) -> Name | None:
    """Return the key with more than twice the seconds of the next one; None if there is none."""
    first, *others = sorted(seconds, key=lambda one: -seconds[one])
    return first if others and seconds[first] > 2 * seconds[others[0]] else None


_DETAILS: Mapping[str, Callable[[Record, Finding], Explanation]] = {
    "unit": _unit,
    "intra_microbatch": _intra,
    "inter_microbatch": _inter,
    "stage": _stage,
    "worker": _worker,
    "experts": _experts,
    "communication": _communication,
    "data": _data,
    "host": _host,
    "unknown": _unknown,
}
