"""Real ranks that are looked after: what is slow or lost is left out, and training goes on by
itself."""

import math
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.replanning import samples
from disttrain_cli import api
from disttrain_cli.analysis.watching.looking import look_once
from disttrain_cli.api.presets import preset_text
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.mitigation import replanning
from disttrain_cli.mitigation.monitor import monitored
from disttrain_cli.runtime import train as training
from disttrain_cli.runtime.train import TrainResult
from disttrain_cli.spec.plan import read_plan
from disttrain_cli.spec.profile import read_profile
from disttrain_cli.spec.rundir import replans_file, stop_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import Job
from disttrain_cli.spec.whole import write_whole
from tests.mitigation.slow_device import DEVICE
from tests.runtime.launching.test_supervise import process_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny preset on four devices, profiled."""
    folder = tmp_path_factory.mktemp("profiled")
    write_sample_data(folder / "data")
    content = yaml.safe_load(preset_text("tiny"))
    content["cluster"]["gpus_per_node"] = 4
    content["samples"] = {"images": 0}
    content["train"] |= {
        "on_straggler": "replan",
        "restarts": 3,
        "checkpoint": {"every_steps": 2},
        "ordering": "none",
        "track": ["tensorboard"],
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(content))
    api.profile(folder)
    return folder


def planned(profiled: Path, folder: Path, **device: Any) -> Run:
    """A planned run of it in another folder; `device` overrides what the profile says of that."""
    run = api.open_run(shutil.copytree(profiled, folder, dirs_exist_ok=True))
    profile = read_profile(run.dir.profile)
    profile = profile.model_copy(update={"device": profile.device.model_copy(update=device)})
    write_whole(run.dir.profile, profile.model_dump_json())
    api.plan(run, strategy="disaggregated", top=0, sensitivity=False)
    return run


def check_went_on(run: Run, result: TrainResult, left_out: list[int]) -> None:
    """The run went on without some devices, and trained every sample once."""
    (replan,) = result.replans
    assert replan.left_out == left_out and replan.gpus <= 3
    assert read_plan(run.dir.plan).plan.left_out == left_out
    assert len(replans_file(run.dir.logs).read_text().splitlines()) == 1
    count = len(result.steps)
    assert [step["step"] for step in result.steps] == list(range(count)) and replan.step < count
    assert all(math.isfinite(step["loss"]) for step in result.steps)
    index = read_index(run, read_profile(run.dir.profile).inputs)
    found = samples(run, index, run.dir, count)
    assert found["samples"] > 0 and (found["lost"], found["doubled"]) == (0, 0)
    tracked = {
        event.step: event.value
        for event in EventAccumulator(str(run.dir.tensorboard)).Reload().Scalars("plan/left_out")
    }
    assert tracked == {step: float(step >= replan.step) for step in range(count)}


def test_a_rank_lost_twice_is_left_out_and_training_goes_on(tmp_path: Path, profiled: Path) -> None:
    run, killed = planned(profiled, tmp_path), list[int]()

    def kill(step: dict[str, Any]) -> None:
        if step["step"] == 3 and not killed:
            killed.append(process_of(run.dir.logs, 1))
            os.kill(killed[0], signal.SIGKILL)

    def kill_again() -> None:
        """As soon as it is back."""
        while True:
            time.sleep(0.05)
            with suppress(IndexError, FileNotFoundError):  # it is not yet
                process = process_of(run.dir.logs, 1)
                if killed and process not in killed:
                    killed.append(process)
                    os.kill(process, signal.SIGKILL)
                    return

    threading.Thread(target=kill_again, daemon=True).start()
    result = api.train(run, steps=8, on_step=kill)
    assert len(killed) == 2 and len(result.restarts) == 2
    assert result.restarts[1] == "Rank 1 was killed by SIGKILL; Device 1 is lost permanently"
    check_went_on(run, result, [1])

    resumed = api.train(run, steps=10, resume=True)
    assert resumed.resumed_from_step == 8 and not resumed.replans
    job = Job.model_validate_json((run.dir.traces / "job.json").read_text())
    assert job.layout.left_out == [1]
    assert api.analyze(run.dir.root).analysis.job.ranks == job.layout.gpus_used
    assert look_once(run.dir.root).last == 9


@pytest.mark.benchmark  # its monitor, at the lowest priority, needs a core
def test_a_device_that_stays_slow_is_left_out_and_training_goes_on(
    tmp_path: Path, profiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The profile claims so many cores that no rank can have waited for one."""
    run = planned(profiled, tmp_path, cores=64)
    monkeypatch.setattr(training, "TRAIN", "tests.mitigation.slow_device:main")
    monkeypatch.setattr(
        replanning,
        "monitored",
        lambda root, note, on_row, *when: monitored(root, note, on_row, 0.0, 0.0),
    )
    said, after = list[str](), list[int]()

    def end(step: dict[str, Any]) -> None:
        """A few steps on the new plan are enough."""
        if replans_file(run.dir.logs).exists():
            after.append(step["step"])
            if len(after) == 6:
                stop_file(run.dir.logs).touch()

    result = api.train(run, steps=400, on_step=end, note=said.append)
    assert any(f"Device {DEVICE} remains slow: without it," in line for line in said), said
    assert result.stopped_by == "stop file" and result.restarts == [result.replans[0].why]
    check_went_on(run, result, [DEVICE])
    assert after[0] == result.replans[0].step  # the steps before it were saved
