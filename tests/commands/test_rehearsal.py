"""`disttrain train --rehearse`: what it refuses, shows and prints as JSON; no process is started
here."""

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.analysis.job import database, operations
from disttrain_cli.analysis.result.rows import OperationRow
from disttrain_cli.runtime.rehearsal import rehearse as rehearsing
from tests.commands.test_train import call

SLOW = OperationRow(
    unit="llm",
    stage=0,
    module="llm",
    operation="forward",
    planned=100.0,
    predicted=100.0,
    measured=120.0,
    measure="ms",
    error_pct=20.0,
    per_step=3.0,
    share_of_step=0.7,
)
WHOLE = OperationRow(
    unit=None,
    stage=None,
    module=None,
    operation="iteration",
    planned=500.0,
    predicted=500.0,
    measured=520.0,
    measure="ms",
    error_pct=4.0,
    per_step=1.0,
    share_of_step=1.0,
)


def result(root: Path, steps: int, images: int = 24) -> rehearsing.RehearsalResult:
    return rehearsing.RehearsalResult(
        run_dir=str(root),
        processes=6,
        gpus=6,
        gpus_per_process=1,
        time_scale=12.0,
        messages="scaled",
        steps=[
            {
                "step": number,
                "iteration_s": 0.52,
                "sequences_per_s": 23.1,
                "mfu": 0.2,
                "data_wait_s": 0.01,
                "tokens": 2400,
                "images": images,
                "targets": 12,
            }
            for number in range(steps)
        ],
        simulated=[
            {"step": number, "iteration_s": 0.5, "predicted_iteration_s": 0.51}
            for number in range(steps)
        ],
        predicted_iteration_s=0.51,
        late_ms=rehearsing.Late(mean=0.4, p99=2.5, max=9.0),
        operations_emulated=100,
        cpu_ms_per_operation=3.0,
        peak_mib=900.0,
        checkpoint=str(root / "checkpoints" / "step-000002"),
        trace=str(root / "traces"),
        resumed_from_step=None,
    )


@pytest.fixture
def faked(planned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A rehearsal that reports two steps, 4 % longer than simulated."""

    def rehearse(run: Any, plan: Any, profile: Any, **options: Any) -> rehearsing.RehearsalResult:
        return result(Path(run.dir.rehearsal.root), 2)

    monkeypatch.setattr(rehearsing, "rehearse", rehearse)
    monkeypatch.setattr(database, "open_database", lambda paths: None)
    monkeypatch.setattr(operations, "compare_operations", lambda opened: [WHOLE, SLOW])
    return planned


def test_prediction_and_rehearsal_stand_side_by_side(
    faked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(["train", faked, "--rehearse"], capsys)
    assert code == 0
    for text in (
        "6 processes emulated 6 GPUs",
        "12 s per second",
        "with one number per row",
        "+4.0 %",
        "forward llm",
        "+20.0 %",
        "70.0 %",
        "0.40 ms behind",
        "rehearsal/traces",
        "ranks that share the cores of this machine",
    ):
        assert text in out
    assert "Steps are 4.0 % longer than simulated" in err
    assert err.endswith(f"Next: disttrain analyze {faked / 'runs' / 'tiny' / 'rehearsal'}\n")


def test_json_has_steps_simulated_and_operations(
    faked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(["train", faked, "--rehearse", "--json", "--quiet"], capsys)
    document = json.loads(out)
    assert code == 0 and [row["iteration_s"] for row in document["steps"]] == [0.52, 0.52]
    assert {"simulated", "processes", "time_scale", "late_ms", "trace", "checkpoint"} <= set(
        document
    )
    assert [row["operation"] for row in document["operations"]] == ["iteration", "forward"]


def test_data_that_moved_are_named(
    faked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        rehearsing,
        "rehearse",
        lambda run, plan, profile, **options: result(Path(run.dir.rehearsal.root), 2, images=240),
    )
    code, out, _ = call(["train", faked, "--rehearse"], capsys)
    assert code == 0 and "images read per sequence instead of the planned" in out
    assert f"disttrain profile {faked} --calibrate" in out and f"&& disttrain plan {faked}" in out
