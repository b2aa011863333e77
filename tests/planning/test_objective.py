"""The formula: what a slot takes on the busiest replica, and the paper's form of it."""

import numpy as np
import pytest

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.costs.replicated import undealt
from disttrain_cli.planning.layouts import layout_with
from disttrain_cli.planning.objective import (
    Time,
    busiest_load,
    combine,
    layout_time,
    planned_stages_ms,
)
from disttrain_cli.planning.options import Columns, layer_gib
from disttrain_cli.planning.units import Cluster, Unit, groupings, replicating, units_of
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.shape import ParallelShape
from tests.planning import synthetic


def test_busiest_replica_has_whole_images() -> None:
    dp = np.array([1.0, 2.0, 3.0, 7.0, 100.0])
    loads = busiest_load(False, 4, 2.5, dp) * 2.5  # ten images
    assert loads[0] == 10.0
    assert loads[1] == pytest.approx(10 / 2 + 1 / 4)
    assert loads[4] == 1.0
    assert (np.diff(loads) <= 0).all()
    # a quarter of an image, on one replica
    assert busiest_load(False, 1, 0.25, dp).tolist() == [1.0] * 5
    assert busiest_load(True, 12, 1.0, np.array([3.0])).tolist() == [4.0]


@pytest.mark.parametrize(("tp", "dp", "pp"), [(2, 2, 1), (4, 1, 1), (2, 1, 2)])
def test_whole_modules_of_a_unit_are_priced_as_its_layout(tp: int, dp: int, pp: int) -> None:
    """By the formula and by memory; no stage ends inside of them."""
    run = synthetic.run_file(batch=24, gpus=8)
    profile = synthetic.tiny(run, tps=(1, 2, 4))
    cluster = Cluster(8, 8, 4.0, 1, 24)
    divided = Unit("all", tuple(profile.modules), profile, cluster)
    unit = replicating(divided)[0]
    assert unit.tps == [2, 4] and unit.widths == [(2, 1), (4, 1)]
    assert replicating(Unit("llm", ("llm",), profile, cluster)) == []
    shape = ParallelShape(tp=tp, dp=dp, pp=pp)
    layout = layout_with([unit], cluster, [shape], dp, "disaggregated")
    assert layout is not None and set(layout.units[0].module_tp) == {*profile.modules} - {"llm"}
    assert undealt(profile, layout.units[0]) is None
    assert unit.allowed is not None and not unit.allowed[0, 2] and unit.allowed[0, 4]
    variant = unit.kinds.variant(shape)
    _, kept, _, _ = layer_gib(Columns(unit, np.array([variant]), np.array([dp]), dp))
    if pp == 1:
        (memory,) = layout_memory(profile, layout, 4.0)
        assert memory.activations_gib == pytest.approx(kept.sum())
    encoder, mean = profile.modules["image_encoder"], 120 / 3
    per_patch = sum(  # forward, and backward that takes twice as long
        3 * encoder.costs[kind].tp["1"].forward_ms.per_token for kind in encoder.layers
    )
    base = sum(3 * encoder.costs[kind].tp["1"].forward_ms.base for kind in encoder.layers)
    row_bytes, rate = 30_000 / 120, profile.links.all_gather_gbps * 1.25e5
    exchanged = 2 * row_bytes * (tp - 1) / tp / rate
    patches = 120 / tp + mean * (tp - 1) / (2 * tp)
    of_encoder = np.array(unit.layer_ms(shape)).sum(axis=0)[:4].sum()
    latency = 2 * profile.links.all_gather_us / 1e3
    expected = base + latency + patches * (per_patch + exchanged)
    assert of_encoder == pytest.approx(expected)
    planned = planned_stages_ms(unit, layout.units[0], dp)
    assert sum(planned) == pytest.approx(np.array(unit.layer_ms(shape)).sum())
    assert planned_stages_ms(units_of(profile, cluster, layout)[0], layout.units[0], dp) == planned


def test_of_encoders_side_by_side_the_slowest_counts() -> None:
    unit_ms, stage_ms = [3.0, 5.0, 7.0, 2.0], [3.0, 2.5, 4.0, 2.0]
    assert combine(unit_ms, stage_ms, 3, 2) == Time(5.0 + 7.0 + 2.0, 2 * 4.0)
    assert combine(unit_ms, stage_ms, 3, 0) == Time(17.0, 8.0)  # all of them in a line


def test_without_bases_the_objective_is_the_papers() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    free = profile.links.model_copy(update={"p2p_us": 0.0, "p2p_gbps": 1e12})
    modules = {}
    for name, module in profile.modules.items():
        costs = {}
        for kind, cost in module.costs.items():
            time = cost.tp["1"].model_copy(
                update={
                    side: Polynomial(per_token=getattr(cost.tp["1"], side).per_token)
                    for side in ("forward_ms", "backward_ms")
                }
            )
            costs[kind] = cost.model_copy(update={"tp": {"1": time}})
        modules[name] = module.model_copy(update={"costs": costs})
    profile = profile.model_copy(update={"links": free, "modules": modules})
    units = groupings(profile, Cluster(6, 6, 4.0, 1, 24), "disaggregated")[0]
    per_sample = [unit.layer_ms(ParallelShape())[1].sum() for unit in units]  # C of one sequence
    plans = [
        UnitPlan(name=u.name, modules=list(u.modules), dp=dp, gpus=dp, layers_per_stage=[u.layers])
        for u, dp in zip(units, (1, 4, 1), strict=True)
    ]
    layout = Layout(
        global_batch_size=24, microbatch_size=2, microbatches=3, gpus_used=6, units=plans
    )
    time = layout_time(units, layout)
    each = [8 / dp * c for dp, c in zip((1, 4, 1), per_sample, strict=True)]
    assert time.warmup_ms == pytest.approx(sum(each), rel=1e-6)
    assert time.steady_ms == pytest.approx(max(each) * 2, rel=1e-6)
