"""Why a job hangs, from its flight recorder's dumps.

A rank waits where an operation of its own is pending, for the ranks that have not asked for it: the
group's others for a collective, the peers for a message or a batch of messages. Where all have
asked for it, it is held up by those of them that wait elsewhere. Ranks that are waited for, wait
for nobody and are not held up are the cause; an operation that ranks disagree about is, before
anything else.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from disttrain_cli.analysis.flight.dumps import Entry, ranks_of, read_dumps
from disttrain_cli.analysis.flight.matching import (
    Finding,
    first_problem,
    first_wrong_message,
    groups_of,
)
from disttrain_cli.analysis.flight.waiting import (
    Position,
    causes_of,
    circle_of,
    positions_of,
)

#: What ranks disagree about; it is found before anything that they wait for.
DISAGREE = ("other operation", "other size", "other dtype")
MOST_LISTED = 8


class Place(Struct, frozen=True, kw_only=True):
    """Where a rank is: its first operation that has not ended, or else its last one."""

    rank: int
    waits: bool  # whether that operation is pending
    operation: str
    group: str
    sequence: int
    state: str
    line: str  # of Python that asked for it: file:line (function), "" where no stack was kept
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
    """What the dumps say."""

    cause: str  # a `matching.Problem`, "message", "circle", "unknown", or "nothing pending"
    sentence: str
    ranks: list[int]
    row: Row | None
    next_step: str


class Dumped(Struct, frozen=True, kw_only=True):
    """All of it: `--json` prints this."""

    format: str = "flight recorder"
    version: str
    ranks: list[int]
    without_dump: list[int]
    verdict: HangVerdict
    collectives: list[Row]
    places: list[Place]
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


def analyze_dumps(files: Sequence[Path]) -> Dumped:
    """Judge the dumps of one hang; raises DataError where none can be read."""
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
        said.append(f"version {versions[-1]} of the format is not known here; read as 2.x")
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
    """The innermost line that is not torch's own."""
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
        cause: str, sentence: str, ranks: Sequence[int], found: Finding | None, advice: str
    ) -> HangVerdict:
        return HangVerdict(
            cause=cause,
            sentence=sentence,
            ranks=[*ranks],
            row=None if found is None else _row(found),
            next_step=advice,
        )

    if findings and findings[0].problem in DISAGREE:
        found = findings[0]
        return verdict(
            found.problem,
            f"{_named(found.ranks)} {_has(found)} {_collective(found)}: {found.detail}",
            found.ranks,
            found,
            "Compare what leads those ranks there with the others: "
            + (_stack(places, found.ranks) or "their logs."),
        )
    causes = causes_of(positions, [*places])
    if causes:
        waiting = [rank for rank, place in places.items() if {*place.waits_for} & {*causes}]
        waited = [
            found for found in findings if found.problem == "missing" and {*found.ranks} & {*causes}
        ]
        here = waited[0] if waited else None
        what = (
            f"{_named(causes)} {'has' if len(causes) == 1 else 'have'} not joined"
            f" {_collective(here)}, in which {_named(here.waiting).lower()} wait"
            if here is not None
            else f"{_named(causes)} {'does' if len(causes) == 1 else 'do'} not answer messages that"
            f" {_named(waiting).lower()} {'waits' if len(waiting) == 1 else 'wait'} for"
        )
        last = places[causes[0]]
        doing = (
            f"; rank {last.rank} {'is in' if last.waits else 'last did'} {last.operation} of"
            f" {last.group}"
            if last.operation
            else f"; rank {last.rank} has recorded nothing"
        )
        return verdict(
            "missing" if here is not None else "message",
            what + doing,
            causes,
            here,
            "See what those ranks do outside of communication: the stacks at the ends of their logs"
            + (f", and {_stack(places, causes)}" if _stack(places, causes) else "."),
        )
    if circle := circle_of(positions):
        return verdict(
            "circle",
            f"{_named(circle)} wait for each other: each is in an operation that another one comes"
            " to later",
            circle,
            next((found for found in findings if {*found.ranks} & {*circle}), None),
            "Groups are used in another order on some ranks; see where each one is, below.",
        )
    lacking = sorted({other for place in places.values() for other in place.waits_for} - {*places})
    if lacking:
        waiting = [rank for rank, place in places.items() if {*place.waits_for} & {*lacking}]
        return verdict(
            "unknown",
            f"{_named(waiting)} {'waits' if len(waiting) == 1 else 'wait'} for"
            f" {_named(lacking).lower()} to answer messages, and there"
            f" {'is no dump' if len(lacking) == 1 else 'are no dumps'} of"
            f" {'it' if len(lacking) == 1 else 'them'}",
            lacking,
            None,
            f"Give the dumps of {_named(lacking).lower()} too: they tell whether those wait for"
            " others.",
        )
    unfinished = [found for found in findings if found.problem in ("not started", "not finished")]
    if unfinished:
        found = unfinished[0]
        late = found.problem == "not started"
        return verdict(
            found.problem,
            f"All ranks with a dump have joined {_collective(found)}, and"
            + (
                f" {_named(found.ranks).lower()} {'has' if len(found.ranks) == 1 else 'have'} not"
                " started it: the device is busy with what comes before it"
                if late
                else " it has not finished: the network, or a rank without a dump, holds it up"
            ),
            found.ranks if late else without or found.ranks,
            found,
            (
                "See what those devices run before it."
                if late
                else "NCCL_DEBUG=INFO says in the logs what it tries; see whether hosts and links"
                " answer."
            ),
        )
    pending = [rank for rank, place in places.items() if place.waits]
    if pending:
        first = places[pending[0]]
        known = all(positions[rank].known for rank in pending)
        return verdict(
            "not finished" if known else "unknown",
            f"{_named(pending)} {'is' if len(pending) == 1 else 'are'} in messages that"
            + (
                f" both ends have asked for (rank {first.rank} in {first.operation} of"
                f" {first.group}), and that have not finished: the network holds them up"
                if known
                else f" do not name their peers (rank {first.rank} in {first.operation} of"
                f" {first.group}), so whom they wait for is not known"
            ),
            pending,
            None,
            "NCCL_DEBUG=INFO says in the logs what it tries; see whether hosts and links answer."
            if known
            else "See the stacks in the logs of those ranks.",
        )
    if without:
        return verdict(
            "unknown",
            f"Nothing is pending in {len(places)} dump(s), and there are no dumps of"
            f" {_named(without).lower()}: who waits for whom is not known without them",
            without,
            None,
            f"Give the dumps of all ranks: disttrain analyze {shlex.quote(str(files[0].parent))}",
        )
    return verdict(
        "nothing pending",
        f"Nothing is pending in {len(places)} dump(s)",
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
    what = {"other operation": "operation", "other size": "size", "other dtype": "type"}
    if found.ranks == found.waiting:  # the two ends of a message
        return f"disagree about the {what[found.problem]} of"
    return f"{'has' if len(found.ranks) == 1 else 'have'} another {what[found.problem]} in"


def _collective(found: Finding) -> str:
    return f"{found.operation} number {found.sequence} of {found.group.title}"


def _named(ranks: Sequence[int]) -> str:
    """Ranks 1, 2, 3, …"""
    shown = ", ".join(map(str, ranks[:MOST_LISTED])) + ", …" * (len(ranks) > MOST_LISTED)
    return f"Rank {shown}" if len(ranks) == 1 else f"Ranks {shown}"


def _stack(places: Mapping[int, Place], ranks: Sequence[int]) -> str:
    line = next((places[rank].line for rank in ranks if places[rank].line), "")
    return f"asked last at {line}" if line else ""
