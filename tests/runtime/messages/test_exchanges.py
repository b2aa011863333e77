"""All-to-alls with uneven counts: no sizes make ranks wait that finish when every exchange blocks.

A backend may send small messages ahead, and ranks without rows for each other need not wait for
each other. Both only remove waits, so that the proof takes an exchange as a collective that ends
when all ranks have joined it.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch.distributed as dist

from disttrain_cli.models.group import Group
from disttrain_cli.runtime.messages.hollow import alone, route
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.runtime.messages.recorder import EXCHANGE, Recorder
from disttrain_cli.runtime.messages.records import RECEIVE, SEND, Operation, Record

RANKS, PROGRAMS = 4, 200
#: A global order of operations: an exchange with its rows [R, R], or a message (sender, receiver).
Program = list[list[list[int]] | tuple[int, int]]


def as_messages(record: Record) -> Record:
    """The record with each exchange as NCCL starts it: grouped messages of pairs with rows."""
    operations: list[Operation] = []
    members = record.members
    for number, one in enumerate(record.operations):
        if not one.gives:
            operations.append(replace(one, batch=-1 - one.batch))
            continue
        for kind, rows in ((SEND, one.gives), (RECEIVE, one.takes)):
            operations += [
                Operation(kind, one.communicator, (size, *one.shape[1:]), one.dtype, peer, number)
                for peer, size in zip(members[one.communicator], rows, strict=True)
                if size and peer != record.rank
            ]
    return Record(record.rank, members, operations)


def _records(program: Program, random_: random.Random, swaps: int) -> list[Record]:
    """The ranks' operations in this order, some neighbouring ones swapped on single ranks."""
    records = [
        Record(rank, {"ep": tuple(range(RANKS)), "line": tuple(range(RANKS))})
        for rank in range(RANKS)
    ]
    for rank, record in enumerate(records):
        numbers = count()
        for step in program:
            if isinstance(step, tuple):
                if rank in step:
                    kind, peer = (SEND, step[1]) if rank == step[0] else (RECEIVE, step[0])
                    record.operations.append(
                        Operation(kind, "line", (1,), "float32", peer, next(numbers))
                    )
                continue
            give, take = tuple(step[rank]), tuple(row[rank] for row in step)
            record.operations.append(
                Operation(EXCHANGE, "ep", (sum(take), 8), "float32", -1, next(numbers), give, take)
            )
    for _ in range(swaps):
        operations = random_.choice(records).operations
        if len(operations) > 1:
            at = random_.randrange(len(operations) - 1)
            operations[at : at + 2] = operations[at + 1], operations[at]
    return records


def _program(random_: random.Random) -> Program:
    steps: Program = []
    for _ in range(random_.randint(2, 8)):
        if random_.random() < 0.5:
            steps.append(tuple(random_.sample(range(RANKS), 2)))  # type: ignore[arg-type]
        else:
            steps.append(
                [[random_.choice((0, 0, 1, 5)) for _ in range(RANKS)] for _ in range(RANKS)]
            )
    return steps


def _finish(records: Iterable[Record]) -> bool:
    return not faults(list(records))


def test_ranks_that_finish_with_barriers_finish_with_messages_of_any_size() -> None:
    outcomes = set()
    for seed in range(PROGRAMS):
        random_ = random.Random(seed)
        records = _records(_program(random_), random_, swaps=seed % 3)
        strict, sent = _finish(records), _finish(map(as_messages, records))
        assert sent or not strict, seed
        outcomes.add((strict, sent))
    assert outcomes == {(True, True), (False, True), (False, False)}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("nodes", "hops"), [(1, 1), (2, 2), (RANKS, 1)])
def test_an_ep_group_exchanges_what_its_ranks_agree_on(
    nodes: int, hops: int, overlap: bool
) -> None:
    """Drawn for each slot, on ranks that do not speak to each other; some pairs have no rows."""
    records = []
    for rank in range(RANKS):
        with alone(rank, RANKS), Recorder(rank) as recorder:
            for slot in range(3):
                route(Group(dist.group.WORLD, RANKS, rank, overlap, nodes=nodes), slot)
        records.append(recorder.record)
    assert faults(records) == [] and faults(list(map(as_messages, records))) == []
    rows = np.array([[one.gives for one in record.operations] for record in records])
    in_slot = 1 + 2 * hops * (1 + overlap)  # counts; each half's hops, both ways
    assert rows.shape[1] == 3 * in_slot
    assert len(np.unique(rows[:, 1::in_slot].sum(axis=2))) > 1 and (rows == 0).any()


def test_counts_that_ranks_do_not_agree_on_are_found() -> None:
    records = _records([[[1] * RANKS] * RANKS], random.Random(0), 0)
    one = records[0].operations[0]
    records[0].operations[0] = replace(one, takes=(1, 2, 1, 1))
    assert "gives rank 0 1 rows, which takes 2" in faults(records)[0]
