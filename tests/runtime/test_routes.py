"""Routes carry every shared row exactly once, in the same order on both sides."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.slots import ReplicaItems, Slot
from disttrain_cli.runtime.routes import local_rows, routes
from disttrain_cli.spec.inputs import ImageInput, ModelInputs

INPUTS = ModelInputs(llm="llm", vocabulary=272, sequence_length=16,
                     image=ImageInput(module="enc", patch_px=8, merge=1, max_pixels=4096))


def _replicas(owners: list[int], dp: int, order: np.random.Generator) -> list[ReplicaItems]:
    none = np.zeros(0, dtype=np.int64)
    shares = []
    for replica in range(dp):
        own = np.flatnonzero(np.array(owners, dtype=np.int64) == replica)
        order.shuffle(own)
        shares.append(ReplicaItems(none, own, none))
    return shares


@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_both_sides_agree(up: int, down: int, images: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    grids = random.integers(1, 4, size=(images, 2))
    slot = Slot(inputs=INPUTS, sequences=np.zeros(0, dtype=np.int64), sequence_tokens=np.zeros(0, dtype=np.int64),
                sequence_length_sq=np.zeros(0, dtype=np.int64), image_sequence=np.zeros(images, dtype=np.int64),
                image_grid=grids, target_sequence=np.zeros(0, dtype=np.int64),
                replicas={"a": _replicas(random.integers(0, up, images).tolist(), up, random),
                          "b": _replicas(random.integers(0, down, images).tolist(), down, random)})
    counts = slot.rows("image", "tokens")
    values = [np.arange(n) + 100 * i for i, n in enumerate(counts)]  # every row of every item is different

    def tensor(unit: str, replica: int) -> np.ndarray:
        items = slot.items(unit, replica, "image")
        return np.concatenate([values[i] for i in items]) if len(items) else np.zeros(0, dtype=np.int64)

    def cut(array: np.ndarray, runs: tuple[tuple[int, int], ...]) -> list[int]:
        return [int(v) for start, length in runs for v in array[start:start + length]]

    moved = 0
    for a in range(up):
        assert local_rows(slot, "image", "tokens", "a", a) == len(tensor("a", a))
        for route in routes(slot, "image", "tokens", ("a", a), "b"):
            back = {r.replica: r for r in routes(slot, "image", "tokens", ("b", route.replica), "a")}[a]
            assert route.rows == back.rows > 0
            assert cut(tensor("a", a), route.runs) == cut(tensor("b", route.replica), back.runs)
            moved += route.rows
    assert moved == counts.sum()


def test_inside_a_unit_everything_goes_to_the_namesake() -> None:
    none = np.zeros(0, dtype=np.int64)
    slot = Slot(inputs=INPUTS, sequences=none, sequence_tokens=none, sequence_length_sq=none,
                image_sequence=np.zeros(3, dtype=np.int64), image_grid=np.ones((3, 2), dtype=np.int64),
                target_sequence=none,
                replicas={"a": [ReplicaItems(none, np.array([2, 0]), none), ReplicaItems(none, np.array([1]), none)]})
    (route,) = routes(slot, "image", "patches", ("a", 0), "a")
    assert (route.replica, route.runs, route.rows) == (0, ((0, 4),), 4)
