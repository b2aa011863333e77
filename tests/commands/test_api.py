"""The commands as functions, called as a notebook would."""

import json
import subprocess
import sys

import pytest

import disttrain_cli
from disttrain_cli import analyze, api, plan, profile, train
from disttrain_cli.commands.init import preset_text
from disttrain_cli.errors import DataError, MismatchError, SpecError, UsageError
from disttrain_cli.runtime import train as training
from disttrain_cli.spec.plan import read_plan
from disttrain_cli.spec.profile import read_profile
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole


def test_the_four_functions_are_imported_when_asked_for():
    code = """import sys, disttrain_cli
assert not [name for name in sys.modules if name.startswith("disttrain_cli.")]
from disttrain_cli import profile, plan, train, analyze
assert not {"torch", "duckdb", "pydantic", "typer"} & sys.modules.keys()"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="fly"):
        disttrain_cli.fly  # noqa: B018


def test_a_plan_is_explained_written_and_compared_with_the_one_before(run_folder, capfd):
    first = plan(run_folder, sensitivity=False)
    assert first.plan == read_plan(first.path) and first.picture.exists()
    assert first.explanation.sentences and first.sensitivity is None and first.changes is None
    second = plan(read_run(run_folder / "disttrain.yaml"), gpus=1, sensitivity=False)
    assert second.plan.plan.gpus_used == second.gpus == 1
    assert second.previous == first.path
    assert second.changes is not None and second.changes.differences
    assert capfd.readouterr() == ("", "")


def test_epochs_are_steps_of_the_profiled_data(run_folder):
    """Rounded up to whole steps, and said in words where the run file gives steps."""
    path = run_folder / "disttrain.yaml"
    sequences = read_run(path).file.train.global_batch_size * 4 - 1
    profile = json.loads((run_folder / "runs/tiny/profile.json").read_text())
    profile["data"]["sequences"] = sequences
    (run_folder / "runs/tiny/profile.json").write_text(json.dumps(profile))
    said = plan(path, sensitivity=False).explanation.sentences
    assert any(one.startswith("Training 360 steps × 6 = 93.9 passes over 23 seq") for one in said)
    path.write_text(path.read_text().replace("  steps: 360", "  epochs: 2.5"))
    assert read_run(path).file.train.total_steps == 10
    (run_folder / "runs/tiny/profile.json").unlink()
    with pytest.raises(SpecError, match="not known in steps yet") as caught:
        assert read_run(path).file.train.total_steps
    assert caught.value.next_step == "disttrain profile"
    for given, why in (("  epochs: 2\n  steps: 3", "both"), ("", "neither")):
        wrong = run_folder / "wrong.yaml"
        wrong.write_text(path.read_text().replace("  epochs: 2.5", given))
        with pytest.raises(SpecError, match="wrong") as caught:
            read_run(wrong)
        assert f"given: {why}" in caught.value.why


def test_notes_go_to_who_asked_for_them(run_folder):
    notes = []
    path = read_run(run_folder / "disttrain.yaml").dir.plan
    write_whole(path, "no plan")
    plan(run_folder, sensitivity=False, note=notes.append)
    assert len(notes) == 1 and "Not compared with" in notes[0]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda run: profile(run, device="abacus"), UsageError, "no device 'abacus'"),
        (lambda run: profile(run, out=run / "disttrain.yaml"), UsageError, "would be replaced"),
        (lambda run: plan(run, out=run / "disttrain.yaml"), UsageError, "would be replaced"),
        (lambda run: plan(run / "nothing.yaml"), SpecError, "nothing.yaml"),
        (lambda run: train(run, resume=True), SpecError, "plan.yaml"),
        (lambda run: train(run, plan=run / "other.yaml"), SpecError, "other.yaml"),
        (lambda run: train(run, resume=True, restart=True), UsageError, "exclude each other"),
        (lambda run: train(run, resume=True, origin=run), UsageError, "does not go with"),
        (lambda run: train(run, origin=run / "nothing"), SpecError, "no weights to start from"),
        (lambda run: analyze([run / "nothing"]), DataError, "nothing"),
    ],
)
def test_wrong_arguments_raise_the_projects_errors(run_folder, call, error, says):
    with pytest.raises(error) as raised:
        call(run_folder)
    assert says in f"{raised.value.what} {raised.value.why}"


class Started(Exception):
    """The ranks would start now."""


@pytest.mark.parametrize("profiled", [True, False])
def test_training_makes_the_profile_and_the_plan_that_a_run_of_this_machine_lacks(
    run_folder, monkeypatch, profiled
):
    run, notes, ran = read_run(run_folder / "disttrain.yaml"), [], []

    def measured(run, *, progress, note):
        assert not profiled
        return api.ProfileResult(costs, write_whole(run.dir.profile, costs.model_dump_json()))

    def start(run, *planned, **options):
        ran.extend(planned)
        raise Started

    monkeypatch.setattr(api, "profile", measured)
    monkeypatch.setattr(training, "train", start)
    costs = read_profile(run.dir.profile)
    if not profiled:
        run.dir.profile.unlink()
    with pytest.raises(Started):
        train(run_folder, note=notes.append)
    assert ran == [read_plan(run.dir.plan), costs]
    said = [one for one in notes if one.startswith("Wrote")]
    assert ["profile.json" in one for one in said] == ([False] if profiled else [True, False])
    assert "plan.yaml" in said[-1] and ran[0].plan.describe() in said[-1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("nodes: 1", "nodes: 2"),
        ("device: auto", "device: analytic:H100"),
        ("device: auto", "hostfile: hosts"),
        ("", "analytic"),
    ],
)
def test_training_plans_nothing_for_machines_that_are_not_here(run_folder, old, new):
    path = run_folder / "disttrain.yaml"
    profile = read_run(path).dir.profile
    if old:
        path.write_text(path.read_text().replace(old, new))
    else:
        document = json.loads(profile.read_text())
        document["device"]["kind"] = new
        profile.write_text(json.dumps(document))
    before = sorted(run_folder.rglob("*"))
    with pytest.raises(SpecError, match="no plan") as caught:
        train(run_folder)
    assert "disttrain plan" in caught.value.next_step and sorted(run_folder.rglob("*")) == before


def test_a_plan_of_another_profile_is_not_trained(run_folder):
    planned = plan(run_folder, sensitivity=False).plan
    other = planned.model_copy(
        update={"fingerprints": planned.fingerprints.model_copy(update={"profile": "other"})}
    )
    with pytest.raises(MismatchError, match="profile"):
        train(run_folder, plan=other)


@pytest.mark.slow
def test_the_chain_as_a_notebook_calls_it(tmp_path, capfd):
    from disttrain_cli.data.sample_data import write_sample_data

    text = preset_text("tiny").replace("  images: 100", "  images: 0")
    run_file = write_whole(tmp_path / "disttrain.yaml", text.replace("  read: 100", "  read: 0"))
    write_sample_data(tmp_path / "data")
    steps = []
    trained = train(run_file, steps=3, on_step=steps.append)
    assert trained.steps == steps and [step["step"] for step in steps] == [0, 1, 2]
    planned = plan(run_file, sensitivity=False)
    assert planned.plan == trained.planned.plan and planned.previous == planned.path
    explained = analyze([trained.run_dir])
    assert explained.analysis.verdict.headline and explained.report.exists()
    assert capfd.readouterr().out == ""
