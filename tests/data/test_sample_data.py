"""The sample dataset: real scans, both forms, skewed, the same bytes for the same seed."""

import hashlib
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.packing import pack
from disttrain_cli.data.sample_data import WORDS, write_sample_data
from disttrain_cli.data.sample_talks import write_sample_talks
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, TARGET
from tests.data.dataset import INPUTS, make_run
from tests.heads import with_heads

BYTE_INPUTS = INPUTS.model_copy(update={"sequence_length": 256})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sample")
    assert write_sample_data(folder) == ["interleaved", "captions"]
    return folder


@pytest.fixture(scope="module")
def digits(folder: Path) -> Index:
    run = make_run(
        folder,
        [{"path": "interleaved"}, {"path": "captions"}],
        sequence_length=256,
        max_bad_fraction=0,
    )
    return build_index(run, BYTE_INPUTS)


def digest(folder: Path) -> str:
    return hashlib.sha256(
        b"".join(path.read_bytes() for path in sorted(folder.rglob("*.tar")))
    ).hexdigest()


def test_every_scan_is_used_and_sizes_are_skewed(digits: Index) -> None:
    assert int((digits.kinds == IMAGE).sum() + (digits.kinds == TARGET).sum()) == 1797
    assert (digits.kinds == TARGET).sum() > 600 and not digits.skipped
    lengths = digits.lengths
    assert lengths.max() <= 256 and np.median(lengths) < 0.5 * lengths.max()
    patches = digits.grids[digits.kinds == IMAGE].prod(axis=1)
    assert patches.min() <= 4 and patches.max() == 64
    images = digits.per_sample((digits.kinds == IMAGE).astype(np.int64))
    assert images.max() >= 6 and (images == 0).sum() > 50
    packing = pack(Mixture(digits, 0), 0)
    assert packing.fill_fraction > 0.95 and len(packing) > 150


def test_the_largest_pixel_budget_fits_too(folder: Path) -> None:
    image = BYTE_INPUTS.image
    assert image is not None
    inputs = with_heads(BYTE_INPUTS, "image", image.model_copy(update={"max_pixels": 16384}))
    run = make_run(folder, [{"path": "interleaved"}, {"path": "captions"}], max_bad_fraction=0)
    assert not build_index(run, inputs).skipped


def test_text_before_a_target_names_the_digit(folder: Path) -> None:
    with tarfile.open(folder / "interleaved" / "00000.tar") as tar:
        segments = [
            json.load(tar.extractfile(name))["segments"]  # type: ignore[arg-type]
            for name in tar.getnames()
            if name.endswith(".json")
        ]
    before = [
        sample[place - 1]["value"]
        for sample in segments
        for place, segment in enumerate(sample)
        if segment.get("generate")
    ]
    assert before and all(any(value.endswith(f" {word}.") for word in WORDS) for value in before)


@pytest.mark.slow
def test_same_seed_same_bytes(folder: Path, tmp_path: Path) -> None:
    write_sample_data(tmp_path / "again")
    write_sample_data(tmp_path / "other", seed=1)
    assert digest(tmp_path / "again") == digest(folder) != digest(tmp_path / "other")


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match="scikit-learn") as caught:
        write_sample_data(tmp_path)
    assert "pip install 'scikit-learn>=1.5'" in str(caught.value)


@pytest.mark.slow
def test_conversations_show_every_scan_once_and_fit_the_small_families(tmp_path: Path) -> None:
    assert write_sample_talks(tmp_path) == ["talks"]
    messages, pictures = [], 0
    for shard in sorted(tmp_path.rglob("*.tar")):
        with tarfile.open(shard) as tar:
            pictures += sum(name.endswith(".jpg") for name in tar.getnames())
            messages += [
                json.load(tar.extractfile(name))["messages"]  # type: ignore[arg-type]
                for name in tar.getnames()
                if name.endswith(".json")
            ]
    assert pictures == 1797
    answers = [turns[-1]["content"][0]["text"] for turns in messages]
    assert {text for text in answers if text.startswith("It is")} == {
        f"It is {'an' if word == 'eight' else 'a'} {word}." for word in WORDS
    }
    assert {len(turns) for turns in messages} == {2, 4}
    write_sample_talks(tmp_path / "again")
    assert digest(tmp_path / "again") == digest(tmp_path / "talks")
