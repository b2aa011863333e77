"""Cause of a hang, from the flight recorder's dumps.

A rank with a pending operation waits for the ranks that have not issued it: the group's others for
a collective, the peers for a message or a batch of messages. If all have issued it, it is blocked
by those of them that wait elsewhere. Ranks that are waited for, wait for no rank and are not
blocked are the cause; an operation on which ranks disagree takes precedence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from disttrain_cli.analysis.figures import agree, counted, name_ranks
from disttrain_cli.analysis.flight.dumps import Entry, ranks_of, read_dumps
from disttrain_cli.analysis.flight.matching import (
    Finding,
    first_problem,
    first_wrong_message,
    groups_of,
)
from disttrain_cli.analysis.flight.waiting import Position, causes_of, circle_of, positions_of

#: Property on which ranks disagree, by problem; these precede anything that ranks wait for.
DISAGREE = {
    "other operation": "operation",
    "other count": "number of operations",
    "other size": "size",
    "other dtype": "type",
}


class Place(Struct, frozen=True, kw_only=True):
    """Position of a rank: its first operation that has not ended, or else its last one."""

    rank: int
    waits: bool  # that operation is pending
    operation: str
    group: str
    sequence: int
    state: str
    line: str  # Python line that issued it: file:line (function), "" if no stack was recorded
    waits_for: list[int]


class Row(Struct, frozen=True, kw_only=True):
    """The first collective of a group that is not in order."""

    group: str
    group_name: str  # torch's
    group_ranks: list[int]
    operation: str
    sequence: int
    problem: str
    ranks: list[int]
    detail: str


class HangVerdict(Struct, frozen=True, kw_only=True):
    """Verdict from the dumps."""

    cause: str  # a `matching.Problem`, "message", "circle", "unknown", or "nothing pending"
    sentence: str
    ranks: list[int]
    row: Row | None
    next_step: str


class Dumped(Struct, frozen=True, kw_only=True):
    """Analysis of the dumps, as `--json` prints it."""

    format: str = "flight recorder"
    version: str
    ranks: list[int]
    without_dump: list[int]
    verdict: HangVerdict
    collectives: list[Row]
    places: list[Place]
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the document of `--json`."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


def analyze_dumps(files: Sequence[Path]) -> Dumped:
    """Judge the dumps of one hang; raise DataError if none can be read."""
    dumps, said = read_dumps(files)
    seen = groups_of(dumps)
    findings = [
        found
        for look in (first_problem, first_wrong_message)
        for one in seen
        if (found := look(one, dumps)) is not None
    ]
    findings.sort(key=lambda found: (found.problem not in DISAGREE, found.since_ns))
    positions = positions_of(seen, dumps)
    places = {rank: _place(rank, positions.get(rank)) for rank in dumps}
    members = [one.group.ranks for one in seen]
    members += [ranks_of(group) for dump in dumps.values() for group in dump.pg_config.values()]
    without = sorted({rank for ranks in members for rank in ranks} - {*dumps})
    versions = sorted({dump.version for dump in dumps.values()}, key=_numbers)
    if len(versions) > 1:
        said.append(f"dumps of several versions: {', '.join(versions)}")
    if versions[-1].partition(".")[0] != "2":
        said.append(f"version {versions[-1]} of the format is unknown; read as 2.x")
    return Dumped(
        version=versions[-1],
        ranks=[*dumps],
        without_dump=without,
        verdict=_verdict(findings, places, positions, without, files),
        collectives=[_row(found) for found in findings],
        places=[*places.values()],
        warnings=said,
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,9}", version)]


def _place(rank: int, position: Position | None) -> Place:
    if position is None:
        return Place(
            rank=rank,
            waits=False,
            operation="",
            group="",
            sequence=-1,
            state="",
            line="",
            waits_for=[],
        )
    return Place(
        rank=rank,
        waits=position.pending,
        operation=position.entry.operation,
        group=position.group.title,
        sequence=position.entry.number,
        state=position.entry.state,
        line=_line(position.entry),
        waits_for=sorted(position.waits_for),
    )


def _line(entry: Entry) -> str:
    """Return the innermost line outside of torch."""
    for frame in entry.frames:
        if "/torch/" not in frame.filename.replace("\\", "/"):
            return f"{frame.filename}:{frame.line} ({frame.name})"
    return ""


def _verdict(
    findings: Sequence[Finding],
    places: Mapping[int, Place],
    positions: Mapping[int, Position],
    without: Sequence[int],
    files: Sequence[Path],
) -> HangVerdict:
    def verdict(
        cause: str, sentence: str, blamed: Sequence[int], found: Finding | None, advice: str
    ) -> HangVerdict:
        return HangVerdict(
            cause=cause,
            sentence=sentence,
            ranks=[*blamed],
            row=None if found is None else _row(found),
            next_step=advice,
        )

    if findings and findings[0].problem in DISAGREE:
        found = findings[0]
        return verdict(
            found.problem,
            f"{_subject(found.ranks)} {_has(found)} {_collective(found)}: {found.detail}",
            found.ranks,
            found,
            "Compare the code that leads to this call on"
            f" {agree(len(found.ranks), 'that rank', 'those ranks')} with the other ranks': "
            + (_stack(places, found.ranks) or "see their logs."),
        )
    causes = causes_of(positions, [*places])
    if causes:
        waited = [
            found for found in findings if found.problem == "missing" and {*found.ranks} & {*causes}
        ]
        here = waited[0] if waited else None
        waiting = (
            here.waiting
            if here is not None
            else [rank for rank, place in places.items() if {*place.waits_for} & {*causes}]
        )
        waits = f"{name_ranks(waiting)} {agree(len(waiting), 'waits', 'wait')}"
        what = (
            f"{_subject(causes)} {agree(len(causes), 'has', 'have')} not joined"
            f" {_collective(here)}, in which {waits}"
            if here is not None
            else f"{_subject(causes)} {agree(len(causes), 'does', 'do')} not answer messages that"
            f" {waits} for"
        )
        last = places[causes[0]]
        doing = (
            f"; rank {last.rank} {'is in' if last.waits else 'last ran'} {last.operation} of"
            f" {last.group}"
            if last.operation
            else f"; rank {last.rank} has recorded nothing"
        )
        return verdict(
            "missing" if here is not None else "message",
            what + doing,
            causes,
            here,
            "Check what"
            + agree(
                len(causes),
                " that rank does outside of communication: the stack at the end of its log",
                " those ranks do outside of communication: the stacks at the ends of their logs",
            )
            + (f", and {_stack(places, causes)}" if _stack(places, causes) else "."),
        )
    if circle := circle_of(positions):
        return verdict(
            "circle",
            f"{_subject(circle)} wait for each other: each is in an operation that another one"
            " reaches only later",
            circle,
            next((found for found in findings if {*found.ranks} & {*circle}), None),
            "Some ranks use the groups in a different order; the position of each is listed below.",
        )
    lacking = sorted({other for place in places.values() for other in place.waits_for} - {*places})
    unfinished = [
        found for found in findings if found.problem in ("not started", "no dump", "not finished")
    ]
    if lacking or (unfinished and unfinished[0].problem == "no dump"):
        here = None if lacking else unfinished[0]
        waiting = (
            [rank for rank, place in places.items() if {*place.waits_for} & {*lacking}]
            if here is None
            else [*here.waiting]
        )
        lacking = lacking or [*unfinished[0].ranks]
        one = len(lacking) == 1
        none = "is no dump" if one else "are no dumps"
        return verdict(
            "unknown",
            f"{_subject(waiting)} {agree(len(waiting), 'waits', 'wait')} "
            + (
                f"in {_collective(here)}, and there {none} of {name_ranks(lacking)}"
                if here is not None
                else f"for {name_ranks(lacking)} to answer messages, and there {none} of"
                f" {'it' if one else 'them'}"
            ),
            lacking,
            here,
            f"Pass the {'dump' if one else 'dumps'} of {name_ranks(lacking)} too: "
            + ("it shows whether that rank waits" if one else "they show whether those ranks wait")
            + " for others.",
        )
    if unfinished:
        found = unfinished[0]
        late = found.problem == "not started"
        dumped = "" if {*found.group.ranks} <= {*places} else " with a dump"
        return verdict(
            found.problem,
            f"All ranks{dumped} have joined {_collective(found)}, and"
            + (
                f" {name_ranks(found.ranks)} {agree(len(found.ranks), 'has', 'have')} not started"
                f" it: {agree(len(found.ranks), 'the device is', 'their devices are')} busy with"
                " what was launched before it"
                if late
                else " it has not finished: the network delays it"
            ),
            found.ranks,
            found,
            (
                "Look at the kernels launched before it on"
                f" {agree(len(found.ranks), 'that device', 'those devices')}."
                if late
                else "With NCCL_DEBUG=INFO the logs show what NCCL attempts; check that hosts and"
                " links respond."
            ),
        )
    pending = [rank for rank, place in places.items() if place.waits]
    unknown = [rank for rank in pending if not positions[rank].known]
    if pending:
        known, pending = not unknown, unknown or pending
        first = places[pending[0]]
        return verdict(
            "not finished" if known else "unknown",
            f"{_subject(pending)} {agree(len(pending), 'is', 'are')} in messages that"
            + (
                f" both ends have asked for (rank {first.rank} in {first.operation} of"
                f" {first.group}), and that have not finished: the network delays them"
                if known
                else " the dumps do not show the other ends of"
                f" (rank {first.rank} in {first.operation} of {first.group}), so"
                f" whom {agree(len(pending), 'it waits', 'they wait')} for is not known"
            ),
            pending,
            None,
            "With NCCL_DEBUG=INFO the logs show what NCCL attempts; check that hosts and links"
            " respond."
            if known
            else "See the stacks in the logs of those ranks.",
        )
    if without:
        return verdict(
            "unknown",
            f"Nothing is pending in {counted(len(places), 'dump')}, and there are no dumps of"
            f" {name_ranks(without)}: without them it is unknown which ranks wait for which",
            without,
            None,
            f"Pass the dumps of all ranks: disttrain analyze {shlex.quote(str(files[0].parent))}",
        )
    return verdict(
        "nothing pending",
        f"Nothing is pending in {counted(len(places), 'dump')}",
        [],
        None,
        "The ranks wait for something other than each other: see the stacks in their logs.",
    )


def _row(found: Finding) -> Row:
    return Row(
        group=found.group.title,
        group_name=found.group.name,
        group_ranks=[*found.group.ranks],
        operation=found.operation,
        sequence=found.sequence,
        problem=found.problem,
        ranks=[*found.ranks],
        detail=found.detail,
    )


def _has(found: Finding) -> str:
    what = DISAGREE[found.problem]
    if found.ranks == found.waiting:  # the two ends of a message
        return f"disagree about the {what} of"
    return f"{agree(len(found.ranks), 'has', 'have')} another {what} in"


def _collective(found: Finding) -> str:
    return f"{found.operation} number {found.sequence} of {found.group.title}"


def _subject(numbers: Sequence[int]) -> str:
    """Format ranks at the beginning of a sentence."""
    return name_ranks(numbers).capitalize()


def _stack(places: Mapping[int, Place], ranks: Sequence[int]) -> str:
    line = next((places[rank].line for rank in ranks if places[rank].line), "")
    return f"the last recorded call at {line}" if line else ""
