"""What is left of messages behind a pass: against messages and layers followed one by one."""

import numpy as np
import pytest

from disttrain_cli.costs import buckets
from disttrain_cli.costs.layout import CostedStage, optimizer_s, reduce_s, stages_of
from disttrain_cli.costs.overlap import Hidden, hidden
from disttrain_cli.schedule.one_f_one_b import last_slots
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import BACKWARD, FORWARD, WEIGHTS
from tests.analysis.simulated import layout_of
from tests.planning import synthetic

PROFILE = synthetic.paper_9b(synthetic.run_file(batch=1920, gpus=1296, nodes=162))
PER_NODE = 8


def layout(weight_delay: list[int | None] | None = None, zero_stage: int = 1) -> Layout:
    units = {
        "image_encoder": {"dp": 136, "layers_per_stage": [32]},
        "llm": {"tp": 2, "dp": 24, "layers_per_stage": [17, 17], "weight_delay": weight_delay},
        "image_generator": {"dp": 1, "layers_per_stage": [11]},
    }
    made = layout_of(PROFILE, 1920, 80, **units)
    return made.model_copy(update={"zero_stage": zero_stage, "overlap": True})


def both(profile: Profile, plan: Layout) -> tuple[list[CostedStage], Hidden, Hidden]:
    stages = stages_of(profile, plan)
    return stages, *hidden(profile, plan, stages, PER_NODE)


def passes(seconds: float, stages: int) -> np.ndarray:
    """All stages' passes of one replica take so long."""
    return np.full((stages, 1), seconds)


def test_messages_of_all_buckets_are_the_whole_one_but_for_latencies() -> None:
    quiet = PROFILE.model_copy(
        update={
            "links": PROFILE.links.model_copy(
                update={
                    f"{name}_us": 0.0 for name in ("all_reduce", "reduce_scatter", "all_gather")
                }
                | {"inter_node": None}
            )
        }
    )
    for zero_stage in (0, 1):
        plan = layout(zero_stage=zero_stage)
        stages, reducing, gathering = both(quiet, plan)
        nothing = passes(0.0, len(stages))
        assert reducing.left_s(nothing)[:, 0] == pytest.approx(
            [reduce_s(quiet, plan, stage, PER_NODE) for stage in stages]
        )
        assert gathering.left_s(nothing)[:, 0] == pytest.approx(
            [optimizer_s(quiet, plan, stage, PER_NODE) for stage in stages]
        )


def test_long_passes_leave_the_message_of_the_first_bucket_only() -> None:
    stages, reducing, gathering = both(PROFILE, layout())
    long = passes(1e6, len(stages))
    assert (np.isfinite(reducing.until_s).sum(axis=0) > 1).sum() >= 2
    for messages in (reducing, gathering):
        assert messages.left_s(long)[:, 0] == pytest.approx(messages.until_s[0])
        assert (messages.before[0] == 0.0).all() and (messages.before < 1.0).all()


def test_a_layer_s_gradients_are_final_where_its_part_of_the_pass_ends(monkeypatch) -> None:
    """Every layer a bucket of its own: the last block of an LLM's stage of equal ones is done after
    its share of the pass."""
    monkeypatch.setattr(buckets, "BUCKET_NUMBERS", 1)
    stages, reducing, gathering = both(PROFILE, layout())
    first, second = 1, 2  # of the LLM, the first begins with the embedding and ends with a block
    assert stages[first].held[-1] == stages[first].held[-2]
    blocks = len([held for held in stages[first].held if held == stages[first].held[-1]])
    shares = 1.0 - reducing.before[len(stages[first].held) - 1, first]
    assert 0.9 / blocks < shares <= 1.0 / blocks
    assert np.isfinite(reducing.until_s[:, second]).sum() == len(stages[second].held)
    assert gathering.operation.tolist() == [FORWARD] * len(stages)


def test_behind_the_weights_parts_of_all_slots_left_where_there_are_some() -> None:
    given = layout(weight_delay=[3, None])
    at_once = both(PROFILE, layout(weight_delay=[0, None]))[1]
    many = both(PROFILE, layout(weight_delay=[100, None]))[1]
    reducing = both(PROFILE, given)[1]
    assert reducing.operation.tolist() == [BACKWARD, WEIGHTS, BACKWARD, BACKWARD]
    slots = given.microbatches
    assert last_slots(slots, 3) == range(slots - 4, slots) and last_slots(3, 7) == range(3)
    assert last_slots(slots, None) == last_slots(slots, 0) == range(slots - 1, slots)
    ratios = [1.0, 4.0, 1.0, 1.0]
    assert reducing.mean_s == pytest.approx(at_once.mean_s * ratios)
    assert many.mean_s[1] == pytest.approx(at_once.mean_s[1] * slots)
    assert reducing.mean_left_s == pytest.approx(reducing.left_s(reducing.mean_s))
    assert reducing.mean_left_s[1] < at_once.mean_left_s[1]
    assert reducing.mean_left_s[[0, 2, 3]].tolist() == at_once.mean_left_s[[0, 2, 3]].tolist()


def test_those_of_some_stages() -> None:
    _, reducing, _ = both(PROFILE, layout(weight_delay=[3, None]))
    pass_s = np.random.default_rng(0).random((4, 5))
    some = reducing.of([2, 0, 2])
    assert some.left_s(pass_s[[2, 0, 2]]).tolist() == reducing.left_s(pass_s)[[2, 0, 2]].tolist()
    assert len(reducing.of([2]).until_s) == np.isfinite(reducing.until_s[:, 2]).sum()
    assert some.operation.tolist() == [BACKWARD, BACKWARD, BACKWARD]


def test_frozen_stages_have_none() -> None:
    plan = layout().model_copy(update={"trained": ["llm"]})
    stages, reducing, gathering = both(PROFILE, plan)
    nothing = passes(0.0, len(stages))
    assert not stages[0].trained
    assert reducing.left_s(nothing)[0, 0] == gathering.left_s(nothing)[0, 0] == 0.0
