"""What a head costs that is the embedding: states once on one stage, one message more on two."""

import numpy as np
import pytest

from disttrain_cli.costs.layout import by_device, copies_s, optimizer_s, reduce_s, stages_of
from disttrain_cli.costs.links import all_reduce_s
from disttrain_cli.costs.memory import GIB, layout_memory
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.planning.options import list_rows
from disttrain_cli.planning.units import Cluster, Unit
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from tests.planning import synthetic

SHARED = 40_000  # parameters of the embedding, and of the head
DP = 2


def profiles(precision: str = "fp32") -> tuple[Profile, Profile]:
    """The same model, tied and not; the head keeps nothing, so that a block's backward is the
    fullest moment."""
    apart = synthetic.tiny(synthetic.run_file())
    apart = apart.model_copy(update={"precision": precision})
    llm = apart.modules["llm"]
    head = llm.costs["head"].tp["1"].model_copy(update={"activation_bytes": Polynomial()})
    costs = llm.costs | {"head": llm.costs["head"].model_copy(update={"tp": {"1": head}})}
    llms = [llm.model_copy(update={"costs": costs, "tied": places}) for places in ([0, 5], [])]
    tied, apart = (
        apart.model_copy(update={"modules": apart.modules | {"llm": one}}) for one in llms
    )
    return tied, apart


def layout(stages: list[int], zero_stage: int, **changes: object) -> Layout:
    units = [
        UnitPlan(name="e", modules=["image_encoder"], dp=3, gpus=3, layers_per_stage=[4]),
        UnitPlan(
            name="l",
            modules=["llm"],
            dp=DP,
            pp=len(stages),
            gpus=DP * len(stages),
            layers_per_stage=stages,
        ).model_copy(update=changes),
        UnitPlan(name="g", modules=["image_generator"], gpus=1, layers_per_stage=[4]),
    ]
    return Layout(
        global_batch_size=32,
        microbatch_size=2,
        microbatches=8,
        gpus_used=4 + DP * len(stages),
        zero_stage=1 if zero_stage else 0,
        units=units,
    )


def test_the_profile_knows_both_layers() -> None:
    tied, apart = profiles()
    assert tied.tied_layers == (4, 9) and apart.tied_layers is None


@pytest.mark.parametrize(
    ("precision", "zero_stage", "states", "waiting"),
    [("fp32", 0, 16, 4), ("fp32", 1, 14, 4), ("bf16", 1, 12, 2)],
)
def test_states_are_there_once_on_one_stage(
    precision: str, zero_stage: int, states: int, waiting: int
) -> None:
    """A gradient of the head waits for the embedding's in every backward, unless it is later."""
    tied, apart = profiles(precision)
    for changes, waits in ({}, waiting), ({"weight_delay": [1]}, 0):
        plan = layout([6], zero_stage, **changes)
        one, two = (layout_memory(profile, plan, 4.0)[1] for profile in (tied, apart))
        assert (two.peak_gib - one.peak_gib) * GIB == pytest.approx((states - waits) * SHARED)
        assert (two.weights_gib - one.weights_gib) * GIB == pytest.approx(
            SHARED * (2 if precision == "bf16" else 4)
        )
    plan = layout([3, 3], zero_stage)
    assert layout_memory(tied, plan, 4.0) == layout_memory(apart, plan, 4.0)


def test_states_are_there_once_on_two_stages_of_a_rank() -> None:
    profiled = profiles("bf16")
    unit = UnitPlan(
        name="all",
        modules=list(profiled[0].modules),
        dp=DP,
        pp=2,
        chunks=2,
        gpus=2 * DP,
        layers_per_stage=[4, 1, 4, 5],
    )
    plan = Layout(
        global_batch_size=32, microbatch_size=2, microbatches=8, gpus_used=2 * DP, units=[unit]
    )
    one, two = (layout_memory(profile, plan, 4.0)[1] for profile in profiled)
    assert (two.weights_gib - one.weights_gib) * GIB == pytest.approx(SHARED * 2)
    assert (two.peak_gib - one.peak_gib) * GIB == pytest.approx(SHARED * 12)
    mine, both = (by_device(stages_of(profile, plan))[1] for profile in profiled)
    assert both.trained - mine.trained == SHARED


def test_a_copy_on_a_later_stage_of_a_rank_leaves_the_rank_in_its_place() -> None:
    profile, _ = profiles()
    unit = UnitPlan(
        name="all",
        modules=list(profile.modules),
        pp=2,
        chunks=2,
        gpus=2,
        layers_per_stage=[4, 3, 4, 3],
    )
    plan = Layout(global_batch_size=2, microbatch_size=1, microbatches=2, gpus_used=2, units=[unit])
    stages = stages_of(profile, plan)
    apart = [stage.number for stage in stages if stage.twin is not None]
    devices = by_device(stages)
    assert len(apart) == 2 and max(apart) > 1
    assert [device.index for device in devices] == [0, 1]
    assert [device.copied for device in devices] == [SHARED, SHARED]
    for stage in (stages[number] for number in apart):
        alone_s = copies_s(profile, plan, stage, 1)
        assert copies_s(profile, plan, devices[stage.index % 2], 1) == alone_s > 0


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize(("gpus_per_node", "inside"), [(64, True), (2, False)])
def test_two_copies_are_one_message_more_and_one_updates_less(
    zero_stage: int, gpus_per_node: int, inside: bool
) -> None:
    tied, apart = profiles()
    plan = layout([2, 2, 2], zero_stage)
    message_s = all_reduce_s(tied.links.of(inside), SHARED * 4 / (DP if zero_stage else 1), 2)
    more = [0, message_s, 0, message_s, 0]
    ours, theirs = (
        np.array([reduce_s(profile, plan, one, gpus_per_node) for one in stages_of(profile, plan)])
        for profile in (tied, apart)
    )
    assert ours - theirs == pytest.approx(more) and message_s > 0
    (ours_behind, _), (theirs_behind, _) = (
        hidden(profile, plan, stages_of(profile, plan), gpus_per_node) for profile in (tied, apart)
    )
    nothing = np.zeros((5, 1))
    assert (ours_behind.left_s(nothing) - theirs_behind.left_s(nothing))[:, 0] == pytest.approx(
        more
    )
    whole = layout([6], zero_stage)
    mine, both = (stages_of(profile, whole)[1] for profile in (tied, apart))
    assert both.trained - mine.trained == SHARED
    assert reduce_s(tied, whole, mine, 64) < reduce_s(apart, whole, both, 64)
    assert optimizer_s(tied, whole, mine, 64) <= optimizer_s(apart, whole, both, 64)


def test_a_frozen_llm_sends_nothing_more() -> None:
    tied, apart = profiles()
    plan = layout([3, 3], 0).model_copy(update={"trained": ["image_encoder", "projectors"]})
    assert [reduce_s(tied, plan, one, 8) for one in stages_of(tied, plan)] == [
        reduce_s(apart, plan, one, 8) for one in stages_of(apart, plan)
    ]


def test_the_simulated_step_ends_later_by_the_message() -> None:
    tied, apart = profiles()
    plan = layout([3, 3], 0)
    loads = {name: np.ones((8, plan.unit_of(name).dp, 3)) * 100.0 for name in tied.modules}
    ours, theirs = (
        pipeline_of(profile, plan, stages_of(profile, plan), loads, 64).exposed_s[:, 0]
        for profile in (tied, apart)
    )
    message_s = all_reduce_s(tied.links, SHARED * 4.0, 2)
    assert ours - theirs == pytest.approx([0, message_s, message_s, 0])


def test_the_search_asks_for_memory_of_one_copy_on_one_stage() -> None:
    tied, apart = profiles()
    totals = []
    for profile in (tied, apart):
        cluster = Cluster(gpus=8, gpus_per_node=8, memory_gib=4.0, zero_stage=0, batch=32)
        rows = list_rows(Unit("llm", ("llm",), profile, cluster), 4, 8, 8, 1)
        totals.append(rows.state_gib)
    assert (totals[1] - totals[0]) * GIB == pytest.approx(16 * SHARED)
