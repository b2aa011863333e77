"""`disttrain watch` on traces of runs that are over, and beside training."""

import fcntl
import json
import shutil
import signal
import subprocess
import sys

import pytest

from disttrain_cli.analysis.watching import looking
from disttrain_cli.analysis.watching.ending import Ending
from disttrain_cli.spec.rundir import RunDir, flight_recorder, pulses, verdicts_file
from tests.analysis import synthetic
from tests.analysis.growing import Growing
from tests.cases import first_fast
from tests.commands import calling


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of a run without a fault, and of one with a slow rank."""
    folder = tmp_path_factory.mktemp("watched") / "runs"
    for name, slow in (("calm", {}), ("slow", {3: 1.6})):
        spec = synthetic.Synthetic(slow_rank=slow)
        synthetic.write(folder / name / "traces", spec, name=f"segment-{spec.run}")
        told = pulses(folder / name / "logs")
        told.mkdir(parents=True)
        (told / "rank-00000.json").write_text(json.dumps({"operation": "ended", "beat": 1}))
    return folder


def call(words, capsys):
    return calling.call(["watch", *words], capsys)


@pytest.mark.parametrize("condition", ["((", "verdict.cause ===", "job.mfu"])
def test_a_condition_that_is_none_is_told_before_the_first_step(tmp_path, capsys, condition):
    code, _, err = call([tmp_path, "--fail-if", condition], capsys)
    assert code == 2 and "cannot read" in err and "waiting" not in err


def test_it_ends_with_a_job_that_never_began(tmp_path):
    ending = Ending(RunDir(tmp_path))
    with (tmp_path / ".training").open("w") as lock:
        assert not ending.over()  # not begun
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert not ending.over()
    assert ending.over()


@pytest.fixture(autouse=True)
def no_next_start(monkeypatch):
    """Runs that are over are not waited for."""
    monkeypatch.setattr(looking, "NEXT_START_S", 0.0)


@pytest.mark.parametrize("once", first_fast([["--once"], []]))
def test_a_run_that_is_over_is_looked_at_once(runs, capsys, once):
    code, out, err = call([runs / "slow", *once], capsys)
    first, learned, advice, following = out.splitlines()
    assert learned.strip().startswith("too early to say")
    assert (
        code == 0 and "Rank 3 (llm, stage 1, replica 0) is slower than its work explains" in first
    )
    assert "steps 1 to 7" in first and "% confidence" in first
    assert "Check the device" in advice and "Next: disttrain analyze" in following
    assert ("Watching" in err) == (not once)


@pytest.mark.slow
def test_lines_of_json_are_for_programs_and_for_the_log(runs, capsys):
    code, out, _ = call([runs / "slow", "--json"], capsys)
    (row,) = map(json.loads, out.splitlines())
    assert code == 0 and (row["cause"], row["place"]["rank"]) == ("worker", 3)
    assert row["lost_fraction"] == pytest.approx(row["lost_s"] / row["iteration_s"])
    assert row["remedies"][0]["cause"] == "worker" and row["drift"] == []
    (logged,) = map(json.loads, verdicts_file(runs / "slow" / "logs").read_text().splitlines()[-1:])
    assert logged["headline"] == row["headline"]


@pytest.mark.slow
def test_a_job_that_hung_is_said_with_its_dumps(runs, tmp_path, capsys):
    shutil.copytree(runs / "calm", tmp_path / "hung")
    assert "hung" not in call([runs / "calm", "--once"], capsys)[2]
    dumps = flight_recorder(tmp_path / "hung" / "logs")
    dumps.mkdir()
    assert "dumped" not in call([tmp_path / "hung", "--once"], capsys)[2]
    (dumps / "rank_00000").write_bytes(b"")
    code, out, err = call([tmp_path / "hung", "--json"], capsys)
    assert code == 0 and len(out.splitlines()) == 1
    assert "dumped PyTorch's flight recorder. To see the collective" in err
    assert "disttrain analyze" in err and "flight-recorder" in err


@pytest.mark.slow
def test_a_condition_that_holds_is_an_exit_code(runs, capsys):
    condition = ["--fail-if", "verdict.cause == worker and verdict.lost_s > 0.01"]
    code, out, err = call([runs / "slow", "--once", *condition], capsys)
    assert code == 5 and "Condition holds" in err and "Rank 3" in out
    code, out, _ = call([runs / "slow", "--json", "--once", *condition], capsys)
    assert code == 5 and "verdict.cause is worker" in json.loads(out)["fail_if"]
    code, out, _ = call([runs / "calm", *condition], capsys)
    assert code == 0 and "No straggler" in out and "Next" not in out
    assert call([runs / "calm", "--fail-if", "nonsense"], capsys)[0] == 2


@pytest.mark.slow
def test_steps_of_an_earlier_start_end_no_job(runs, tmp_path, capsys, monkeypatch):
    """What is watched is over, until the next start has its first steps."""
    condition = ["--fail-if", "verdict.cause == worker"]
    assert call([runs / "slow", *condition], capsys)[0] == 0
    shutil.copytree(runs / "slow", tmp_path / "again")
    starts, written = [], []

    def a_while_later(seconds):
        if not starts:
            shutil.rmtree(tmp_path / "again" / "traces")
            starts.append(Growing(runs / "slow" / "traces", tmp_path / "again" / "traces"))
        elif len(written) < len(starts[0].steps):
            written.append(starts[0].steps[len(written)])
            starts[0].write(written[-1])

    monkeypatch.setattr(looking, "NEXT_START_S", 1e9)
    monkeypatch.setattr(looking.time, "sleep", a_while_later)
    assert call([tmp_path / "again", "--every", "0", *condition], capsys)[0] == 5
    assert written


def test_what_is_no_run_is_said(runs, tmp_path, capsys):
    code, _, err = call([tmp_path / "none"], capsys)
    assert code == 1 and "no run's folder" in err
    code, _, err = call([tmp_path, "--once"], capsys)
    assert code == 1 and "no complete step" in err
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "job.json").write_text('{"version": 99}')
    code, _, err = call([tmp_path, "--once"], capsys)
    assert code == 1 and "version" in err


@pytest.mark.slow
def test_it_ends_with_the_run_or_by_ctrl_c(runs, tmp_path):
    growing = Growing(runs / "slow" / "traces", tmp_path / "traces")
    with (tmp_path / ".training").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        words = [sys.executable, "-m", "disttrain_cli", "watch", str(tmp_path), "--every", "0"]
        watch = [
            subprocess.Popen([*words, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(2)
        ]
        for step in growing.steps:
            growing.write(step)
        for one in watch:
            assert json.loads(one.stdout.readline())["cause"] == "worker"
        watch[0].send_signal(signal.SIGINT)
        assert watch[0].wait() == 130 and b"Traceback" not in watch[0].stderr.read()
        assert watch[1].poll() is None
    assert watch[1].wait() == 0


def test_the_end_is_seen_on_another_host(tmp_path):
    """Where nobody here holds the folder, by what ranks tell."""
    from disttrain_cli.analysis.watching import ending

    folder = RunDir(tmp_path)
    end = ending.Ending(folder)
    assert not end.over()  # nothing has begun
    folder.traces.mkdir()
    (folder.traces / "job.json").touch()
    pulses(folder.logs).mkdir(parents=True)
    state = pulses(folder.logs) / "rank-00000.json"
    state.write_text(json.dumps({"operation": "forward", "beat": 1}))
    assert not end.over()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "SILENT_S", 0.0)
        assert end.over()  # it tells no more
    state.write_text(json.dumps({"operation": "ended", "beat": 2}))
    assert end.over()
