"""Verdict from lost seconds: cause, location, confidence, evidence and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from disttrain_cli.analysis.causes import LEAST_SHARE, SMALLEST_SHARE, Finding
from disttrain_cli.analysis.confidence import calibrated, exceeds
from disttrain_cli.analysis.explanations import MOST_PLACES, Explanation, clocks_of, explain
from disttrain_cli.analysis.figures import counted
from disttrain_cli.analysis.losses import CROWDED
from disttrain_cli.analysis.next_commands import REMEASURE
from disttrain_cli.analysis.record import Record
from disttrain_cli.analysis.result.rows import Comparison
from disttrain_cli.analysis.result.verdicts import (
    LEAST_GAIN_PCT,
    Cause,
    Evidence,
    Place,
    Remedy,
    Verdict,
)

_FEWER_RANKS = (
    "The ranks share the cores of one machine, so a rank that is ready to compute or receive may"
    " wait for a core. Fewer ranks, or one device per rank, show whether that is the only reason."
)
#: Causes in the data.
UNEVEN = ("intra_microbatch", "inter_microbatch")
#: Causes that a job avoids by running without a host.
OF_HOSTS = ("worker", "host")
#: Causes in the ranks or between them.
IN_RANKS = ("worker", "experts", "communication", "host")


def rows_of(record: Record, findings: Sequence[Finding]) -> list[Cause]:
    """Return the findings as rows, in their order, without those that cost nearly nothing."""
    rows = []
    for finding in (
        findings if not record.contradicts else [one for one in findings if one.cause == "unknown"]
    ):
        gain_pct = 100 * float(finding.gain_s.mean()) / record.measured_s
        alone_s = float(finding.alone_s.mean())
        if max(gain_pct, 100 * alone_s / record.measured_s) < LEAST_GAIN_PCT:
            continue
        place, _, _, _, command = explain(record, finding)
        rows.append(
            Cause(
                cause=finding.cause,
                place=place,
                places=finding.places[:MOST_PLACES],
                sentence=_explained(record, finding).sentence,
                gain_s=float(finding.gain_s.mean()),
                gain_pct=gain_pct,
                alone_s=alone_s,
                confidence=_sure(record, finding, []),
                one_event=_one_event(record, finding),
                next_command=command,
            )
        )
    return rows


def judge(record: Record, findings: Sequence[Finding]) -> Verdict:
    """Name the cause whose removal saves most and others that save enough, or that there is none.

    Args:
        record: figures of the steps.
        findings: causes that slow the steps (`causes.find_causes`).
    """
    measured_s = record.measured_s
    if record.contradicts and not any(one.cause == "unknown" for one in findings):
        return unknown(
            "the traces are inconsistent: a replay of the recorded operations and messages misses"
            f" the steps by {100 * abs(record.unexplained):.0f} %, so rows are missing, or the"
            " clocks of ranks disagree"
        )
    large = [
        one
        for one in findings
        if max(one.gain_s.mean(), one.alone_s.mean()) >= one.least_share * measured_s
    ]
    main = next((one for one in large if one.gain_s.mean() >= one.least_share * measured_s), None)
    if main is None:
        return _calm(record, findings)
    explanation, gain_s = _helped(record, main, _explained(record, main)), float(main.gain_s.mean())
    remarks = list(_remarks(record, findings, main, large))
    evidence = [
        *_steps(record),
        Evidence(f"saved by fixing it: {explanation.sentence}", gain_s, "s"),
        *(figure for remark in remarks for figure in remark.evidence),
    ]
    found = (
        f"{explanation.sentence}: {gain_s:.3g} s of every {measured_s:.3g} s step"
        f" ({100 * gain_s / measured_s:.0f} %{record.sampled})."
    )
    return Verdict(
        cause=main.cause,
        headline=" ".join([found, *(note for remark in remarks for note in remark.notes)]),
        place=explanation.place,
        lost_s=gain_s,
        lost_fraction=gain_s / measured_s,
        confidence=_sure(record, main, [one for one in findings if one is not main]),
        evidence=evidence + explanation.evidence + _own_bubbles(record, findings),
        advice=explanation.advice,
        next_command=explanation.command,
    )


def _steps(record: Record) -> list[Evidence]:
    predicted = _predicted_step(record)
    return [
        Evidence("recorded step", record.measured_s, "s"),
        *([Evidence(f"step as {_by(predicted)}", predicted.predicted, "s")] if predicted else []),
        Evidence(
            "ideal step: GPUs perfectly shared, no delays", float(record.losses.ideal.mean()), "s"
        ),
    ]


class _Remark(NamedTuple):
    """Sentences that a headline adds to the cause, and their evidence."""

    notes: list[str]
    evidence: list[Evidence]


def _remarks(
    record: Record, findings: Sequence[Finding], main: Finding, large: Sequence[Finding]
) -> Iterator[_Remark]:
    """Yield what hides the main finding, what else costs time, and in how many steps it occurs."""
    if main.alone_s.mean() < 0.5 * main.gain_s.mean():
        yield _hidden(record, findings, main)
    for one in findings:
        if one is not main:
            yield _also(record, one, one in large)
    # worker, host and stage make a unit slower by themselves, shared cores make all units slower
    if record.shared_cores or main.cause not in (*OF_HOSTS, "stage", "experts"):
        yield _Remark(_slower_than_predicted(record), [])
    yield _how_often(record, main)
    if _one_event(record, main):
        figure = Evidence(
            "saved by fixing it, without its largest single event", float(main.rest_s or 0.0), "s"
        )
        yield _Remark(["It is due to a single event in one step."], [figure])


def _hidden(record: Record, findings: Sequence[Finding], main: Finding) -> _Remark:
    alone_s = float(main.alone_s.mean())
    behind = "; ".join(_explained(record, one).sentence for one in findings[: findings.index(main)])
    return _Remark(
        [f"Fixing it alone saves {alone_s:.3g} s, because another cause hides it: {behind}."],
        [Evidence("saved by fixing it alone, all else as recorded", alone_s, "s")],
    )


def _also(record: Record, finding: Finding, large: bool) -> _Remark:
    gain_s, sentence = float(finding.gain_s.mean()), _explained(record, finding).sentence
    most_s = max(gain_s, float(finding.alone_s.mean()))
    worth = gain_s >= SMALLEST_SHARE * record.measured_s
    return _Remark(
        [f"Also: {sentence}, {most_s:.3g} s."] if large else [],
        [Evidence(f"saved by fixing next: {sentence}", gain_s, "s")] if worth else [],
    )


def _how_often(record: Record, main: Finding) -> _Remark:
    often = main.gain_s >= main.least_share * record.losses.measured
    rare = 0 < often.sum() <= len(often) / 2
    figure = Evidence(
        "steps in which fixing it saves that much", float(often.mean()), "share of steps"
    )
    note = f"Only in {often.sum()} of {counted(len(often), 'step')}."
    return _Remark([note] if rare else [], [figure])


def _crowded(record: Record, finding: Finding) -> bool:
    """Return True if a finding about ranks may only be their waiting for shared cores."""
    return record.shared_cores and record.losses.crowded > CROWDED and finding.cause in IN_RANKS


def _explained(record: Record, finding: Finding) -> Explanation:
    """Explain a cause, with a note if ranks may only have waited for a shared core."""
    explanation = explain(record, finding)
    if not _crowded(record, finding):
        return explanation
    figure = Evidence(
        "compute time of all ranks ÷ time of the shared cores", record.losses.crowded, "ratio"
    )
    explanation = explanation._replace(
        evidence=[*explanation.evidence, figure], advice=_FEWER_RANKS, command=_fewer_ranks(record)
    )
    if finding.cause != "host":
        return explanation
    slow = Evidence(
        "transfers beyond their usual time, summed over ranks",
        sum(record.losses.links.values()),
        "s",
    )
    rank = explanation.place.rank
    return explanation._replace(
        place=Place(host=explanation.place.host),
        sentence=(
            "Ranks that are ready to run wait"
            if rank is None
            else f"Rank {rank} ({explanation.place.named}) is ready to run and waits"
        )
        + " for one of the cores that all ranks share",
        evidence=[slow, *explanation.evidence[1:]],
    )


def _fewer_ranks(record: Record) -> str:
    return f"disttrain plan --gpus {max(1, record.gpus - 1)}"


def _calm(record: Record, findings: Sequence[Finding]) -> Verdict:
    """Return the verdict that no cause saves enough, with the small causes and their costs."""
    measured_s, losses, evidence = record.measured_s, record.losses, _steps(record)
    small = sorted(
        (one for one in findings if one.gain_s.mean() >= SMALLEST_SHARE * measured_s),
        key=lambda one: -float(one.gain_s.mean()),
    )
    headline = (
        f"No straggler: no cause that can be fixed costs more than {100 * LEAST_SHARE:.0f} % of a"
        " step"
    )
    for one in small:
        evidence.append(
            Evidence(f"small: {_explained(record, one).sentence}", float(one.gain_s.mean()), "s")
        )
    faults, limits = ([one for one in small if one.limit == limit] for limit in (False, True))
    if faults:
        share = 100 * faults[0].gain_s.mean() / measured_s
        headline += f" (the largest: {_explained(record, faults[0]).sentence}, {share:.1f} %)"
    if limits:
        share = 100 * limits[0].gain_s.mean() / measured_s
        headline += (
            f"; train.ordering: best would save {share:.0f} % of a step by balancing uneven data"
            if limits[0].regained
            else f"; uneven data cost {share:.0f} % at most"
        )
    bubbles = _own_bubbles(record, findings)
    if bubbles and any(one.cause == "unit" for one in record.remedies):
        headline += (
            f"; the plan's inherent bubbles take {100 * bubbles[0].value / measured_s:.0f} %, which"
            " none of the tried layouts avoids"
        )
    slower = _slower_than_predicted(record)
    notes = [note.removesuffix(".") for note in slower]
    # oversubscribed cores hide slow ranks: they are reported first, and the confidence is halved
    waits = (record.core_wait_s or 0.0) > LEAST_SHARE * measured_s
    crowded = bool(notes) and (record.shared_cores or waits)
    headline = ". ".join([*notes, headline] if crowded else [headline, *notes])
    fill = record.shares["warmup"] + record.shares["drain"] if record.pipelined else 0.0
    evidence += bubbles
    if record.pipelined:
        evidence.append(Evidence("warm-up and drain of the pipeline", fill, "share of time"))
    gains = np.array(
        [one.gain_s / losses.measured * (LEAST_SHARE / one.least_share) for one in findings]
    )
    gains = gains.reshape(-1, len(losses.measured))
    most = gains.max(axis=0, initial=0.0)
    return Verdict(
        cause="none",
        headline=f"{headline}.",
        place=Place(),
        lost_s=0.0,
        lost_fraction=0.0,
        confidence=calibrated((1 - exceeds(most, LEAST_SHARE)) * record.known, record.kind)
        / (2 if crowded else 1),
        evidence=evidence,
        **_calm_advice(
            record,
            bool(slower),
            fill,
            fitting(
                [
                    one
                    for one in record.remedies
                    if one.cause == "unit" or (one.cause in UNEVEN and one.basis == "plan")
                ],
                "unit",
                *UNEVEN,
            ),
        ),
    )


def _sure(record: Record, finding: Finding, others: Sequence[Finding]) -> float:
    """Return the confidence in a cause, halved if ranks may only have waited for a core."""
    halved = 2 if _crowded(record, finding) else 1
    return round(calibrated(_raw(record, finding, others), record.kind) / halved, 3)


def _raw(record: Record, finding: Finding, others: Sequence[Finding]) -> float:
    """Return the evidence for a cause, 0 to 1 (see `confidence`), reduced by rivals in `others`."""
    shares = finding.gain_s / record.losses.measured
    raw = exceeds(shares, finding.least_share) * record.known
    if _one_event(record, finding):
        raw /= 2
    if finding.cause == "communication":  # clock errors look like slow transfers
        raw *= max(0.0, 1.0 - record.clocks_s / float(finding.gain_s.mean()))
    rivals = [one.alone_s / record.losses.measured for one in others]
    return min([raw, *(raw * exceeds(shares - rival, 0.0) for rival in rivals)])


def _one_event(record: Record, finding: Finding) -> bool:
    """Return True if a cause saves enough only due to one pass, transfer or wait of one step."""
    least_s = finding.least_share * record.measured_s
    return finding.rest_s is not None and finding.rest_s < least_s <= finding.gain_s.mean()


def _slower_than_predicted(record: Record) -> list[str]:
    """Return a sentence if every unit, or on shared cores the step, is slower than predicted.

    On separate devices either the profile is wrong or all of them are slow: no trace shows which.
    """
    step = _predicted_step(record)
    if record.shared_cores:
        if step is None or step.error_pct < 100 * LEAST_SHARE:
            return []
        return [
            f"Steps take {1 + step.error_pct / 100:.2g} times as long as {_by(step)}"
            f" ({step.measured:.3g} instead of {step.predicted:.3g} s): the ranks share the cores"
            f" of one machine, with each other and with other processes, {_waited(record, step)}."
        ]
    off = [
        row.error_pct
        for row in record.comparisons
        if row.what == "stage_ms" and row.basis == "same work"
    ]
    if min(off, default=0.0) < 100 * LEAST_SHARE:
        return []
    waited_s = record.core_wait_s or 0.0
    clocks = clocks_of(record, list(record.where.values()))
    why = (
        f"a runnable rank waited {waited_s:.3g} s per step for a core"
        f" ({100 * waited_s / record.measured_s:.0f} %), which other processes held."
        if waited_s > LEAST_SHARE * record.measured_s
        else f"{clocks.removeprefix('; ')}."
        if clocks
        else "either the profile is wrong (disttrain profile), or all devices are slow."
    )
    return [
        f"Every unit takes at least {1 + min(off) / 100:.2g} times as long as the profile predicts:"
        f" {why}"
    ]


def _waited(record: Record, step: Comparison) -> str:
    """Format the time that ranks waited for cores, if the kernel reports it."""
    waited_s = record.core_wait_s
    if waited_s is None:
        return "which is the likely reason"
    return (
        f"and a runnable rank waited {waited_s:.3g} s per step for a core"
        f" ({100 * waited_s / step.measured:.0f} %)"
    )


def _predicted_step(record: Record) -> Comparison | None:
    """Return the predicted and measured step, by the profile at the recorded sizes if known."""
    steps = {row.basis: row for row in record.comparisons if row.what == "iteration_s"}
    return steps.get("same work") or steps.get("plan")


def _by(step: Comparison) -> str:
    return (
        "the profile predicts for this work" if step.basis == "same work" else "the plan predicts"
    )


def _own_bubbles(record: Record, findings: Sequence[Finding]) -> list[Evidence]:
    """Return evidence of the saving by an ideal partition of the devices, which no layout has."""
    regained = sum(float(one.gain_s.mean()) for one in findings if one.cause == "unit")
    kept = float(record.losses.lost["unit"].mean()) - regained
    if kept >= SMALLEST_SHARE * record.measured_s:
        return [
            Evidence(
                "the plan's inherent bubbles: whole devices cannot be shared more evenly"
                " between the units",
                kept,
                "s",
            )
        ]
    return []


def _helped(record: Record, main: Finding, explanation: Explanation) -> Explanation:
    """Return the explanation with the remedy that fits, and its command."""
    remedies, cause, more = record.remedies, main.cause, ""
    remedy = fitting(remedies, cause)
    if cause == "unit" and remedy is not None:
        explanation, more = (
            explanation._replace(command=remedy.command),
            _gain_of(remedy, record.measured_s),
        )
        bought = [
            one
            for one in remedies
            if one.cause == cause and one.gpus > 0 and one.gain_s > remedy.gain_s
        ]
        if bought and remedy.gpus <= 0:
            best = max(bought, key=lambda one: one.gain_s / one.gpus)
            more += f" {_gain_of(best, record.measured_s)}"
    elif cause == "unit" and explanation.command != REMEASURE:
        more = (
            f"If the plan is already the best for {counted(record.gpus, 'GPU')}, plan for one more:"
            " the work may divide better."
        )
    elif remedy is not None and (main.regained or (cause in OF_HOSTS and remedy.gpus < 0)):
        more = _gain_of(remedy, record.measured_s)
    elif cause in UNEVEN:
        more = (
            f"In a replay of the recorded steps equal work saves {main.gain_s.mean():.3g} s at"
            " most: reordering does not split samples."
        )
    return explanation._replace(advice=f"{explanation.advice} {more}".rstrip())


def fitting(remedies: Sequence[Remedy], *causes: str) -> Remedy | None:
    """Return the remedy that helps one of the causes most, or None.

    Remedies without more devices come first, then those found by planning, then exact ones before
    upper bounds.
    """
    worth = [remedy for remedy in remedies if remedy.cause in causes and remedy.worth]
    return min(
        worth,
        key=lambda one: (one.gpus > 0, one.basis != "plan", one.at_most, -one.gain_s),
        default=None,
    )


def _gain_of(remedy: Remedy, measured_s: float) -> str:
    by = "replay of the recorded steps" if remedy.basis == "replay" else "the planner"
    least = "at least " if remedy.at_most else ""
    return (
        f"By {by}, a step would take {least}{remedy.step_s:.3g} instead of {measured_s:.3g} s "
        f"({remedy.gain_pct:.0f} %) with {remedy.change}."
    )


def unknown(reason: str) -> Verdict:
    """Return the verdict if no step can be replayed."""
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


def _calm_advice(
    record: Record, slower: bool, fill: float, remedy: Remedy | None
) -> dict[str, str]:
    advice = "Nothing to fix; more speed needs more GPUs or faster kernels."
    command = "disttrain plan --top 5"
    if fill > 0.25:
        advice = (
            f"{100 * fill:.0f} % of the time is the pipeline's warm-up and drain: more slots per"
            " step (a larger train.global_batch_size) or fewer stages shorten it."
        )
        command = "disttrain plan"
    if slower and record.shared_cores:
        advice, command = _FEWER_RANKS, _fewer_ranks(record)
    elif slower:
        advice = (
            "Measure the profile again on these devices: if it does not change, check what they"
            " share (clocks, temperature, other jobs)."
        )
        command = REMEASURE
    elif remedy is not None:
        advice += f" {_gain_of(remedy, record.measured_s)}"
        if remedy.gpus <= 0 and remedy.gain_pct >= 100 * LEAST_SHARE:
            command = remedy.command
    return {"advice": advice, "next_command": command}
