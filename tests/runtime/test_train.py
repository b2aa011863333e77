"""Training as the command runs it: traces, checkpoints, resuming, and what happens when something
breaks."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.inside import inside
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.errors import MismatchError, RankFailedError, SpecError
from disttrain_cli.runtime.checkpoints.checkpoint import read_tensors
from disttrain_cli.runtime.checkpoints.folder import all_of
from disttrain_cli.runtime.train import train
from disttrain_cli.spec.trace import COMPUTE, OPERATIONS, STEP_COLUMNS, TRACE_COLUMNS, read_job
from tests.runtime.factory import make_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_sample_data(folder)
    return folder


def _losses(steps: list[dict[str, Any]]) -> list[tuple[float, float, float]]:
    return [(step["losses"]["text"], step["losses"]["image"], step["grad_norm"]) for step in steps]


def test_resuming_is_bit_identical_and_leaves_whole_traces(tmp_path: Path, data: Path) -> None:
    import pyarrow.parquet as pq

    changes = {
        "zero_stage": 1,
        "ordering": "paper",
        "held_out": 0.3,
        "evaluation": {"every_steps": 2, "sequences": 6},
        "ema": {"decay": 0.5, "modules": ["image_generator"]},
        "checkpoint": {"every_steps": 1, "keep": 2},
    }
    whole = train(*make_job(tmp_path / "whole", data, **changes), steps=4)
    assert [step["step"] for step in whole.steps] == [0, 1, 2, 3]
    assert len(whole.images) == 8 and all(Path(path).stat().st_size > 100 for path in whole.images)

    job = make_job(tmp_path / "parts", data, **changes)
    first = train(*job, steps=2)
    second = train(*job, steps=4, resume=True)
    assert (first.resumed_from_step, second.resumed_from_step) == (None, 2)
    assert _losses(first.steps) + _losses(second.steps) == _losses(whole.steps)
    evaluated = [step.get("evaluation") for step in whole.steps]
    assert [step.get("evaluation") for step in (*first.steps, *second.steps)] == evaluated
    assert [sorted(own) if own else None for own in evaluated] == [None, ["image", "text"]] * 2
    groups = ("weight", "exp_avg", "exp_avg_sq", "ema")
    ends = [read_tensors(Path(result.checkpoint), groups=groups) for result in (whole, second)]
    assert ends[0].keys() == ends[1].keys() and all(
        torch.equal(ends[0][key], ends[1][key]) for key in ends[0]
    )
    assert [path.name for path in all_of(Path(second.checkpoint).parent)] == [
        "step-000003",
        "step-000004",
    ]

    traces = Path(second.trace)
    assert read_job(traces / "job.json").layout == job[1].plan
    table = pq.read_table(traces / "rank-00001")
    assert [field.name for field in table.schema][: len(TRACE_COLUMNS)] == list(TRACE_COLUMNS)
    assert set(table["operation"].to_pylist()) == set(OPERATIONS) - {"weights"}
    assert set(table["step"].to_pylist()) == {0, 1, 2, 3}
    held = [
        size
        for operation, size in zip(
            table["operation"].to_pylist(), table["bytes"].to_pylist(), strict=True
        )
        if operation == "memory"
    ]
    assert len(held) == 4 and 0 < held[0] <= held[1] and 0 < held[2] <= held[3]  # two starts
    assert list(pq.read_table(traces / "steps").column_names)[: len(STEP_COLUMNS)] == list(
        STEP_COLUMNS
    )
    with pytest.raises(SpecError, match="newest checkpoint is of step 4"):
        train(*job, steps=4, resume=True)
    with pytest.raises(SpecError, match="restart=True"):
        train(*job, steps=4)


def test_a_processor_that_changed_since_the_profile_is_refused(tmp_path: Path, data: Path) -> None:
    run, plan, profile = make_job(tmp_path, data)
    heads = [
        head.model_copy(update={"mean": (0.1, 0.2, 0.3)}) if head.item == "image" else head
        for head in profile.inputs.heads
    ]
    inputs = profile.inputs.model_copy(update={"heads": heads})
    marks = profile.fingerprints.model_copy(update={"data": build_index(run, inputs).fingerprint})
    with pytest.raises(MismatchError, match="asks for other data"):
        train(run, plan, profile.model_copy(update={"inputs": inputs, "fingerprints": marks}))
    assert not run.dir.checkpoints.exists() and not run.dir.traces.exists()


def test_a_killed_rank_ends_the_job_and_is_named(tmp_path: Path, data: Path) -> None:
    job, ranks = make_job(tmp_path, data), []

    def kill_rank_1(step: dict[str, Any]) -> None:
        if step["step"] != 2:
            return
        line = (job[0].dir.logs / "rank-00001.log").read_text().splitlines()[0]
        ranks.append(int(line.removeprefix("rank 1 of 3, process ")))
        os.kill(ranks[-1], signal.SIGKILL)

    with pytest.raises(RankFailedError, match="Rank 1 was killed by SIGKILL") as caught:
        train(*job, steps=50, on_step=kill_rank_1)
    assert "rank-00001.log" in caught.value.why
    steps = open_database([job[0].dir.root]).sql(
        "SELECT rank, max(step) AS last FROM recorded GROUP BY rank"
    )
    # step 2 had just been reported
    assert len(steps) == 3 and all(row["last"] >= 1 for row in steps)
    assert ranks and not psutil.Process().children(recursive=True)


def test_too_many_broken_images_stop_the_job_by_name(tmp_path: Path, data: Path) -> None:
    broken = tmp_path / "data"
    for tar in data.rglob("*.tar"):
        content = bytearray(tar.read_bytes())
        # start of scan: the header stays readable, the pixels do not
        place = content.find(b"\xff\xda")
        while place >= 0:
            content[place : place + 2] = b"\xff\xd9"
            place = content.find(b"\xff\xda", place + 2)
        (broken / tar.relative_to(data)).parent.mkdir(parents=True, exist_ok=True)
        (broken / tar.relative_to(data)).write_bytes(content)
    with pytest.raises(RankFailedError, match="cannot be decoded") as caught:
        train(*make_job(tmp_path, broken), steps=20)
    assert ".tar/" in caught.value.why


def test_profiled_steps_are_joined_with_our_rows(tmp_path: Path, data: Path) -> None:
    job = make_job(tmp_path, data, checkpoint={"every_steps": 3, "keep": 2})
    train(*job, steps=3)
    # of which the first is past
    resumed = train(*job, steps=6, resume=True, profile_steps=range(2, 5))
    files = sorted(path.name for path in (Path(resumed.trace) / "kineto").iterdir())
    assert files == [f"rank-{rank:05d}-start-001.json.gz" for rank in range(3)]
    database = open_database([Path(resumed.run_dir)])
    rows = {(row.unit, row.operation): row for row in inside(database) if row.operation in COMPUTE}
    assert {operation for _, operation in rows} == {"forward", "backward"} and len(rows) == 6
    for row in rows.values():
        assert row.count == 2 * job[1].plan.microbatches and 0 < row.shares["idle"] < 1 and row.top
        assert sum(row.shares.values()) == pytest.approx(1, abs=0.02)
    assert rows["llm", "forward"].shares["gemm"] + rows["llm", "forward"].shares["attention"] > 0.05
    assert any(
        warning.startswith("steps 3 to 4 were also recorded by torch.profiler")
        for warning in database.warnings
    )
    assert not any("the clock offset" in warning for warning in database.warnings)
