"""Training is monitored by a process of its own, which is replaced when it dies."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from disttrain_cli.mitigation import monitor
from tests.analysis import synthetic


@pytest.fixture
def runs(tmp_path):
    """Folder of runs, of which one has a slow rank."""
    spec = synthetic.Synthetic(slow_rank={3: 1.6})
    synthetic.write(tmp_path / "slow" / "traces", spec, name=f"segment-{spec.run}")
    (tmp_path / "slow" / "logs").mkdir()
    return tmp_path


@pytest.mark.slow
def test_training_says_what_slows_it(runs, monkeypatch):
    monkeypatch.setattr(monitor, "AFTER_S", 0.0)
    monkeypatch.setattr(monitor, "LOWEST_PRIORITY", 0)  # next to other tests it would not run
    said = []
    with monitor.monitored(runs / "slow", said.append):
        deadline = time.monotonic() + 120
        while not said and time.monotonic() < deadline:
            time.sleep(0.05)
    (line,) = said
    assert line.startswith("Steps 1 to 7: Rank 3 (llm, stage 1, replica 0) is slow")
    assert line.endswith("--once")


def test_training_says_what_is_sure_and_when_it_is_over(runs):
    def row(cause, confidence):
        known = {"first_step": 1, "last_step": 5, "headline": f"{cause}.", "drift": []}
        return json.dumps(known | {"cause": cause, "confidence": confidence}) + "\n"

    told = [row("none", 0.9), row("host", 0.4), row("worker", 0.8), row("none", 0.9), "cut"]
    said = []
    listener = monitor._Monitor(runs / "slow", said.append)
    listener._listen(SimpleNamespace(stdout=told))
    assert [line.split()[4] for line in said] == ["worker.", "none."]


def test_short_runs_are_not_monitored(runs, monkeypatch):
    monkeypatch.setattr(monitor.subprocess, "Popen", None)
    with monitor.monitored(runs / "slow", print):
        pass


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert found
    return found


def processes(root):
    """Processes of `disttrain watch` on a run."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(root) in (process.info["cmdline"] or []) and "watch" in process.info["cmdline"]
    ]


def test_a_monitor_that_is_killed_is_reported_and_started_again(runs, monkeypatch):
    monkeypatch.setattr(monitor, "RESTART_S", 0.2)
    monkeypatch.setattr(monitor, "LOWEST_PRIORITY", 0)
    said = []
    with monitor.monitored(runs / "slow", said.append, after_s=0.0):
        (first,) = wait_for(lambda: processes(runs / "slow"))
        first.send_signal(signal.SIGKILL)
        (second,) = wait_for(
            lambda: [one for one in processes(runs / "slow") if one.pid != first.pid]
        )
        assert any("killed by SIGKILL" in line and "watch.log" in line for line in said)
        second.suspend()
    assert not second.is_running()


@pytest.mark.slow
def test_a_monitor_ends_with_the_process_that_started_it(runs):
    code = (
        "import sys, time; from pathlib import Path\n"
        "from disttrain_cli.mitigation import monitor\n"
        "monitor.LOWEST_PRIORITY = 0  # next to other tests it would not get as far as to end\n"
        "with monitor.monitored(Path(sys.argv[1]), print, after_s=0.0): time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code, runs / "slow"])
    (process,) = wait_for(
        lambda: [one for one in processes(runs / "slow") if one.ppid() == launcher.pid]
    )
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    process.wait(120)
