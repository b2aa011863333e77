"""A run's folder before a start: what is asked first, what is moved where, and what cannot be
written."""

import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from disttrain_cli.errors import DisttrainError, SpecError, Terminated
from disttrain_cli.runtime.launching.begin import begin
from disttrain_cli.runtime.launching.rank import JobFile
from disttrain_cli.runtime.launching.starts import (
    Reports,
    alone,
    begin_start,
    check_fresh,
    move_aside,
    run_ranks,
)
from disttrain_cli.runtime.launching.supervise import stop_request
from disttrain_cli.spec.rundir import RunDir, stop_file, stopped_file
from tests.analysis import synthetic
from tests.runtime.factory import write_run

JOB = synthetic.make_job(synthetic.Synthetic(steps=1))


def started(root: Path) -> RunDir:
    """A folder in which a training has left something of every kind."""
    folder = RunDir(root)
    for path in (
        folder.checkpoints / "step-000004",
        folder.traces / "rank-00000",
        folder.traces / "steps",
        folder.images / "step-000004",
        folder.logs,
    ):
        path.mkdir(parents=True, exist_ok=True)
    for path in (folder.traces / "rank-00000", folder.traces / "steps"):
        (path / "segment-start-000-00000.parquet").touch()
    (folder.traces / "job.json").touch()
    (folder.logs / "start-000-steps.jsonl").touch()
    return folder


@pytest.fixture
def mounted() -> Iterator[Callable[[Path], None]]:
    """Mounts a small disk there."""
    places: list[Path] = []

    def mount(place: Path) -> None:
        place.mkdir(parents=True)
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True
        ).returncode:
            pytest.skip("mounting is not permitted here")
        places.append(place)

    yield mount
    for place in places:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_start_leaves_no_checkpoints_behind_unasked(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    check_fresh(folder)
    started(tmp_path)
    with pytest.raises(SpecError, match="step-000004") as caught:
        check_fresh(folder)
    assert caught.value.exit_code == 1 and str(folder.checkpoints) in caught.value.what
    assert "resume=True" in caught.value.next_step and "restart=True" in caught.value.next_step


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_ranks_start_ends_at_once(tmp_path: Path, number: int) -> None:
    folder, said, before = RunDir(tmp_path / "run"), list[str](), psutil.Process().children()

    def progress(what: str, done: float, total: int) -> None:
        said.append(what)

    with (
        stop_request() as request,
        pytest.raises(KeyboardInterrupt if number == signal.SIGINT else Terminated),
        alone(folder),
    ):
        run_ranks(
            folder,
            JOB,
            "tests.runtime.launching.launch_worker:write_rank",
            1,
            {"stop_by": number},
            steps=1,
            resume=False,
            on_step=None,
            progress=progress,
            watch=pytest.fail,
            wait=lambda: request.end_before_ranks(progress),
        )
    assert said[-1] == f"{signal.Signals(number).name}: ending at once, as no rank has started"
    assert [path.name for path in folder.root.iterdir()] == [".training"]
    assert set(psutil.Process().children()) <= set(before)
    with alone(folder):
        pass


def test_what_was_left_is_moved_and_told(tmp_path: Path) -> None:
    folder = started(tmp_path)
    for left in (stop_file(folder.logs), stopped_file(folder.logs)):
        left.touch()
    name, _, notes = begin_start(folder, JOB, resume=False)
    assert name == "start-000" and notes == [
        f"Moved what an earlier start left to {tmp_path / 'earlier' / '000'}"
    ]
    assert sorted(path.name for path in (tmp_path / "earlier" / "000").iterdir()) == [
        "checkpoints",
        "images",
        "logs",
        "traces",
    ]
    assert not folder.checkpoints.exists()
    name, _, notes = begin_start(folder, JOB, resume=True)
    assert (name, notes) == ("start-001", []) and not stop_file(folder.logs).exists()


def test_links_are_followed_and_stay(tmp_path: Path) -> None:
    elsewhere = tmp_path / "large disk"
    elsewhere.mkdir()
    (elsewhere / "mine").mkdir()
    folder = RunDir(tmp_path / "run")
    folder.root.mkdir()
    for path in (folder.checkpoints, folder.traces):
        path.symlink_to(elsewhere)
    started(folder.root)
    assert f"Moved what an earlier start left to {folder.root / 'earlier' / '000'}" in move_aside(
        folder
    )
    assert folder.checkpoints.is_symlink() and folder.traces.is_symlink()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["earlier", "mine"]
    assert (elsewhere / "earlier" / "000" / "step-000004").is_dir()
    assert (elsewhere / "earlier" / "000" / "steps" / "segment-start-000-00000.parquet").exists()
    assert (folder.root / "earlier" / "000" / "images").is_dir() and move_aside(folder) == []
    started(folder.root)
    move_aside(folder)
    assert (elsewhere / "earlier" / "001" / "step-000004").is_dir()


def test_a_disk_of_its_own_is_not_moved(tmp_path: Path, mounted: Callable[[Path], None]) -> None:
    folder = RunDir(tmp_path / "run")
    mounted(folder.checkpoints)
    started(folder.root)
    begin_start(folder, JOB, resume=False)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["earlier"]
    assert (folder.checkpoints / "earlier" / "000" / "step-000004").is_dir()
    subprocess.run(["mount", "-o", "remount,ro", folder.checkpoints], check=True)
    with pytest.raises(SpecError, match=r"Cannot write into .*checkpoints") as caught:
        begin_start(folder, JOB, resume=True)
    assert "Read-only" in caught.value.why


@pytest.mark.parametrize("name", ["checkpoints", "traces", "images", "logs"])
def test_what_cannot_be_written_is_named_before_anything_is_moved(
    tmp_path: Path, name: str
) -> None:
    folder = started(tmp_path / "run")
    place = folder.root / name
    place.rename(tmp_path / "away")
    for make in (lambda: place.symlink_to("nowhere"), place.touch):
        make()
        with pytest.raises(SpecError, match=f"Cannot write into .*{name}"):
            begin_start(folder, JOB, resume=False)
        assert not (folder.root / "earlier").exists()
        place.unlink()


def test_a_full_trace_disk_is_told_at_the_start(
    tmp_path: Path, mounted: Callable[[Path], None]
) -> None:
    folder = RunDir(tmp_path / "run")
    mounted(folder.traces)
    (folder.traces / "full").write_bytes(bytes(1 << 20))
    _, _, [note] = begin_start(folder, JOB, resume=False)
    assert (
        note.startswith("warning: Cannot write")
        and "No space left" in note
        and note.endswith("training goes on")
    )


def test_lines_cut_by_a_full_disk_are_left_out_and_equal_notes_told_once(tmp_path: Path) -> None:
    said: list[str] = []
    file = tmp_path / "steps.jsonl"
    note = '{"note": "no more traces", "done": 0, "total": 0}\n'
    file.write_text(f'{note}{{"note": "cut{note}{note}{note}')
    Reports("start-000", file, None, lambda what, done, total: said.append(what), 3).poll()
    assert said == ["no more traces"]


def test_a_job_of_scripts_does_not_begin_beside_another_training(tmp_path: Path) -> None:
    run = write_run(tmp_path, tmp_path / "data")
    job = JobFile(
        target="a:b",
        payload={"run": run.source, "logs": str(run.dir.logs)},
        logs=str(run.dir.logs),
        ranks=1,
    )
    with (
        alone(run.dir),
        pytest.raises(
            DisttrainError, match="Another training of this run, or data latents, is under way"
        ),
    ):
        begin(job)
