"""The lean evaluation gives the simulator's numbers to the bit."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.simulation import makespan
from disttrain_cli.simulation.makespan import Delayed, iterations_s, of_replica, orders_s
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.timeline import Pipeline
from tests.simulation.test_pipeline import equal, pipelines


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(1, 7), st.integers(0, 1000))
def test_other_durations_and_other_orders(pipeline: Pipeline, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = (*pipeline.forward_s.shape, count)
    names = ["forward_s", "backward_s", *([] if pipeline.weight_s is None else ["weight_s"])]
    durations = {name: random.random(shape) for name in names}
    assert iterations_s(pipeline, **durations).tolist() == [
        simulate(
            dataclasses.replace(
                pipeline, **{name: times_s[..., number] for name, times_s in durations.items()}
            )
        ).iteration_s
        for number in range(count)
    ]
    orders = np.array([random.permutation(len(pipeline.forward_s)) for _ in range(count)])
    assert orders_s(pipeline, orders).tolist() == [
        simulate(
            dataclasses.replace(
                pipeline, **{name: getattr(pipeline, name)[order] for name in names}
            )
        ).iteration_s
        for order in orders
    ]


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(1, 7), st.integers(0, 1000))
def test_other_delays(pipeline: Pipeline, count: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    if pipeline.weight_s is None:
        pipeline = dataclasses.replace(pipeline, weight_s=random.random(pipeline.forward_s.shape))
    delays = random.integers(0, 2 * len(pipeline.forward_s), (count, len(pipeline.replicas)))
    assert Delayed(pipeline).times_s(delays).tolist() == [
        simulate(dataclasses.replace(pipeline, weight_delay=one)).iteration_s for one in delays
    ]


def test_more_steps_than_fit_one_update(monkeypatch) -> None:
    pipeline = equal(3, 4, 1.0, 2.0)
    factors = np.arange(1.0, 8.0)
    durations = [
        times_s[..., None] * factors for times_s in (pipeline.forward_s, pipeline.backward_s)
    ]
    monkeypatch.setattr(makespan, "NUMBERS", 6)  # two steps of three ranks
    assert iterations_s(pipeline, *durations).tolist() == (18 * factors).tolist()


def test_a_replica_of_its_own() -> None:
    pipeline = dataclasses.replace(
        equal(2, 3, 1.0, 2.0), replicas=np.array([2, 2]), entry=np.array([True, False])
    )
    two = {
        name: np.concatenate([times_s, 2 * times_s], axis=2)
        for name, times_s in (
            ("forward_s", pipeline.forward_s),
            ("backward_s", pipeline.backward_s),
        )
    }
    pipeline = dataclasses.replace(pipeline, **two)
    alone = [simulate(of_replica(pipeline, replica)).iteration_s for replica in range(2)]
    assert alone == [12.0, 24.0] and max(alone) == simulate(pipeline).iteration_s
