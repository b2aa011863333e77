"""The verdict at the end of a job: for trackers, and in the output of ranks that others start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.mitigation import learned as judging
from disttrain_cli.runtime import worker
from disttrain_cli.runtime.launching.payload import TRAIN_AND_JUDGE
from disttrain_cli.runtime.launching.rank import resolve
from disttrain_cli.runtime.launching.starts import job_of
from disttrain_cli.runtime.watching import trackers
from disttrain_cli.spec.samples import Answer, Samples
from tests.planning.synthetic import run_file, tiny
from tests.runtime.factory import plan_of, unit, write_run


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The payload of a run that has trained, whose text loss has not fallen in 200 steps."""
    run = write_run(tmp_path, tmp_path, track=["tensorboard"])
    profile = tiny(run_file())
    plan = plan_of(run, [unit("llm", ["llm"], [3])], 3)
    run.dir.traces.mkdir(parents=True)
    about = job_of(run, plan, profile).model_copy(update={"run": "start-000"})
    (run.dir.traces / "job.json").write_text(about.model_dump_json())
    row = {"loss_text": 5.0, "loss_image": 0.0, "generator_losses": {}, "learning_rate": 1e-9}
    held_out = {"evaluation_loss_text": None, "evaluation_loss_image": None}
    rows = [row | held_out | {"step": step, "learning_rates": {"llm": 1e-9}} for step in range(200)]
    monkeypatch.setattr(judging, "recorded_steps", lambda traces: rows)
    return {
        "run": run.source,
        "profile": profile.model_dump(mode="json"),
        "steps": 200,
        "folder": run.dir.root,
    }


class Fake:
    """A tracker that records."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, Any]] = {}

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.values[step] = values

    def close(self) -> None:
        self.values[-1] = {}


def test_the_first_rank_of_an_emitted_job_ends_with_the_verdict(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "main", lambda payload: None)
    monkeypatch.setattr(trackers, "trackers_of", lambda *given: [])
    _, main = resolve(TRAIN_AND_JUDGE)
    said = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        heard, console = os.pipe()
        main(trained | {"console": console})
        os.close(console)
        with open(heard) as output:
            said.append(output.read().splitlines())
    assert said[0][0].startswith("Verdict     not learning: text") and not said[1]
    assert "optimizer.lr" in said[0][1]


def test_trackers_get_verdict_and_samples_when_a_run_ends(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, asked = Fake(), list[object]()
    monkeypatch.setattr(trackers, "trackers_of", lambda *given: asked.append(given) or [fake])
    run = judging.read_run(*trained["run"])
    profile = judging.Profile.model_validate_json(json.dumps(trained["profile"]))
    answers = [Answer(prompt="?", text="a", recorded="a", scores={"exact_match": 1.0})]
    samples = Samples(checkpoint="c/step-000199", step=199, answers=answers)
    verdict = judging.learned(run, profile, samples, pytest.fail)
    assert verdict.verdict == "not learning" and "1 of 1 held-out answers" in verdict.headline
    assert [given[1:3] for given in asked] == [("start-000", True)]  # type: ignore[index]
    assert list(fake.values) == [199, 200, -1]
    assert fake.values[199]["samples/exact_match"] == 1.0
    assert fake.values[200] == {"verdict": f"{verdict.headline}. {verdict.advice}"}
