"""Samples of checkpoints while training goes on: each new one once, one at a time, ended with the
run."""

from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.errors import RankFailedError
from disttrain_cli.runtime.outputs import during
from disttrain_cli.runtime.outputs.during import During
from disttrain_cli.spec.samples import FILE, Answer, Samples
from tests.planning.synthetic import run_file, tiny
from tests.runtime.factory import write_run


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Payloads of processes, which write two answers, or fail, or wait until they are ended."""
    started: list[dict[str, Any]] = []

    def launch(count: int, target: str, payload: dict[str, Any], logs: Path, on_poll: Any) -> None:
        started.append(payload)
        folder = Path(payload["images"])
        if folder.name == "step-000004":
            raise RankFailedError("it is gone")
        while folder.name == "step-000006":
            on_poll()
        folder.mkdir(parents=True)
        answers = [Answer(prompt="?", text=text, recorded="a") for text in "ab"]
        samples = Samples(checkpoint=payload["checkpoint"], step=2, answers=answers)
        (folder / FILE).write_text(samples.model_dump_json())

    monkeypatch.setattr(during.launching, "launch", launch)
    return started


def test_each_new_checkpoint_is_sampled_once(
    tmp_path: Path, launched: list[dict[str, Any]]
) -> None:
    run = write_run(tmp_path, tmp_path)
    asked = run.file.samples.model_copy(update={"answers": 50, "during": 2})
    run = run.model_copy(update={"file": run.file.model_copy(update={"samples": asked})})
    said: list[str] = []
    beside = During(run, tiny(run_file()), 8, lambda what, done, total: said.append(what))
    for step in (2, 4, 8, 6):
        (run.dir.checkpoints / f"step-{step:06d}").mkdir(parents=True)
        if step == 8:  # the last one is sampled after training
            beside.look()
            (run.dir.checkpoints / "step-000008").rmdir()
            continue
        for _ in range(3):
            beside.look()
            if step != 6 and beside.thread is not None:
                beside.thread.join()
    beside.close()
    assert [Path(one["checkpoint"]).name[-1] for one in launched] == ["2", "4", "6"]
    assert {(one["most"], one["device"]) for one in launched} == {(2, "cpu")}
    assert said == [
        "step-000002: 1 of 2 held-out answers right",
        "warning: no samples of step-000004: it is gone",
        "step-000006: training ended before its samples were there",
    ]
