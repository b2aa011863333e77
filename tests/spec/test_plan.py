"""Plans are written whole, and a hand-edited one is not lost when planning again."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.plan import UnitPlan, read_plan, write_plan
from disttrain_cli.spec.settings import with_settings
from tests.runtime.factory import plan_of, unit, write_run


def test_the_plan_that_is_replaced_is_kept(tmp_path: Path) -> None:
    run = write_run(tmp_path, tmp_path)
    plan = plan_of(run, [unit("all", ["image_encoder", "llm", "image_generator"], [4], 2)], 1)
    path = tmp_path / "plan.yaml"
    write_plan(path, plan)
    edited = path.read_text().replace("# Written by", "# Edited by me, written by")
    path.write_text(edited)
    write_plan(path, plan)
    assert (tmp_path / "plan.yaml.before").read_text() == edited
    assert read_plan(path) == plan


@pytest.mark.parametrize("field", ["dp", "layers_per_stage.0"])
def test_a_boolean_is_no_number(tmp_path: Path, field: str) -> None:
    run, path = write_run(tmp_path, tmp_path), tmp_path / "plan.yaml"
    write_plan(path, plan_of(run, [unit("llm", ["llm"], [4], 1)], 1))
    value, _ = with_settings(yaml.safe_load(path.read_text()), [f"plan.units.0.{field}=yes"])
    path.write_text(yaml.safe_dump(value))
    with pytest.raises(SpecError, match=r"1 wrong field") as caught:
        read_plan(path)
    assert f"plan.units.0.{field}: should be a number (given: True)" in (caught.value.why or "")


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


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({}, ""),
        ({"module_tp": {"ear": 1}}, "module_tp names ear, .* modules: eye, llm"),
        ({"module_tp": {"eye": 2}}, "module_tp of eye must be 1.*given: 2"),
        ({"module_tp": {"eye": True}}, "integer"),
        ({"tp": 1, "dp": 2}, "needs a TP group"),
        ({"cp": 2, "gpus": 4}, "module_tp and cp exclude each other"),
    ],
)
def test_a_module_may_be_whole_on_every_rank_of_a_tp_group(
    changes: dict[str, Any], refused: str
) -> None:
    known = {"name": "both", "modules": ["eye", "llm"], "layers_per_stage": [7], "tp": 2, "gpus": 2}
    given = known | {"module_tp": {"eye": 1}} | changes
    if refused:
        with pytest.raises(ValueError, match=refused):
            UnitPlan.model_validate(given)
        return
    unit = UnitPlan.model_validate(given)
    assert unit.degrees == "TP 2 (eye 1) DP 1 PP 1"
    assert [(names, shape.tp) for names, shape in unit.parts] == [(["eye"], 1), (["llm"], 2)]
    assert (unit.dealt_over("eye"), unit.dealt_over("llm")) == (2, 1)


def test_messages_of_one_rank_do_not_travel_behind_products() -> None:
    known = {"name": "llm", "modules": ["llm"], "layers_per_stage": [3], "tp_overlap": True}
    assert UnitPlan(**known, tp=2, gpus=2).tp_overlap
    with pytest.raises(ValueError, match="tp_overlap needs a TP group"):
        UnitPlan(**known, tp=1, gpus=1)
