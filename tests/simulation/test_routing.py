"""Drawn routing of a step: the same for a part of the EP groups as for all, and only in passes."""

import numpy as np
import pytest

from disttrain_cli.api.presets import preset_text
from disttrain_cli.costs.layout import CostedStage, stages_of
from disttrain_cli.simulation.routing import added_s, dispatched_rows, routed_rows, with_routing
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.spec.layer_costs import Experts
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import read_run
from tests.commands.conftest import make_profile

DP, EP, SLOTS = 4, 2, 6
Made = tuple[Profile, Layout, list[CostedStage]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The tiny preset with experts in the LLM's layers, four replicas in two EP groups."""
    path = tmp_path_factory.mktemp("run") / "disttrain.yaml"
    path.write_text(preset_text("tiny"))
    profile = make_profile(read_run(path).file)
    llm = profile.modules["llm"]
    experts = Experts(8, 2, 16, 30_000, 30_000)
    costs = {kind: cost.model_copy(update={"experts": experts}) for kind, cost in llm.costs.items()}
    modules = profile.modules | {"llm": llm.model_copy(update={"costs": costs})}
    profile = profile.model_copy(update={"modules": modules})
    units = [
        UnitPlan(
            name=name,
            modules=[name],
            dp=DP if name == "llm" else 1,
            ep=EP if name == "llm" else 1,
            gpus=DP if name == "llm" else 1,
            layers_per_stage=[len(module.layers)],
        )
        for name, module in modules.items()
    ]
    layout = Layout(
        global_batch_size=DP * SLOTS,
        microbatch_size=1,
        microbatches=SLOTS,
        gpus_used=sum(unit.gpus for unit in units),
        units=units,
    )
    return profile, layout, stages_of(profile, layout)


def _loads(layout: Layout) -> dict[str, np.ndarray]:
    work = np.array([2.0, 200.0, 20_000.0])
    return {unit.name: np.tile(work, (SLOTS, unit.dp, 1)) for unit in layout.units}


def test_groups_wait_for_their_fullest_rank_whoever_computes_it(made: Made) -> None:
    profile, layout, stages = made
    stage = next(one for one in stages if one.unit.name == "llm")
    loads = _loads(layout)
    whole = added_s(profile, stage, loads, 7, 3, range(DP // EP))["llm"]
    for both, second in zip(
        whole,
        added_s(profile, stage, {"llm": loads["llm"][:, EP:]}, 7, 3, range(1, 2))["llm"],
        strict=True,
    ):
        assert both.shape == (SLOTS, DP) and (both[:, 0] == both[:, 1]).all()
        assert (both[:, EP:] == second).all()  # of the process with the second group
        assert len(np.unique(both)) > SLOTS  # drawn for every slot and group
    again = added_s(profile, stage, loads, 7, 4, range(DP // EP))["llm"]
    assert (again[0] != whole[0]).any()


def test_rows_of_a_group_are_all_that_its_ranks_send(made: Made) -> None:
    profile, _, stages = made
    stage = next(one for one in stages if one.unit.name == "llm")
    rows = routed_rows(profile, stage, "llm", (7, 3, 0), 0)
    assert rows is not None and rows.shape == (len(stage.layers), EP, EP)
    assert len(np.unique(rows.sum(axis=2))) == 1 and len(np.unique(rows.sum(axis=1))) > 1
    assert routed_rows(profile, stages[0], "image_encoder", (7, 3, 0), 0) is None


def test_a_row_goes_once_to_each_rank_and_node_of_its_experts(made: Made) -> None:
    profile, _, stages = made
    stage = next(one for one in stages if one.unit.name == "llm")
    experts = next(
        cost.experts for cost in profile.modules["llm"].costs.values() if cost.experts is not None
    )
    for slot in range(SLOTS):
        at = "llm", (0, 0, slot), 0
        for nodes in (1, EP):
            found = dispatched_rows(profile, stage, *at, nodes)
            assert found is not None
            pairs, by_rank, by_node = found
            assert (pairs == routed_rows(profile, stage, *at)[0]).all()
            rows = pairs.sum() // EP // experts.chosen
            assert (by_rank < pairs).all() and (by_rank < rows).all()
            if nodes == EP:
                assert (by_node == by_rank).all()
            else:
                assert (by_node == rows).all() and (by_rank.sum(axis=1) > rows).all()


def test_only_passes_with_experts_change(made: Made) -> None:
    profile, layout, stages = made
    loads = _loads(layout)
    even = pipeline_of(profile, layout, stages, loads, 8)
    routed = with_routing(even, profile, stages, loads, 7, 3)
    llm = next(one.number for one in stages if one.unit.name == "llm")
    for before, after in (
        (even.forward_s, routed.forward_s),
        (even.backward_s, routed.backward_s),
    ):
        changed = before != after
        assert changed[:, llm].all() and not np.delete(changed, llm, axis=1).any()
        assert (after >= 0).all()
