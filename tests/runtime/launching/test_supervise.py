"""Training that is looked after: asked to stop, and started again when a rank is lost."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from disttrain_cli.analysis.flight.verdict import analyze_dumps
from disttrain_cli.analysis.formats import find_format
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.runtime.train import preflight, train
from disttrain_cli.spec.rundir import flight_recorder, stop_file
from tests.runtime.factory import make_job

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_sample_data(folder)
    return folder


def process_of(logs: Path, rank: int) -> int:
    line = (logs / f"rank-{rank:05d}.log").read_text().splitlines()[0]
    return int(line.rpartition(" ")[2])


def test_a_lost_rank_is_replaced_and_a_signal_stops_with_a_checkpoint(
    tmp_path: Path, data: Path
) -> None:
    job, said = (
        make_job(tmp_path, data, restarts=1, checkpoint={"every_steps": 1}, track=["tensorboard"]),
        list[str](),
    )
    logs, killed = job[0].dir.logs, list[int]()

    def disturb(step: dict[str, Any]) -> None:
        if step["step"] == 1 and not killed:
            killed.append(process_of(logs, 1))
            os.kill(killed[0], signal.SIGKILL)
        elif step["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    result = train(
        *job, steps=50, on_step=disturb, progress=lambda what, done, total: said.append(what)
    )
    assert result.restarts == ["Rank 1 was killed by SIGKILL"] and result.stopped_by == "SIGTERM"
    done = result.steps[-1]["step"] + 1
    assert [step["step"] for step in result.steps] == list(range(done)) and 3 <= done < 50
    assert (
        result.checkpoint is not None
        and Path(result.checkpoint).name == f"step-{done:06d}"
        and result.images == []
    )
    assert any("restart 1 of 1" in line for line in said) and any(
        "SIGTERM: stopping" in line for line in said
    )
    assert {"tokens_per_s", "images_per_s", "memory_gib", "unit_mfu"} <= set(result.steps[0])
    assert list(job[0].dir.tensorboard.glob("events*"))
    assert not psutil.Process().children(recursive=True)

    resumed = train(*job, steps=50, resume=True, on_step=lambda step: stop_file(logs).touch())
    assert resumed.resumed_from_step == done and resumed.stopped_by == "stop file"
    asked = list[int]()

    def ask_once(step: dict[str, Any]) -> None:  # a second signal ends a rank at once
        if not asked:
            asked.append(process_of(logs, 2))
            os.kill(asked[0], signal.SIGTERM)

    term = train(*job, steps=50, resume=True, on_step=ask_once)
    assert term.stopped_by == "SIGTERM" and term.checkpoint == str(
        job[0].dir.checkpoints / f"step-{term.steps[-1]['step'] + 1:06d}"
    )
    last = term.steps[-1]["step"] + 2
    assert (
        train(
            *job, steps=last, resume=True, on_step=lambda step: stop_file(logs).touch()
        ).stopped_by
        is None
    )


def test_a_rank_that_is_stopped_is_named_and_preflight_finds_nothing_wrong(
    tmp_path: Path, data: Path
) -> None:
    from disttrain_cli.errors import RankLostError

    job = make_job(tmp_path, data, hang_s=10.0)
    assert any("groups over gloo: world" in line for line in preflight(*job))

    def stop_rank_1(step: dict[str, Any]) -> None:
        if step["step"] == 0:
            os.kill(process_of(job[0].dir.logs, 1), signal.SIGSTOP)

    with pytest.raises(RankLostError, match=r"others wait for rank 1 \(llm, stage 0") as caught:
        train(*job, steps=50, on_step=stop_rank_1)
    assert "rank 1 is stopped (SIGSTOP)" in caught.value.why
    assert "most recent call first" in (job[0].dir.logs / "rank-00002.log").read_text()
    dumps = flight_recorder(job[0].dir.logs)
    assert f"disttrain_cli.explain_hang({str(dumps)!r})" in caught.value.why
    found = analyze_dumps(find_format([dumps]).files)  # the stopped rank cannot write its own
    assert 1 not in found.ranks and len(found.ranks) > 1
    assert not psutil.Process().children(recursive=True)
