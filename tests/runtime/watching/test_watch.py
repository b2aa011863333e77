"""What the step loop hears and tells: requests to stop, and trackers that never stop training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from disttrain_cli.errors import RankFailedError, RankLostError, Terminated
from disttrain_cli.runtime.launching import supervise
from disttrain_cli.runtime.launching.starts import Reports, move_aside
from disttrain_cli.runtime.watching.judged import Judged
from disttrain_cli.runtime.watching.trackers import (
    NewSamples,
    Tracker,
    Tracking,
    figures,
    figures_of,
    sampled,
    trackers_of,
)
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.rundir import RunDir, stop_file, stopped_file
from disttrain_cli.spec.samples import FILE, Answer, Drawn, Judge, Samples, Written
from tests.runtime.factory import plan_of, step_of, unit, write_run
from tests.runtime.watching.test_hang import layout_of

ROW = {
    "step": 3,
    "loss": 2.5,
    "loss_text": 2.0,
    "loss_image": float("nan"),
    "mfu": 0.25,
    "tokens": 100,
    "unit_mfu": {"llm": 0.5},
}

#: A rank that says when it listens, and what it heard.
LISTENS = """
import sys
from pathlib import Path
from disttrain_cli.runtime.watching.watch import StopRequests
requests = StopRequests(Path(sys.argv[1]))
print(requests.reason() or "ready", flush=True)
for line in sys.stdin:
    print(requests.reason() or "not asked", flush=True)
"""


@pytest.fixture
def listener(tmp_path: Path):
    """A process that makes a watch."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENS, str(tmp_path / "stop")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    yield process
    process.kill()
    process.communicate()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def heard(process: subprocess.Popen[str]) -> None:
    """Wait until the process says that it has heard a signal."""
    assert process.stdout is not None
    assert "stopping after this step" in process.stdout.readline()


def test_a_signal_asks_to_stop_and_a_second_one_ends(listener: subprocess.Popen[str]) -> None:
    assert answer(listener) == "not asked\n"
    listener.send_signal(signal.SIGUSR1)
    heard(listener)
    assert answer(listener) == "SIGUSR1\n"
    listener.send_signal(signal.SIGTERM)
    assert listener.wait(timeout=60) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("content", "reason"), [("", "stop file"), ("SIGINT", "SIGINT"), ("later", "stop file")]
)
def test_the_stop_file_asks_to_stop(
    listener: subprocess.Popen[str], tmp_path: Path, content: str, reason: str
) -> None:
    (tmp_path / "stop").write_text(content)
    assert answer(listener) == f"{reason}\n"


def test_a_tracker_that_fails_says_so_once(tmp_path: Path) -> None:
    said: list[str] = []

    def connect() -> tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]:
        def write(step: int, values: Mapping[str, float]) -> None:
            raise OSError("the disk is full")

        return write, lambda: said.append("ended")

    tracker = Tracker("wandb", connect, said.append)
    for _ in range(3):
        tracker.write(3, {})
    tracker.close()
    assert len(said) == 1 and "wandb gets no figures" in said[0] and "the disk is full" in said[0]


def test_a_tracker_that_is_not_installed_names_its_extra() -> None:
    said: list[str] = []

    def connect() -> tuple[Callable[[int, Mapping[str, float]], None], Callable[[], None]]:
        raise ImportError("No module named 'tensorboard'")

    Tracker("tensorboard", connect, said.append).write(3, {})
    assert len(said) == 1 and "pip install 'tensorboard>=2.18'" in said[0]


def test_trackers_get_the_figures_that_are_numbers() -> None:
    assert figures(ROW) == {"loss/total": 2.5, "loss/text": 2.0, "speed/mfu": 0.25, "mfu/llm": 0.5}


def planned(layout: Layout, iteration_s: float = 1.0) -> supervise.Planned:
    """A layout as `Supervisor` asks for it."""
    plan = SimpleNamespace(plan=layout, predicted=SimpleNamespace(iteration_s=iteration_s))
    profile = SimpleNamespace(inputs=SimpleNamespace(llm="l"), tied_layers=None)
    return supervise.Planned(plan, profile)  # type: ignore[arg-type]


def run_supervised(
    folder: Path,
    restarts: int,
    outcomes: list[object],
    request: supervise.StopRequest | None = None,
    replanner: Anew | None = None,
) -> tuple[list[bool], supervise.Supervised]:
    """A job whose starts have these outcomes: an error, with a note for every step before it, or
    what happens while it is looked after; returns which of them resumed, and how it went."""
    resumed: list[bool] = []
    ended = 0
    (folder / "logs").mkdir(exist_ok=True)

    def start(given: supervise.Planned, resume: bool, watch: Callable[[], None]) -> Reports:
        nonlocal ended
        for left in (stop_file(folder / "logs"), stopped_file(folder / "logs")):
            left.unlink(missing_ok=True)
        resumed.append(resume)
        outcome = outcomes[len(resumed) - 1]
        if callable(outcome):
            outcome = outcome(watch)
        if isinstance(outcome, Exception):
            ended += len(getattr(outcome, "__notes__", ()))  # steps before it
            raise outcome
        return outcome  # type: ignore[return-value]

    went = supervise.Supervisor(
        RunDir(folder),
        planned(layout_of()),
        restarts,
        5.0,
        request or supervise.StopRequest(),
        silent,
        lambda: ended,
        replanner,
    ).run(False, start)
    return resumed, went


class Anew:
    """A `supervise.Replanner` with a plan without device 2, or with none."""

    def __init__(self, fits: bool = True) -> None:
        self.fits, self.found, self.taken = fits, False, 0
        self.new = planned(layout_of().model_copy(update={"left_out": [1, 2]}), 0.5)

    def ready(self) -> bool:
        return self.found

    def take(self) -> tuple[str, supervise.Planned]:
        self.found, self.taken = False, self.taken + 1
        return "slow", self.new

    def goes_with(self, device: int) -> range:
        return range(1, 3) if device else range(1)

    def without(self, device: int) -> tuple[str, supervise.Planned] | None:
        return ("gone", self.new) if self.fits else None


def lost(rank: int) -> RankLostError:
    error = RankLostError(f"Rank {rank} was killed by SIGKILL")
    error.rank = rank
    return error


def test_a_lost_rank_starts_the_job_again_from_its_checkpoint(tmp_path: Path) -> None:
    resumed, went = run_supervised(tmp_path, 1, [lost(2), "reports"])
    assert resumed == [False, False] and went.restarts == ["Rank 2 was killed by SIGKILL"]
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    assert run_supervised(tmp_path, 2, [lost(2), lost(2), "reports"])[0] == [False, True, True]


def test_restarts_end(tmp_path: Path) -> None:
    with pytest.raises(RankLostError, match="again"):
        run_supervised(tmp_path, 1, [RankLostError("once"), RankLostError("again")])


def test_a_rank_that_says_why_it_failed_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="broken images"):
        run_supervised(tmp_path, 3, [RankFailedError("too many broken images")])


def test_a_stopped_job_is_not_started_again(tmp_path: Path) -> None:
    request = supervise.StopRequest()
    request.on_signal(signal.SIGTERM, None)
    with pytest.raises(RankLostError):
        run_supervised(tmp_path, 3, [RankLostError("lost")], request)


def stopping(anew: Anew, logs: Path) -> Callable[[Callable[[], None]], str]:
    """A start while which a better plan is found; its ranks do what the stop file says."""

    def run(watch: Callable[[], None]) -> str:
        anew.found = True
        watch()
        if stop_file(logs).exists():
            stopped_file(logs).write_text(stop_file(logs).read_text())
        return "reports"

    return run


def test_a_better_plan_stops_the_ranks_and_starts_them_on_it(tmp_path: Path) -> None:
    anew, logs = Anew(), tmp_path / "logs"
    (tmp_path / "checkpoints" / "step-000004").mkdir(parents=True)
    resumed, went = run_supervised(tmp_path, 1, [stopping(anew, logs), "reports"], replanner=anew)
    assert resumed == [False, True] and went.restarts == ["slow"] and went.stopped is None
    assert went.planned is anew.new
    (replan,) = went.replans
    assert (replan.step, replan.left_out, replan.predicted_iteration_s) == (4, [1, 2], 0.5)


def test_a_better_plan_is_only_told_where_no_restart_is_left(tmp_path: Path) -> None:
    anew, logs = Anew(), tmp_path / "logs"
    resumed, went = run_supervised(tmp_path, 0, [stopping(anew, logs)], replanner=anew)
    assert resumed == [False] and not (went.restarts or anew.taken or stop_file(logs).exists())


def test_a_signal_ends_a_job_that_is_to_go_on_with_another_plan(tmp_path: Path) -> None:
    """Before the plan is taken, and while it is written."""
    logs, request, anew = tmp_path / "logs", supervise.StopRequest(), Anew()
    stop = stopping(anew, logs)

    def signalled(watch: Callable[[], None]) -> str:
        stop(watch)
        request.on_signal(signal.SIGTERM, None)
        return "reports"

    resumed, went = run_supervised(tmp_path, 3, [signalled], request, anew)
    assert resumed == [False] and went.stopped == "SIGTERM" and not anew.taken

    class Slow(Anew):
        def take(self) -> tuple[str, supervise.Planned]:
            later.on_signal(signal.SIGINT, None)
            return super().take()

    later, slow = supervise.StopRequest(), Slow()
    resumed, went = run_supervised(tmp_path, 3, [stopping(slow, logs)], later, slow)
    assert resumed == [False] and went.stopped == "SIGINT" and slow.taken == 1


def test_devices_that_are_lost_again_are_left_out(tmp_path: Path) -> None:
    """Ranks 1 and 2 go together; rank 0 is alone, and so is a loss after a step has ended."""
    anew = Anew()
    _, went = run_supervised(tmp_path, 3, [lost(1), lost(2), "reports"], replanner=anew)
    assert went.restarts[1] == "Rank 2 was killed by SIGKILL; gone" and went.planned is anew.new

    late = lost(1)
    late.add_note("a step")
    for second in (lost(0), late):
        _, went = run_supervised(tmp_path, 3, [lost(1), second, "reports"], replanner=anew)
        assert len(went.restarts) == 2 and not went.replans
    _, went = run_supervised(tmp_path, 3, [lost(1), lost(1), "reports"], replanner=Anew(False))
    assert len(went.restarts) == 2 and not went.replans  # as before


def test_the_first_signal_asks_and_the_second_ends(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "logs").mkdir()
    with supervise.stop_request() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        request.pass_on(tmp_path / "logs", lambda what, done, total: said.append(what))
        assert (
            (tmp_path / "logs" / "stop").read_text() == "SIGTERM"
            and len(said) == 1
            and "SIGTERM" in said[0]
        )
        with pytest.raises(KeyboardInterrupt):  # `--json` has a document then, too
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigtimedwait([], 0)
        with pytest.raises(Terminated):
            os.kill(os.getpid(), signal.SIGTERM)
            signal.sigtimedwait([], 0)


class FakeWandb:
    """The calls that trackers make, recorded; a run that goes on knows its last step."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.logged: list[tuple[int, dict[str, object]]] = []

    def init(self, **options: object) -> SimpleNamespace:
        self.ids.append(str(options["id"]))
        run = SimpleNamespace(step=0, finish=lambda: None)

        def log(values: dict[str, object], step: int) -> None:
            run.step = step
            self.logged.append((step, values))

        run.log = log
        return run

    @staticmethod
    def Image(pixels: np.ndarray) -> tuple[int, ...]:
        return pixels.shape


def test_wandb_takes_figures_and_goes_on_under_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = write_run(tmp_path, tmp_path, track=["wandb"])
    for resumed in (None, 3, None):
        [tracker] = trackers_of(run, resumed, pytest.fail)
        tracker.write(3, figures(ROW))
        tracker.write(2, {"verdict": "learning", "drawn/0": np.zeros((2, 3, 3), np.uint8)})
        tracker.close()
    assert wandb.ids[0] == wandb.ids[1] != wandb.ids[2]
    assert wandb.logged[:2] == [
        (3, figures(ROW)),
        (3, {"verdict": "learning", "drawn/0": (2, 3, 3)}),
    ]


def test_trackers_show_the_load_of_experts_by_module() -> None:
    assert figures({"expert_load": {"llm": 1.5}}) == {"experts/llm": 1.5}


def drawn_samples(folder: Path) -> Samples:
    """An image that was drawn, one that was read, and an answer, in a folder."""
    folder.mkdir(parents=True)
    Image.new("RGB", (3, 2), (255, 0, 0)).save(folder / "00.png")
    samples = Samples(
        checkpoint="c/step-000002",
        step=2,
        drawn=[Drawn(file="00.png", prompt="Draw a|b.", asked="a", recognised="a")],
        written=[Written(prompt="", text="a\nb", image="read/0.png", recorded="b", names_it=False)],
        answers=[Answer(prompt="1|1?", text="2", recorded="2", scores={"exact_match": 1.0})],
        judge=Judge(name="j", accuracy=None),
    )
    (folder / FILE).write_text(samples.model_dump_json())
    return samples


def test_trackers_get_samples_as_scores_texts_and_images(tmp_path: Path) -> None:
    """TensorBoard reads back a scalar, a table and an image, at the checkpoint's step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values = sampled(tmp_path / "step-000002", drawn_samples(tmp_path / "step-000002"))
    image = values.pop("drawn/00: Draw a|b.")
    assert isinstance(image, np.ndarray) and image.shape == (2, 3, 3) and image[0, 0, 0] == 255
    assert values == {
        "samples/exact_match": 1.0,
        "samples/recognised": 1.0,
        "samples/named": 0.0,
        "samples/answers": "| asked | model | data |\n| --- | --- | --- |\n| 1\\|1? | 2 | 2 |",
        "samples/read": "| asked | model | data |\n| --- | --- | --- |\n| read/0.png | a\\nb | b |",
    }
    run = write_run(tmp_path, tmp_path, track=["tensorboard"])
    [tracker] = trackers_of(run, None, pytest.fail)
    tracker.write(2, values | {"drawn/0": image})
    tracker.close()
    events = EventAccumulator(str(run.dir.tensorboard))
    events.Reload()
    assert events.Scalars("samples/exact_match")[0].step == 2
    assert events.Images("drawn/0")[0].width == 3
    assert "samples/answers/text_summary" in events.Tags()["tensors"]


def test_tensorboard_draws_a_training_as_one_curve_and_a_restarted_one_as_another(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def curve(folder: Path) -> list[tuple[int, float]]:
        events = EventAccumulator(str(folder))
        events.Reload()
        return [(one.step, one.value) for one in events.Scalars("loss/total")]

    run = write_run(tmp_path, tmp_path, track=["tensorboard"])
    for number, (resumed, steps) in enumerate([(None, range(4)), (2, range(2, 6)), (None, [0, 1])]):
        if number == 2:
            assert move_aside(run.dir)
        [tracker] = trackers_of(run, resumed, pytest.fail)
        for step in steps:
            tracker.write(step, {"loss/total": float(number)})
        tracker.close()
    aside = run.dir.root / "earlier" / "000" / "tensorboard"
    assert curve(aside) == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 1.0)]
    assert curve(run.dir.tensorboard) == [(0, 2.0), (1, 2.0)]


def test_samples_of_a_start_reach_trackers_once(tmp_path: Path) -> None:
    drawn_samples(tmp_path / "step-000001")
    taken: list[tuple[int, dict[str, object]]] = []
    tracker = SimpleNamespace(
        write=lambda step, values: taken.append((step, dict(values))), close=lambda: None
    )
    tracking = Tracking(
        [tracker],  # type: ignore[list-item]
        {},
        Judged(tmp_path / "verdicts.jsonl"),
        NewSamples(tmp_path),
    )
    tracking.reported(step_of(3, row=ROW))
    drawn_samples(tmp_path / "step-000002")
    for step in (4, 5):
        tracking.reported(step_of(step, row=ROW | {"step": step}))
    assert [step for step, _ in taken] == [3, 4, 1, 5] and "samples/read" in taken[2][1]


def test_trackers_get_the_plan_with_every_step(tmp_path: Path) -> None:
    plan = plan_of(write_run(tmp_path, tmp_path), [unit("llm", ["llm"], [3], dp=2)], 3)
    left_out = plan.model_copy(update={"plan": plan.plan.model_copy(update={"left_out": [1, 2]})})
    shown = {"plan/devices": 2.0, "plan/left_out": 2.0, "plan/predicted_iteration_s": 1.0}
    assert figures({"step": 3, "plan": figures_of(left_out)}) == shown


def test_trackers_get_what_verdicts_change_to(tmp_path: Path) -> None:
    path = tmp_path / "verdicts.jsonl"
    path.write_text('{"cause": "data", "lost_fraction": 0.5}\n')  # of an earlier start
    judged = Judged(path)
    assert judged.lost() == {}
    with path.open("a") as file:
        file.write('{"cause": "worker", "lost_fraction": 0.2}\n{"cause": "no')
    assert judged.lost() == judged.lost() == {"worker": 0.2}
    with path.open("a") as file:
        file.write('ne", "lost_fraction": 0.0}\n')
    assert judged.lost() == {"worker": 0.0, "none": 0.0}
    assert figures({"step": 3, "watch": {"worker": 0.2}}) == {"watch/worker": 0.2}
    path.unlink()
    assert judged.lost() == {"worker": 0.0, "none": 0.0}
