"""Every documented field of the run file through the whole chain, in run files that are drawn from
the schema."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.profiling import sizes
from disttrain_cli.spec.runfile import RunFile
from tests.commands.test_train import call
from tests.every_field import ELSEWHERE, NAMES, RANGES, draw_run_file, fields

#: Seeds of the run files that go through the chain, and what each leaves out.
DRAWN = {1490: ["train.ema"], 1133: ["train.evaluation"]}


def _at(file: Any, path: list[str]) -> list[Any]:
    """Values of a field, of every name or place that `*` stands for."""
    if not path or file is None:
        return [file]
    if path[0] == "*":
        return [
            value
            for one in (file.values() if isinstance(file, dict) else file)
            for value in _at(one, path[1:])
        ]
    return _at(file[path[0]], path[1:]) if path[0] in file else []


def test_every_field_of_the_schema_is_drawn() -> None:
    """Each has, in one of the run files that are run, a value that is not the default; or it is
    known why not."""
    paths = dict(fields())
    assert set(RANGES) | set(ELSEWHERE) <= set(paths)
    files = [draw_run_file(seed, absent) for seed, absent in DRAWN.items()]
    for file in files:
        RunFile.model_validate(file)
    default = {path: field.get_default(call_default_factory=True) for path, field in paths.items()}
    left = [
        path
        for path in paths
        if not any(path == one or path.startswith(f"{one}.") for one in ELSEWHERE)
        and all(
            value in (default[path], None) for file in files for value in _at(file, path.split("."))
        )
    ]
    assert not left


@pytest.mark.slow
@pytest.mark.parametrize("seed", DRAWN)
def test_the_whole_chain_runs(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "SEQUENCES", 24)
    monkeypatch.chdir(tmp_path)
    file = draw_run_file(seed, DRAWN[seed])
    Path("disttrain.yaml").write_text(yaml.safe_dump(file))
    write_sample_data(Path("data"))

    def said(*words: str) -> Any:
        code, out, err = call([*words, "--json"], capsys)
        assert code == 0, f"{words}: {out}\n{err}\n{yaml.safe_dump(file)}"
        return json.loads(out)

    assert set(said("profile")["modules"]) == set(NAMES.values())
    plan = said("plan")["plan"]
    assert (plan["trained"] is None) == (file["model"]["trained"] is None)
    trained = said("train")
    assert [step["step"] for step in trained["steps"]] == [0, 1]
    assert all(
        step["losses"]["text"] > 0 and step["losses"]["image"] is not None
        for step in trained["steps"]
    )
    assert len(trained["images"]) == file["samples"]["images"]
    assert sum("evaluation" in step for step in trained["steps"]) == (
        2 // file["train"]["evaluation"]["every_steps"] if file["train"]["evaluation"] else 0
    )
    again = said("train", "--from", "runs/" + file["name"], "--steps", "1", "--restart")
    assert again["started_from"].endswith("step-000002")
    assert said("analyze")["job"]["steps"] == 1
    assert set(said("export", "--to", "out")["modules"]) >= set(NAMES.values())
    said("train", "--rehearse")
    for kind in ("torchrun", "slurm"):
        assert all(
            Path(script).is_file()
            for script in said("train", "--emit", kind, "--restart")["scripts"]
        )
