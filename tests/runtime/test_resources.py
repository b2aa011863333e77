"""Waits and memory of the ranks: rows of the trace, values of a step, and notes of rank 0."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_cli.analysis.analyze import ask
from disttrain_cli.runtime.hooks import Step
from disttrain_cli.runtime.resources import Resources, of_device
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.spec.prediction import StageMemory
from disttrain_cli.spec.stage_graph import RankCoords
from tests.runtime.factory import step_of
from tests.runtime.watching.test_hang import graph_of

GIB = 2**30


def measured(folder: Path, kind: str, rank: int, growth: float) -> tuple[list[Step], list[str]]:
    """Steps 3, 4 and 5 of a start at step 3 of 1,000, and notes."""
    stage, notes = graph_of().stages[0], list[str]()
    coords = RankCoords(rank, stage, 0)
    tracer = Tracer(folder, "start-000", coords, lambda: 10, pytest.fail)
    engine: Any = SimpleNamespace(
        device=torch.device(kind, 0), coords=coords, tracer=tracer, data_wait_ns=5 * 10**8
    )
    planned = {"unit": stage.unit.name, "stage": stage.index, "peak_gib": 9, "limit_gib": 70}
    task: Any = SimpleNamespace(
        plan=SimpleNamespace(
            predicted=SimpleNamespace(memory=[StageMemory(**planned, reserve_gib=1.5)])
        ),
        run=SimpleNamespace(file=SimpleNamespace(cluster=SimpleNamespace(ranks_per_gpu=1))),
        steps=1000,
        say=notes.append,
    )
    resources, steps = Resources(task, 3, engine, idle_gib=1.0), []
    for number in (3, 4, 5):
        tracer.step = number
        resources.begin(number)
        step = step_of(number)
        step.largest = resources.measure() | {"growth": growth}
        resources.stepped(step)
        tracer.end_step()
        steps.append(step)
    tracer.close()
    return steps, notes


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a GPU: 10 GiB in use, 8 of them by torch's allocator, at most 7 in tensors."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 8 * GIB)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * GIB)


@pytest.mark.usefixtures("gpu")
def test_memory_of_a_device_is_told_from_that_of_the_stage(tmp_path: Path) -> None:
    steps, notes = measured(tmp_path, "cuda", 0, growth=0.0)
    rows = ask([tmp_path], "SELECT step, held_gib, device_gib, allocator_gib FROM memory").rows
    assert sorted(rows) == [(3, 6.0, 10.0, 8.0), (4, 6.0, None, None), (5, 6.0, None, None)]
    assert of_device(torch.device("cpu")) == {}
    assert [(step.row["memory_gib"], step.row["data_wait_s"]) for step in steps] == [(7.0, 0.5)] * 3
    assert notes == [
        "After the first step up to 2.00 GiB of a device are in use outside PyTorch's allocator,"
        " up to 0.50 GiB more than the plan reserves."
    ]


def test_growth_that_fills_a_host_is_reported_once(tmp_path: Path) -> None:
    _, notes = measured(tmp_path / "0", "cpu", 0, growth=0.01)
    assert len(notes) == 1 and "a host's is full at about step 103 of 1,000." in notes[0]
    assert measured(tmp_path / "slow", "cpu", 0, growth=0.001)[1] == []
    assert measured(tmp_path / "1", "cpu", 1, growth=0.01)[1] == []  # rank 0 reports it
