"""The proof finds every fault of order that is put into good records, names it, and finds none in
good ones."""

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from disttrain_cli.data.slots import StepOrder
from disttrain_cli.runtime.engine import engine
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.messages.hollow import HollowEngine
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.runtime.messages.records import RECEIVE, SEND, Operation, Record
from tests.runtime.messages.drawing import Drawn, draw, write_models
from tests.runtime.messages.faulting import KINDS, inject

PLANS = 16


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    runs = write_models(tmp_path_factory.mktemp("models"))
    return [draw(runs, seed) for seed in range(PLANS)]


@pytest.fixture(scope="module")
def plans(drawn: list[Drawn]) -> dict[str, list[Record]]:
    """By name, the records of all ranks of drawn plans."""
    return {one.name: one.records() for one in drawn}


@pytest.mark.slow
def test_drawn_plans_run_to_their_end(plans: dict[str, list[Record]]) -> None:
    assert {name: found for name, records in plans.items() if (found := faults(records))} == {}
    operations = [
        one for records in plans.values() for record in records for one in record.operations
    ]
    assert {one.kind for one in operations} >= {SEND, RECEIVE, "allreduce"}
    assert max(map(len, plans.values())) > 32 and sum(one.is_message for one in operations) > 1500


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_is_found(plans: dict[str, list[Record]], kind: str) -> None:
    generator = random.Random(kind)
    places = list(plans.values())
    generator.shuffle(places)
    altered = next(
        found for records in places if (found := inject(kind, records, generator)) is not None
    )
    found = faults(altered)
    assert found, kind
    assert all("ank" in sentence for sentence in found)


@pytest.mark.slow
def test_the_order_of_gloo_would_hang(
    drawn: list[Drawn], plans: dict[str, list[Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sends first, which gloo allows: where pipelines run full, stages that exchange rows wait for
    each other."""
    full = [
        one
        for one in drawn
        if one.layout.microbatches > 4
        and inject("send and receive turned around", plans[one.name], random.Random(0))
    ]
    stock = engine.program
    monkeypatch.setattr(engine, "program", lambda stage, slots, _: stock(stage, slots, True))
    for one in full:
        assert any("wait for each other" in sentence for sentence in faults(one.records())), (
            one.name
        )
    assert len(full) >= 3


@pytest.mark.slow
def test_an_evaluation_of_slots_in_another_order_is_found(
    drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the ranks of one stage; where slots have equal rows, their order cannot be told from
    messages."""
    stock = UnitEngine.evaluate

    def turned(self: UnitEngine, order: StepOrder, *more: Any) -> Any:
        return stock(
            self,
            replace(order, slots=order.slots[::-1]) if self.coords.stage.number == 0 else order,
            *more,
        )

    monkeypatch.setattr(UnitEngine, "evaluate", turned)
    several = [one for one in drawn if 1 < len(one.graph.stages) <= 8 and len(one.order.slots) > 2]
    assert sum(bool(faults(one.records())) for one in several) >= 2


def test_what_one_rank_leaves_out_after_the_norm_is_found(
    drawn: list[Drawn], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What each tells the others, and the gathering of updated weights over replicas."""
    one = next(one for one in drawn if one.graph.stages[0].unit.dp > 1)

    def alone(self: HollowEngine) -> None:
        if self.coords.rank == 0:
            self._to_maximise = tuple
        stock(self)

    stock = HollowEngine._update
    monkeypatch.setattr(HollowEngine, "_update", alone)
    assert any("rank 0" in sentence and "world" in sentence for sentence in faults(one.records()))
    monkeypatch.setattr(
        HollowEngine,
        "_update",
        lambda self: UnitEngine._update(self) if self.coords.rank == 0 else stock(self),
    )
    assert any(
        "no collective" in sentence and "replicas" in sentence for sentence in faults(one.records())
    )


def send(to: int, shape: tuple[int, ...] = (4,), over: str = "pair", batch: int = 0) -> Operation:
    return Operation(SEND, over, shape, "float32", to, batch)


def receive(
    of: int, shape: tuple[int, ...] = (4,), over: str = "pair", batch: int = 0
) -> Operation:
    return Operation(RECEIVE, over, shape, "float32", of, batch)


def both(*operations: list[Operation], over: tuple[str, ...] = ("pair",)) -> list[Record]:
    """Ranks 0, 1, … that share all communicators."""
    ranks = tuple(range(len(operations)))
    return [Record(rank, dict.fromkeys(over, ranks), own) for rank, own in enumerate(operations)]


def test_a_fault_is_named() -> None:
    (stuck,) = faults(
        both([send(1, batch=1), receive(1, batch=2)], [send(0, batch=1), receive(0, batch=2)])
    )
    assert (
        stuck
        == "Ranks wait for each other: rank 0 in operation 0, send of float32 [4] to rank 1, over"
        ' "pair", for rank 1; rank 1 in operation 0, send of float32 [4] to rank 0, over "pair",'
        " for rank 0, which waits in turn"
    )
    unlike, *_ = faults(both([send(1, (4, 2))], [receive(0, (2, 4))]))
    assert (
        unlike
        == 'Over "pair", operation 0 of rank 0, send of float32 [4, 2] to rank 1, meets operation 0'
        " of rank 1, receive of float32 [2, 4] from rank 0,"
    )
    missing, stuck = faults(both([send(1)], []))
    assert missing.endswith("meets rank 1 with no receive") and stuck.endswith(
        "and rank 1 has nothing left to do"
    )
    (apart,) = faults(
        both([send(1, batch=1), send(1, batch=1)], [receive(0, batch=1), receive(0, batch=2)])
    )[:1]
    assert apart.startswith(
        'Over "pair", rank 0 groups what is apart on rank 1: operation 0 of rank 1'
    )


def test_grouping_saves_what_would_hang_apart() -> None:
    assert (
        faults(
            both([send(1, batch=1), receive(1, batch=1)], [send(0, batch=1), receive(0, batch=1)])
        )
        == []
    )


def test_a_circle_over_several_communicators_is_found() -> None:
    """Each pair of ranks is right by itself."""

    def ring(rank: int) -> list[Operation]:
        after, before = (rank + 1) % 3, (rank - 1) % 3
        return [send(after, over=f"{rank}", batch=1), receive(before, over=f"{before}", batch=2)]

    (stuck,) = faults(both(*map(ring, range(3)), over=("0", "1", "2")))
    assert "rank 2 in operation 0" in stuck
    turned = ring(2)[::-1]
    assert faults(both(ring(0), ring(1), turned, over=("0", "1", "2"))) == []


def program(generator: random.Random) -> list[Record]:
    """Messages and collectives of a few ranks, some batches of which have changed places."""
    ranks, names = tuple(range(generator.randint(2, 4))), ("a", "b")[: generator.randint(1, 2)]
    own: list[list[list[Operation]]] = [[] for _ in ranks]
    for _ in range(generator.randint(1, 10)):
        name, batches = generator.choice(names), list[list[Operation]]([] for _ in ranks)
        if generator.random() < 0.25:
            batches = [[Operation("allreduce", name, (1,), "float32")] for _ in ranks]
        else:
            for _ in range(generator.choice([1, 1, 2, 3])):
                sender, taker = generator.sample(ranks, 2)
                batches[sender].append(send(taker, over=name))
                batches[taker].append(receive(sender, over=name))
        for rank in ranks:
            own[rank] += [batches[rank]] if batches[rank] else []
    for steps in own:
        for _ in range(generator.choice([0, 0, 1, 2]) if len(steps) > 1 else 0):
            place = generator.randrange(len(steps) - 1)
            steps[place : place + 2] = steps[place + 1], steps[place]
    return [
        Record(
            rank,
            dict.fromkeys(names, ranks),
            [replace(one, batch=number) for number, batch in enumerate(own[rank]) for one in batch],
        )
        for rank in ranks
    ]


def ends(records: list[Record]) -> bool:
    """Whether all ranks get to their end, by counting: an operation is met when its partners have
    begun theirs."""
    batch_of: dict[tuple[object, ...], int] = {}  # by (rank, who meets, how often before)
    keys: list[list[tuple[object, ...]]] = []
    for record in records:
        seen = Counter[tuple[object, ...]]()
        keys.append([])
        for one in record.operations:
            line = (
                one.communicator,
                one.kind,
                *(
                    (record.rank, one.peer)
                    if one.kind == SEND
                    else (one.peer, record.rank)
                    if one.kind == RECEIVE
                    else ()
                ),
            )
            keys[-1].append((*line, seen[line]))
            batch_of[record.rank, *keys[-1][-1]] = one.batch
            seen[line] += 1
    at, moved = [0] * len(records), True
    while moved:
        moved = False
        for record, own in zip(records, keys, strict=True):
            here = [
                (one, key)
                for one, key in zip(record.operations, own, strict=True)
                if one.batch == at[record.rank]
            ]
            partners = [
                (one.peer, key[0], RECEIVE if one.kind == SEND else SEND, *key[2:])
                for one, key in here
                if one.is_message
            ] + [
                (rank, *key)
                for one, key in here
                if not one.is_message
                for rank in record.members[one.communicator]
            ]
            if here and all(
                key in batch_of and at[int(str(key[0]))] >= batch_of[key] for key in partners
            ):
                at[record.rank] += 1
                moved = True
    return all(
        not record.operations or at[record.rank] > record.operations[-1].batch for record in records
    )


@pytest.mark.slow
def test_who_gets_to_the_end_is_what_counting_says() -> None:
    found = []
    for seed in range(2000):
        records = program(random.Random(seed))
        found.append(ends(records))
        assert found[-1] == (
            not any("wait for each other" in sentence for sentence in faults(records))
        ), seed
    assert 600 < sum(found) < 1400


def test_strangers_are_named() -> None:
    alone = Record(0, {"pair": (0, 1)}, [send(1)])
    assert faults([alone]) == ['Rank 1, which is in "pair" with rank 0, has no record']
    other = Record(1, {"pair": (1, 2)}, [])
    assert any("disagree" in sentence for sentence in faults([alone, other]))
    outside = both([send(7)], [])
    assert any("which joins the ranks [0, 1]" in sentence for sentence in faults(outside))
    mixed = both([send(1, over="a", batch=1), send(1, over="b", batch=1)], [], over=("a", "b"))
    assert any("groups operation 0" in sentence for sentence in faults(mixed))


def test_records_are_written_and_read() -> None:
    record = both([send(1), receive(1)], [])[0]
    assert Record.of_json(json.loads(json.dumps(record.to_json()))) == record


def test_exchanges_of_unequal_parts_have_to_match() -> None:
    """What a rank gives another is what that one takes."""

    def records(taken: int) -> list[Record]:
        parts = [((3, 1), (3, taken)), ((2, 4), (1, 4))]
        return [
            Record(
                rank,
                {"cp": (0, 1)},
                [Operation("alltoall_base", "cp", (sum(takes), 8), "float32", -1, 1, gives, takes)],
            )
            for rank, (gives, takes) in enumerate(parts)
        ]

    assert faults(records(2)) == []
    assert [Record.of_json(json.loads(json.dumps(one.to_json()))) for one in records(2)] == records(
        2
    )
    (found,) = faults(records(5))
    assert "operation 0 of rank 1" in found and "gives rank 0 2 rows, which takes 5" in found
