"""Training that is watched from beside it."""

from __future__ import annotations

import json
import time
from types import SimpleNamespace

import pytest

from disttrain_cli.mitigation import beside as watching
from tests.analysis import synthetic


@pytest.fixture
def runs(tmp_path):
    """Folder of runs, of which one has a slow rank."""
    spec = synthetic.Synthetic(slow_rank={3: 1.6})
    synthetic.write(tmp_path / "slow" / "traces", spec, name=f"segment-{spec.run}")
    (tmp_path / "slow" / "logs").mkdir()
    return tmp_path


def test_training_says_what_slows_it(runs, monkeypatch):
    monkeypatch.setattr(watching, "AFTER_S", 0.0)
    monkeypatch.setattr(watching, "LOWEST_PRIORITY", 0)  # beside other tests it would get no turn
    said = []
    with watching.watched(runs / "slow", said.append):
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
    beside = watching._Beside(runs / "slow", said.append)
    beside._listen(SimpleNamespace(stdout=told))
    assert [line.split()[4] for line in said] == ["worker.", "none."]


def test_short_runs_are_not_watched(runs, monkeypatch):
    monkeypatch.setattr(watching.subprocess, "Popen", None)
    with watching.watched(runs / "slow", print):
        pass
