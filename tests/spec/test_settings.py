"""`--set`: a run file changed in memory is one that was edited."""

import json

import pytest
import yaml

from disttrain_cli.api.presets import preset_text
from disttrain_cli.app import main
from disttrain_cli.commands.common import next_command
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.naming import DEFAULT_RUN_FILE
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.settings import differences


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "disttrain.yaml"
    path.write_text(preset_text("tiny"))
    return path


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("train.steps=7", ("train", "steps"), 7),
        ("train.optimizer.lr=2e-5", ("train", "optimizer", "lr"), 2e-5),
        (" train.precision = bf16", ("train", "precision"), "bf16"),
        ("model.trained=[projectors, llm]", ("model", "trained"), ["projectors", "llm"]),
        ("data.sources.1.weight=3", ("data", "sources", 1, "weight"), 3),
        ("data.sources.1={path: a=b}", ("data", "sources", 1), {"path": "a=b"}),
        (
            "train.evaluation={every_steps: 5, sequences: 6}",
            ("train", "evaluation", "sequences"),
            6,
        ),
        ("cluster.device=cpu", ("cluster", "device"), "cpu"),
        ("samples={}", ("samples",), {}),
    ],
)
def test_what_is_set_is_as_if_it_were_edited(file, setting, path, value):
    edited = yaml.safe_load(file.read_text())
    section = edited
    for part in path[:-1]:
        section = section[part] if isinstance(section, list) else section.setdefault(part, {})
    section[path[-1]] = value
    if "every_steps" in setting:
        section["every_steps"] = 5
    other = file.with_name("edited.yaml")
    other.write_text(yaml.safe_dump(edited))
    assert read_run(file, setting).file == read_run(other).file != read_run(file).file
    run = read_run(file, setting, "train.seed=3")
    assert read_run(*run.source).file == run.file and run.file.train.seed == 3
    assert read_run(*json.loads(json.dumps(run.source))).file == run.file


def test_steps_that_are_set_replace_epochs_and_the_reverse(file):
    by_epochs = read_run(file, "train.epochs=2").file.train
    assert (by_epochs.steps, by_epochs.epochs) == (None, 2)
    file.write_text(file.read_text().replace("  steps: 240", "  epochs: 2"))
    by_steps = read_run(file, "train.steps=7").file.train
    assert (by_steps.steps, by_steps.epochs) == (7, None)
    for settings in (("train.steps=7", "train.epochs=2"), ("train.epochs=null",)):
        with pytest.raises((SpecError, UsageError), match="either steps"):
            read_run(file, *settings)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.steps", "allowed: KEY=VALUE"),
        ("=3", "allowed: KEY=VALUE"),
        ("train..steps=3", "allowed: KEY=VALUE"),
        ("train.steps=[", "the value is not valid YAML"),
        ("train.steps.x=3", "'x' is inside 240, which has no fields"),
        ("data.sources.2.weight=3", "'2' is no index of a list of 2"),
        ("data.sources.-1.weight=3", "'-1' is no index of a list of 2"),
        ("train.stepz=3", "settings train.stepz: unknown key; did you mean steps?"),
        ("train.stepz.x=3", "settings train.stepz: unknown key"),
        ("learning_rate=3", "settings learning_rate: unknown key; here it is train.optimizer.lr"),
        ("train.steps=many", "settings train.steps: input should be a valid integer"),
        ("train.precision=bfloat16", "here it is bf16"),
        ("train.steps=yes", "settings train.steps: should be a number (given: True)"),
        ("train.optimizer.betas=[0.9, off]", "train.optimizer.betas.1: should be a number"),
        ("train.optimizer.modules.llm.lr=no", "modules.llm.lr: should be a number (given: False)"),
        ("train.steps=1:30", "1:30 is 90 in YAML"),
        ("train.ema.decay=0.9", "settings train.ema.modules: field required"),
        ("data.sources.²={}", "'²' is no index of a list of 2"),
        ("train.zero_stage=0 # no", None),
    ],
)
def test_a_wrong_setting_is_named_and_wrong_usage(file, setting, said):
    if said is None:
        assert read_run(file, setting).file.train.zero_stage == 0
        return
    with pytest.raises(UsageError) as refused:
        read_run(file, setting)
    assert said in refused.value.why


def test_what_is_wrong_in_the_file_stays_the_files(file):
    file.write_text(file.read_text().replace("  steps: 240", "  stepz: 240"))
    with pytest.raises(SpecError) as refused:
        read_run(file, "train.precisio=bf16", "train.seed=3")
    assert "settings train.precisio" in refused.value.why
    assert "line 49, train.stepz" in refused.value.why
    assert read_run(file, "train={global_batch_size: 2, steps: 3}").file.train.steps == 3


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("train.optimizer.lr=1e-3", [("train.optimizer.lr", 2e-3, 1e-3)]),
        ("train.optimizer.lr=0.002", []),
        ("train.ema={decay: 0.9, modules: [llm]}", [("train.ema", None, dict)]),
        ("data.sources.1.weight=3", [("data.sources.1.weight", 1.0, 3.0)]),
        ("data.sources=[{path: a}]", [("data.sources", list, list)]),
        ("samples.prompts=[]", [("samples.prompts", list, [])]),
    ],
)
def test_differences_are_named_as_settings(file, setting, found):
    before, now = (read_run(file, *given).file.model_dump(mode="json") for given in ([], [setting]))
    assert [key for key, _, _ in differences(before, now)] == [key for key, _, _ in found]
    for (_, *values), (_, *expected) in zip(differences(before, now), found, strict=True):
        for value, one in zip(values, expected, strict=True):
            assert isinstance(value, one) if isinstance(one, type) else value == one
    assert differences({"a": {"b": 1}}, {"c": 2}) == [("a", {"b": 1}, None), ("c", None, 2)]


def test_commands_take_settings_and_suggest_themselves_with_them(file, capsys, monkeypatch):
    monkeypatch.chdir(file.parent)
    words = ["--set", "name=x", "--set", "train.steps=3"]
    for command in (["plan"], ["train", "--resume"], ["data", "serve"]):
        with pytest.raises(SystemExit) as left:
            main([*command, *words])
        err = capsys.readouterr().err
        assert left.value.code == 1 and "runs/x/" in err
        assert "--set name=x --set train.steps=3" in err and err.count("--set") == 2
    for command in ("profile", "plan", "train", "export --to y", "data check", "data index"):
        with pytest.raises(SystemExit) as left:
            main([*command.split(), "--set", "train.stepz=3"])
        assert left.value.code == 2 and "did you mean steps?" in capsys.readouterr().err
    assert next_command("plan", DEFAULT_RUN_FILE) == "disttrain plan"
