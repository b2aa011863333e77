"""Routes carry every shared row exactly once, in the same order on both sides, whatever DP, CP and
TP they have."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.slots import ReplicaItems, Slot, replica_items, slot_items
from disttrain_cli.runtime.units.routes import End, Route, local_rows, routes
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.inputs import ModelInputs

INPUTS = ModelInputs(
    llm="llm",
    vocabulary=272,
    sequence_length=16,
    heads=[ImageInput(module="enc", patch_px=8, merge=1, max_pixels=4096)],
)


def _replicas(owners: list[int], dp: int, order: np.random.Generator) -> list[ReplicaItems]:
    shares = []
    for replica in range(dp):
        own = np.flatnonzero(np.array(owners, dtype=np.int64) == replica)
        order.shuffle(own)
        shares.append(replica_items(image=own))
    return shares


def _cut(array: np.ndarray, route: Route) -> list[int]:
    return [int(v) for start, length in route.runs for v in array[start : start + length]]


@pytest.mark.slow
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(0, 2**32 - 1),
)
def test_both_sides_agree(
    up: int, up_tp: int, down: int, down_tp: int, down_cp: int, images: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    grids = random.integers(1, 4, size=(images, 2))
    slot = Slot(
        inputs=INPUTS,
        sequences=np.zeros(0, dtype=np.int64),
        sequence_tokens=np.zeros(0, dtype=np.int64),
        sequence_length_sq=np.zeros(0, dtype=np.int64),
        items={"image": slot_items(np.zeros(images, dtype=np.int64), grids)},
        replicas={
            "a": _replicas(random.integers(0, up, images).tolist(), up, random),
            "b": _replicas(random.integers(0, down, images).tolist(), down, random),
        },
    )
    counts = slot.rows("image", "tokens")
    # every row of every item is different
    values = [np.arange(n) + 100 * i for i, n in enumerate(counts)]

    def tensor(end: End) -> np.ndarray:
        items = slot.replicas[end.unit][end.replica]["image"]
        whole = (
            np.concatenate([values[i] for i in items])
            if len(items)
            else np.zeros(0, dtype=np.int64)
        )
        assert local_rows(slot, "image", "tokens", end.unit, end.replica) == len(whole)
        return whole[slice(*end.place.own_rows(len(whole)))]

    def between(here: End, there: End) -> dict[tuple[int, int, int], Route]:
        found = routes(slot, "image", "tokens", here, there)
        by_peer = {(route.replica, route.tp_rank, route.cp_rank): route for route in found}
        assert len(by_peer) == len(found)
        return by_peer

    arrived: list[int] = []
    for replica, rank in product(range(up), range(up_tp)):
        here = End("a", up_tp, replica, rank)
        ends = End("b", down_tp, cp=down_cp)
        for (other, other_rank, cp_rank), route in between(here, ends).items():
            there = End("b", down_tp, other, other_rank, down_cp, cp_rank)
            back = between(there, End("a", up_tp))[replica, rank, 0]
            assert route.rows == back.rows == len(_cut(tensor(here), route)) > 0
            assert _cut(tensor(here), route) == _cut(tensor(there), back)
            arrived += _cut(tensor(here), route)
    assert sorted(arrived) == sorted(int(v) for rows in values for v in rows)
    assert len(arrived) == counts.sum()


def test_inside_a_unit_everything_goes_to_the_namesake() -> None:
    none = np.zeros(0, dtype=np.int64)
    slot = Slot(
        inputs=INPUTS,
        sequences=none,
        sequence_tokens=none,
        sequence_length_sq=none,
        items={"image": slot_items(np.zeros(3, dtype=np.int64))},
        replicas={
            "a": [
                replica_items(image=np.array([2, 0])),
                replica_items(image=np.array([1])),
            ]
        },
    )
    (route,) = routes(slot, "image", "patches", End("a"), End("a"))
    assert (route.replica, route.tp_rank, route.runs, route.rows) == (0, 0, ((0, 4),), 4)
    (route,) = routes(slot, "image", "patches", End("a", 3, 0, 1), End("a", 3))
    assert (route.replica, route.tp_rank, route.runs) == (
        0,
        1,
        ((0, 2),),
    )  # two rows each, and none for the last
    assert routes(slot, "image", "patches", End("a", 3, 0, 2), End("a", 3)) == []
    shared = End("a", 1, 0, 0, 3, 1)
    (route,) = routes(slot, "image", "patches", shared, End("a", cp=3))
    assert (route.replica, route.cp_rank, route.runs) == (0, 1, ((0, 2),))
