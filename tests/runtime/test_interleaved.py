"""Interleaved 1F1B: ranks with several stages train the same model as a single process (fp32,
1e-5), and no message of theirs waits forever."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from pydantic import ValidationError

from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import describe
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime.equivalence_worker import recorded, reference
from tests.runtime.factory import plan_of, unit, write_run
from tests.runtime.layouts import train
from tests.runtime.messages.drawing import step_of, write_model

STEPS, BATCH = 2, 8
MODULES = ("image_encoder", "llm", "image_generator")  # of 4, 5 and 8 layers
ONE_RANK = [4, 1, 3, 1, 4, 4]  # stages of the LLM's embedding and tied head are both on rank 1


def interleaved(layers: list[int], chunks: int, **degrees: Any) -> UnitPlan:
    """All modules on ranks with so many stages each."""
    known = {"pp": len(layers) // chunks, "tp": 1, "dp": 1} | degrees
    return UnitPlan(
        name="all",
        modules=list(MODULES),
        chunks=chunks,
        gpus=known["pp"] * known["tp"] * known["dp"],
        layers_per_stage=layers,
        **known,
    )


#: On four ranks each: unit, microbatch size, True if reductions overlap with the last pass.
CASES = {
    "pp2 dp2, 2 chunks": (interleaved([4, 4, 4, 5], 2, dp=2), 1, False),
    "overlapped pp2 dp2, 2 chunks": (interleaved([4, 4, 4, 5], 2, dp=2), 1, True),
    "pp2 tp2, 3 chunks, recomputed": (interleaved(ONE_RANK, 3, tp=2, checkpointing=True), 2, False),
    "pp4, 4 chunks": (interleaved([1] * 15 + [2], 4), 1, False),
    "resumed": (unit("all", list(MODULES), [4, 4, 4, 5]), 2, False),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("interleaved")
    write_sample_data(folder / "data")
    run = _run(folder / "run", folder / "data", zero_stage=1)
    cases = [
        (name, run, plan_of(run, [one], size, over)) for name, (one, size, over) in CASES.items()
    ]
    first, *_ = CASES
    out = train(cases, STEPS, folder, in_order={first, "pp4, 4 chunks"}, after={"resumed": first})
    alone = _run(folder / "alone", folder / "data", zero_stage=0)
    history, _, _ = reference(alone, 2 * STEPS)
    _, weights, _ = reference(alone, STEPS)
    return {"out": out, "history": history, "weights": weights}


def _run(folder: Path, data: Path, zero_stage: int) -> Run:
    run = write_run(
        folder, data, name="test", tied=True, global_batch_size=BATCH, zero_stage=zero_stage,
        steps=2 * STEPS,
    )  # fmt: skip
    content = yaml.safe_load(run.path.read_text())
    content["cluster"]["gpus_per_node"] = 4
    run.path.write_text(yaml.safe_dump(content, sort_keys=False))
    run = read_run(run.path)
    build_index(run, describe(run))
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_several_stages_on_a_rank_equal_a_single_process(runs: dict[str, Any], name: str) -> None:
    first = STEPS if name == "resumed" else 0
    history = json.loads((runs["out"] / name / "history.json").read_text())
    expected = torch.tensor(runs["history"][first : first + STEPS])
    assert torch.allclose(torch.tensor(history), expected, rtol=1e-5, atol=1e-5)
    if not first:
        folder = checkpoint.latest(runs["out"] / name / "checkpoints")
        assert folder is not None
        weights = checkpoint.read_tensors(folder)
        for key, value in runs["weights"].items():
            assert torch.allclose(weights[f"weight/{key}"], value, rtol=1e-5, atol=1e-5), key


@pytest.mark.slow
def test_reductions_beside_the_last_pass_change_no_bit(runs: dict[str, Any]) -> None:
    plain, beside = (
        json.loads((runs["out"] / name / "history.json").read_text()) for name in list(CASES)[:2]
    )
    assert plain == beside


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pp2 dp2, 2 chunks", "pp4, 4 chunks"])
def test_recorded_messages_pair_in_nccls_order(runs: dict[str, Any], name: str) -> None:
    assert faults(recorded(runs["out"] / name)) == []


@pytest.mark.slow
def test_rows_of_traces_name_their_stage(runs: dict[str, Any]) -> None:
    name = "pp2 tp2, 3 chunks, recomputed"
    for rank, folder in enumerate(sorted((runs["out"] / name / "traces").glob("rank*"))):
        rows = pq.read_table(folder).to_pylist()
        stages = {row["stage"] for row in rows if row["operation"] in ("forward", "backward")}
        assert stages == set(range(rank // 2, 6, 2))


@pytest.mark.slow
def test_messages_of_dry_ranks_pair_in_nccls_order(tmp_path: Path) -> None:
    run = write_model(tmp_path / "model", MODULES, layers={"llm": 10}, tied=True)
    units = {
        "tied embedding on one rank": (interleaved([4, 1, 8, 1, 4, 4], 3), 1),
        "tp2 dp2": (interleaved([6, 6, 6, 4], 2, tp=2, dp=2), 1),
    }
    for name, (one, size) in units.items():
        for overlap in (False, True):
            layout = Layout(
                global_batch_size=8 * one.dp,
                microbatch_size=size,
                microbatches=8,
                gpus_used=one.gpus,
                overlap=overlap,
                units=[one],
            )
            step = step_of(name, run, layout, random.Random(0))
            records = step.records()
            assert faults(records) == []
            assert any(one.is_message for record in records for one in record.operations)


def test_the_graph_has_several_stages_on_a_rank() -> None:
    one = interleaved(ONE_RANK, 3, dp=2)
    layout = Layout(
        global_batch_size=8, microbatch_size=1, microbatches=4, gpus_used=4, units=[one]
    )
    apart, together = (stage_graph(layout, "llm", tied) for tied in ((4, 9), (4, 8)))
    assert apart.world_size == 4 and [*apart.coords(3).layers] == [4, 8, *range(13, 17)]
    assert [stage.twin for stage in apart.stages] == [None, 4, None, None, 1, None]
    assert {stage.twin for stage in together.stages} == {None}


@pytest.mark.parametrize(
    ("changes", "microbatches", "told"),
    [
        ({"pp": 1, "gpus": 1, "chunks": 2, "layers_per_stage": [8, 9]}, 4, "pp is 1"),
        ({"weight_delay": [0] * 2}, 4, "exclude each other"),
        ({"layers_per_stage": [8, 9]}, 4, r"4 stage\(s\) \(pp × chunks\)"),
        ({}, 3, "multiple of pp"),
    ],
)
def test_what_interleaving_cannot_do_is_refused(
    changes: dict[str, Any], microbatches: int, told: str
) -> None:
    known = interleaved([4, 4, 4, 5], 2).model_dump(mode="json") | changes
    with pytest.raises(ValidationError, match=told):
        Layout.model_validate(
            {
                "global_batch_size": microbatches,
                "microbatch_size": 1,
                "microbatches": microbatches,
                "gpus_used": known["gpus"],
                "units": [known],
            }
        )
