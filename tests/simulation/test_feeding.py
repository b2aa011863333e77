"""Feeding against the loader's own rule played event by event, closed forms, and the simulator
without it."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.costs.preparing import prepare_s
from disttrain_cli.simulation.pipeline import simulate, simulate_steps
from disttrain_cli.simulation.step import fed, pipeline_of
from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.profile import PreprocessProfile
from tests.planning import synthetic
from tests.planning.test_predict import three
from tests.simulation.test_pipeline import by_events, equal, pipelines, when


def with_loads(pipeline: Pipeline, load_s: object, prefetch: int) -> Pipeline:
    return dataclasses.replace(
        pipeline,
        load_s=np.broadcast_to(np.asarray(load_s, float), pipeline.forward_s.shape),
        prefetch=prefetch,
    )


@st.composite
def fed_steps(draw: st.DrawFn) -> list[Pipeline]:
    """One to three steps of one layout, of other work each; some stages load, some of them not in
    every step."""
    first, prefetch = draw(pipelines()), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    loading = random.random(len(first.replicas)) < 0.6
    steps = []
    for _ in range(draw(st.integers(1, 3))):
        forward_s, backward_s, load_s = random.random((3, *first.forward_s.shape))
        load_s *= draw(st.sampled_from([0.0, 0.3, 2.0, 10.0])) * loading[:, None]
        steps.append(
            dataclasses.replace(
                first, forward_s=forward_s, backward_s=backward_s, load_s=load_s, prefetch=prefetch
            )
        )
    return steps


class PlainLoader:
    """The rule of `data.loader`: asking for a slot hands over all that are missing up to `prefetch`
    after it."""

    def __init__(self, load_s: list[float], prefetch: int) -> None:
        self.load_s, self.prefetch, self.done, self.free = load_s, prefetch, {}, 0.0
        self.ahead(0, 0.0)

    def ahead(self, number: int, now: float) -> None:
        for later in range(number, min(number + self.prefetch + 1, len(self.load_s))):
            if later not in self.done:
                self.free = self.done[later] = max(self.free, now) + self.load_s[later]

    def fetch(self, number: int, now: float) -> float:
        self.ahead(number, now)
        return max(now, self.done[number])


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(fed_steps())
def test_steps_are_those_of_the_loader_played_event_by_event(steps: list[Pipeline]) -> None:
    slots, begins = len(steps[0].forward_s), 0.0
    load_s = np.concatenate([step.load_s for step in steps])
    loaders = {
        (stage, replica): PlainLoader(load_s[:, stage, replica].tolist(), steps[0].prefetch)
        for stage, replicas in enumerate(steps[0].replicas)
        for replica in range(replicas)
    }
    for number, (step, timeline) in enumerate(zip(steps, simulate_steps(steps), strict=True)):
        waits: dict[tuple[int, int, int], float] = {}

        def fetch(
            stage: int,
            replica: int,
            slot: int,
            asked: float,
            number: int = number,
            begins: float = begins,
            waits: dict[tuple[int, int, int], float] = waits,
        ) -> float:
            has = loaders[stage, replica].fetch(number * slots + slot, begins + asked) - begins
            waits[slot, stage, replica] = max(0.0, has - asked)
            return asked + waits[slot, stage, replica]

        times, iteration_s = by_events(step, fetch)
        assert timeline.iteration_s == pytest.approx(iteration_s)
        for (what, *place), (start, end) in times.items():
            starts, ends = when(timeline)[what]
            assert (starts[tuple(place)], ends[tuple(place)]) == pytest.approx(
                (start, end), abs=1e-9
            )
        assert timeline.load_wait_s is not None
        assert {place: timeline.load_wait_s[place] for place in waits} == pytest.approx(
            waits, abs=1e-9
        )
        assert np.isfinite(timeline.load_wait_s).sum() == len(waits)
        begins += iteration_s


def same(one: Timeline, other: Timeline) -> bool:
    names = ("forward_start", "forward_end", "backward_start", "backward_end")
    return one.iteration_s == other.iteration_s and all(
        np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True) for name in names
    )


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(1, 3))
def test_data_prepared_in_no_time_change_no_bit(pipeline: Pipeline, prefetch: int) -> None:
    plain = simulate(pipeline)
    assert plain.load_wait_s is None
    for timeline in simulate_steps([with_loads(pipeline, 0.0, prefetch)] * 2):
        assert same(timeline, plain)
    # time to prepare the next slot in
    busy = dataclasses.replace(pipeline, forward_s=pipeline.forward_s + 0.01)
    first, *others = simulate_steps([with_loads(busy, 1e-6, prefetch)] * 3)
    assert all(same(timeline, simulate(busy)) for timeline in others)
    assert first.iteration_s == pytest.approx(simulate(busy).iteration_s, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(1, 3))
def test_workers_that_are_the_bottleneck_set_the_pace(pipeline: Pipeline, prefetch: int) -> None:
    """In the end steps take as long as the preparation of their slots, however long the way through
    the pipeline.

    Stage by stage, workers first fall behind by the time in which a slot gets there.
    """
    slots, load_s = len(pipeline.forward_s), simulate(pipeline).iteration_s + 1.0
    steps_s = [
        one.iteration_s
        for one in simulate_steps(
            [with_loads(pipeline, load_s, prefetch)] * (len(pipeline.replicas) + 2)
        )
    ]
    assert (np.cumsum(steps_s) >= slots * load_s * np.arange(1, len(steps_s) + 1) - 1e-9).all()
    assert steps_s[-1] == pytest.approx(slots * load_s)


def test_one_rank_by_hand() -> None:
    """2 s of work and 3 s of preparation per slot, one slot ahead; then a step whose data take 1
    s."""
    slow, fast = (with_loads(equal(1, 3, 1.0, 1.0), load_s, 1) for load_s in (3.0, 1.0))
    first, second = simulate_steps([slow, fast])
    # handed over at 0, 0, and 5 (asked for slot 1): ready at 3, 6, 9
    assert first.forward_start[:, 0, 0].tolist() == [3.0, 6.0, 9.0]
    assert first.load_wait_s is not None and first.load_wait_s[:, 0, 0].tolist() == [3.0, 1.0, 1.0]
    assert first.iteration_s == 11.0
    # slot 3 was asked for at 8 with slot 2, and begun at 9: ready at 10, one second before the step
    # begins
    assert second.forward_start[:, 0, 0].tolist() == [0.0, 2.0, 4.0] and second.iteration_s == 6.0


def test_a_layouts_data_are_prepared_where_its_modules_begin() -> None:
    rates = PreprocessProfile(images_per_s_per_core=100, sequences_per_s_per_core=10)
    profile, layout = (
        synthetic.tiny(synthetic.run_file()).model_copy(update={"preprocess": rates}),
        three(),
    )
    stages, loads = (
        stages_of(profile, layout),
        synthetic.loads_of(profile, layout, synthetic.paper_policy(profile, layout), 0),
    )
    pipeline = fed(
        pipeline_of(profile, layout, stages, loads, 6),
        profile,
        stages,
        loads,
        workers=2,
        prefetch=3,
    )
    assert pipeline.load_s is not None and pipeline.prefetch == 3
    assert pipeline.load_s.any(axis=(0, 2)).tolist() == [True, True, False, True, False]
    for number, stage in enumerate(stages):
        np.testing.assert_array_equal(
            pipeline.load_s[:, number, : stage.unit.dp], prepare_s(profile, stage, loads, 2)
        )
    assert not pipeline.load_s[:, ~pipeline.present].any()
