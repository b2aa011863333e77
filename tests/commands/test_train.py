"""`disttrain train`: what is refused before anything starts, and how a run is shown (the run itself
is faked)."""

import json
import os
import signal
from pathlib import Path

import pytest

from disttrain_cli.commands.steps import LiveStep
from disttrain_cli.errors import RankFailedError, RankLostError, UsageError
from disttrain_cli.runtime import train as training
from disttrain_cli.runtime.launching.supervise import Planned
from disttrain_cli.spec.runfile import read_run
from tests.commands.calling import call

STEPS = [
    {
        "step": number,
        "loss": 3.0 - number,
        "losses": {"text": 2.0 - number, "image": None},
        "grad_norm": 1.5,
        "iteration_s": 0.5,
        "sequences_per_s": 24.0,
        "mfu": 0.25,
        "data_wait_s": 0.01,
        "tokens": 2400,
        "images": 24,
        "targets": 12,
    }
    for number in range(3)
]


@pytest.fixture
def faked(planned, monkeypatch):
    """A run that reports three steps and starts no rank."""

    def train(
        run,
        plan,
        profile,
        *,
        steps,
        resume,
        restart,
        profile_steps,
        origin,
        on_step,
        progress,
        note,
        again,
        replanner,
    ):
        root = Path(run.dir.root)
        for step in STEPS:
            on_step(step)
            progress("training", step["step"] + 1, 3)
        return training.TrainResult(
            run_dir=str(root),
            planned=Planned(plan, profile),
            steps=STEPS,
            skipped_samples=[{"sample": "a/1", "reason": "broken"}] * 5,
            resumed_from_step=7 if resume else None,
            started_from=str(origin) if origin else None,
            checkpoint=str(root / "checkpoints" / "step-000003"),
            trace=str(root / "traces"),
            images=[str(root / "images" / "0.png")],
        )

    monkeypatch.setattr(training, "train", train)
    return planned


def test_steps_losses_and_paths_are_shown(faked, capsys):
    code, out, err = call(["train", faked, "--resume"], capsys)
    assert code == 0
    for text in (
        "3.0000",
        "predicted",
        "Resumed from step 7",
        "a/1: broken",
        "2 more",
        "checkpoints/step-000003",
        "traces",
        "1 generated",
    ):
        assert text in out
    assert (
        "training  loss 1.0000 (text 0.0000)  0.500 s per step  24.00 sequences/s  MFU 25.0 %"
        in err
    )
    assert err.endswith(f"Next: disttrain analyze {faked / 'runs' / 'tiny'}\n")


def test_a_run_starts_from_another_ones_weights(faked, capsys):
    before = faked / "before" / "checkpoints" / "step-000009"
    before.mkdir(parents=True)
    code, out, _ = call(["train", faked, "--from", faked / "before"], capsys)
    assert code == 0 and "Started from the weights of" in out and str(before) in out
    said = json.loads(call(["train", faked, "--from", before.parent, "--json"], capsys)[1])
    assert said["started_from"] == str(before)
    code, _, err = call(["train", faked, "--from", faked / "before", "--dry-run"], capsys)
    assert code == 0 and f"--from {faked / 'before'}" in err
    code, out, _ = call(
        ["train", faked, "--from", faked / "before", "--restart", "--steps", 7, "--dry-run"], capsys
    )
    assert code == 0 and out.rstrip().endswith(
        f"disttrain train {faked} --steps 7 --from {faked / 'before'} --restart"
    )
    for other in ("--resume", "--rehearse"):
        code, _, err = call(["train", faked, "--from", faked / "before", other], capsys)
        assert code == 2 and f"--from cannot be combined with {other}" in err
    code, _, err = call(["train", faked, "--from", faked / "nothing"], capsys)
    assert code == 1 and "There are no weights to start from" in err


def test_data_that_moved_away_from_the_plan_are_named(faked, monkeypatch, capsys):
    many = [step | {"images": 240} for step in STEPS]
    monkeypatch.setattr("tests.commands.test_train.STEPS", many)
    code, out, _ = call(["train", faked], capsys)
    assert code == 0 and "images read per sequence instead of the planned 2" in out
    assert f"disttrain profile {faked} --calibrate" in out


def test_json_has_the_promised_keys(faked, capsys):
    code, out, _ = call(["train", faked, "--json", "--quiet"], capsys)
    document = json.loads(out)
    assert code == 0 and document["steps"] == STEPS
    assert {
        "run_dir",
        "steps",
        "skipped_samples",
        "resumed_from_step",
        "checkpoint",
        "trace",
    } <= set(document)


def test_a_failed_rank_is_exit_4(planned, monkeypatch, capsys):
    def train(*about, **more):
        raise RankFailedError("Rank 3 (llm, stage 0, replica 1) failed", "Log: logs/rank-00003.log")

    monkeypatch.setattr(training, "train", train)
    code, out, err = call(["train", planned], capsys)
    assert code == 4 and out == "" and "Rank 3" in err and "rank-00003.log" in err


def test_sigterm_while_no_rank_runs_is_143_and_said(planned, monkeypatch, capsys):
    def terminated(*arguments, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 0)

    monkeypatch.setattr(training, "train", terminated)
    code, out, err = call(["train", planned], capsys)
    assert (code, out) == (143, "") and err.endswith("Error: Terminated\n  SIGTERM\n")
    error = json.loads(call(["train", planned, "--json"], capsys)[1])["error"]
    assert (error["why"], error["exit_code"]) == ("SIGTERM", 143)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("  global_batch_size: 6", "  global_batch_size: 24", "24"),
        ("hidden_size: 128", "hidden_size: 256", "another model"),
        ("  gpus_per_node: 6", "  gpus_per_node: 2", "another cluster"),
    ],
)
def test_a_plan_that_does_not_belong_is_refused(planned, old, new, named, capsys):
    file = planned / "disttrain.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    code, out, err = call(["train", planned], capsys)
    assert (
        code == 1
        and out == ""
        and named in err
        and not (planned / "runs" / "tiny" / "traces").exists()
    )


def test_progress_carries_the_figures_and_the_time_left(monkeypatch):
    lines, clock = [], iter([0.0, 10.0])
    monkeypatch.setattr("disttrain_cli.commands.steps.time.monotonic", lambda: next(clock))
    live = LiveStep(lambda what, done, total: lines.append(what))
    live("starting ranks", 0, 0)
    for step in STEPS[:2]:
        live.on_step(step)
        live("training", step["step"] + 1, 8)
    live("generating images", 0, 0)
    assert lines[0] == "starting ranks" and lines[-1] == "generating images"
    assert "grad norm 1.5" in lines[1] and lines[2].endswith("1:00 left")


def test_steps_to_profile_reach_the_ranks(planned, monkeypatch, capsys):
    given = []

    def train(run, plan, profile, *, profile_steps, **more):
        given.append(profile_steps)
        raise RankFailedError("enough")

    monkeypatch.setattr(training, "train", train)
    assert call(["train", planned, "--steps", "20", "--profile-steps", "5:8"], capsys)[0] == 4
    assert given == [range(5, 8)]
    for source in read_run(planned / "disttrain.yaml").file.data.sources:
        (planned / source.path).mkdir(parents=True)
    words = ["train", planned, "--steps", "20", "--profile-steps", "5:8", "--emit", "torchrun"]
    code, _, err = call(words, capsys)
    assert code == 0, err
    job = json.loads((planned / "runs" / "tiny" / "launch" / "job.json").read_text())
    assert job["payload"]["profile_steps"] == [5, 8]


ALONE = [
    ["--preflight", "--rehearse"],
    ["--preflight", "--dry-run"],
    ["--preflight", "--restart"],
    ["--preflight", "--resume"],
    ["--preflight", "--from", "runs/other"],
    ["--rehearse", "--restart"],
]
PROFILED = [
    (["5"], "given: 5"),
    (["8:5"], "given: 8:5"),
    (["5:5"], "A < B"),
    (["-1:3"], "given: -1:3"),
    (["a:b"], "given: a:b"),
    (["5:8:9"], "given: 5:8:9"),
    (["18:22"], "may end at 20"),
    (["5:8", "--rehearse"], "cannot be combined with --rehearse"),
    (["5:8", "--preflight"], "cannot be combined with --preflight"),
]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        *((options, f"{options[0]} cannot be combined with {options[1]}") for options in ALONE),
        *((["--steps", "20", "--profile-steps", *words], said) for words, said in PROFILED),
        (["--resume", "--restart"], "--resume and --restart exclude each other"),
        (["--emit", "torchrun", "--rehearse"], "--emit cannot be combined with --rehearse"),
        (["--emit", "slurm", "--rehearse", "--dry-run"], "--emit cannot be combined with"),
    ],
)
def test_options_that_do_not_go_together_are_wrong_usage(planned, capsys, options, said):
    code, out, err = call(["train", planned, *options], capsys)
    assert code == 2 and out == "" and said in err and "Next: " in err
    assert not (planned / "runs" / "tiny" / "launch").exists()


@pytest.mark.parametrize("checkpoint", [None, "step-000004"])
def test_after_a_lost_rank_the_command_to_go_on_is_named(planned, monkeypatch, capsys, checkpoint):
    def train(run, *about, **more):
        if checkpoint:
            (run.dir.checkpoints / checkpoint).mkdir(parents=True)
        raise RankLostError("Rank 1 was killed by SIGKILL", "log: x", "See its log: less x")

    monkeypatch.setattr(training, "train", train)
    code, out, err = call(["train", planned, "--steps", "9"], capsys)
    again = f"disttrain train {planned} --steps 9"
    assert code == 4 and out == ""
    assert err.endswith(
        f"Next: Resume from {checkpoint}: {again} --resume\n"
        if checkpoint
        else f"Next: See its log: less x\nThere is no checkpoint yet; restart: {again}\n"
    )


def test_steps_to_profile_must_not_be_past(planned):
    with pytest.raises(UsageError, match="is past"):
        training.check_profiled(range(5, 8), 20, first=8)
    training.check_profiled(range(5, 8), 20, first=7)
