"""The schedule with weights' parts against 1F1B."""

from deepspeed.runtime.pipe import schedule
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.costs.overlap import last_slots
from disttrain_cli.runtime.engine.split import SplitSchedule, WeightPass


@given(st.integers(1, 9), st.integers(1, 6), st.data())
def test_weights_follow_backwards_and_messages_stay(slots: int, stages: int, data: st.DataObject):
    stage, delay = data.draw(st.integers(0, stages - 1)), data.draw(st.integers(0, 10))
    stock = list(schedule.TrainSchedule(slots, stages, stage))
    split = list(SplitSchedule(delay, slots, stages, stage))
    names = [
        [[repr(c) for c in step if type(c) is not WeightPass] for step in one]
        for one in (stock, split)
    ]
    assert names[0] == names[1]
    order = [command for step in split for command in step]
    weights = [number for number, c in enumerate(order) if type(c) is WeightPass]
    left = last_slots(slots, delay)
    assert [order[number].buffer_id for number in weights] == list(range(left.start + 1))
    backwards = [number for number, c in enumerate(order) if type(c) is schedule.BackwardPass]
    sends = [number for number, c in enumerate(order) if type(c) is schedule.SendGrad]
    reduces = next(n for n, c in enumerate(order) if type(c) is schedule.ReduceTiedGrads)
    for slot, number in enumerate(weights):
        last = min(slot + delay, slots - 1)  # the backward that it waits for
        assert backwards[last] < number < reduces
        if last + 1 < slots:
            assert number < backwards[last + 1]
        if sends:
            assert sends[last] < number
