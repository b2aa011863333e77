"""Torch's profile of some steps: which ones, what is marked, and what happens where it cannot be
written."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from disttrain_cli.runtime.watching.profiles import StepProfiler
from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.stage_graph import RankCoords, stage_graph
from disttrain_cli.spec.trace import profile_file, read_mark
from tests.runtime.factory import step_of


def place() -> RankCoords:
    unit = UnitPlan(name="llm", modules=["llm"], gpus=1, layers_per_stage=[1])
    layout = Layout(
        global_batch_size=1, microbatch_size=1, microbatches=1, gpus_used=1, units=[unit]
    )
    return replace(stage_graph(layout, "llm").coords(0), rank=3)


def run(folder: Path, steps: range, wanted: range) -> tuple[StepProfiler, list[str]]:
    """Some steps of a rank that multiplies matrices in its forward."""
    told: list[str] = []
    tracer = Tracer(folder, "start-000", place(), wall_clock())
    profiler = StepProfiler(
        wanted, folder, "start-000", tracer, 3, torch.device("cpu"), told.append
    )
    for step in steps:
        tracer.step = step
        profiler.begin(step)
        start = tracer.now()
        tracer.begin("forward", 0, "llm")
        torch.ones(64, 64) @ torch.ones(64, 64)
        tracer.record("forward", start, slot=0, module="llm")
        profiler.ended(step_of(step))
    profiler.close()
    tracer.close()
    return profiler, told


def events(folder: Path) -> tuple[list[dict], int]:
    document = json.loads(gzip.decompress(profile_file(folder, 3, "start-000").read_bytes()))
    return document["traceEvents"], document["baseTimeNanoseconds"]


def test_the_steps_asked_for_are_recorded_and_marked(tmp_path):
    import pyarrow.parquet as pq

    _, told = run(tmp_path, range(5), range(1, 3))
    assert told == [] and [path.name for path in (tmp_path / "kineto").iterdir()] == [
        "rank-00003-start-000.json.gz"
    ]
    found, base_ns = events(tmp_path)
    assert {e["name"] for e in found if e["name"].startswith("ProfilerStep")} == {
        "ProfilerStep#1",
        "ProfilerStep#2",
    }
    marks = {mark[1]: event for event in found if (mark := read_mark(event["name"]))}
    assert sorted(marks) == [1, 2] and read_mark(marks[1]["name"]) == ("forward", 1, 0, "llm")
    assert sum(event["name"] == "aten::mm" for event in found) == 2
    rows = {row["step"]: row for row in pq.read_table(tmp_path / "rank-00003").to_pylist()}
    for (
        step,
        event,
    ) in marks.items():  # one clock: the mark begins after the row does, within its time
        assert (
            rows[step]["start_ns"] - 5e6 < base_ns + 1e3 * event["ts"] < rows[step]["end_ns"] + 5e6
        )


def test_a_range_that_is_entered_late_or_left_early_is_recorded_in_part(tmp_path):
    run(tmp_path, range(4, 6), range(2, 9))
    found, _ = events(tmp_path)
    assert {e["name"] for e in found if e["name"].startswith("ProfilerStep")} == {
        "ProfilerStep#4",
        "ProfilerStep#5",
    }


def test_nothing_is_written_of_other_steps(tmp_path):
    assert run(tmp_path, range(3), range(7, 9))[1] == []
    assert not (tmp_path / "kineto").exists()


@pytest.mark.parametrize("failure", ["disk full", "cut off"])
def test_what_cannot_be_written_is_told_and_left_out(tmp_path, monkeypatch, failure):
    def export(self: object, path: str) -> None:
        if failure == "disk full":
            raise OSError(28, "No space left on device")
        Path(path).write_text('{"traceEvents": [')

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
    _, told = run(tmp_path, range(3), range(3))
    assert len(told) == 1 and "no profile of rank-00003-start-000" in told[0]
    assert list((tmp_path / "kineto").iterdir()) == []
