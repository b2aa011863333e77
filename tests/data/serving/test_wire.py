"""A slot survives the journey bit by bit, in pieces too; what is cut short or no request is
noticed."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.checking import Broken
from disttrain_cli.data.preparing import Prepared, Request
from disttrain_cli.data.serving import wire
from disttrain_cli.data.slots import Assignment, ItemArrays, SlotBatch
from disttrain_cli.data.sources import Skipped
from tests.data.dataset import PROPERTY
from tests.data.serving.services import content


class Chunk(NamedTuple):
    data: Any
    app_metadata: Any


def chunks_of(messages: Iterator[Any]) -> Iterator[Chunk]:
    for message in messages:
        yield Chunk(*message) if isinstance(message, tuple) else Chunk(message, None)


def sent(prepared: Prepared) -> Iterator[Chunk]:
    return chunks_of(wire.slot_messages(prepared))


def array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-(2**30), 2**30, shape).astype(dtype)


@given(
    sides=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=4),
    tokens=st.integers(0, 40),
    broken=st.lists(st.tuples(st.integers(0, 99), st.text(max_size=5)), max_size=3),
    piece=st.integers(1, 200),
)
@PROPERTY
def test_a_slot_arrives_as_it_was_sent(
    sides: list[tuple[int, int]], tokens: int, broken: list[tuple[int, str]], piece: int
) -> None:
    batch = SlotBatch(
        items={
            "image": ItemArrays(
                array((len(sides), 2), "<i8"),
                {0: [array((count, 3, side, side), "|u1", side) for count, side in sides]},
            ),
            "target": ItemArrays(
                array((tokens, 2), "<i8"),
                {1: [array((0, 1, 1, 1), "<f4"), array((tokens, 1, 2, 2), "<f4", 1)]},
                weights=array((tokens,), "<f4"),
            ),
        },
        token_ids=array((2, tokens), "<i8"),
    )
    prepared = Prepared(
        batch, [Broken(number, Skipped("a.tar", key, "why")) for number, key in broken]
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PIECE_BYTES", piece)
        beats = (Chunk(wire.EMPTY, None), Chunk(wire.EMPTY, None))
        arrived = wire.read_slot(iter([*beats, *sent(prepared)]))
    assert content(arrived.batch) == content(batch) and arrived.broken == prepared.broken


def test_a_tensor_of_one_piece_is_not_copied() -> None:
    nothing = array((0, 2), "<i8")
    batch = SlotBatch({"target": ItemArrays(nothing, weights=array((1000,), "<f4"))})
    chunks = list(sent(Prepared(batch, [])))
    weights = wire.read_slot(iter(chunks)).batch.items["target"].weights
    assert (
        weights is not None
        and weights.ctypes.data == chunks[-1].data.column(0).buffers()[1].address
    )


@pytest.mark.parametrize("carry", [False, True])
def test_an_assignment_arrives_as_it_was_sent(carry: bool) -> None:
    assignment = Assignment(array((3, 2, 4), "<i8"), carry)
    arrived = wire.read_assignment(chunks_of(wire.assignment_messages(assignment)))
    assert arrived.carry is carry and np.array_equal(arrived.positions, assignment.positions)


def test_answers_that_end_too_early() -> None:
    chunks = list(
        sent(
            Prepared(
                SlotBatch({"image": ItemArrays(array((5, 2), "<i8"))}, labels=array((2, 8), "<i8")),
                [],
            )
        )
    )
    for length in range(len(chunks)):
        with pytest.raises(EOFError):
            wire.read_slot(iter(chunks[:length]))


def test_requests_are_json_and_nothing_else_is_taken() -> None:
    request = Request(3, 1, "llm", 2, frozenset({"tokens", "labels"}))
    data = wire.request_bytes(request, "0123")
    assert json.loads(data)["fields"] == ["labels", "tokens"]
    assert wire.read_request(data) == (request, "0123")
    assert wire.read_request(wire.request_bytes(7, "0123")) == (7, "0123")
    for wrong in (
        b"",
        b"[]",
        b"{}",
        b"\x80\x04.",
        data.replace(b"3", b'"3"', 1),
        b"[" * 99_999,
        data + b" " * 2**16,
    ):
        with pytest.raises((ValueError, RecursionError)):
            wire.read_request(wrong)
