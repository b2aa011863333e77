"""The simulators against closed forms, hand computation, and each other."""

import dataclasses
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.costs.overlap import Hidden
from disttrain_cli.schedule.one_f_one_b import passes
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.shared_cores import simulate_shared, speed
from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.stage_graph import stage_cuts
from disttrain_cli.spec.trace import BACKWARD, FORWARD, WEIGHTS


def equal(stages: int, slots: int, forward: float, backward: float) -> Pipeline:
    shape = (slots, stages, 1)
    return Pipeline(
        np.ones(stages, np.int64),
        np.arange(stages) == 0,
        tuple(pairwise(range(stages))),
        np.full(shape, forward),
        np.full(shape, backward),
        np.zeros(max(0, stages - 1)),
        np.zeros(stages),
    )


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    """One to five units; those before one of them stand side by side, and so do those behind it."""
    # (DP, PP)
    units = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=5))
    cuts = tuple(stage_cuts([pp for _, pp in units], draw(st.integers(0, len(units) - 1))))
    replicas = np.array([dp for dp, pp in units for _ in range(pp)])
    entry = np.array([stage == 0 for _, pp in units for stage in range(pp)])
    slots, seed = draw(st.integers(1, 6)), draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    shape = (slots, len(replicas), int(replicas.max()))
    zeros = random.random(shape) > 0.2  # some replicas have no work
    pipeline = Pipeline(
        replicas,
        entry,
        cuts,
        random.random(shape) * zeros,
        random.random(shape) * zeros,
        random.random(len(replicas) - 1) * 0.1,
        random.random(len(replicas)) * 0.1,
        0.05,
    )
    weighted = random.random(len(replicas)) > 0.3  # backwards of the other stages are whole
    if draw(st.booleans()):
        pipeline = dataclasses.replace(
            pipeline,
            weight_s=random.random(shape) * zeros * weighted[:, None],
            weight_delay=random.integers(0, 4, len(replicas)) * weighted,
        )
    if draw(st.booleans()):
        last = BACKWARD if pipeline.weight_s is None else np.where(weighted, WEIGHTS, BACKWARD)
        pipeline = dataclasses.replace(
            pipeline,
            reducing=messages(random, len(replicas), last),
            gathering=messages(random, len(replicas), FORWARD),
        )
    return pipeline


def messages(random: np.random.Generator, stages: int, operation: Any) -> Hidden:
    """One to four per stage, somewhere behind its pass."""
    most = 4
    missing = np.arange(most)[:, None] >= random.integers(1, most + 1, stages)
    before = np.sort(random.random((most, stages)), axis=0)
    before[0] = 0.0
    until_s = np.cumsum(random.random((most, stages)) * 0.6, axis=0)
    operation = np.broadcast_to(operation, stages)
    until_s = np.where(missing, -np.inf, until_s)
    return Hidden(operation, until_s, before, np.zeros(stages))


def orders(pipeline: Pipeline) -> list[list[tuple[int, int]]]:
    """What every stage does, in its order."""
    delays = [None] * len(pipeline.replicas)
    if pipeline.weight_delay is not None:
        delays = pipeline.weight_delay.tolist()
    return [
        passes(len(pipeline.forward_s), to_end, delay)
        for to_end, delay in zip(pipeline.to_end.tolist(), delays, strict=True)
    ]


def when(timeline: Timeline) -> list[tuple[Any, Any]]:
    """Starts and ends of forwards, backwards and weights' parts."""
    return [
        (timeline.forward_start, timeline.forward_end),
        (timeline.backward_start, timeline.backward_end),
        (timeline.weight_start, timeline.weight_end),
    ]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 8), st.integers(1, 8))
def test_equal_stages_have_the_closed_form(
    stages: int, slots: int, forward: int, backward: int
) -> None:
    timeline = simulate(equal(stages, slots, float(forward), float(backward)))
    if slots >= stages or forward == backward:
        assert timeline.iteration_s == (slots + stages - 1) * (forward + backward)
    assert timeline.iteration_s >= slots * (forward + backward)


def test_two_units_by_hand() -> None:
    """Encoder DP 2 (1 s and 2 s, backward 1 s), LLM DP 1 (3 s, 4 s), transfers of 0.5 s, two
    slots."""
    forward = np.array([[[1.0, 2.0], [3.0, 0.0]]] * 2)
    backward = np.array([[[1.0, 1.0], [4.0, 0.0]]] * 2)
    timeline = simulate(
        Pipeline(
            np.array([2, 1]),
            np.array([True, True]),
            ((0, 1),),
            forward,
            backward,
            np.array([0.5]),
            np.array([0.25, 0.0]),
            1.0,
        )
    )
    assert timeline.forward_end[:, 0].tolist() == [[1.0, 2.0], [2.0, 4.0]]
    assert timeline.forward_start[:, 1, 0].tolist() == [2.5, 9.5]
    assert timeline.backward_start[:, 1, 0].tolist() == [5.5, 12.5]
    assert timeline.backward_start[:, 0].tolist() == [[10.0, 10.0], [17.0, 17.0]]
    assert timeline.iteration_s == 18.0 + 0.25 + 1.0
    assert np.isnan(timeline.forward_start[:, 1, 1]).all()


def test_two_encoders_side_by_side_by_hand() -> None:
    """One of two stages (1 s each), one of one stage (3 s) beside them, LLM (2 s); backwards as
    long; two slots."""
    forward = np.array([[[1.0], [1.0], [3.0], [2.0]]] * 2)
    pipeline = Pipeline(
        np.ones(4, np.int64),
        np.array([True, False, True, True]),
        ((0, 1), (1, 3), (2, 3)),
        forward,
        forward,
        np.array([0.0, 0.5, 1.0]),
        np.zeros(4),
    )
    assert pipeline.to_end.tolist() == [3, 2, 2, 1]
    timeline = simulate(pipeline)
    assert timeline.forward_start[0, :, 0].tolist() == [
        0.0,
        1.0,
        0.0,
        4.0,
    ]  # the LLM waits for the slower one
    assert timeline.forward_start[1, :, 0].tolist() == [
        1.0,
        2.0,
        3.0,
        8.0,
    ]  # and does the first backward at 6
    assert timeline.backward_end[:, :, 0].tolist() == [
        [10.5, 9.5, 12.0, 8.0],
        [14.5, 13.5, 16.0, 12.0],
    ]
    assert timeline.iteration_s == 16.0


def test_two_generators_side_by_side_by_hand() -> None:
    """LLM (2 s), a generator of two stages (1 s each), one of one stage (3 s) beside it; backwards
    as long."""
    forward = np.array([[[2.0], [1.0], [1.0], [3.0]]] * 2)
    pipeline = Pipeline(
        np.ones(4, np.int64),
        np.array([True, True, False, True]),
        ((0, 1), (0, 3), (1, 2)),
        forward,
        forward,
        np.array([0.5, 1.0, 0.0]),
        np.zeros(4),
    )
    assert pipeline.to_end.tolist() == [3, 2, 1, 2]  # the shorter one is no nearer to the end
    timeline = simulate(pipeline)
    assert timeline.forward_start[:, :, 0].tolist() == [[0.0, 2.5, 3.5, 3.0], [2.0, 4.5, 5.5, 6.0]]
    assert timeline.backward_start[0, :, 0].tolist() == [
        13.0,
        5.5,
        4.5,
        9.0,
    ]  # the LLM waits for the slower one
    assert timeline.backward_end[:, 3, 0].tolist() == [12.0, 15.0] and timeline.iteration_s == 18.0


def check_order(pipeline: Pipeline, timeline: Timeline) -> None:
    slots = len(pipeline.forward_s)
    kinds = 2 if pipeline.weight_s is None else 3
    for stage, order in enumerate(orders(pipeline)):
        assert sorted(order) == [(what, slot) for what in range(kinds) for slot in range(slots)]
        for replica in range(pipeline.replicas[stage]):
            starts, ends = (
                [when(timeline)[what][end][slot, stage, replica] for what, slot in order]
                for end in (0, 1)
            )
            assert all(start >= end - 1e-9 for start, end in zip(starts[1:], ends, strict=False))
    for number, (stage, other) in enumerate(pipeline.cuts):
        before, after = range(pipeline.replicas[stage]), range(pipeline.replicas[other])
        pairs = [(a, b) for a in before for b in after if pipeline.entry[other] or a == b]
        for a, b in pairs:
            cut = pipeline.transfer_s[number] - 1e-9
            assert (
                timeline.forward_start[:, other, b] >= timeline.forward_end[:, stage, a] + cut
            ).all()
            assert (
                timeline.backward_start[:, stage, a] >= timeline.backward_end[:, other, b] + cut
            ).all()


def there(stage: int, replica: int, slot: int, asked: float) -> float:
    """Data that nobody has to prepare."""
    return asked


def by_events(
    pipeline: Pipeline, fetch: Callable[[int, int, int, float], float] = there
) -> tuple[dict[tuple[int, int, int, int], tuple[float, float]], float]:
    """(start, end) of every (operation, slot, stage, replica), one operation after the other, and
    the step's time.

    `fetch` says when a replica that asks for a slot's data has them.
    """
    stages = len(pipeline.replicas)
    ranks = [
        (stage, replica) for stage in range(stages) for replica in range(pipeline.replicas[stage])
    ]
    order = orders(pipeline)
    todo = {rank: list(order[rank[0]]) for rank in ranks}
    cuts_of = {
        (stage, what): [
            (*pair, cut)
            for cut, pair in enumerate(pipeline.cuts)
            if what != WEIGHTS and pair[what == FORWARD] == stage
        ]
        for stage in range(stages)
        for what in (FORWARD, BACKWARD, WEIGHTS)
    }
    free = dict.fromkeys(ranks, 0.0)
    times: dict[tuple[int, int, int, int], tuple[float, float]] = {}
    while any(todo.values()):
        for stage, replica in ranks:
            if not todo[stage, replica]:
                continue
            what, slot = todo[stage, replica][0]
            forward = what == FORWARD
            arrivals, cuts = [0.0], cuts_of[stage, what]
            for before, after, cut in cuts:
                other = before if forward else after
                senders = range(pipeline.replicas[other]) if pipeline.entry[after] else [replica]
                if any((what, slot, other, sender) not in times for sender in senders):
                    break
                last = max(times[what, slot, other, sender][1] for sender in senders)
                arrivals.append(last + float(pipeline.transfer_s[cut]))
            if len(arrivals) <= len(cuts):
                continue
            arrival = max(arrivals)
            durations = (pipeline.forward_s, pipeline.backward_s, pipeline.weight_s)[what]
            asked = max(free[stage, replica], arrival)
            if pipeline.gathering is not None and forward and not slot:
                asked = with_weights(pipeline.gathering, stage, asked, durations[0, stage, replica])
            start = fetch(stage, replica, slot, asked) if forward else asked
            free[stage, replica] = start + float(durations[slot, stage, replica])
            times[what, slot, stage, replica] = (start, free[stage, replica])
            todo[stage, replica].pop(0)
    if pipeline.reducing is None or pipeline.gathering is None:
        ends = [free[rank] + float(pipeline.reduce_s[rank[0]]) for rank in ranks]
        return times, max(ends) + pipeline.step_s
    return times, max(reduced_at(pipeline, times, *rank) for rank in ranks)


def by_bucket(messages: Hidden, stage: int) -> list[tuple[float, float, float]]:
    """Of each bucket in layer order: its message in s, and where in the pass its layers are."""
    until_s = messages.until_s[np.isfinite(messages.until_s[:, stage]), stage].tolist()
    shares = [*messages.before[: len(until_s), stage].tolist(), 1.0]
    each_s = np.diff(until_s, prepend=0.0).tolist()
    return list(zip(each_s, shares[:-1], shares[1:], strict=True))


def with_weights(messages: Hidden, stage: int, asked: float, forward_s: float) -> float:
    """The start of a forward that takes its time without waiting inside, and ends as the one that
    waits for the weights of each bucket."""
    gathered, now = 0.0, asked
    for message_s, begin, end in by_bucket(messages, stage):
        gathered += message_s
        now = max(now, gathered) + (end - begin) * forward_s
    return now - forward_s


def reduced_at(
    pipeline: Pipeline,
    times: dict[tuple[int, int, int, int], tuple[float, float]],
    stage: int,
    replica: int,
) -> float:
    """When the last bucket is reduced: from the last layers on, each as its gradients are there.

    What follows the last backward is computed layer by layer over its slots, not slot by slot.
    """
    assert pipeline.reducing is not None
    last = len(pipeline.forward_s) - 1
    left = [(BACKWARD, last)]
    if pipeline.reducing.operation[stage] == WEIGHTS:
        order = orders(pipeline)[stage]
        left = order[order.index((BACKWARD, last)) + 1 :]
        assert left and all(what == WEIGHTS for what, _ in left)
    spans = [times[what, slot, stage, replica] for what, slot in left]
    now, done = spans[0][0], -np.inf
    for message_s, begin, end in reversed(by_bucket(pipeline.reducing, stage)):
        for started, ended in spans:
            now += (end - begin) * (ended - started)
        done = max(done, now) + message_s
    return done


@settings(max_examples=80, deadline=None)
@given(pipelines())
def test_simulation_is_the_event_by_event_one_to_the_bit(pipeline: Pipeline) -> None:
    timeline = simulate(pipeline)
    times, iteration_s = by_events(pipeline)
    # several weights' parts at the end are added up before they are added
    plain = pipeline.weight_s is None and pipeline.reducing is None
    close = 0.0 if plain else 1e-12
    assert timeline.iteration_s == pytest.approx(iteration_s, rel=close, abs=0.0)
    for (what, *place), (start, end) in times.items():
        starts, ends = when(timeline)[what]
        found = (starts[tuple(place)], ends[tuple(place)])
        assert found == pytest.approx((start, end), rel=close, abs=close)
    assert np.isfinite(timeline.forward_end).sum() == sum(what == FORWARD for what, *_ in times)


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_nothing_starts_before_its_input_and_each_rank_does_one_thing(pipeline: Pipeline) -> None:
    timeline = simulate(pipeline)
    check_order(pipeline, timeline)


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_sharing_with_a_core_for_every_rank_changes_nothing(pipeline: Pipeline) -> None:
    pipeline = dataclasses.replace(pipeline, reducing=None, gathering=None)
    alone, shared = (
        simulate(pipeline),
        simulate_shared(pipeline, cores=int(pipeline.replicas.sum()), shared_by=1),
    )
    assert shared.iteration_s == pytest.approx(alone.iteration_s)
    np.testing.assert_allclose(shared.backward_end, alone.backward_end, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(1, 3), st.integers(1, 9))
def test_sharing_keeps_the_order_and_the_cores_full_at_most(
    pipeline: Pipeline, cores: int, shared_by: int
) -> None:
    timeline = simulate_shared(pipeline, cores, shared_by)
    check_order(pipeline, timeline)
    present = pipeline.present
    core_seconds = min(1.0, cores / shared_by) * float(pipeline.computing_s[:, present].sum())
    assert timeline.iteration_s >= core_seconds / cores - 1e-9


def test_two_ranks_on_one_core_by_hand() -> None:
    """Two replicas of one stage, measured alone: both take twice as long, then the longer one is
    alone."""
    forward, backward = np.array([[[1.0, 3.0]]]), np.array([[[0.0, 0.0]]])
    pipeline = Pipeline(
        np.array([2]), np.array([True]), (), forward, backward, np.zeros(0), np.zeros(1)
    )
    timeline = simulate_shared(pipeline, cores=1, shared_by=1)
    assert timeline.forward_end[0, 0].tolist() == pytest.approx([2.0, 4.0])
    assert simulate_shared(pipeline, cores=1, shared_by=2).forward_end[
        0, 0
    ].tolist() == pytest.approx([1.0, 2.0])


def test_speed_relative_to_the_measurement() -> None:
    assert speed(busy=6, cores=2, shared_by=6) == 1.0
    assert speed(busy=1, cores=2, shared_by=6) == 3.0
    assert speed(busy=4, cores=2, shared_by=2) == 0.5


def test_weights_fill_the_wait_for_a_gradient_by_hand() -> None:
    """Two stages, two slots, F = B = W = 1 s: the first stage's last wait is half as long."""
    pipeline = equal(2, 2, 1.0, 1.0)
    ones, now = np.ones((2, 2, 1)), np.zeros(2, np.int64)
    timeline = simulate(dataclasses.replace(pipeline, weight_s=ones, weight_delay=now))
    assert timeline.backward_start[:, 1, 0].tolist() == [2.0, 5.0]
    assert timeline.backward_start[:, 0, 0].tolist() == [3.0, 6.0]
    assert timeline.weight_start is not None
    assert timeline.weight_start[:, 0, 0].tolist() == [4.0, 7.0] and timeline.iteration_s == 8.0
    later = simulate(dataclasses.replace(pipeline, weight_s=ones, weight_delay=np.array([0, 1])))
    assert later.weight_start is not None
    assert later.weight_start[:, 1, 0].tolist() == [5.0, 6.0] and later.iteration_s == 7.0
    whole = simulate(equal(2, 2, 1.0, 2.0))
    assert whole.iteration_s == 9.0
