"""Proof that recorded ranks finish if messages pair by order alone and every operation blocks.

NCCL has no tags: on one communicator the n-th send from a rank to another matches the n-th receive
there, a group of messages ends when all of them are matched, and messages that are grouped at one
end only are undefined (NCCL user guide, "Group calls" and "Point-to-point communication"). A rank
is assumed to start an operation only when the previous one has ended, whatever the communicator.
That is stricter than NCCL, whose communicators run concurrently: if every rank finishes this way,
the ranks' orders agree with one global order, and no number of streams, however few of them a
device runs at a time, can deadlock in a cycle of waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, zip_longest

from disttrain_cli.runtime.messages.records import RECEIVE, SEND, Operation, Record

#: Index among a rank's operations, and the operation.
Step = tuple[int, Operation]
#: Communicator, sending rank, receiving rank.
Line = tuple[str, int, int]


def faults(records: Iterable[Record]) -> list[str]:
    """Return errors in the order of all ranks' operations; empty if all ranks finish.

    Each sentence names the ranks, the communicator and the two operations that do not match.
    """
    by_rank = {record.rank: record for record in records}
    problems = list(_strangers(by_rank))
    if problems:  # further checks need consistent communicators
        return problems
    problems = [
        *_unlike_messages(by_rank),
        *_unlike_batches(by_rank),
        *_unlike_collectives(by_rank),
        *_unlike_parts(by_rank),
    ]
    return problems + ([] if (stuck := _deadlock(by_rank)) is None else [stuck])


def _strangers(records: Mapping[int, Record]) -> Iterator[str]:
    """Yield communicators with inconsistent members, and operations with non-members."""
    known: dict[str, tuple[tuple[int, ...], int]] = {}
    for rank, record in records.items():
        for name, ranks in record.members.items():
            others, first = known.setdefault(name, (ranks, rank))
            if ranks != others:
                yield (
                    f'Ranks {first} and {rank} disagree on who is in "{name}": {list(others)} and'
                    f" {list(ranks)}"
                )
            for missing in sorted(set(ranks) - set(records)):
                yield f'Rank {missing}, which is in "{name}" with rank {rank}, has no record'
        for index, one in enumerate(record.operations):
            ranks = record.members.get(one.communicator, ())
            if rank not in ranks or (
                one.is_message and (one.peer == rank or one.peer not in ranks)
            ):
                yield (
                    f'Rank {rank} begins operation {index}, {one}, over "{one.communicator}", '
                    f"which joins the ranks {list(ranks)}"
                )
        for steps in _batches(record):
            first_name = steps[0][1].communicator
            for index, one in steps:
                if one.communicator != first_name or (len(steps) > 1 and not one.is_message):
                    yield (
                        f"Rank {rank} groups operation {steps[0][0]}, {steps[0][1]} over"
                        f' "{first_name}", with operation {index}, {one} over "{one.communicator}"'
                    )


def _batches(record: Record) -> Iterator[list[Step]]:
    for _, steps in groupby(enumerate(record.operations), key=lambda step: step[1].batch):
        yield list(steps)


def _lines(records: Mapping[int, Record]) -> dict[Line, tuple[list[Step], list[Step]]]:
    """Return the sends and receives of each line, each in its rank's order."""
    lines: dict[Line, tuple[list[Step], list[Step]]] = defaultdict(lambda: ([], []))
    for rank, record in records.items():
        for step in enumerate(record.operations):
            one = step[1]
            if one.kind == SEND:
                lines[one.communicator, rank, one.peer][0].append(step)
            elif one.kind == RECEIVE:
                lines[one.communicator, one.peer, rank][1].append(step)
    return lines


def _unlike_messages(records: Mapping[int, Record]) -> Iterator[str]:
    """Yield the first message of each line whose counterpart differs or is missing."""
    for (name, sender, taker), (sends, receives) in _lines(records).items():
        for sent, taken in zip_longest(sends, receives):
            if (
                sent is None
                or taken is None
                or (sent[1].shape, sent[1].dtype) != (taken[1].shape, taken[1].dtype)
            ):
                yield (
                    f'Over "{name}", {_named(sender, sent, "send")} meets'
                    f" {_named(taker, taken, 'receive')}"
                )
                break


def _unlike_batches(records: Mapping[int, Record]) -> Iterator[str]:
    """Yield the first message of each pair of ranks that is grouped differently at its two ends."""
    pairs: dict[tuple[str, int, int], tuple[dict[int, Step], dict[int, Step]]] = defaultdict(
        lambda: ({}, {})
    )
    reported = set()
    for (name, sender, taker), (sends, receives) in _lines(records).items():
        low, high = sorted((sender, taker))
        for sent, taken in zip(sends, receives, strict=False):
            ends = (sent, taken) if sender == low else (taken, sent)
            firsts = pairs[name, low, high]
            partners = [
                firsts[side].setdefault(ends[side][1].batch, ends[1 - side]) for side in (0, 1)
            ]
            for side in (0, 1):
                if (
                    partners[side][1].batch != ends[1 - side][1].batch
                    and (name, low, high) not in reported
                ):
                    reported.add((name, low, high))
                    grouping, parting = ((low, high), (high, low))[side]
                    yield (
                        f'Over "{name}", rank {grouping} groups what is apart on rank {parting}: '
                        f"{_named(parting, partners[side])} and {_named(parting, ends[1 - side])}"
                    )


def _unlike_collectives(records: Mapping[int, Record]) -> Iterator[str]:
    """Yield the first collective of each communicator that differs between its ranks."""
    members = {name: ranks for record in records.values() for name, ranks in record.members.items()}
    joined: dict[tuple[str, int], list[Step]] = defaultdict(list)
    for rank, record in records.items():
        for step in enumerate(record.operations):
            if not step[1].is_message:
                joined[step[1].communicator, rank].append(step)
    for name, ranks in members.items():
        for rank in ranks[1:]:
            for first, other in zip_longest(joined[name, ranks[0]], joined[name, rank]):
                if first is None or other is None or _alike(first[1]) != _alike(other[1]):
                    yield f'Over "{name}", {_named(ranks[0], first)} meets {_named(rank, other)}'
                    break


def _unlike_parts(records: Mapping[int, Record]) -> Iterator[str]:
    """Yield the first all-to-all of each communicator with unequal rows sent and received."""
    exchanges: dict[tuple[str, int], list[Step]] = defaultdict(list)
    members = {name: ranks for record in records.values() for name, ranks in record.members.items()}
    for rank, record in records.items():
        for step in enumerate(record.operations):
            if step[1].gives:
                exchanges[step[1].communicator, rank].append(step)
    for name, ranks in members.items():
        for steps in zip(*(exchanges[name, rank] for rank in ranks), strict=False):
            unlike = (
                (giver, taker)
                for giver in range(len(ranks))
                for taker in range(len(ranks))
                if steps[giver][1].gives[taker] != steps[taker][1].takes[giver]
            )
            if (pair := next(unlike, None)) is not None:
                giver, taker = pair
                yield (
                    f'Over "{name}", {_named(ranks[giver], steps[giver])} gives rank'
                    f" {ranks[taker]} {steps[giver][1].gives[taker]} rows, which takes"
                    f" {steps[taker][1].takes[giver]}"
                )
                break


def _alike(one: Operation) -> tuple[object, ...]:
    shape = one.shape[1:] if one.gives else one.shape  # the number of rows differs between ranks
    return one.kind, shape, bool(one.gives), one.dtype, one.peer


def _named(rank: int, step: Step | None, what: str = "collective") -> str:
    return (
        f"rank {rank} with no {what}"
        if step is None
        else f"operation {step[0]} of rank {rank}, {step[1]},"
    )


class _Rank:
    """Progress of one rank in the simulation."""

    def __init__(self, record: Record) -> None:
        self.rank = record.rank
        self.left = deque(_batches(record))
        self.waits: list[Step] = []  # unmatched operations of the current batch

    def begin(self) -> list[Step]:
        """Start the next batch and return its operations."""
        self.waits = self.left.popleft() if self.left else []
        return list(self.waits)


def _deadlock(records: Mapping[int, Record]) -> str | None:
    """Run all ranks; return a description of the cycle of waits if they do not finish."""
    members = {name: ranks for record in records.values() for name, ranks in record.members.items()}
    ranks = {rank: _Rank(record) for rank, record in records.items()}
    posted: dict[tuple[str, Line], deque[tuple[_Rank, Step]]] = defaultdict(deque)
    gathered: dict[str, list[tuple[_Rank, Step]]] = defaultdict(list)
    free = deque(ranks.values())

    def met(pairs: Sequence[tuple[_Rank, Step]]) -> None:
        for rank, step in pairs:
            rank.waits.remove(step)
            if not rank.waits:
                free.append(rank)

    while free:
        rank = free.popleft()
        for step in rank.begin():
            one, key = step[1], (rank, step)
            if not one.is_message:
                gathered[one.communicator].append(key)
                if len(gathered[one.communicator]) == len(members[one.communicator]):
                    met(gathered.pop(one.communicator))
                continue
            line = (
                (one.communicator, rank.rank, one.peer)
                if one.kind == SEND
                else (one.communicator, one.peer, rank.rank)
            )
            others = posted[RECEIVE if one.kind == SEND else SEND, line]
            if others:
                met([others.popleft(), key])
            else:
                posted[one.kind, line].append(key)
    waiting = {rank.rank: rank for rank in ranks.values() if rank.waits}
    return _circle(waiting, members) if waiting else None


def _circle(waiting: Mapping[int, _Rank], members: Mapping[str, tuple[int, ...]]) -> str:
    """Describe the waits from one rank on until a rank recurs or has no operations left."""
    waits, rank = list[str](), min(waiting)
    seen: list[int] = []
    while rank in waiting and rank not in seen:
        seen.append(rank)
        index, one = waiting[rank].waits[0]
        rank, current = _awaited(rank, one, waiting, members), rank
        waits.append(
            f'rank {current} in operation {index}, {one}, over "{one.communicator}", for'
            f" rank {rank}"
        )
    end = "which waits in turn" if rank in waiting else f"and rank {rank} has nothing left to do"
    first = seen.index(rank) if rank in seen else 0
    return f"Ranks wait for each other: {'; '.join(waits[first:])}, {end}"


def _awaited(
    rank: int, one: Operation, waiting: Mapping[int, _Rank], members: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the rank that an operation waits for: the first missing one of a collective."""
    if one.is_message:
        return one.peer
    elsewhere = [
        other
        for other in members[one.communicator]
        if other not in waiting
        or not any(
            step[1].communicator == one.communicator and not step[1].is_message
            for step in waiting[other].waits
        )
    ]
    return elsewhere[0] if elsewhere else rank
