"""Checkpoints say how a run draws its data, and what they were made from."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.runtime.checkpoints.folder import (
    DESCRIPTION,
    Begun,
    begun,
    best_of,
    changed_since,
    check_belongs,
    held,
    remove,
    sealed,
    superseded,
)
from disttrain_cli.spec.runfile import read_run
from tests.runtime.factory import write_run


def checkpoint(root: Path, step: int, **said: Any) -> Path:
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    about = {"version": 3, "step": step, "model": "m", "files": [], **said}
    (folder / DESCRIPTION).write_text(json.dumps(sealed(about)))
    return folder


def test_data_of_a_run_are_those_of_its_newest_sound_checkpoint(tmp_path: Path) -> None:
    assert begun(tmp_path) == Begun(0, [], [])
    checkpoint(tmp_path, 3, dataset=["a"], phases=[[0, [1.0]], [3, [2.0]]])
    damaged = checkpoint(tmp_path, 6, dataset=["b"], phases=[])
    (damaged / DESCRIPTION).write_text("{")
    assert begun(tmp_path) == Begun(3, ["a"], [(0, [1.0])])


def test_a_checkpoint_of_another_seed_is_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 3, seed=1)
    assert check_belongs(folder, {"seed": 1}) == 3
    with pytest.raises(MismatchError, match="another seed") as error:
        check_belongs(folder, {"seed": 2})
    assert error.value.why == "seed of the checkpoint: 1; here: 2"
    assert "train.seed" in (error.value.next_step or "")


def test_the_best_checkpoint_is_kept_besides_the_newest(tmp_path: Path) -> None:
    losses = [3.0, 1.0, 2.0, None, 4.0]
    folders = [
        checkpoint(tmp_path, step, **({} if loss is None else {"held_out_loss": loss}))
        for step, loss in enumerate(losses)
    ]
    assert best_of(tmp_path) == folders[1]
    assert superseded(tmp_path, 1) == folders[:-1]
    assert superseded(tmp_path, 1, keep_best=True) == [folders[0], *folders[2:-1]]
    unsound = checkpoint(tmp_path, 9, held_out_loss=0.5, sound=False)
    assert best_of(tmp_path) == folders[1] != unsound


def test_a_checkpoint_stays_while_it_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 3)
    with held(folder), held(folder):
        remove(folder)
        assert folder.exists()
    remove(folder)
    assert not folder.exists()
    with pytest.raises(SpecError, match="has been removed"), held(folder):
        pass


def test_a_loss_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    folders = [
        checkpoint(tmp_path, step, held_out_loss=loss)
        for step, loss in enumerate([math.nan, -math.inf, 2.0, math.nan, 3.0])
    ]
    assert best_of(tmp_path) == folders[2]
    assert folders[2] not in superseded(tmp_path, 1, keep_best=True)


def test_fields_that_changed_since_the_newest_checkpoint_are_named(tmp_path: Path) -> None:
    run = write_run(tmp_path, tmp_path)
    assert changed_since(run.dir.checkpoints, run) == []
    wide = {"samples": {"prompts": ["draw it"] * 20}}
    with_settings = read_run(run.path, "train.seed=4", f"samples={json.dumps(wide['samples'])}")
    said = with_settings.file.model_dump(mode="json")
    checkpoint(run.dir.checkpoints, 3, run_file=said)
    assert changed_since(run.dir.checkpoints, with_settings) == []
    prompts, seed = sorted(changed_since(run.dir.checkpoints, run))
    assert seed == "train.seed: 4 up to step-000003, 0 from here on."
    assert prompts.startswith('samples.prompts: ["draw it", ') and "…" in prompts
    assert "[] from here on." in prompts
    many = {key: {"x": key} for key in map(str, range(14))}
    checkpoint(run.dir.checkpoints, 4, run_file=said | many)
    assert changed_since(run.dir.checkpoints, with_settings)[12:] == [
        "2 more fields have other values."
    ]
