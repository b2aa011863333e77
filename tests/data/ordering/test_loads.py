"""The planner simulates the very loads that training's slots hold."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.ordering.assigning import assign, count_costs, order_step
from disttrain_cli.data.ordering.levelling import (
    deal,
    dealt,
    even_shares,
    image_owners,
    level,
    owners,
)
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.packing import Packing, pack
from disttrain_cli.data.sizes import sampled_batch, sizes_of, sizes_of_sample
from disttrain_cli.data.slots import Assignment
from disttrain_cli.data.statistics import size_sample
from disttrain_cli.spec.plan import Layout
from tests.cases import first_fast
from tests.data.dataset import INPUTS, PROPERTY
from tests.data.ordering.test_assigning import LAYOUTS, MONOLITHIC, random_batch


def loads_of_slots(
    batch: Packing, layout: Layout, assignment: Assignment
) -> dict[str, list[list[list[float]]]]:
    slots = order_step(batch, layout, 0, assignment).slots
    return {
        module: [
            [
                list(slot.work(module, own))
                for items in slot.replicas[unit.name]
                for own in dealt(slot, module, items, unit.dealt_over(module))
            ]
            for slot in slots
        ]
        for module in ("encoder", "llm", "generator")
        for unit in [layout.unit_of(module)]
    }


#: Each of two ranks of a TP group works on images of its own.
REPLICATED = MONOLITHIC.model_copy(
    update={
        "units": [
            MONOLITHIC.units[0].model_copy(
                update={"tp": 2, "module_tp": {"encoder": 1, "generator": 1}}
            )
        ]
    }
)


@pytest.mark.parametrize("layout", [*LAYOUTS, REPLICATED], ids=Layout.describe)
@pytest.mark.parametrize("policy", first_fast(["paper", "none"]))
@pytest.mark.parametrize("carry", first_fast([True, False]))
@given(st.integers(0, 10_000))
@PROPERTY
def test_a_size_sample_gives_the_loads_of_training(
    layout: Layout, policy: str, carry: bool, seed: int
) -> None:
    batch = random_batch(seed)
    sizes = sizes_of_sample(size_sample(batch))
    assignment = Assignment(
        assign(count_costs(sizes, INPUTS), layout, "llm", policy).positions, carry
    )
    loads = replica_loads(sizes, INPUTS, layout, assignment)
    assert {module: load.tolist() for module, load in loads.items()} == loads_of_slots(
        batch, layout, assignment
    )


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 6))
@PROPERTY
def test_dealt_shares_stay_in_their_slot_and_level_the_step(
    seed: int, slots: int, replicas: int
) -> None:
    shares = np.random.default_rng(seed).integers(0, 50, size=(slots, replicas))
    dealt = np.empty_like(shares)
    np.put_along_axis(dealt, deal(shares), shares, axis=1)
    assert np.sort(dealt, axis=1).tolist() == np.sort(shares, axis=1).tolist()
    # No two replicas are ever farther apart than the shares of one slot.
    assert np.ptp(np.cumsum(dealt, axis=0), axis=1).max() <= np.ptp(shares, axis=1).max()


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 7))
@PROPERTY
def test_owners_are_those_of_level(costs: list[int], replicas: int) -> None:
    array = np.array(costs, dtype=np.int64)
    groups = [
        np.flatnonzero(owners(array, replicas) == replica).tolist() for replica in range(replicas)
    ]
    assert groups == [sorted(group) for group in level(array, replicas)]
    assert even_shares(len(costs), replicas).tolist() == [
        len(part) for part in np.array_split(array, replicas)
    ]


def test_a_size_sample_has_the_means_of_the_epoch(index: Index) -> None:
    packing = pack(Mixture(index, 0), 0)
    whole = sizes_of_sample(size_sample(packing, len(packing) + 5))
    assert whole.tokens.tolist() == packing.tokens.tolist()
    assert whole.items["image"].area.tolist() == packing.items["image"].grid.prod(axis=1).tolist()
    large = random_batch(0, 400)
    all_of_them, some = sizes_of(large), sizes_of_sample(size_sample(large, 100))
    assert len(some) == 100
    assert some.items["target"].counts.mean() == pytest.approx(
        all_of_them.items["target"].counts.mean(), rel=0.05
    )
    assert some.items["image"].area.sum() / 100 == pytest.approx(
        all_of_them.items["image"].area.sum() / 400, rel=0.02
    )


def test_sampled_batches_hold_every_sequence_equally_often() -> None:
    sizes = sizes_of(random_batch(3))
    first, second = (sampled_batch(sizes, 24, step) for step in range(2))
    assert sorted(first.tokens) == sorted(second.tokens) == sorted([*sizes.tokens, *sizes.tokens])
    assert first.tokens.tolist() != second.tokens.tolist()
    assert len(sampled_batch(sizes, 5, 0)) == 5


@pytest.mark.parametrize(("slots", "most", "replicas"), [(40, 7, 3), (40, 7, 100), (3, 9, 2)])
def test_images_of_all_slots_go_where_each_slot_alone_sends_them(
    slots: int, most: int, replicas: int
) -> None:
    random = np.random.default_rng(0)
    counts = random.integers(0, most, slots)
    patches = random.integers(0, 4, counts.sum())  # many ties, some without any
    alone = [owners(each, replicas) for each in np.split(patches, np.cumsum(counts)[:-1])]
    found = image_owners(patches, counts, replicas, carry=False)
    assert found.tolist() == np.concatenate(alone).tolist()
