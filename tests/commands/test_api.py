"""The commands as functions, called as a notebook would."""

import ast
import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import disttrain_cli
from disttrain_cli import analyze, api, plan, profile, train
from disttrain_cli.api import measuring
from disttrain_cli.app import command_line
from disttrain_cli.calls import OPTIONS, Reader, argument, call, read_by, spelled
from disttrain_cli.errors import DataError, DisttrainError, MismatchError, SpecError, UsageError
from disttrain_cli.runtime import train as training
from disttrain_cli.spec.plan import read_plan
from disttrain_cli.spec.profile import read_profile
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole
from tests.cases import first_fast

ROOT = Path(__file__).parent.parent.parent


def test_functions_are_imported_when_asked_for_and_cost_nothing_then():
    code = """import sys, disttrain_cli
assert not [name for name in sys.modules if name.startswith("disttrain_cli.")]
from disttrain_cli import api
assert {*api.__all__} <= {*dir(disttrain_cli)}
assert not {"torch", "transformers", "duckdb", "pydantic", "numpy", "typer"} & sys.modules.keys()"""
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="fly"):
        disttrain_cli.fly  # noqa: B018


@pytest.mark.slow
def test_a_plan_is_explained_written_and_compared_with_the_one_before(run_folder, capfd):
    first = plan(run_folder, sensitivity=False)
    assert first.plan == read_plan(first.path) and first.picture.exists()
    assert first.explanation.sentences and first.sensitivity is None and first.changes is None
    second = plan(read_run(run_folder / "disttrain.yaml"), gpus=1, sensitivity=False)
    assert second.plan.plan.gpus_used == second.gpus == 1
    assert second.previous == first.path
    assert second.changes is not None and second.changes.differences
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_epochs_are_steps_of_the_profiled_data(run_folder):
    """Rounded up to whole steps, and said in words where the run file gives steps."""
    path = run_folder / "disttrain.yaml"
    sequences = read_run(path).file.train.global_batch_size * 4 - 1
    profile = json.loads((run_folder / "runs/tiny/profile.json").read_text())
    profile["data"]["sequences"] = sequences
    (run_folder / "runs/tiny/profile.json").write_text(json.dumps(profile))
    notes = []
    write_whole(read_run(path).dir.plan, "no plan")
    said = plan(path, sensitivity=False, note=notes.append).explanation.sentences
    assert len(notes) == 1 and "Not compared with" in notes[0]
    assert any(one.startswith("Training 240 steps × 6 = 62.6 passes over 23 seq") for one in said)
    path.write_text(path.read_text().replace("  steps: 240", "  epochs: 2.5"))
    assert read_run(path).file.train.total_steps == 10
    (run_folder / "runs/tiny/profile.json").unlink()
    with pytest.raises(SpecError, match="not known in steps yet") as caught:
        assert read_run(path).file.train.total_steps
    assert caught.value.next_step == f"disttrain_cli.profile({str(path)!r})"
    for given, why in (("  epochs: 2\n  steps: 3", "both"), ("", "neither")):
        wrong = run_folder / "wrong.yaml"
        wrong.write_text(path.read_text().replace("  epochs: 2.5", given))
        with pytest.raises(SpecError, match="wrong") as caught:
            read_run(wrong)
        assert f"given: {why}" in caught.value.why


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
        (lambda run: train(run, resume=True, origin=run), UsageError, "cannot be combined with"),
        (lambda run: train(run, origin=run / "nothing"), SpecError, "no weights to start from"),
        (lambda run: analyze(run / "nothing"), DataError, "nothing"),
        (lambda run: api.sql("SELECT 1", run / "nothing"), DataError, "nothing"),
        (lambda run: api.look(run / "nothing"), DataError, "no run's folder"),
        (lambda run: api.watch(run / "nothing"), DataError, "no run's folder"),
        (lambda run: api.explain_hang(run), DataError, "not dumps"),
        (lambda run: api.sample(run), UsageError, "neither prompts nor images"),
        (lambda run: api.sample(run, prompts="Draw"), UsageError, "prompts is not a list"),
        (lambda run: api.init(run, model="m"), UsageError, "model and data go together"),
        (lambda run: api.init(run, preset="tiny"), SpecError, "differs from the preset"),
        (lambda run: api.data_index_share(run, number=2, hosts=2), UsageError, "no share 2/2"),
        (lambda run: api.export(run, to=run / "to"), SpecError, "no checkpoint"),
        (lambda run: train(run, steps=0), UsageError, "steps cannot be 0"),
        (lambda run: plan(run, gpus=True), UsageError, "gpus cannot be True"),
        (lambda run: plan(run, top=-1), UsageError, "top cannot be -1"),
        (lambda run: plan(run, strategy="best"), UsageError, "strategy cannot be 'best'"),
        (
            lambda run: api.compare_clusters(run, devices="H100"),
            UsageError,
            "devices is not a list",
        ),
        (lambda run: api.look(run, steps=40), UsageError, "whole numbers, 4 to 32"),
        (lambda run: api.sample(run, prompts=["a"], temperature=-1.0), UsageError, "temperature"),
        (lambda run: api.emit(run, kind="ssh"), UsageError, "kind cannot be 'ssh'"),
        (lambda run: api.dry_run(run, kind="ssh"), UsageError, "kind cannot be 'ssh'"),
        (lambda run: api.schema("index"), UsageError, "allowed: runfile, profile, plan"),
        (lambda run: api.data_serve(run, port=70_000), UsageError, "port cannot be 70000"),
        (
            lambda run: api.emit(run, kind="slurm", preflight=True, profile_steps=range(2)),
            UsageError,
            "cannot be combined with preflight=True",
        ),
        (lambda run: api.open_run(run, "train.step=1"), UsageError, "unknown key"),
    ],
)
def test_wrong_arguments_raise_the_projects_errors(run_folder, call, error, says):
    with pytest.raises(error) as raised:
        call(run_folder)
    assert says in f"{raised.value.what} {raised.value.why}"


class Started(Exception):
    """The ranks would start now."""


@pytest.mark.slow
@pytest.mark.parametrize("profiled", first_fast([True, False]))
def test_training_makes_the_profile_and_the_plan_that_a_run_of_this_machine_lacks(
    run_folder, monkeypatch, profiled
):
    run, notes, ran = read_run(run_folder / "disttrain.yaml"), [], []

    def measured(run, *, progress, note):
        assert not profiled
        return measuring.ProfileResult(costs, write_whole(run.dir.profile, costs.model_dump_json()))

    def start(run, *planned, **options):
        ran.extend(planned)
        raise Started

    monkeypatch.setattr(measuring, "profile", measured)
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
    assert (
        "disttrain_cli.plan" in caught.value.next_step and sorted(run_folder.rglob("*")) == before
    )


def test_a_plan_of_another_profile_is_not_trained(planned):
    made = read_plan(read_run(planned / "disttrain.yaml").dir.plan)
    other = made.model_copy(
        update={"fingerprints": made.fingerprints.model_copy(update={"profile": "other"})}
    )
    with pytest.raises(MismatchError, match="profile"):
        train(planned, plan=other)


#: A message with a call or an argument, in Python and in a shell, of a run file that was named.
SPELLED = [
    (
        call("train", resume=True),
        "train('my run', resume=True)",
        "train 'my run' --set a=1 --resume",
    ),
    (call("plan", gpus="N"), "plan('my run', gpus=N)", "plan 'my run' --set a=1 --gpus N"),
    (call("rehearse"), "rehearse('my run')", "train 'my run' --set a=1 --rehearse"),
    (
        call("emit", kind="slurm"),
        "emit('my run', kind='slurm')",
        "train 'my run' --set a=1 --emit slurm",
    ),
    (call("analyze"), "analyze('traces')", "analyze traces"),
    (call("profile", help=True), "help(disttrain_cli.profile)", "profile --help"),
    (argument("origin"), "origin", "--from"),
    (argument("profile_steps", range(2, 5)), "profile_steps=range(2, 5)", "--profile-steps 2:5"),
]


@pytest.mark.parametrize(("text", "python", "shell"), SPELLED)
def test_a_message_spells_calls_as_its_reader_makes_them(text, python, shell):
    for in_shell, expected in ((False, python), (True, shell)):
        before = read_by(Reader(in_shell, Path("my run"), ["a=1"], [Path("traces")]))
        said = DisttrainError(f"Go on: {text}.").what
        read_by(before)
        assert said.removeprefix("Go on: ").removesuffix(".").endswith(expected)


def test_a_strangers_marks_are_no_call():
    assert spelled("\ufdd0no JSON\ufdd1") == "\ufdd0no JSON\ufdd1"


def test_hints_of_functions_name_the_run_and_the_argument(run_folder):
    with pytest.raises(UsageError) as raised:
        train(run_folder, resume=True, restart=True)
    assert raised.value.what == "resume=True and restart=True exclude each other"
    with pytest.raises(SpecError) as raised:
        train(run_folder, resume=True)
    assert raised.value.next_step == f"Create one with: disttrain_cli.plan({str(run_folder)!r})"
    with pytest.raises(SpecError) as raised:
        train(api.open_run(run_folder, "train.steps=3"), resume=True)
    assert raised.value.next_step == "Create one with: disttrain_cli.plan(run)"


def suggestions():
    """Calls and arguments in the package's messages: function, their positional and named ones."""
    for path in Path(disttrain_cli.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
                continue
            if node.func.id not in ("call", "argument") or path.name == "calls.py":
                continue
            if node.args and isinstance(node.args[0], ast.Constant):
                yield path.name, node.func.id, node.args[0].value, [k.arg for k in node.keywords]


@pytest.mark.slow
def test_every_suggestion_is_a_function_and_a_command_line():
    """Names of functions and arguments are those of the API, and their options exist."""
    found = list(suggestions())
    assert len(found) > 100
    options = {
        option for _, command in _commands(get_command(command_line())) for option in command
    }
    parameters = {
        name: {*inspect.signature(getattr(api, name)).parameters, "help"}
        for name in api.__all__[1:]
    }
    every = set().union(*parameters.values()) | {"settings"}
    for file, kind, name, named in found:
        if kind == "argument":
            assert name in every and f"--{OPTIONS.get(name, name).replace('_', '-')}" in options, (
                file,
                name,
            )
        else:
            assert set(named) <= parameters[name], (file, name, named)
            for one in {*named} - {"help"}:
                assert f"--{OPTIONS.get(one, one).replace('_', '-')}" in options, (file, name, one)


def _commands(command, name=""):
    yield name, [option for one in command.params for option in one.opts]
    for inner, one in getattr(command, "commands", {}).items():
        yield from _commands(one, f"{name} {inner}")


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch, capfd):
    """docs/examples/first_run.py: from a preset to a sampled answer."""
    monkeypatch.chdir(tmp_path)
    book = runpy.run_path(str(ROOT / "docs" / "examples" / "first_run.py"))
    assert [step["step"] for step in book["trained"].steps] == [0, 1, 2, 3]
    assert book["losses"] == [step["loss"] for step in book["trained"].steps]
    assert read_profile(book["run"].dir.profile) == book["costs"]
    assert book["explained"].report.exists() and book["slowest"].num_rows > 3
    assert book["said"].samples.written[0].prompt == "Draw a seven."
    said = capfd.readouterr()
    assert "Go on from it: disttrain_cli.train(run, resume=True)" in said.out and not said.err
