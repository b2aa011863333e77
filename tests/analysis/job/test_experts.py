"""Load of experts: rows by layer, collapsed routers, and slow ranks whose experts are full."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.causes import Finding
from disttrain_cli.analysis.job.experts import expert_rows, named, rank_loads
from disttrain_cli.analysis.result.rows import ExpertRow
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.analysis.watching.looking import look_once
from disttrain_cli.spec.layer_costs import Experts
from disttrain_cli.spec.stage_graph import stage_graph
from disttrain_cli.spec.trace import EXPERT_COLUMNS
from tests.analysis.synthetic import Synthetic, table, write
from tests.runtime.rehearsal.test_joining import layout

EXPERTS, CHOSEN = 16, 2


def _database(rows: dict[int, list[float]]) -> Any:
    cost = SimpleNamespace(experts=Experts(EXPERTS, CHOSEN, 8, 100, 100))
    module = SimpleNamespace(costs={"block": cost})
    answer = [
        {"module": "llm", "layer": layer, "expert": number, "rows": value}
        for layer, values in rows.items()
        for number, value in enumerate(values)
    ]
    job = SimpleNamespace(profile=SimpleNamespace(modules={"llm": module}))
    return SimpleNamespace(query=lambda name: answer, warnings=[], job=job, stages=[])


def test_a_router_that_uses_few_experts_has_collapsed() -> None:
    random = np.random.default_rng(0)
    usual = 100 * np.exp(1.2 * random.standard_normal(EXPERTS))
    two = [500.0, 450.0, *[3.0] * (EXPERTS - 2)]
    database = _database({1: [10.0] * EXPERTS, 2: usual.tolist(), 4: two})
    even, wide, collapsed = expert_rows(database)
    assert (even.load, even.collapsed) == (1.0, False)
    assert even.in_use == pytest.approx(EXPERTS)
    assert not wide.collapsed and wide.load == pytest.approx(usual.max() / usual.mean())
    assert collapsed.collapsed and (collapsed.layer, collapsed.fullest) == (4, 0)
    (warning,) = database.warnings
    assert warning.startswith("1 router collapsed: the rows of layer 4 (llm) go to 2.")


def test_layers_without_rows_are_left_out() -> None:
    assert expert_rows(_database({3: [0.0] * EXPERTS})) == []


def test_loads_of_ranks_are_those_of_their_experts() -> None:
    plan = layout(2, 4)
    units = [plan.units[0], plan.units[1].model_copy(update={"ep": 2})]
    stages = stage_graph(plan.model_copy(update={"units": units}), "llm").stages
    row: dict[str, Any] = {"module": "llm", "load": 1.0, "fullest": 0, "in_use": 1.0}
    first = stages[1].layers.start
    rows = [ExpertRow(layer=first, rows=[3.0, 3.0, 1.0, 1.0], collapsed=False, **row)]
    loads = rank_loads(SimpleNamespace(stages=stages), rows)  # type: ignore[arg-type]
    assert loads == dict(zip(stages[1].ranks, [1.5, 0.5] * 2, strict=True))


@pytest.mark.parametrize(("waited", "cause"), [(0.3, "experts"), (0.4, "worker"), (0.0, "worker")])
def test_full_experts_explain_a_slow_rank_up_to_their_load(waited: float, cause: str) -> None:
    """A rank with 1.5 times the rows can have its group wait for a third of a pass at most."""
    gain = np.array([0.1, 0.1])
    finding = Finding("worker", [Place(unit="llm", stage=0, rank=3)], gain, gain)
    data = Finding("data", [Place(unit="llm")], gain, gain)
    found = named([finding, data], {2: 0.5, 3: 1.5}, {3: waited})
    assert [one.cause for one in found] == [cause, "data"]


@pytest.mark.slow
def test_recorded_rows_are_found_by_analyze_watch_and_sql(tmp_path: Path) -> None:
    """Of the measured steps; a router that collapses is a finding of `watch`."""
    spec = Synthetic(steps=10, dp=1, pp=1, slots=2)
    write(tmp_path / "traces", spec)
    rows = [
        {"run": spec.run, "step": step, "module": "llm", "layer": layer, "rows": counts}
        for step in range(spec.steps)
        for layer, counts in ((1, [8, 8, 8, 8]), (2, [step, 60, 0, 0]))
    ]
    table(tmp_path / "traces" / "experts" / "segment-0.parquet", rows, EXPERT_COLUMNS)
    even, collapsed = analyze([tmp_path]).experts
    measured = range(2, spec.steps)  # without warm-up
    assert even.rows == [8, 8, 8, 8] and not even.collapsed
    assert collapsed.rows == [np.mean(measured), 60, 0, 0] and collapsed.collapsed
    answer = ask([tmp_path], "SELECT step, rows[2] FROM experts WHERE layer = 2 AND step = 3")
    assert answer.rows == [(3, 60)]
    source = next((tmp_path / "traces" / "experts").glob("*"))  # `watch` reads those of one start
    source.rename(source.with_name(f"segment-{spec.run}-00000.parquet"))
    for file in tmp_path.glob("traces/[!e]*/segment-*"):
        number = file.stem.removeprefix("segment-")
        file.rename(file.with_name(f"segment-{spec.run}-{number}.parquet"))
    assert look_once(tmp_path).row()["collapsed_routers"] == [2]
