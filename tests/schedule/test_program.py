"""Programs of stages: DeepSpeed's 1F1B, split backwards, and evaluations."""

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.schedule.one_f_one_b import last_slots, passes, slots_in_flight, ticks
from disttrain_cli.schedule.program import evaluation, program
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.stage_graph import Stage, stages_to_end
from disttrain_cli.spec.trace import BACKWARD, FORWARD, OPERATIONS, WEIGHTS


def stage_of(stages: int, index: int, delay: int | None = None) -> Stage:
    """A stage of a unit of so many, in a line."""
    unit = UnitPlan(
        name="model",
        modules=["llm"],
        pp=stages,
        gpus=stages,
        layers_per_stage=[1] * stages,
        weight_delay=None if delay is None else [delay] * stages,
    )
    before, after = ((index - 1,) if index else ()), ((index + 1,) if index + 1 < stages else ())
    line = index, range(index, index + 1), (index,), before, after, index, stages - index
    return Stage(index, unit, *line, parallel=frozenset(), twin=None)


lines = st.tuples(st.integers(1, 9), st.integers(1, 6)).flatmap(
    lambda line: st.tuples(*map(st.just, line), st.integers(0, line[1] - 1))
)


@given(lines)
def test_the_order_is_deepspeeds(line: tuple[int, int, int]) -> None:
    schedule = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    slots, stages, index = line
    names = {
        schedule.RecvActivation: "receive_activation",
        schedule.ForwardPass: "forward",
        schedule.SendActivation: "send_activation",
        schedule.RecvGrad: "receive_gradient",
        schedule.BackwardPass: "backward",
        schedule.SendGrad: "send_gradient",
        schedule.ReduceGrads: "reduce",
        schedule.OptimizerStep: "step",
    }

    def stock(sends_first: bool) -> list[str]:
        def late(command: object) -> bool:
            return sends_first and type(command) not in (
                schedule.SendActivation,
                schedule.SendGrad,
            )

        return [
            names[type(command)]
            for commands in schedule.TrainSchedule(slots, stages, index)
            for command in sorted(commands, key=late)
            if type(command) in names
        ]

    for sends_first in (False, True):
        mine = list(program(stage_of(stages, index), slots, sends_first))
        assert [one.operation for one in mine if one.operation in names.values()] == stock(
            sends_first
        )
        for operation in set(names.values()) - {"reduce", "step"}:  # which DeepSpeed only counts
            of_slots = [slot for name, slot, _ in mine if name == operation]
            assert of_slots in ([], list(range(slots)))


@given(lines, st.integers(0, 10), st.booleans())
def test_weights_follow_backwards_and_messages_stay(
    line: tuple[int, int, int], delay: int, sends_first: bool
) -> None:
    slots, stages, index = line
    whole = list(program(stage_of(stages, index), slots, sends_first))
    order = list(program(stage_of(stages, index, delay), slots, sends_first))
    assert [one for one in order if one.operation != "weights"] == whole
    at = {one[:2]: number for number, one in enumerate(order)}
    left = last_slots(slots, delay)
    weights = [one.slot for one in order if one.operation == "weights"]
    assert weights == list(range(left.start + 1))
    for slot in weights:
        number = at["weights", slot]
        last = min(slot + delay, slots - 1)  # the backward that it waits for
        assert at["backward", last] < number < at["reduce", -1]
        if index:
            assert at["send_gradient", last] < number
        if last + 1 < slots:
            assert number < at["backward", last + 1]
            if stages > index + 1:
                assert number < at["receive_gradient", last + 1]


@given(lines, st.integers(0, 10))
def test_passes_are_in_the_order_of_their_ticks(line: tuple[int, int, int], delay: int) -> None:
    slots, stages, index = line
    forwards, backwards = ticks(slots, stages - index)
    when = {FORWARD: forwards, BACKWARD: backwards}
    order = passes(slots, stages - index)
    assert all(when[a][one] < when[b][two] for (a, one), (b, two) in pairwise(order))
    split = passes(slots, stages - index, delay)
    assert [one for one in split if one[0] != WEIGHTS] == order
    assert sorted(split) == [(what, slot) for what in range(3) for slot in range(slots)]
    held = accumulate({FORWARD: 1, BACKWARD: -1}[operation] for operation, _ in order)
    assert max(held) == slots_in_flight(slots, stages - index)


@given(st.integers(1, 9), st.integers(2, 6))
def test_a_pass_comes_a_tick_after_those_that_it_waits_for(slots: int, stages: int) -> None:
    to_end = stages_to_end([(one, one + 1) for one in range(stages - 1)], stages)
    of_stages = [ticks(slots, left, first) for first, left in enumerate(to_end)]
    for (forwards, backwards), (next_forwards, next_backwards) in pairwise(of_stages):
        assert [tick + 1 for tick in forwards] == list(next_forwards)
        assert [tick + 1 for tick in next_backwards] == list(backwards)
    forwards, backwards = of_stages[-1]
    assert [tick + 1 for tick in forwards] == list(backwards)


@given(lines)
def test_every_operation_is_a_row_of_traces(line: tuple[int, int, int]) -> None:
    slots, stages, index = line
    stage = stage_of(stages, index)
    for instructions in (program(stage, slots), evaluation(stage, slots)):
        assert {one.operation for one in instructions} <= set(OPERATIONS)


def test_an_evaluation_has_one_slot_on_its_way() -> None:
    order = [str(one.operation) for one in evaluation(stage_of(3, 1), 2)]
    slot = ["receive_activation", "load", "forward", "wait", "send_activation"]
    assert order == [*slot, *slot, "wait"]
    assert [one.operation for one in evaluation(stage_of(3, 2), 1)] == [*slot[:3], "wait"]


def test_the_last_stage_of_a_shorter_branch_sends_nothing() -> None:
    """It runs as many forwards ahead as its peers of longer branches."""
    order = list(program(replace(stage_of(2, 0), after=()), 3))
    assert [one.operation for one in order[:4]] == ["load", "forward"] * 2
    assert not any("send" in one.operation or "gradient" in one.operation for one in order)
