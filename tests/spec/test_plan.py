"""Plans are written whole, and a hand-edited one is not lost when planning again."""

from __future__ import annotations

from pathlib import Path

import pytest

from disttrain_cli.spec.plan import UnitPlan, read_plan, write_plan
from tests.runtime.factory import plan_of, unit, write_run


def test_the_plan_that_is_replaced_is_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path, tmp_path)
    plan = plan_of(run, [unit("all", ["image_encoder", "llm", "image_generator"], [4], 2)], 1)
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    edited = path.read_text().replace("# Made by", "# Edited by me, made by")
    path.write_text(edited)
    write_plan(path, plan)
    assert (tmp_path / "plan.yaml.before").read_text() == edited
    assert read_plan(path) == plan


@pytest.mark.parametrize(
    "delays, refused",
    [([0, None], ""), ([None, -1], "0 or more"), ([1], "2"), ([True, True], "integer")],
)
def test_delays_are_given_for_every_stage(delays: list[int | None], refused: str) -> None:
    known = {"name": "llm", "modules": ["llm"], "pp": 2, "gpus": 2, "layers_per_stage": [3, 3]}
    if not refused:
        assert UnitPlan(**known, weight_delay=delays).weight_delay == delays
    else:
        with pytest.raises(ValueError, match=refused):
            UnitPlan(**known, weight_delay=delays)


def test_messages_of_one_rank_do_not_travel_behind_products() -> None:
    known = {"name": "llm", "modules": ["llm"], "layers_per_stage": [3], "tp_overlap": True}
    assert UnitPlan(**known, tp=2, gpus=2).tp_overlap
    with pytest.raises(ValueError, match="tp_overlap needs a TP group"):
        UnitPlan(**known, tp=1, gpus=1)
