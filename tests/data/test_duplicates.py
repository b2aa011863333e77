"""Of samples that say the same only the first is used; whatever form they lie in."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.duplicates import of_samples, repeated
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index, held_out
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.packing import pack
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import (
    INPUTS,
    PROPERTY,
    encoded,
    image,
    interleaved,
    make_run,
    text,
    write_tar,
)

SAMPLES = st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=4))


@given(samples=SAMPLES)
@PROPERTY
def test_the_first_of_equal_samples_stays(samples: list[list[tuple[int, int]]]) -> None:
    flat = np.array([one for sample in samples for one in sample], np.int64).reshape(-1, 2)
    start = np.cumsum([0, *map(len, samples)])
    again = repeated(of_samples(start, flat[:, 0], flat[:, 1]))
    assert again.tolist() == [samples.index(one) < at for at, one in enumerate(samples)]


def used(index: Index) -> list[str]:
    return sorted(index.keys[int(one)] for one in pack(Mixture(index, 0), 0).samples)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Samples of two shards; d says what a says, g what f says, and h what e says."""
    one, other = encoded(40, 40), encoded(40, 40, shade=9)
    captions = [("a", one, "red"), ("b", one, "blue"), ("c", other, "red"), ("d", one, "red")]
    files = [
        (f"{key}{suffix}", data)
        for key, picture, said in captions
        for suffix, data in ((".jpg", picture), (".txt", said.encode()))
    ]
    write_tar(tmp_path / "own" / "0.tar", files)
    segments: list[dict[str, Any]] = [text("red"), image("x.jpg")]
    samples = [
        interleaved("e", *segments),
        ("x.jpg", one),
        interleaved("f", text("long " * 40)),
        interleaved("g", text("long " * 40)),
        interleaved("h", *segments),
    ]
    write_tar(tmp_path / "own" / "1.tar", samples)
    return make_run(tmp_path, [{"path": "own"}], deduplicate=True)


def test_samples_that_repeat_others_are_not_drawn(run: Run) -> None:
    assert used(build_index(run, INPUTS)) == ["a", "b", "c", "e", "f", "f"]  # f is in two pieces
    index = open_index(run, INPUTS)
    assert index.repeated_count == 4 and used(index) == ["a", "b", "c", "e", "f", "f"]
    without = make_run(run.folder, [{"path": "own"}])
    all_ = build_index(without, INPUTS)
    assert all_.repeated is None and len(used(all_)) == 10
    assert all_.fingerprint != index.fingerprint


@pytest.mark.slow
def test_processes_find_the_same(run: Run) -> None:
    alone = build_index(run, INPUTS, processes=0)
    written = run.dir.index.read_bytes()
    assert build_index(run, INPUTS, processes=2).fingerprint == alone.fingerprint
    assert run.dir.index.read_bytes() == written


def test_nothing_held_out_is_a_repetition(run: Run) -> None:
    half = make_run(run.folder, [{"path": "own"}], deduplicate=True, held_out=0.5)
    index = build_index(half, INPUTS)
    trained, held = used(index), used(held_out(index))
    assert sorted(trained + held) == ["a", "b", "c", "e", "f", "f"] and trained and held
    assert index.held_count == len(held)
