"""Plans are written whole, and a hand-edited one is not lost when planning again."""

from __future__ import annotations

from pathlib import Path

from disttrain_cli.spec.plan import in_line, neighbours, read_plan, stage_cuts, to_end, write_plan
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


def test_encoders_and_generators_stand_side_by_side() -> None:
    assert neighbours(5, 2) == [(0, 2), (1, 2), (2, 3), (2, 4)]
    assert stage_cuts([1, 2, 2, 1, 2], 2) == [(0, 3), (1, 2), (2, 3), (3, 4), (4, 5), (4, 6), (6, 7)]
    assert stage_cuts([3], 0) == [(0, 1), (1, 2)] and stage_cuts([1], 0) == []


def test_amounts_to_the_end() -> None:
    """Generators count as much as the largest of them, from the LLM as from each other; in a line they add up."""
    assert to_end([1, 2, 4, 8, 16], 2) == [21, 22, 20, 16, 16]
    assert in_line([1, 2, 4, 8, 16], 2) == [29, 30, 28, 24, 16]
    for amounts, llm in (([1, 2, 4], 2), ([1, 2, 4], 1), ([5], 0), ([1, 2, 4, 8], 2)):
        assert to_end(amounts, llm) == in_line(amounts, llm)
