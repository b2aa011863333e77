"""The policy `best`: nothing lost, never slower than the others in the simulator, the same in every
process."""

import dataclasses
import os
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.data.ordering import best as policy_best
from disttrain_cli.data.ordering import sequencing, shaping
from disttrain_cli.data.ordering.apart import order_apart
from disttrain_cli.data.ordering.assigning import assign, count_costs, order_step
from disttrain_cli.data.ordering.best import Best
from disttrain_cli.data.ordering.fitting import fit
from disttrain_cli.data.ordering.levelling import level
from disttrain_cli.data.ordering.sequencing import search_order
from disttrain_cli.data.ordering.shaping import Shaped, shape
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.sizes import sizes_of
from disttrain_cli.data.slots import Assignment
from disttrain_cli.data.statistics import size_sample
from disttrain_cli.simulation.makespan import orders_s
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.work import Work
from tests import profiles
from tests.cases import first_fast
from tests.data.dataset import INPUTS, PROPERTY, make_layout
from tests.data.ordering.test_assigning import check_step, random_batch
from tests.planning import synthetic
from tests.simulation.test_pipeline import equal

LAYERS = {"encoder": 2, "llm": 4, "generator": 2}
FEW = settings(PROPERTY, max_examples=15)


def unit(name: str, modules: list[str], dp: int, *layers: int) -> UnitPlan:
    layers = layers or (sum(LAYERS[module] for module in modules),)
    return UnitPlan(
        name=name,
        modules=modules,
        dp=dp,
        pp=len(layers),
        gpus=dp * len(layers),
        layers_per_stage=list(layers),
    )


LAYOUTS = [
    make_layout(
        [
            unit("encoder", ["encoder"], 3),
            unit("llm", ["llm"], 2, 2, 2),
            unit("generator", ["generator"], 5),
        ],
        global_batch_size=24,
    ),
    make_layout([unit("all", ["encoder", "llm", "generator"], 3, 2, 4, 2)], global_batch_size=24),
    make_layout(
        [unit("front", ["encoder", "llm"], 3), unit("generator", ["generator"], 2)],
        global_batch_size=24,
    ),
    make_layout(
        [unit("encoder", ["encoder"], 5, 1, 1), unit("back", ["llm", "generator"], 2)], 3, 24
    ),
]


def profile_of(batch: Packing, inputs: ModelInputs = INPUTS) -> Profile:
    """Costs of every module's own work; sizes are the batch's."""
    run = synthetic.run_file()
    tiny = synthetic.tiny(run)
    rates = {
        "encoder": Polynomial(base=0.01, per_item=0.02, per_token=0.01),
        "llm": Polynomial(base=0.02, per_token=0.004, per_length_sq=1e-5),
        "generator": Polynomial(base=0.01, per_item=1.0),
    }
    work = {
        "encoder": Work(2, 60, 3000),
        "llm": Work(1, 100, 4000),
        "generator": Work(1, 256, 256**2),
    }
    modules = {
        name: synthetic.module(
            kind,
            ["layer"] * LAYERS[name],
            {"layer": profiles.cost(rates[name])},
            work[name],
            work[name].scaled(3),
            1000.0,
        )
        for name, kind in (("encoder", "encoder"), ("llm", "llm"), ("generator", "generator"))
    }
    data = tiny.data.model_copy(update={"sample": size_sample(batch)})
    return tiny.model_copy(update={"modules": modules, "inputs": inputs, "data": data})


def best_of(batch: Packing, layout: Layout) -> Best:
    return Best(profile_of(batch), layout, gpus_per_node=8, memory_gib=16.0)


@pytest.mark.parametrize(
    "layout",
    [LAYOUTS[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])],
    ids=Layout.describe,
)
@given(st.integers(0, 10_000))
@FEW
def test_every_item_once_and_never_slower_than_none_and_paper(layout: Layout, seed: int) -> None:
    batch = random_batch(seed, 24)
    best, sizes = best_of(batch, layout), sizes_of(batch)
    found = best.order(sizes)
    check_step(batch, layout, order_step(batch, layout, 0, found))
    others = [
        assign(count_costs(sizes, INPUTS), layout, "llm", policy) for policy in ("none", "paper")
    ]
    time_s, *others_s = (
        simulate(best.pipeline(sizes, one)).iteration_s for one in (found, *others)
    )
    assert time_s <= min(others_s) + 1e-9


@pytest.mark.parametrize("layout", first_fast(LAYOUTS), ids=Layout.describe)
def test_it_is_faster_on_skewed_data(layout: Layout) -> None:
    gains = []
    for seed in range(5):
        batch = random_batch(seed, 24)
        best, sizes = best_of(batch, layout), sizes_of(batch)
        none = assign(count_costs(sizes, INPUTS), layout, "llm", "none")
        times_s = [
            simulate(best.pipeline(sizes, one)).iteration_s for one in (none, best.order(sizes))
        ]
        gains.append(times_s[0] / times_s[1])
    assert np.mean(gains) > 1.03


def _digest() -> str:
    batch = random_batch(1, 24)
    places = [best_of(batch, layout).order(sizes_of(batch)) for layout in LAYOUTS]
    return repr([(one.positions.tolist(), one.carry) for one in places])


@pytest.mark.slow
def test_every_process_finds_the_same() -> None:
    command = [
        sys.executable,
        "-c",
        "from tests.data.ordering.test_best import _digest; print(_digest())",
    ]
    for seed, threads in (("1", "1"), ("2", "2")):
        settings_ = os.environ | {
            "PYTHONHASHSEED": seed,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        told = subprocess.run(
            command,
            cwd=Path(__file__).parents[3],
            env=settings_,
            capture_output=True,
            text=True,
            check=True,
        )
        assert told.stdout.strip() == _digest()


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5), st.integers(1, 3))
@PROPERTY
def test_bins_hold_every_sequence_once(seed: int, bins: int, count: int, loads: int) -> None:
    random = np.random.default_rng(seed)
    members = fit(
        random.integers(0, 100, size=(bins * count, loads)),
        random.integers(0, 9, size=(bins, loads)),
    )
    assert members.shape == (bins, count) and sorted(members.ravel()) == list(range(bins * count))


def test_bins_are_level_in_every_load_at_once() -> None:
    costs = np.random.default_rng(0).lognormal(5, 1, size=(320, 2)).astype(np.int64)
    loads = costs[fit(costs, np.ones((16, 2), dtype=np.int64))].sum(axis=1)
    by_sum = np.array([costs[own].sum(axis=0) for own in level(costs.sum(axis=1), 16, 20)])
    assert (loads.max(axis=0) / loads.mean(axis=0)).max() < 1.005
    assert (by_sum.max(axis=0) / by_sum.mean(axis=0)).max() > 1.1


def test_bins_come_near_uneven_targets() -> None:
    costs = np.random.default_rng(1).lognormal(5, 1, size=(160, 2)).astype(np.int64)
    targets = np.array([[6, 9], [10, 8], [11, 12], [13, 11]])
    loads = costs[fit(costs, targets)].sum(axis=1)
    assert np.allclose(loads / loads.sum(axis=0), targets / 40, atol=0.01)


@given(st.integers(0, 10_000), st.integers(1, 7), st.integers(1, 4))
@FEW
def test_the_order_of_slots_is_nearly_the_best_of_all(seed: int, slots: int, stages: int) -> None:
    random = np.random.default_rng(seed)
    times_s = random.lognormal(0, 0.7, size=(slots, stages, 1)).round(3)
    pipeline = equal(stages, slots, 0.0, 0.0)
    object.__setattr__(pipeline, "forward_s", times_s)
    object.__setattr__(pipeline, "backward_s", 2 * times_s)
    order, time_s = search_order(pipeline, [np.arange(slots)], 2000)
    every_s = orders_s(pipeline, np.array(list(permutations(range(slots)))))
    assert sorted(order) == list(range(slots)) and time_s == orders_s(pipeline, order[None])[0]
    assert time_s <= 1.01 * every_s.min()


def test_moves_are_all_exchanges_and_shifts() -> None:
    for slots in range(2, 6):
        rows = [row for turn in range(3) for row in sequencing._moves(slots, turn, 3).tolist()]
        expected = []
        for first, second in permutations(range(slots), 2):
            exchanged, shifted = list(range(slots)), list(range(slots))
            exchanged[first], exchanged[second] = second, first
            shifted.insert(second, shifted.pop(first))
            expected += [exchanged] * (first < second) + [shifted] * (abs(first - second) > 1)
        assert sorted(rows) == sorted(expected)


def encoder(lightest: float = 0.0, window: int = 2, most: float = 1.5) -> Shaped:
    return Shaped(
        slice(0, 1),
        np.zeros((2, 1)),
        np.array([[0.3], [0.6]]),
        lightest * np.arange(1, 9),
        window,
        most,
    )


def line(slots: int = 8) -> Pipeline:
    """An encoder that takes 0.9 s of a slot, before an LLM that takes 1.2 s."""
    pipeline = equal(2, slots, 0.4, 0.8)
    pipeline.forward_s[:, 0], pipeline.backward_s[:, 0] = 0.3, 0.6
    return pipeline


def test_the_first_slot_is_lighter_so_that_the_llm_starts_sooner() -> None:
    weights = shape(line(), [encoder()])[:, 0]
    assert weights.sum() == pytest.approx(8) and weights[0] < 0.3 and weights[-1] < 0.8
    assert (weights[1:] + weights[:-1]).max() <= 3 + 1e-6


def test_of_many_slots_those_between_the_ends_are_even() -> None:
    few, many = (
        shape(line(slots), [dataclasses.replace(encoder(), lightest=np.zeros(slots))])[:, 0]
        for slots in (64, 1000)
    )
    assert many.sum() == pytest.approx(1000) and many[32:-32].tolist() == [1.0] * 936
    assert many[:32].tolist() + many[-32:].tolist() == few.tolist() and few[0] < 0.3


def test_slots_hold_no_less_than_the_lightest_sequences_and_no_more_than_memory() -> None:
    assert shape(line(), [encoder(lightest=0.9)]).min() >= 0.9 - 1e-6
    assert shape(line(), [encoder(most=1.0)]).tolist() == [[1.0]] * 8
    assert shape(line(), []).shape == (8, 0)


def test_replicas_of_one_unit_have_orders_of_their_own() -> None:
    random = np.random.default_rng(3)
    times_s = random.lognormal(0, 0.7, size=(6, 3, 4))
    pipeline = Pipeline(
        np.full(3, 4),
        np.array([True, False, False]),
        ((0, 1), (1, 2)),
        times_s,
        2 * times_s,
        np.zeros(2),
        np.zeros(3),
    )
    places = np.arange(24).reshape(6, 4, 1)
    found = order_apart(pipeline, places)
    assert sorted(found.ravel()) == list(range(24))
    came = np.divmod(found[..., 0], 4)  # slot and replica that a microbatch came from
    after = times_s[came[0], :, came[1]].transpose(0, 2, 1)
    moved = Pipeline(
        pipeline.replicas, pipeline.entry, pipeline.cuts, after, 2 * after, np.zeros(2), np.zeros(3)
    )
    assert simulate(moved).iteration_s < 0.9 * simulate(pipeline).iteration_s


def test_data_that_are_all_alike_and_data_without_images() -> None:
    batch = random_batch(0, 24)
    same = sizes_of(batch).take(np.zeros(24, dtype=np.int64))
    for layout in LAYOUTS:
        found = best_of(batch, layout).order(same)
        assert isinstance(found, Assignment) and sorted(found.positions.ravel()) == list(range(24))


def test_a_search_over_many_slots_simulates_no_more_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulated = []
    monkeypatch.setattr(
        sequencing,
        "orders_s",
        lambda pipeline, orders: simulated.append(orders.size) or orders_s(pipeline, orders),
    )
    for slots in (256, 1024):
        order, _ = search_order(equal(2, slots, 1.0, 2.0), [np.arange(slots)], 1200)
        assert sorted(order) == list(range(slots))
        assert 1000 * 256 < sum(simulated) < 3000 * 256
        simulated.clear()


@pytest.mark.slow
def test_how_many_candidates_are_in_memory_at_once_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = random_batch(2, 24)
    layout = next(layout for layout in LAYOUTS if len(layout.units) > 1)
    found = best_of(batch, layout).order(sizes_of(batch))
    evaluated = []
    some_s = shaping._some_s
    monkeypatch.setattr(
        shaping,
        "_some_s",
        lambda pipeline, units, weights: (
            evaluated.append(len(weights)) or some_s(pipeline, units, weights)
        ),
    )
    monkeypatch.setattr(shaping, "NUMBERS", 1)
    again = best_of(batch, layout).order(sizes_of(batch))
    assert set(evaluated) == {1}
    assert (again.positions == found.positions).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_a_step_of_very_many_slots_is_ordered_without_a_search(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("search_order", "order_apart"):
        monkeypatch.setattr(policy_best, name, lambda *given: pytest.fail("searched"))
    passes = layout.microbatches * sum(unit.pp for unit in layout.units)
    monkeypatch.setattr(policy_best, "MOST_PASSES", passes - 1)
    batch = random_batch(1, 24)
    found = best_of(batch, layout).order(sizes_of(batch))
    check_step(batch, layout, order_step(batch, layout, 0, found))
