"""Virtual stages of layouts: cutting, pricing, memory."""

import math
from dataclasses import replace

import pytest

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.costs.replicated import undealt
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.interleaved import cut_into, interleaved_s
from disttrain_cli.planning.predict import predict, simulated_s
from disttrain_cli.planning.split_backward import timed
from disttrain_cli.planning.units import Cluster, units_of
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from tests.planning import synthetic


def made(overlap: bool = False, slots: int = 4) -> tuple[Profile, Cluster, Layout]:
    """Four stages of all modules of the tiny model, two replicas on nodes of four devices."""
    run = synthetic.run_file(batch=2 * slots, gpus=8, nodes=2)
    profile = synthetic.on_nodes(synthetic.tiny(run, kind="cuda"), 4)
    unit = UnitPlan(
        name="model",
        modules=list(profile.modules),
        dp=2,
        pp=4,
        gpus=8,
        layers_per_stage=[4, 3, 3, 4],
    )
    layout = Layout(
        strategy="megatron",
        global_batch_size=2 * slots,
        microbatch_size=1,
        microbatches=slots,
        gpus_used=8,
        overlap=overlap,
        units=[unit],
    )
    return profile, Cluster(8, 4, 4.0, 1, 2 * slots), layout


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slots", [3, 8])
def test_one_chunk_is_the_simulators_step(overlap: bool, slots: int) -> None:
    profile, cluster, layout = made(overlap, slots)
    draws = Draws(profile, cluster)
    expected = simulated_s(profile, layout, cluster, draws=draws)
    assert interleaved_s(profile, layout, cluster, draws, 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_of_a_layout(overlap: bool) -> None:
    profile, cluster, layout = made(overlap)
    draws = Draws(profile, cluster)
    balanced = cut_into(profile, layout, 1)
    cut = cut_into(profile, layout, 2)
    assert balanced is not None and cut is not None
    assert sum(cut.units[0].layers_per_stage) == 14 and len(cut.units[0].layers_per_stage) == 8
    free = {
        name: 1e9 if name.endswith("gbps") else 0.0
        for name in type(profile.links).model_fields
        if name.endswith(("gbps", "us"))
    }
    between = profile.links.inter_node.model_copy(update=free)
    links = profile.links.model_copy(update={**free, "inter_node": between})
    fast = profile.model_copy(update={"links": links})
    whole = interleaved_s(fast, balanced, cluster, draws, 1)
    assert interleaved_s(fast, balanced, cluster, draws, 2) < whole
    # messages: twice as many cuts
    assert interleaved_s(profile, layout, cluster, draws, 2) > interleaved_s(
        fast, layout, cluster, draws, 2
    )
    assert interleaved_s(profile, layout, cluster, draws, 4) == math.inf  # 16 chunks of 14 layers
    odd = made(slots=6)
    assert interleaved_s(*odd[:1], odd[2], odd[1], Draws(odd[0], odd[1]), 2) == math.inf


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_with_chunks_is_predicted(overlap: bool) -> None:
    profile, cluster, layout = made(overlap)
    draws = Draws(profile, cluster)
    cut = cut_into(profile, layout, 2)
    assert cut is not None and cut.units[0].gpus == layout.gpus_used
    predicted = predict(units_of(profile, cluster, cut), cut, cluster, draws)
    expected = interleaved_s(profile, layout, cluster, draws, 2)
    assert predicted.iteration_s == pytest.approx(expected, rel=1e-12)
    plain = predict(units_of(profile, cluster, layout), layout, cluster, draws)
    assert predicted.bubble_fraction < plain.bubble_fraction
    assert predicted.kernel_mfu == pytest.approx(plain.kernel_mfu)
    assert [stage.stage for stage in predicted.memory] == list(range(4))
    assert [stage.stage for stage in predicted.stages] == list(range(8))
    states = ("weights_gib", "gradients_gib", "optimizer_gib")
    for part in states:
        held = [
            sum(getattr(one, part) for one in each) for each in (predicted.memory, plain.memory)
        ]
        assert held[0] == pytest.approx(held[1])
    assert timed(profile, replace(cluster, splits=True), cut, draws=draws)[0] == cut


def test_the_best_ordering_is_sought_with_chunks_on_their_ranks() -> None:
    profile, cluster, layout = made(slots=8)
    cut = cut_into(profile, layout, 2)
    assert cut is not None
    loads = Draws(profile, cluster).loads(cut, 0, "best")
    assert {load.shape[:2] for load in loads.values()} == {(8, 2)}


def test_chunks_keep_more_slots_in_flight() -> None:
    profile, cluster, layout = made(slots=8)
    draws = Draws(profile, cluster)
    peak = max(stage.peak_gib for stage in layout_memory(profile, layout, 4.0))
    tight = replace(cluster, memory_gib=1.02 * peak)
    assert interleaved_s(profile, layout, tight, draws, 1) < math.inf
    assert interleaved_s(profile, layout, tight, draws, 2) == math.inf
    assert interleaved_s(profile, layout, cluster, draws, 2) < math.inf


def test_a_replicated_module_stays_on_one_stage() -> None:
    run = synthetic.run_file(batch=8, gpus=8, nodes=2)
    profile = synthetic.on_nodes(synthetic.tiny(run, kind="cuda", tps=(1, 2)), 4)
    names = {"image_generator": 1}
    unit = UnitPlan(
        name="model",
        modules=list(profile.modules),
        tp=2,
        pp=2,
        gpus=4,
        layers_per_stage=[7, 7],
    )
    layout = made()[2].model_copy(update={"global_batch_size": 4, "gpus_used": 4, "units": [unit]})
    sharded, whole = (
        cut_into(
            profile,
            layout.model_copy(update={"units": [unit.model_copy(update={"module_tp": module_tp})]}),
            4,
        )
        for module_tp in ({}, names)
    )
    assert sharded is not None and whole is not None
    assert undealt(profile, whole.units[0]) is None
    assert undealt(
        profile, sharded.units[0].model_copy(update={"module_tp": {"image_generator": 1}})
    )
    assert sum(whole.units[0].layers_per_stage) == 14 and whole.units[0].stages == 8
