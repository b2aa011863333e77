"""The verdict at the end of a job: for trackers, and in the output of ranks that others start."""

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.errors import RankFailedError
from disttrain_cli.mitigation import learned as judging
from disttrain_cli.runtime.launching.payload import TRAIN
from disttrain_cli.runtime.launching.rank import JobFile
from disttrain_cli.runtime.launching.starts import job_of
from disttrain_cli.runtime.outputs import during
from disttrain_cli.runtime.watching import trackers
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir, stopped_file
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.samples import Answer, Samples
from disttrain_cli.spec.whole import write_whole
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
        "folder": str(run.dir.root),
    }


class Fake:
    """A tracker that records."""

    def __init__(self) -> None:
        self.values: dict[int, dict[str, Any]] = {}

    def write(self, step: int, values: dict[str, Any]) -> None:
        self.values[step] = values

    def close(self) -> None:
        self.values[-1] = {}


ANSWERS = [Answer(prompt="?", text="a", recorded="a", scores={"exact_match": 1.0})]
SAMPLES = Samples(checkpoint="c/step-000199", step=199, answers=ANSWERS)


@pytest.mark.parametrize("ended", ["", "stopped", "unsampled"])
def test_an_emitted_job_ends_with_samples_and_the_verdict(
    trained: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ended: str,
) -> None:
    def sample(run: Run, profile: Profile, checkpoint: Path, *given: object) -> Samples:
        assert ended != "stopped" and checkpoint.name == "step-000200"
        if ended == "unsampled":
            raise RankFailedError("Rank 0 stopped: no memory is left")
        return SAMPLES

    monkeypatch.setattr(during, "sample", sample)
    monkeypatch.setattr(trackers, "trackers_of", lambda *given: [])
    folder, logs = RunDir(Path(trained["folder"])), tmp_path / "logs"
    (folder.checkpoints / "step-000200").mkdir(parents=True)
    logs.mkdir()
    if ended == "stopped":
        stopped_file(logs).touch()
    content = JobFile(target=TRAIN, payload=trained | {"logs": str(logs)}, logs=str(logs), ranks=1)
    job = write_whole(tmp_path / "job.json", content.model_dump_json())
    judging.main([str(job)])
    *before, first, second = capfd.readouterr().out.splitlines()
    assert first.startswith("Verdict     not learning: text") and "optimizer.lr" in second
    said = {
        "": ["sampling", f"{folder.checkpoints}/step-000200: 1 of 1 held-out answers right"],
        "stopped": [],
        "unsampled": [
            "sampling",
            "warning: no samples of step-000200: Rank 0 stopped: no memory is left",
        ],
    }
    assert before == said[ended] and (("1 of 1 held-out" in first) == (not ended))


def test_trackers_get_verdict_and_samples_when_a_run_ends(
    trained: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, asked = Fake(), list[object]()
    monkeypatch.setattr(trackers, "trackers_of", lambda *given: asked.append(given) or [fake])
    run = judging.read_run(*trained["run"])
    profile = judging.Profile.model_validate_json(json.dumps(trained["profile"]))
    verdict = judging.learned(run, profile, SAMPLES, pytest.fail)
    assert verdict.verdict == "not learning" and "1 of 1 held-out answers" in verdict.headline
    assert [given[1] for given in asked] == [200]  # type: ignore[index]
    assert list(fake.values) == [198, 200, -1]
    assert fake.values[198]["samples/exact_match"] == 1.0
    assert fake.values[200] == {"verdict": f"{verdict.headline}. {verdict.advice}"}
