"""Checkpoints of one rank: what is written, what is refused, and what a crash leaves."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from disttrain_cli.errors import DisttrainError, MismatchError, SpecError
from disttrain_cli.runtime.checkpoints import checkpoint, storage
from disttrain_cli.runtime.checkpoints.averaging import Average
from disttrain_cli.runtime.checkpoints.checkpoint import Saver, load, read_tensors, save
from disttrain_cli.runtime.checkpoints.folder import (
    all_of,
    describe,
    latest,
    newly_trained,
    partial,
)
from disttrain_cli.runtime.checkpoints.owning import allocate_moments, staged, weights
from disttrain_cli.spec.runfile.train import EmaSpec
from tests.runtime.checkpoints.checkpoint_parts import SHAPES, alone, engine_of

HERE = {"model": "m", "dataset": "d", "seed": 0, "global_batch_size": 6}
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def world(tmp_path: Path) -> Iterator[None]:
    with alone(tmp_path):
        yield


def _state(engine: Any) -> dict[str, torch.Tensor]:
    allocate_moments(engine)
    return {key: values.clone() for key, _, values in staged(engine)}


def _assert_same(own: Any, other: Any) -> None:
    expected = _state(other)
    assert len(expected) == 2 * len(SHAPES) * 3
    for key, values in _state(own).items():
        assert torch.equal(values, expected[key]), key


@pytest.mark.parametrize("zero", [False, True])
def test_a_rank_gets_back_what_it_saved(tmp_path: Path, zero: bool) -> None:
    engine, other = engine_of(1, zero=zero), engine_of(7, zero=zero)
    engine.skipped_steps, engine.updates = 2, {"llm": 58}
    folder = save(tmp_path / "c", 60, HERE, engine, keep=2)
    assert folder.name == "step-000060" and load(folder, HERE, other) == 60
    _assert_same(other, engine)
    steps = {float(state["step"]) for state in other.basic_optimizer.state.values()}
    assert (other.skipped_steps, steps) == (2, {58.0})
    for (_, own), (_, wanted) in zip(
        *(checkpoint.named_parameters(e.module.layers) for e in (other, engine)), strict=True
    ):
        assert torch.equal(own, wanted)


def test_before_the_first_step_moments_are_zero(tmp_path: Path) -> None:
    engine = engine_of(1)
    engine.basic_optimizer.state.clear()
    tensors = read_tensors(save(tmp_path / "c", 0, HERE, engine, keep=1), groups=MOMENTS)
    assert len(tensors) == 2 * len(SHAPES) * 2 and not any(
        values.any() for values in tensors.values()
    )


def test_frozen_weights_are_saved_without_moments(tmp_path: Path) -> None:
    engine, other = engine_of(1, trained=False), engine_of(7, trained=False)
    folder = save(tmp_path / "c", 1, HERE, engine, keep=1)
    assert set(read_tensors(folder, groups=("weight", *MOMENTS))) == {
        f"weight/layer{number}/{key}" for number in range(2) for key in SHAPES
    }
    load(folder, HERE, other)
    assert torch.equal(other.module.layers[0].kernel, engine.module.layers[0].kernel)


def test_what_was_frozen_up_to_a_checkpoint_begins_with_moments_of_zero(tmp_path: Path) -> None:
    frozen, engine = engine_of(1, trained=False), engine_of(7)
    folder = save(tmp_path / "c", 5, HERE, frozen, keep=1)
    assert newly_trained(folder, ["llm"]) == ["llm"]
    assert load(folder, HERE, engine) == 5 and engine.updates == {"llm": 0}
    assert torch.equal(engine.module.layers[0].kernel, frozen.module.layers[0].kernel)
    states = engine.basic_optimizer.state.values()
    assert {float(state["step"]) for state in states} == {0.0}
    assert not any(state[moment].any() for state in states for moment in MOMENTS)
    on = save(tmp_path / "c", 6, HERE, engine, keep=1)
    assert newly_trained(on, ["llm", "projectors"]) == ["projectors"]
    load(on, HERE, engine_of(3, trained=False))  # and frozen again, its moments are left


def test_files_are_safetensors_of_whole_tensors(tmp_path: Path) -> None:
    engine = engine_of(1)
    folder = save(tmp_path / "c", 1, HERE, engine, keep=1)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoint.json",
        "rank-00000.safetensors",
        "tensors.json",
    ]
    with safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        assert torch.equal(
            file.get_tensor("weight/layer1/kernel@0,0,0,0"), engine.module.layers[1].kernel
        )
    assert json.loads((folder / "checkpoint.json").read_text())["seed"] == 0


def test_the_average_is_saved_and_begins_as_the_weights_where_there_is_none(tmp_path: Path) -> None:
    spec = EmaSpec(decay=0.5, modules=["llm"])
    engine, other = engine_of(1), engine_of(7)
    average = Average(engine, spec)
    before = engine.module.layers[0].matrix.detach().clone()
    with torch.no_grad():
        engine.module.layers[0].matrix += 1
    average.update()
    with Saver(tmp_path / "c", HERE, engine, 2, average) as saver:
        saver.save(1)
    stored = read_tensors(tmp_path / "c" / "step-000001", ["layer0"], ("ema",))["ema/layer0/matrix"]
    assert torch.allclose(stored, before + 0.5)
    found = Average(other, spec)
    load(tmp_path / "c" / "step-000001", HERE, other, found)
    assert all(
        torch.equal(a, b) for (_, a), (_, b) in zip(found.values(), average.values(), strict=True)
    )
    load(save(tmp_path / "without", 1, HERE, engine, keep=1), HERE, other, found)
    assert torch.equal(found.values()[0][1], weights(found.values()[0][0]))


def test_training_goes_on_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written is the state as it was, however it changes meanwhile; the next one waits for
    it."""
    import threading

    go, write = threading.Event(), storage.write_tensors
    monkeypatch.setattr(storage, "write_tensors", lambda *known: go.wait(60) and write(*known))
    engine = engine_of(1)
    expected = engine.module.layers[0].matrix.detach().clone()
    with Saver(tmp_path / "c", HERE, engine, 1) as saver:
        saver.save(1)
        with torch.no_grad():
            engine.module.layers[0].matrix.zero_()
        assert latest(tmp_path / "c") is None
        go.set()
        saver.save(2)
        assert torch.equal(
            read_tensors(tmp_path / "c" / "step-000001")["weight/layer0/matrix"], expected
        )
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000002"]  # keep = 1


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    with Saver(tmp_path / "c", HERE, engine_of(), 2) as saver:
        for step in (9, 999_999, 1_000_000):
            saver.save(step)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "step-1000000",
        "step-999999",
    ]
    assert latest(tmp_path / "c") == tmp_path / "c" / "step-1000000"


def _tensors_file(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_tensors_file, "rank-00000.safetensors has another checksum"),
        (lambda folder: os.truncate(folder / "rank-00000.safetensors", 100), "has 100 of"),
        (
            lambda folder: (folder / "rank-00000.safetensors").unlink(),
            "rank-00000.safetensors is missing",
        ),
        (lambda folder: (folder / "tensors.json").write_text("{}"), "tensors.json has 2 of"),
        (lambda folder: (folder / "checkpoint.json").write_text("{"), "Cannot read the checkpoint"),
        (lambda folder: (folder / "checkpoint.json").unlink(), "There is no checkpoint at"),
        (
            lambda folder: (folder / "checkpoint.json").write_text("{}"),
            "lacks version, step, model or files",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(
    tmp_path: Path, damage: Callable[[Path], Any], told: str
) -> None:
    engine = engine_of()
    save(tmp_path / "c", 1, HERE, engine, keep=2)
    damage(save(tmp_path / "c", 2, HERE, engine, keep=2))
    with pytest.raises(SpecError) as caught:
        checkpoint.resume(tmp_path / "c", HERE, engine)
    assert told in str(caught.value)
    assert "step-000002 away to go on from step-000001" in caught.value.next_step
    with pytest.raises(SpecError):
        read_tensors(tmp_path / "c" / "step-000002")
    assert read_tensors(tmp_path / "c" / "step-000001")


@pytest.mark.parametrize("what", list(HERE))
def test_a_checkpoint_of_something_else_is_refused_with_both_named(
    tmp_path: Path, what: str
) -> None:
    save(tmp_path / "c", 1, HERE, engine_of(), keep=1)
    with pytest.raises(MismatchError, match=f"{what} of the checkpoint: {HERE[what]}; here: 77"):
        checkpoint.resume(tmp_path / "c", HERE | {what: 77}, engine_of())


def test_tensors_that_are_missing_or_of_another_shape_are_named(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", 1, HERE, engine_of(), keep=1)
    renamed, reshaped = engine_of(), engine_of()
    renamed.module.layers[1].name = "other"
    with pytest.raises(SpecError, match=r"lacks 15 tensors of this model.*\n.*weight/other/matrix"):
        load(folder, HERE, renamed)
    reshaped.module.layers[0].vector = torch.nn.Parameter(torch.zeros(4))
    reshaped.basic_optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for layer in reshaped.module.layers for p in layer.parameters()],
                "module": "llm",
            }
        ]
    )
    with pytest.raises(
        SpecError, match=r"weight/layer0/vector: \(5,\) in the checkpoint, \(4,\) in the model"
    ):
        load(folder, HERE, reshaped)
    with pytest.raises(SpecError, match="lacks the layers layer7"):
        read_tensors(folder, ["layer0", "layer7"])


class Crash(Exception):
    pass


#: Stages of writing, the last of which is the renaming of the folder that is replaced and of the
#: one that replaces it.
STAGES = [
    (storage, "write_tensors", 1),
    (storage, "write_whole", 1),
    (storage, "write_whole", 2),
    (storage, "replace_folder", 1),
    (os, "replace", 3),
    (os, "replace", 4),
]


@pytest.mark.parametrize(("place", "name", "call"), STAGES)
def test_a_crash_while_writing_leaves_the_ones_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, call: int
) -> None:
    engine = engine_of(1)
    for step in (1, 2):
        save(tmp_path / "c", step, HERE, engine, keep=3)
    calls, real = [], getattr(place, name)

    def crash(*known: Any, **more: Any) -> Any:
        calls.append(known)
        if len(calls) == call:
            raise Crash(f"in {name}")
        return real(*known, **more)

    monkeypatch.setattr(place, name, crash)
    with pytest.raises(
        DisttrainError, match="The checkpoint of step 2 could not be written"
    ) as caught:
        save(tmp_path / "c", 2, HERE, engine, keep=3)  # again, over the one that is there
    assert f"in {name}" in caught.value.why
    monkeypatch.undo()
    newest = latest(tmp_path / "c")
    assert newest is not None and newest.name in ("step-000001", "step-000002")
    load(newest, HERE, engine)
    assert not any(path.name.startswith(".") for path in (tmp_path / "c").iterdir())


def test_what_a_killed_rank_left_half_written_goes_at_the_next_start(tmp_path: Path) -> None:
    for left in (partial(tmp_path / "c" / "step-000002"), tmp_path / "c" / ".step-000001.replaced"):
        left.mkdir(parents=True)
    with Saver(tmp_path / "c", HERE, engine_of(), 3):
        assert not list((tmp_path / "c").iterdir())


def test_a_full_disk_is_named_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, tensors: Any) -> Any:
        path.write_bytes(b"half of it")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(storage, "write_tensors", full)
    with pytest.raises(DisttrainError, match="step 2 could not be written") as caught:
        save(tmp_path / "c", 2, HERE, engine_of(), keep=3)
    assert (
        "No space left on device (rank 0)" in caught.value.why
        and "start again" in caught.value.next_step
    )
    assert not list((tmp_path / "c").iterdir())


def test_checkpoints_of_skipped_steps_push_out_none_that_is_sound(tmp_path: Path) -> None:
    with Saver(tmp_path, HERE, engine_of(), 2) as saver:
        for step, sound in ((1, True), (2, True), (3, True), (4, False), (5, False), (6, False)):
            saver.save(step, sound)
        saver.wait()
        assert [path.name for path in all_of(tmp_path)] == [
            "step-000002",
            "step-000003",
            "step-000006",
        ]
        saver.save(7)
        saver.wait()
        assert [path.name for path in all_of(tmp_path)] == [
            "step-000003",
            "step-000006",
            "step-000007",
        ]
    assert describe(tmp_path / "step-000006")["sound"] is False


@pytest.mark.slow
def test_a_changed_description_is_refused_and_one_of_another_version(tmp_path: Path) -> None:
    folder = save(tmp_path, 60, HERE, engine_of(), keep=1)
    file, engine = folder / "checkpoint.json", engine_of()
    text = file.read_text()
    for old, new in (('"step": 60', '"step": 40'), ('"skipped_steps": 0', '"skipped_steps": 1')):
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(SpecError, match=r"damaged\ncheckpoint.json has another checksum"):
            load(folder, HERE, engine)
    file.write_text(text.replace('"version": 3', '"version": 2'))
    with pytest.raises(SpecError, match="has version 2\nthis disttrain reads 3"):
        load(folder, HERE, engine)


def test_a_half_written_checkpoint_has_another_name(tmp_path: Path) -> None:
    assert partial(tmp_path / "step-000002").name == ".step-000002.partial"
    partial(tmp_path / "step-000002").mkdir()
    assert latest(tmp_path) is None
