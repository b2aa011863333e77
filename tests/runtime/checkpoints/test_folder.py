"""Which order of the data a run has: the one that it began with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.data.epochs import HISTOGRAM, NEWEST, STREAMS, WINDOWS
from disttrain_cli.errors import MismatchError
from disttrain_cli.runtime.checkpoints.folder import (
    DESCRIPTION,
    begun,
    best_of,
    check_belongs,
    sealed,
    superseded,
)


def checkpoint(root: Path, step: int, **said: Any) -> Path:
    folder = root / f"step-{step:06d}"
    folder.mkdir(parents=True)
    about = {"version": 3, "step": step, "model": "m", "files": [], **said}
    (folder / DESCRIPTION).write_text(json.dumps(sealed(about)))
    return folder


def test_a_run_keeps_the_order_that_it_began_with(tmp_path: Path) -> None:
    assert begun(tmp_path / "none").order == NEWEST == STREAMS
    checkpoint(tmp_path / "old", 3)  # as they were written when there was one order
    assert begun(tmp_path / "old").order == WINDOWS
    checkpoint(tmp_path / "new", 3, order=HISTOGRAM)
    assert begun(tmp_path / "new").order == HISTOGRAM
    damaged = checkpoint(tmp_path / "old", 6, order=HISTOGRAM)
    (damaged / DESCRIPTION).write_text("{")
    assert begun(tmp_path / "old").order == WINDOWS


def test_a_checkpoint_of_another_order_is_refused(tmp_path: Path) -> None:
    old = checkpoint(tmp_path, 3)
    assert check_belongs(old, {"order": WINDOWS}) == 3
    with pytest.raises(MismatchError, match="another order of the data") as error:
        check_belongs(old, {"order": HISTOGRAM})
    assert error.value.why == "order of the checkpoint: 1; here: 2"
    assert "disttrain profile && disttrain plan" in (error.value.next_step or "")


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
