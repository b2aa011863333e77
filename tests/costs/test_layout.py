"""Stages whose backwards have two parts cost what whole ones cost."""

import numpy as np
import pytest

from disttrain_cli.costs.layout import after_s, amount, partial_bytes, stages_of
from disttrain_cli.costs.links import all_reduce_s
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.spec.plan import Layout
from tests.costs.test_memory import layout, replicated
from tests.planning import synthetic

PROFILE = synthetic.tiny(synthetic.run_file())


def split(given: Layout, delays: dict[str, list[int | None]], **changes: object) -> Layout:
    """The layout with weights' gradients of some units computed later."""
    units = [
        unit.model_copy(update={"weight_delay": delays.get(unit.name)}) for unit in given.units
    ]
    return given.model_copy(update={"units": units, **changes})


def test_the_busiest_rank_of_a_module_that_is_dealt_out_counts() -> None:
    """Times of whole layers and one exchange at each rank's own work; FLOPs of all work, once; the
    gradients of all layers summed over the TP group."""
    profile = synthetic.tiny(synthetic.run_file(), tps=(1, 2))
    given, alone = replicated(), replicated(tp=1, module_tp={})
    loads = synthetic.loads_of(profile, given, synthetic.paper_policy(profile, given), 0)
    of_replicas = synthetic.loads_of(profile, alone, synthetic.paper_policy(profile, alone), 0)
    assert loads["image_encoder"].shape == (4, 4, 3) and loads["llm"].shape == (4, 2, 3)
    by_replica = loads["image_encoder"].reshape(4, 2, 2, 3)
    np.testing.assert_allclose(by_replica.sum(axis=2), of_replicas["image_encoder"])
    (eye, llm), (whole, _) = (stages_of(profile, one)[0].costs for one in (given, alone))
    latency, per_patch = (eye.forward_ms - whole.forward_ms)[[0, 2]]
    links, row_bytes = profile.links, 30_000 / 120
    assert latency == pytest.approx(links.all_gather_us / 1e3)
    assert per_patch == pytest.approx(row_bytes / 2 / (links.all_gather_gbps * 1.25e8) * 1e3)
    np.testing.assert_allclose(
        eye.backward_ms - whole.backward_ms, eye.forward_ms - whole.forward_ms
    )
    np.testing.assert_allclose(eye.flops, whole.flops)
    step = pipeline_of(profile, given, stages_of(profile, given), loads, 8)
    busiest = amount(eye.forward_ms, loads["image_encoder"]).reshape(4, 2, 2).max(axis=2)
    of_llm = amount(llm.forward_ms, loads["llm"])
    np.testing.assert_allclose(step.forward_s[:, 0, :2], (busiest + of_llm) / 1e3)
    partial = (10_000 + 2 * 50_000 + 20_000) * 4 / 2  # the share of one of two replicas
    assert partial_bytes(given, stages_of(profile, given)[0]) == partial
    sums = after_s(profile, given, stages_of(profile, given)[0], 8)
    assert sums == pytest.approx(all_reduce_s(links, partial, 2))


def test_the_two_parts_add_up() -> None:
    whole = stages_of(PROFILE, layout(4))
    parts = stages_of(PROFILE, split(layout(4), {"e": [1], "l": [0, 2]}))
    for before, after in zip(whole, parts, strict=True):
        for one, two in zip(before.costs, after.costs, strict=True):
            np.testing.assert_allclose(one.backward_ms, two.backward_ms + two.weight_ms)
            np.testing.assert_allclose(sum(one.parts_ms), sum(two.parts_ms))
            np.testing.assert_allclose(sum(one.parts_flops), sum(two.parts_flops))
            np.testing.assert_array_equal(one.forward_ms, two.forward_ms)
            assert not one.weight_ms.any() and two.weight_ms.any() == (before.unit.name != "g")
            np.testing.assert_allclose(two.weight_ms, two.weight_ms.any() * 0.8 * two.forward_ms)


def test_a_stage_without_a_delay_is_whole() -> None:
    whole = stages_of(PROFILE, layout(4))
    parts = stages_of(PROFILE, split(layout(4), {"l": [None, 2]}))
    assert [any(c.weight_ms.any() for c in s.costs) for s in parts] == [False, False, True, False]
    for before, after in zip(whole[1].costs, parts[1].costs, strict=True):
        np.testing.assert_array_equal(before.backward_ms, after.backward_ms)
    peaks = [
        [stage.peak_gib for stage in layout_memory(PROFILE, one, 4.0)]
        for one in (layout(4), split(layout(4), {"l": [None, 2]}), split(layout(4), {"l": [2, 2]}))
    ]
    assert peaks[0][1] == peaks[1][1] < peaks[2][1] and peaks[0][2] < peaks[1][2] == peaks[2][2]


def test_frozen_layers_have_no_weights_part() -> None:
    given = split(layout(4), {"e": [1], "l": [0, 2]}, trained=["image_encoder"])
    assert {
        cost.module: bool(cost.weight_ms.any())
        for stage in stages_of(PROFILE, given)
        for cost in stage.costs
    } == {"image_encoder": True, "llm": False, "image_generator": False}


def test_a_simulated_step_has_delays_by_stage() -> None:
    given = split(layout(4), {"e": [1], "l": [0, 2]})
    loads = synthetic.loads_of(PROFILE, given, synthetic.paper_policy(PROFILE, given), 0)
    whole = pipeline_of(PROFILE, layout(4), stages_of(PROFILE, layout(4)), loads, 8)
    parts = pipeline_of(PROFILE, given, stages_of(PROFILE, given), loads, 8)
    assert whole.weight_s is None and parts.weight_s is not None and parts.weight_delay is not None
    assert parts.weight_delay.tolist() == [1, 0, 2, 0]
    np.testing.assert_allclose(parts.backward_s + parts.weight_s, whole.backward_s)
    assert not parts.weight_s[:, 3].any() and parts.weight_s[:, :3].any(axis=(0, 2)).all()
