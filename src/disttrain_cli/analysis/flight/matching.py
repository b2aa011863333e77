"""Comparison of the operations that the ranks of each process group have issued.

Ranks of a group join its collectives in one order, so those with the same sequence number must be
one: the same operation, sizes and types on every rank. If they differ, the majority of ranks is
taken to be right, and in a tie the lowest rank.

Messages from one rank to another are received in the order in which they were sent, whatever their
sequence numbers, which count all messages of a rank. So the third send belongs to the third
receive, if both recorders hold all messages. If one has dropped its first ones, the last messages
that have ended on both sides belong together, or, if only one side waits, their neighbours if these
are closer in time and can be two ends of one message.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from math import prod
from statistics import fmean, median
from typing import Literal

from disttrain_cli.analysis.figures import counted, name_ranks
from disttrain_cli.analysis.flight.dumps import MESSAGE, Dump, Entry, ranks_of
from disttrain_cli.analysis.kineto.shapes import item_bytes

Problem = Literal[
    "other operation",
    "other count",
    "other size",
    "other dtype",
    "missing",
    "not started",
    "no dump",
    "not finished",
]
#: Operations with different sizes on every rank, by their names without underscores (all_to_all,
#: ALLTOALLV_BASE, all_gather_v, reduce_scatter_v_single), and those that have inputs or outputs on
#: one rank only.
UNEVEN = re.compile(r"alltoall|(gather|scatter)v(base|single)?\b")
FROM_ONE, TO_ONE = "scatter", "gather"


@dataclass(frozen=True)
class Group:
    """A process group."""

    name: str
    description: str
    ranks: tuple[int, ...]

    @property
    def title(self) -> str:
        """Name in sentences: its description if it has one."""
        return self.description or f"group {self.name}"


@dataclass(frozen=True)
class Finding:
    """The first collective of a group that not all of its ranks have joined alike."""

    group: Group
    problem: Problem
    sequence: int
    operation: str  # operation of most ranks
    ranks: tuple[int, ...]  # ranks that are missing, differ, are behind, or have no dump
    waiting: tuple[int, ...]  # ranks that are in it
    detail: str
    since_ns: int  # when the first rank issued it


@dataclass(frozen=True)
class Seen:
    """A group with the entries of each of its ranks that has a dump."""

    group: Group
    entries: Mapping[int, list[Entry]]


def groups_of(dumps: Mapping[int, Dump]) -> list[Seen]:
    """Return the groups with operations.

    Groups of the same name are one group only if their ranks are equal: `split_group` uses one name
    for several. A group without a configured list of ranks (gloo's) has the ranks with an entry of
    it; the default group has all.
    """
    found: dict[Group, dict[int, list[Entry]]] = defaultdict(dict)
    unknown: dict[tuple[str, str], dict[int, list[Entry]]] = defaultdict(dict)
    for rank, dump in dumps.items():
        own: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        for entry in dump.entries:
            own[entry.process_group].append(entry)
        for (name, description), entries in own.items():
            config = dump.pg_config.get(name)
            ranks = ranks_of(config) if config is not None else ()
            if rank in ranks:
                found[Group(name, _plain(description), ranks)][rank] = entries
            else:
                unknown[name, description][rank] = entries
    for (name, description), of_rank in unknown.items():
        everybody = dumps if description == "default_pg" else of_rank
        found[Group(name, _plain(description), tuple(sorted(everybody)))].update(of_rank)
    for group, of_rank in found.items():
        for rank in group.ranks:
            if rank in dumps:
                of_rank.setdefault(rank, [])
    return [Seen(group, dict(sorted(of_rank.items()))) for group, of_rank in found.items()]


def _plain(description: str) -> str:
    return {"default_pg": "the world", "undefined": ""}.get(description, description)


def first_problem(seen: Seen, dumps: Mapping[int, Dump]) -> Finding | None:
    """Return the first collective of a group that is not in order; messages are ignored."""
    by_rank = {
        rank: {entry.collective_seq_id: entry for entry in entries if not entry.is_message}
        for rank, entries in seen.entries.items()
    }
    dropped = {rank for rank in by_rank if overflowed(dumps[rank])}
    kept = [min(own) for rank, own in by_rank.items() if own and rank in dropped]
    first = max(kept, default=0)  # earlier collectives are not recorded on all ranks
    for sequence in sorted({number for own in by_rank.values() for number in own}):
        if sequence < first:
            continue
        there = {rank: own[sequence] for rank, own in by_rank.items() if sequence in own}
        if not any(entry.pending for entry in there.values()) and any(
            not own and rank in dropped for rank, own in by_rank.items()
        ):
            continue  # they may have joined it before the first entry that their recorders hold
        finding = _judge(seen, sequence, there)
        if finding is not None:
            return finding
    return None


def overflowed(dump: Dump) -> bool:
    """Return True if the recorder has dropped the first entries of this rank."""
    return bool(dump.entries) and dump.entries[0].record_id > 0


@dataclass(frozen=True)
class Channel:
    """Messages of a group from one rank to another, in the order of both sides."""

    sender: int
    receiver: int
    sends: Sequence[Entry]
    receives: Sequence[Entry]
    complete: bool  # both recorders hold all of them

    def pairs(self) -> Iterator[tuple[Entry | None, Entry | None]]:
        """Return every send with its receive, None for an end that was not issued.

        There are no pairs if the recorders hold too little to match any.
        """
        shift = 0 if self.complete else self._shift()
        if shift is None:
            return iter(())
        return zip_longest(self.sends[max(shift, 0) :], self.receives[max(-shift, 0) :])

    def _shift(self) -> int | None:
        """Return the number of recorded sends less that of receives of the same messages, or None.

        It is the difference of those that have ended, or, if only one side has a pending message,
        one more or less, as that message may have ended on the other side. Of these it is the one
        whose pairs were enqueued at the closest times. If the first pairs none, another one counts
        only if its pairs are closer than half the median time between messages. None means that it
        is not known.
        """
        sides = self.sends, self.receives
        ended = [sum(not one.pending for one in side) for side in sides]
        usual = ended[0] - ended[1]
        if all(some < len(side) for some, side in zip(ended, sides, strict=True)):
            # times cannot decide: clocks may differ, and both sides have a pending message
            return usual
        apart_ns: dict[int, float] = {}
        for shift in (usual, usual - 1, usual + 1):
            if not -ended[1] <= shift <= ended[0]:
                continue
            if ended[1] + shift > len(self.sends) or ended[0] - shift > len(self.receives):
                continue
            sends, receives = self.sends[max(shift, 0) :], self.receives[max(-shift, 0) :]
            pairs = [*zip(sends, receives, strict=False)]
            if pairs and (shift == usual or all(_can_be_one(*pair) for pair in pairs)):
                apart_ns[shift] = fmean(
                    abs(send.time_created_ns - receive.time_created_ns) for send, receive in pairs
                )
        if not apart_ns:
            return usual
        closest = min(apart_ns, key=apart_ns.__getitem__)
        if usual in apart_ns:
            return closest
        gaps = [
            after.time_created_ns - before.time_created_ns
            for side in sides
            for before, after in pairwise(side)
        ]
        if not gaps:
            return None
        return closest if apart_ns[closest] < median(gaps) / 2 else usual


def _can_be_one(send: Entry, receive: Entry) -> bool:
    """Return False if the receive has ended although the send is pending and was issued later.

    A pending send in a batch may have been sent already: the batch may wait for other peers.
    """
    if receive.pending or not send.pending:
        return True
    ended_ns = receive.time_discovered_completed_ns
    return send.batch_size > 1 and (ended_ns is None or ended_ns >= send.time_created_ns)


def channels_of(seen: Seen, dumps: Mapping[int, Dump]) -> list[Channel]:
    """Return the channels of a group that have messages."""
    ranks = seen.group.ranks
    sides: dict[tuple[int, int], tuple[list[Entry], list[Entry]]] = defaultdict(lambda: ([], []))
    for entries in seen.entries.values():
        for entry in entries:
            message = MESSAGE.match(entry.operation)
            if message is None or max(int(message[2]), int(message[4])) >= len(ranks):
                continue
            own, peer = ranks[int(message[2])], ranks[int(message[4])]
            if message[1] == "send":
                sides[own, peer][0].append(entry)
            else:
                sides[peer, own][1].append(entry)
    return [
        Channel(
            sender,
            receiver,
            *both,
            not any(rank in dumps and overflowed(dumps[rank]) for rank in (sender, receiver)),
        )
        for (sender, receiver), both in sides.items()
    ]


def first_wrong_message(seen: Seen, dumps: Mapping[int, Dump]) -> Finding | None:
    """Return the first message of a group that cannot end, as its two ends differ in bytes."""
    wrong = [
        (send, receive, channel)
        for channel in channels_of(seen, dumps)
        if channel.complete
        for send, receive in channel.pairs()
        if send is not None and receive is not None
        if (send.pending or receive.pending) and _bytes(send) != _bytes(receive)
    ]
    if not wrong:
        return None
    send, receive, channel = min(wrong, key=lambda pair: pair[0].time_created_ns)
    return Finding(
        seen.group,
        "other size",
        send.number,
        send.operation,
        (channel.sender, channel.receiver),
        (channel.sender, channel.receiver),
        f"rank {channel.sender} sends {send.input_sizes} {' '.join(send.input_dtypes)}, rank"
        f" {channel.receiver} receives {receive.output_sizes} {' '.join(receive.output_dtypes)}",
        min(send.time_created_ns, receive.time_created_ns),
    )


def _bytes(message: Entry) -> int:
    """Return the bytes of a message; torch records its tensor as both in- and output."""
    sizes = message.input_sizes or message.output_sizes
    dtypes = message.input_dtypes or message.output_dtypes
    return sum(
        prod(size) * (item_bytes(dtype) or 1) for size, dtype in zip(sizes, dtypes, strict=False)
    )


def _judge(seen: Seen, sequence: int, there: Mapping[int, Entry]) -> Finding | None:
    def finding(
        problem: Problem, ranks: list[int], usual: Entry, detail: str, waiting: list[int]
    ) -> Finding:
        return Finding(
            seen.group,
            problem,
            sequence,
            usual.operation,
            tuple(ranks),
            tuple(waiting),
            detail,
            min(entry.time_created_ns for entry in there.values()),
        )

    index_of = {rank: index for index, rank in enumerate(seen.group.ranks)}
    for problem, compared, described in DIFFERENCES:
        values = {rank: compared(entry, index_of[rank]) for rank, entry in there.items()}
        usual = _usual(values)
        others = [rank for rank, value in values.items() if value != usual]
        if others:
            right = [rank for rank in there if rank not in others]
            detail = "; ".join(
                [f"{name_ranks(right)}: {described(there[right[0]])}"]
                + [f"rank {rank}: {described(there[rank])}" for rank in others[:4]]
            )
            return finding(problem, others, there[right[0]], detail, right)
    example = next(iter(there.values()))
    absent = [rank for rank in seen.entries if rank not in there]
    if absent:
        return finding("missing", absent, example, "", [*there])
    pending = [rank for rank, entry in there.items() if entry.pending]
    # gloo's never start
    begun = [rank for rank, entry in there.items() if entry.state != "scheduled"]
    if pending and begun and len(begun) < len(there):
        return finding(
            "not started", [rank for rank in there if rank not in begun], example, "", begun
        )
    lacking = [rank for rank in seen.group.ranks if rank not in seen.entries]
    if pending and lacking:
        return finding("no dump", lacking, example, "", pending)
    if pending:
        return finding("not finished", pending, example, "", pending)
    return None


def _sizes(entry: Entry) -> str:
    return _in_and_out(entry, entry.input_sizes, entry.output_sizes)


def _elements(entry: Entry, index: int) -> str:
    """Return sizes as NCCL compares them: numbers of elements, not shapes.

    If a rank's one tensor is that of its `index` in a list for all ranks (uneven all_gather,
    reduce_scatter), only the list must be equal.
    """
    if UNEVEN.search(entry.operation.lower().replace("_", "")):
        return ""
    inputs, outputs = _totals(entry.input_sizes), _totals(entry.output_sizes)
    if entry.operation not in (FROM_ONE, TO_ONE):
        if len(inputs) > 1 and outputs == inputs[index : index + 1]:
            return f"in {inputs}"
        if len(outputs) > 1 and inputs == outputs[index : index + 1]:
            return f"out {outputs}"
    return _in_and_out(entry, inputs, outputs)


def _totals(sizes: Sequence[Sequence[int]]) -> list[int]:
    return [prod(size) for size in sizes]


def _operations(entry: Entry) -> str:
    return counted(entry.batch_size, "operation")


def _dtypes(entry: Entry) -> str:
    return _in_and_out(entry, entry.input_dtypes, entry.output_dtypes)


def _in_and_out(entry: Entry, inputs: object, outputs: object) -> str:
    """Format inputs and outputs, without those that only one rank has."""
    parts = [f"in {inputs}"] * (entry.operation != FROM_ONE)
    return " ".join(parts + [f"out {outputs}"] * (entry.operation != TO_ONE))


#: What must be equal on all ranks, in the order of the checks, and how it is shown.
DIFFERENCES: tuple[tuple[Problem, Callable[[Entry, int], str], Callable[[Entry], str]], ...] = (
    ("other operation", lambda entry, _: entry.operation, lambda entry: entry.operation),
    ("other count", lambda entry, _: _operations(entry), _operations),
    ("other size", _elements, _sizes),
    ("other dtype", lambda entry, _: _dtypes(entry), _dtypes),
)


def _usual(values: Mapping[int, str]) -> str:
    """Return the value of most ranks; in a tie, that of the lowest rank."""
    counts = Counter(values.values())
    most = max(counts.values())
    return next(value for _, value in sorted(values.items()) if counts[value] == most)
