"""The launcher runs every rank, and names the one that fails."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from disttrain_cli.errors import RankFailedError, RankLostError, SpecError
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.runtime.launching.launch import _failure, launch
from disttrain_cli.runtime.launching.rank import ALLOCATOR, settle
from disttrain_cli.runtime.launching.supervise import Planned, StopRequest, Supervisor
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.rundir import RunDir
from tests.cases import first_fast
from tests.commands.conftest import make_profile
from tests.runtime.factory import plan_of, unit, write_run


def test_every_rank_runs_with_its_environment(tmp_path: Path) -> None:
    launch(
        3,
        "tests.runtime.launching.launch_worker:write_rank",
        {"folder": str(tmp_path)},
        tmp_path / "logs",
    )
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.is_file()} == {
        "0": "3",
        "1": "3",
        "2": "3",
    }


def test_a_start_begins_once_its_ranks_can_be_forked(tmp_path: Path) -> None:
    logs, notes = tmp_path / "logs", list[str]()

    def begin(said: list[str]) -> dict[str, str]:
        assert not logs.exists()
        notes.extend(said)
        return {"folder": str(tmp_path)}

    target = "tests.runtime.launching.launch_worker:write_rank"
    launch(1, target, {"notes": ["llm: random weights."] * 9999}, logs, begin=begin)
    assert notes == ["llm: random weights."] * 9999 and (tmp_path / "0").read_text() == "1"


def test_what_is_wrong_before_ranks_are_forked_is_raised_before_anything_is_written(
    tmp_path: Path,
) -> None:
    target = "tests.runtime.launching.launch_worker:write_rank"
    with pytest.raises(SpecError, match="The weights do not fit") as caught:
        launch(1, target, {"unfit": "long " * 9999}, tmp_path / "logs", begin=pytest.fail)
    assert type(caught.value) is SpecError and caught.value.why == "long " * 9999
    assert caught.value.next_step == "Take others." and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_starter_lost_before_a_start_begins_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    """A restart then starts as the first one did, not from the checkpoints of an earlier run."""
    target, folder = "tests.runtime.launching.launch_worker:write_rank", RunDir(tmp_path / "run")
    (folder.checkpoints / "step-000003").mkdir(parents=True)
    started: list[bool] = []

    def start(planned: object, resume: bool, watch: object) -> None:
        started.append(resume)
        launch(1, target, {"killed": True}, tmp_path / "logs", begin=pytest.fail)

    run = write_run(tmp_path, tmp_path)
    modules = [info.module for info in layer_table(run)]
    units = [unit(name, [name], [modules.count(name)]) for name in dict.fromkeys(modules)]
    planned = Planned(plan_of(run, units, 3), make_profile(run.file))
    supervisor = Supervisor(folder, planned, 2, 60.0, StopRequest(), silent)
    with pytest.raises(RankLostError, match="killed by SIGKILL") as caught:
        supervisor.run(False, start)
    assert started == [False] * 3 and not caught.value.begun


@pytest.mark.slow
def test_a_failing_rank_is_named_and_ends_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        launch(3, "tests.runtime.launching.launch_worker:fail", {"rank": "1"}, tmp_path)
    assert caught.value.exit_code == 4
    assert "Rank 1 ended with exit code 1" in caught.value.what
    assert "this rank is broken" in caught.value.why
    assert str(tmp_path / "rank-00001.log") in caught.value.why
    assert str(tmp_path / "rank-00001.log") in caught.value.next_step


@pytest.mark.slow
def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="Rank 2 was killed by SIGKILL") as caught:
        launch(3, "tests.runtime.launching.launch_worker:killed", {"rank": "2"}, tmp_path)
    assert "memory" in caught.value.why and "rank-00002.log" in caught.value.next_step


@pytest.mark.slow
def test_what_went_wrong_arrives_though_the_logs_disk_is_full(tmp_path: Path) -> None:
    for name in ("rank-00000.log", "rank-00001.log", "starter.log"):
        (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(RankFailedError) as caught:
        launch(2, "tests.runtime.launching.launch_worker:refuse", {"rank": "1"}, tmp_path)
    assert caught.value.what == "Rank 1 stopped: The checkpoint could not be written"
    assert (
        caught.value.why.startswith("rank 0: No space left\n" * 20) and "log: " in caught.value.why
    )
    assert caught.value.next_step == "Free some."


def test_time_running_out_names_a_waiting_rank(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="Rank 0 did not finish in time"):
        launch(
            1,
            "tests.runtime.launching.launch_worker:fail",
            {"rank": "none"},
            tmp_path,
            timeout_s=1.0,
        )


@pytest.mark.slow
@pytest.mark.parametrize("stopped", first_fast([False, True]))
def test_a_rank_ends_when_its_launcher_is_killed(tmp_path: Path, stopped: bool) -> None:
    pid = tmp_path / "pid"

    def kill_the_launcher_of_the_rank() -> None:
        if pid.exists() and pid.read_text():
            psutil.Process(int(pid.read_text())).parents()[1].kill()

    with pytest.raises(RankFailedError, match="killed by SIGKILL"):
        launch(
            1,
            "tests.runtime.launching.launch_worker:launcher",
            {"folder": str(tmp_path), "stopped": stopped},
            tmp_path,
            on_poll=kill_the_launcher_of_the_rank,
        )
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid.read_text())).wait(timeout=20)


def test_a_starter_whose_launcher_is_gone_before_it_looks_ends(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "0"]) as gone:
        gone.wait()
    told, tell = os.pipe()
    with os.fdopen(told) as ends:
        starter = subprocess.run(
            [
                sys.executable,
                "-m",
                "disttrain_cli.runtime.launching.launch",
                "tests.runtime.launching.launch_worker:killed",
                str(gone.pid),
                str(tmp_path),
                str(tell),
            ],
            input='{"rank": "none"}',
            text=True,
            stderr=subprocess.PIPE,
            pass_fds=[tell],
            env=os.environ | {"WORLD_SIZE": "1"},
            timeout=300,
        )
        os.close(tell)
        assert starter.returncode == 1 and "Traceback" not in starter.stderr
        assert ends.read() == ""  # also the rank that it may have forked is gone


@pytest.mark.slow
def test_a_starter_that_is_killed_says_so(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def kill_the_starter() -> None:
        if pid.exists() and pid.read_text():
            psutil.Process(int(pid.read_text())).parents()[0].kill()

    with pytest.raises(
        RankLostError, match="The process that starts the ranks was killed by SIGKILL"
    ) as caught:
        launch(
            1,
            "tests.runtime.launching.launch_worker:report_and_wait",
            {"folder": str(tmp_path), "stopped": False},
            tmp_path,
            on_poll=kill_the_starter,
        )
    assert "memory" in caught.value.why


@pytest.mark.slow
def test_ranks_listen_on_loopback_only(tmp_path: Path) -> None:
    launch(
        2,
        "tests.runtime.launching.launch_worker:listening",
        {"folder": str(tmp_path)},
        tmp_path / "logs",
        timeout_s=120,
    )
    for rank in ("0", "1"):
        assert set((tmp_path / rank).read_text().split()) == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nvml", "device", "said"),
    [
        (8, "cuda", "cuda expandable_segments:True"),
        (-1, "cuda", "cuda expandable_segments:True"),
        (8, "cpu", "cpu None"),
    ],
)
def test_no_device_is_touched_before_the_ranks_are_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvml: int, device: str, said: str
) -> None:
    for name in ("DS_ACCELERATOR", *ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    run = write_run(tmp_path, tmp_path / "data")
    launch(
        2,
        "tests.runtime.launching.fork_worker:main",
        {
            "run": run.source,
            "folder": str(tmp_path),
            "device": device,
            "profile": {"inputs": describe(run).model_dump(mode="json")},
            "resume": False,
        },
        tmp_path,
        timeout_s=300,
        variables={"NVML_COUNT": str(nvml)},
    )
    assert [(tmp_path / rank).read_text() for rank in "01"] == [said] * 2


@pytest.mark.parametrize("name", ALLOCATOR)
def test_a_users_word_to_the_allocator_stands(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for other in ("DS_ACCELERATOR", *ALLOCATOR):
        monkeypatch.setenv(other, "")  # so that what is set is taken back
        monkeypatch.delenv(other)
    monkeypatch.setenv(name, "max_split_size_mb:512")
    settle("cuda")
    assert {one: os.environ.get(one) for one in ALLOCATOR} == dict.fromkeys(ALLOCATOR) | {
        name: "max_split_size_mb:512"
    }


LOST = "RuntimeError: [pair.cc] Connection closed by peer"


@pytest.mark.parametrize(
    ("codes", "errors", "cause"),
    [
        (
            {1: -6, 0: 4},
            {2: "mine"},
            2,
        ),  # NCCL has aborted rank 1, and rank 2 still closes what it has open
        ({1: 1, 0: 1, 2: -9}, {1: LOST, 0: LOST}, 2),
        ({2: -9, 1: 4}, {1: "follows from it"}, 2),
        ({0: 1, 1: 1}, {0: LOST, 1: "mine"}, 1),
        ({0: 1}, {0: LOST}, 0),
        ({3: -6}, {}, 3),
        ({1: 0, 0: 1}, {0: LOST}, 1),  # some library has ended it
        ({1: 0, 0: 1}, {0: "mine"}, 0),
        ({2: -14, 1: 4}, {2: "mine"}, 2),
    ],
)  # it was stuck while it closed
def test_the_rank_that_failed_by_itself_is_the_cause(
    tmp_path: Path, codes: dict[int, int], errors: dict[int, str], cause: int
) -> None:
    for rank in range(4):
        (tmp_path / f"rank-{rank:05d}.log").write_text(f"{errors.get(rank, '')}\n")
    error = _failure(codes, {rank: [text, "", ""] for rank, text in errors.items()}, tmp_path)
    assert error.what.startswith(f"Rank {cause} ") and errors.get(cause, "") in str(error)
