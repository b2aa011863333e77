"""Virtual stages of layouts: cutting, pricing, memory."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from disttrain_cli.costs.memory import fits, layout_memory
from disttrain_cli.costs.replicated import undealt
from disttrain_cli.planning import interleaved
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.finalists import Ranked
from disttrain_cli.planning.interleaved import cut_into, with_chunks
from disttrain_cli.planning.predict import batches, predict, simulated_s
from disttrain_cli.planning.solve import solve
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


def seconds(profile: Profile, layout: Layout, cluster: Cluster, draws: Draws, chunks: int) -> float:
    """Mean step time with so many stages on a rank; inf if there is no such layout, or no room."""
    cut = layout if chunks == 1 else cut_into(profile, layout, chunks)
    if cut is None or not fits(profile, cut, cluster.memory_gib):
        return math.inf
    return simulated_s(profile, cut, cluster, draws=draws)


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
    whole = seconds(fast, balanced, cluster, draws, 1)
    assert seconds(fast, balanced, cluster, draws, 2) < whole
    # messages: twice as many cuts
    assert seconds(profile, layout, cluster, draws, 2) > seconds(fast, layout, cluster, draws, 2)
    assert seconds(profile, layout, cluster, draws, 4) == math.inf  # 16 chunks of 14 layers
    odd = made(slots=6)
    assert seconds(*odd[:1], odd[2], odd[1], Draws(odd[0], odd[1]), 2) == math.inf


def test_the_chosen_layout_is_the_fastest_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against every partition of the layers over two ranks, of one stage or two each."""
    monkeypatch.setattr(interleaved, "CHUNKS", (2,))
    profile, cluster, layout = made()
    unit = layout.units[0].model_copy(update={"pp": 2, "gpus": 4, "layers_per_stage": [7, 7]})
    layout = layout.model_copy(update={"units": [unit], "gpus_used": 4})
    draws, numbers = Draws(profile, cluster), range(1)
    plain = cut_into(profile, layout, 1)
    assert plain is not None
    plain_s = simulated_s(profile, plain, cluster, batches(cluster), draws=draws)
    best, *others = with_chunks(profile, cluster, draws, [Ranked(plain, plain_s)])
    assert [one.layout for one in others] == [plain] and best.layout.units[0].chunks > 1
    found_s = simulated_s(profile, best.layout, cluster, numbers, draws=draws)
    for chunks in (1, 2):
        for cuts in itertools.combinations(range(1, 14), 2 * chunks - 1):
            layers = np.diff([0, *cuts, 14]).tolist()
            one = unit.model_copy(update={"chunks": chunks, "layers_per_stage": layers})
            other = layout.model_copy(update={"units": [one]})
            assert found_s <= simulated_s(profile, other, cluster, numbers, draws=draws)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_with_chunks_is_predicted(overlap: bool) -> None:
    profile, cluster, layout = made(overlap)
    draws = Draws(profile, cluster)
    cut = cut_into(profile, layout, 2)
    assert cut is not None and cut.units[0].gpus == layout.gpus_used
    predicted = predict(units_of(profile, cluster, cut), cut, cluster, draws)
    expected = seconds(profile, layout, cluster, draws, 2)
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


@pytest.mark.slow
def test_a_plan_has_chunks_where_memory_asks_for_stages() -> None:
    """The baseline is the same layout, and not faster."""
    run = synthetic.run_file(batch=8, gpus=4, nodes=1)
    profile = synthetic.tiny(run, kind="cuda", memory_gib=0.013)
    plan = solve(run, profile, top=2)
    (unit,) = plan.plan.units
    assert unit.chunks > 1 and f"{unit.pp} × {unit.chunks} chunks" in plan.plan.describe()
    baseline = plan.baselines["megatron"]
    assert baseline is not None and baseline.plan is not None
    assert baseline.plan.units[0].chunks > 1
    assert plan.predicted.iteration_s <= baseline.iteration_s * (1 + 1e-9)
    assert all(stage.peak_gib <= stage.limit_gib for stage in plan.predicted.memory)


def test_chunks_keep_more_slots_in_flight() -> None:
    profile, cluster, layout = made(slots=8)
    draws = Draws(profile, cluster)
    peak = max(stage.peak_gib for stage in layout_memory(profile, layout, 4.0))
    tight = replace(cluster, memory_gib=1.02 * peak)
    assert seconds(profile, layout, tight, draws, 1) < math.inf
    assert seconds(profile, layout, tight, draws, 2) == math.inf
    assert seconds(profile, layout, cluster, draws, 2) < math.inf


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
