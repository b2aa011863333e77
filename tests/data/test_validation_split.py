"""The validation split of a folder is what evaluation uses, and never trained on."""

import json
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index, held_out, read_index
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.packing import pack
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.train import EvaluationSpec
from tests.data.dataset import INPUTS, make_run

EVALUATION = EvaluationSpec(every_steps=1, sequences=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, samples in (("train", 20), ("validation", 6), ("test", 5)):
        for shard in range(2):
            records = [{"id": f"{split}{shard}-{n}", "text": f"{n}"} for n in range(samples)]
            path = tmp_path / "own" / f"{split}-{shard:05d}-of-00002.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "more.jsonl").write_text('{"id": "more", "text": "of another source"}\n')
    return tmp_path


def run_in(folder: Path, evaluation: bool = True, **data: Any) -> Run:
    run = make_run(folder, data.pop("sources", [{"path": "own"}, {"path": "more.jsonl"}]), **data)
    train = run.file.train.model_copy(update={"evaluation": EVALUATION if evaluation else None})
    return run.model_copy(update={"file": run.file.model_copy(update={"train": train})})


def drawn(index: Index) -> list[str]:
    """Names of the samples that an epoch has, each once."""
    rows = pack(Mixture(index, 0), 0).samples.tolist()
    return sorted({index.keys[row].rpartition("-")[0] or index.keys[row] for row in rows})


def test_it_is_evaluated_and_not_trained_on(folder: Path) -> None:
    index = build_index(run_in(folder), INPUTS)
    assert len(index) == 2 * 20 + 2 * 6 + 1 and index.held_count == 2 * 6
    assert drawn(index) == ["more", "train0", "train1"]
    assert drawn(held_out(index)) == ["validation0", "validation1"]
    assert any("held out: validation-00000-of-00002.jsonl" in line for line in index.unread_files)
    assert any("test-00000-of-00002.jsonl" in line for line in index.unread_files)
    assert read_index(run_in(folder), INPUTS).fingerprint == index.fingerprint


def test_without_evaluation_it_is_left_out_and_named(folder: Path) -> None:
    index = build_index(run_in(folder, evaluation=False), INPUTS)
    assert len(index) == 2 * 20 + 1 and index.drawn is None
    assert any("validation-00000-of-00002.jsonl" in line for line in index.unread_files)


def test_a_share_that_is_given_comes_first(folder: Path) -> None:
    index = build_index(run_in(folder, held_out=0.3), INPUTS)
    assert len(index) == 2 * 20 + 1 and 0 < index.held_count < 30
    assert not any(key.startswith("validation") for key in index.keys)


def test_evaluation_may_begin_and_end(folder: Path) -> None:
    """The data that are trained on stay the same, so that a run goes on."""
    without = open_index(run_in(folder, evaluation=False), INPUTS)
    evaluated = open_index(run_in(folder), INPUTS)
    again = open_index(run_in(folder, evaluation=False), INPUTS)
    assert without.of_sources == evaluated.of_sources == again.of_sources
    assert drawn(without) == drawn(evaluated) == drawn(again)
    assert without.fingerprint == again.fingerprint != evaluated.fingerprint


@pytest.mark.parametrize("data", [{}, {"held_out": 1e-9}])
def test_evaluation_without_samples_is_refused_when_data_are_indexed(
    folder: Path, data: dict[str, float]
) -> None:
    run = run_in(folder, sources=[{"path": "more.jsonl"}], **data)
    with pytest.raises(DataError, match="No sample is held out") as caught:
        open_index(run, INPUTS)
    assert "data.held_out" in caught.value.next_step


def test_a_split_that_is_named_is_trained_on(folder: Path) -> None:
    source = {"path": "own/validation-00000-of-00002.jsonl"}
    index = build_index(run_in(folder, evaluation=False, sources=[source]), INPUTS)
    assert drawn(index) == ["validation0"] and not index.skipped and not index.unread_files


def test_what_one_source_holds_out_is_trained_on_by_none(folder: Path) -> None:
    (folder / "all").mkdir()
    for shard in range(2):
        name = f"validation-{shard:05d}-of-00002.jsonl"
        (folder / "all" / f"copy{shard}.jsonl").symlink_to(folder / "own" / name)
    (folder / "more.jsonl").rename(folder / "all" / "more.jsonl")
    index = build_index(run_in(folder, sources=[{"path": "own"}, {"path": "all"}]), INPUTS)
    assert drawn(index) == ["more", "train0", "train1"]
    assert drawn(held_out(index)) == ["validation0", "validation1"]
    assert any("copy0.jsonl (the validation split of another" in one for one in index.unread_files)
    named = {"path": "own/validation-00001-of-00002.jsonl"}
    with pytest.raises(DataError, match="is used for evaluation and cannot be trained on"):
        build_index(run_in(folder, sources=[named, {"path": "own"}]), INPUTS)
