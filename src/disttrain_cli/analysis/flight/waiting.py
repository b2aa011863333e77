"""Position of each rank, and the ranks that it waits for there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from disttrain_cli.analysis.flight.dumps import Dump, Entry
from disttrain_cli.analysis.flight.matching import Group, Seen, channels_of


@dataclass(frozen=True)
class Position:
    """A rank's first operation that has not ended, or else its last one; a batch counts as one."""

    entry: Entry
    group: Group
    waits_for: frozenset[int] = frozenset()  # ranks that have not issued it
    # other ranks that have issued it, and on which it is pending
    inside: frozenset[int] = frozenset()
    lacking: frozenset[int] = frozenset()  # ranks of its group without a dump
    known: bool = True  # False if a message does not name its peer, or cannot be paired

    @property
    def pending(self) -> bool:
        """True if the operation has not ended."""
        return self.entry.pending


#: A message by rank and record → its peer, and the peer's end of it, if issued.
Answers = Mapping[tuple[int, int], tuple[int, Entry | None]]


def positions_of(seen: Sequence[Seen], dumps: Mapping[int, Dump]) -> dict[int, Position]:
    """Return the position of every rank that has recorded an operation."""
    answers = _answers(seen, dumps)
    found: dict[int, Position] = {}
    for rank, dump in dumps.items():
        if not dump.entries:
            continue
        entry = next((entry for entry in dump.entries if entry.pending), dump.entries[-1])
        where = next(one for one in seen if any(own is entry for own in one.entries.get(rank, ())))
        if not entry.pending:
            found[rank] = Position(entry, where.group)
        elif entry.is_message:
            found[rank] = _in_messages(rank, entry, where, answers)
        else:
            found[rank] = _in_collective(rank, entry, where)
    return found


def _in_collective(rank: int, entry: Entry, where: Seen) -> Position:
    later = {
        other: [
            own
            for own in entries
            if not own.is_message and own.collective_seq_id >= entry.collective_seq_id
        ]
        for other, entries in where.entries.items()
        if other != rank
    }
    return Position(
        entry,
        where.group,
        frozenset(other for other, entries in later.items() if not entries),
        frozenset(
            other
            for other, entries in later.items()
            if any(
                own.pending and own.collective_seq_id == entry.collective_seq_id for own in entries
            )
        ),
        frozenset(where.group.ranks) - {*where.entries},
    )


def _in_messages(rank: int, entry: Entry, where: Seen, answers: Answers) -> Position:
    batch = [
        own
        for own in where.entries[rank]
        if own.pending and own.is_message and own.p2p_seq_id == entry.p2p_seq_id
    ]
    known = [own for own in batch if (rank, own.record_id) in answers]
    ends = [(own, *answers[rank, own.record_id]) for own in known]
    waiting = {own.record_id: peer for own, peer, answer in ends if answer is None}
    return Position(
        next((own for own in batch if own.record_id in waiting), entry),
        where.group,
        frozenset(waiting.values()),
        frozenset(peer for _, peer, answer in ends if answer is not None and answer.pending),
        known=len(known) == len(batch),
    )


def _answers(seen: Sequence[Seen], dumps: Mapping[int, Dump]) -> Answers:
    return {
        (own, entry.record_id): (peer, answer)
        for one in seen
        for channel in channels_of(one, dumps)
        for send, receive in channel.pairs()
        for own, entry, peer, answer in (
            (channel.sender, send, channel.receiver, receive),
            (channel.receiver, receive, channel.sender, send),
        )
        if entry is not None
    }


def causes_of(positions: Mapping[int, Position], ranks: Sequence[int]) -> list[int]:
    """Return the ranks with a dump that others wait for and that, as far as known, none blocks.

    Args:
        positions: position by rank.
        ranks: ranks with a dump.
    """
    asked = {other for position in positions.values() for other in position.waits_for}
    unknown = {rank for rank, position in positions.items() if not position.known}
    return sorted(
        rank for rank in asked.intersection(ranks) - unknown if not _held_up_by(rank, positions)
    )


def circle_of(positions: Mapping[int, Position]) -> list[int]:
    """Return ranks that are blocked by themselves through other ranks."""

    def reached_from(rank: int) -> set[int]:
        reached: set[int] = set()
        left = [rank]
        while left:
            new = _held_up_by(left.pop(), positions) - reached
            reached |= new
            left += new
        return reached

    return [rank for rank in positions if rank in reached_from(rank)]


def _held_up_by(rank: int, positions: Mapping[int, Position]) -> frozenset[int]:
    """Return the ranks that block `rank` in its operation.

    They are the ranks that have not issued it; if all have, those inside it that wait for others,
    or else those without a dump, whose state is unknown.
    """
    position = positions.get(rank)
    if position is None:
        return frozenset()
    elsewhere = {
        peer for peer in position.inside if peer in positions and positions[peer].waits_for
    }
    return position.waits_for or frozenset(elsewhere) or position.lacking
