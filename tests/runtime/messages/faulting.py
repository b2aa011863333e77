"""Faults of order, put into the records of ranks that run to their end: each of them would hang, or
mix up messages."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from disttrain_cli.runtime.messages.records import RECEIVE, SEND, Operation, Record

#: (record, place of an operation in it)
Where = tuple[Record, int]


def inject(kind: str, records: Sequence[Record], generator: random.Random) -> list[Record] | None:
    """The records with one fault of a kind; None if nothing in them can be altered in this way."""
    altered = [Record(one.rank, dict(one.members), list(one.operations)) for one in records]
    return altered if KINDS[kind](altered, generator) else None


def _messages(records: Sequence[Record], kinds: Sequence[str] = (SEND, RECEIVE)) -> list[Where]:
    return [
        (record, place)
        for record in records
        for place, one in enumerate(record.operations)
        if one.kind in kinds
    ]


def _change(where: Where, **fields: object) -> None:
    record, place = where
    record.operations[place] = replace(record.operations[place], **fields)  # type: ignore[arg-type]


def _of_batches(record: Record) -> list[list[int]]:
    """Places of the operations of each batch."""
    found: dict[int, list[int]] = {}
    for place, one in enumerate(record.operations):
        found.setdefault(one.batch, []).append(place)
    return list(found.values())


def _exchange(record: Record, first: list[int], second: list[int]) -> None:
    """Turn two batches around, one of which follows the other."""
    begin, end = first[0], second[-1] + 1
    record.operations[begin:end] = [record.operations[place] for place in (*second, *first)]


def _turned(records: Sequence[Record], generator: random.Random) -> bool:
    """A rank receives before it sends, or sends before it receives, where its peer expects the
    other."""
    found = []
    for record in records:
        for first, second in pairwise(_of_batches(record)):
            kinds = [
                {(record.operations[place].peer, record.operations[place].kind) for place in places}
                for places in (first, second)
            ]
            if any(
                (peer, {SEND: RECEIVE, RECEIVE: SEND}.get(kind)) in kinds[1]
                for peer, kind in kinds[0]
            ):
                found.append((record, first, second))
    if found:
        _exchange(*generator.choice(found))
    return bool(found)


def _altered(
    records: Sequence[Record], generator: random.Random, **fields: Callable[[Operation], object]
) -> bool:
    found = _messages(records)
    if found:
        record, place = generator.choice(found)
        _change(
            (record, place),
            **{name: change(record.operations[place]) for name, change in fields.items()},
        )
    return bool(found)


def _shape(records: Sequence[Record], generator: random.Random) -> bool:
    return _altered(records, generator, shape=lambda one: (one.shape[0] + 1, *one.shape[1:]))


def _dtype(records: Sequence[Record], generator: random.Random) -> bool:
    return _altered(
        records, generator, dtype=lambda one: "bfloat16" if one.dtype == "float32" else "float32"
    )


def _missing(records: Sequence[Record], generator: random.Random) -> bool:
    if found := _messages(records):
        record, place = generator.choice(found)
        del record.operations[place]
    return bool(found)


def _extra(records: Sequence[Record], generator: random.Random) -> bool:
    if found := _messages(records):
        record, place = generator.choice(found)
        record.operations.insert(place, record.operations[place])
    return bool(found)


def _peer(records: Sequence[Record], generator: random.Random) -> bool:
    found = [
        (record, place, other)
        for record, place in _messages(records)
        for other in record.members[record.operations[place].communicator]
        if other not in (record.rank, record.operations[place].peer)
    ]
    if found:
        record, place, other = generator.choice(found)
        _change((record, place), peer=other)
    return bool(found)


def _communicator(records: Sequence[Record], generator: random.Random) -> bool:
    found = [
        (record, place, name)
        for record, place in _messages(records)
        for name, ranks in record.members.items()
        if name != record.operations[place].communicator and record.operations[place].peer in ranks
    ]
    if found:
        record, place, name = generator.choice(found)
        for other in _batch_of(record, place):  # all of its batch, which has one communicator
            _change((record, other), communicator=name)
    return bool(found)


def _batch_of(record: Record, place: int) -> Iterator[int]:
    batch = record.operations[place].batch
    return (other for other, one in enumerate(record.operations) if one.batch == batch)


def _split(records: Sequence[Record], generator: random.Random) -> bool:
    """Two messages with one rank, together there, are apart here."""
    found = []
    for record in records:
        for places in _of_batches(record):
            peers = [record.operations[place].peer for place in places]
            found += [
                (record, places[cut:]) for cut in range(1, len(places)) if peers[cut] in peers[:cut]
            ]
    if found:
        record, places = generator.choice(found)
        for place in places:
            _change((record, place), batch=-1)
    return bool(found)


def _grouped(records: Sequence[Record], generator: random.Random) -> bool:
    """Two messages with one rank, apart there, are together here."""
    found = []
    for record in records:
        for first, second in pairwise(_of_batches(record)):
            ends = [
                {
                    (one.communicator, one.peer)
                    for one in (record.operations[place] for place in places)
                    if one.is_message
                }
                for places in (first, second)
            ]
            if ends[0] & ends[1]:
                found.append((record, first[0], second))
    if found:
        record, place, second = generator.choice(found)
        for other in second:
            _change((record, other), batch=record.operations[place].batch)
    return bool(found)


def _within(records: Sequence[Record], generator: random.Random) -> bool:
    """Two messages of different shape to one rank change places inside their batch."""
    found = []
    for record in records:
        for places in _of_batches(record):
            for a in places:
                for b in places[places.index(a) + 1 :]:
                    one, other = record.operations[a], record.operations[b]
                    if one.peer == other.peer and one.is_message and one.shape != other.shape:
                        found.append((record, a, b))
    if found:
        record, a, b = generator.choice(found)
        record.operations[a], record.operations[b] = record.operations[b], record.operations[a]
    return bool(found)


def _collectives(records: Sequence[Record], generator: random.Random) -> bool:
    """A rank joins the world before its own group, which the world's other ranks join first."""
    found = [
        (record, a, b)
        for record in records
        for a, b in pairwise(_of_batches(record))
        if not any(record.operations[place].is_message for place in (*a, *b))
        and len(
            set(record.members[record.operations[a[0]].communicator])
            & set(record.members[record.operations[b[0]].communicator])
        )
        > 1
        and record.operations[a[0]].communicator != record.operations[b[0]].communicator
    ]
    if found:
        _exchange(*generator.choice(found))
    return bool(found)


def _absent(records: Sequence[Record], generator: random.Random) -> bool:
    """A rank leaves a collective out."""
    found = [
        (record, place)
        for record in records
        for place, one in enumerate(record.operations)
        if not one.is_message and len(record.members[one.communicator]) > 1
    ]
    if found:
        record, place = generator.choice(found)
        del record.operations[place]
    return bool(found)


def _other_sum(records: Sequence[Record], generator: random.Random) -> bool:
    """A rank brings another number of values to a collective."""
    found = [
        (record, place)
        for record in records
        for place, one in enumerate(record.operations)
        if not one.is_message and one.shape and len(record.members[one.communicator]) > 1
    ]
    if found:
        record, place = generator.choice(found)
        _change(
            (record, place),
            shape=(record.operations[place].shape[0] + 1, *record.operations[place].shape[1:]),
        )
    return bool(found)


def _late(records: Sequence[Record], generator: random.Random) -> bool:
    """A batch of messages comes after what every rank joins at the end."""
    found = [
        (record, places)
        for record in records
        for places in _of_batches(record)
        if record.operations[places[0]].is_message
    ]
    if found:
        record, places = generator.choice(found)
        moved = [record.operations[place] for place in places]
        del record.operations[places[0] : places[-1] + 1]
        record.operations += moved
    return bool(found)


#: By name, what puts such a fault in; it says whether there was a place for it.
KINDS: dict[str, Callable[[Sequence[Record], random.Random], bool]] = {
    "send and receive turned around": _turned,
    "wrong shape": _shape,
    "wrong dtype": _dtype,
    "missing message": _missing,
    "extra message": _extra,
    "wrong peer": _peer,
    "wrong communicator": _communicator,
    "apart at one end": _split,
    "grouped at one end": _grouped,
    "messages of a batch changed places": _within,
    "collectives turned around": _collectives,
    "collective left out": _absent,
    "other collective": _other_sum,
    "messages after the last collective": _late,
}
