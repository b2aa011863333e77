"""Samples are held out by their keys: the same ones whatever else there is, and never in a training
sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.held_out import chosen, hashes
from disttrain_cli.data.index import build_index, held_out, read_index
from disttrain_cli.data.packing import pack
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import INPUTS, PROPERTY, interleaved, text

SHARDS = {
    name: [interleaved(f"{name}{n:03d}", text("Words, and more words. " * 3)) for n in range(60)]
    for name in "ab"
}


@given(st.lists(st.text(max_size=12), max_size=40), st.integers(0, 40))
@PROPERTY
def test_a_key_has_one_hash_wherever_it_stands(keys: list[str], cut: int) -> None:
    whole = hashes(pa.array(keys, pa.string()))
    parts = [pa.array(keys, pa.string())[:cut], pa.array(keys, pa.string())[cut:]]
    assert np.array_equal(whole, np.concatenate([hashes(part) for part in parts]))
    by_key = dict(zip(keys, whole.tolist(), strict=True))
    assert [by_key[key] for key in keys] == whole.tolist() and len(set(by_key.values())) == len(
        by_key
    )


def test_hashes_stay_what_they_are() -> None:
    """Another hash would put samples into training that were held out before."""
    assert hashes(pa.array(["", "000017", "ä"])).tolist() == [
        16294208416658607535,
        6908622863927597454,
        14576766600866752650,
    ]


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
def test_about_the_fraction_is_chosen(fraction: float) -> None:
    keys = pa.chunked_array([pa.array([f"{number:08d}" for number in range(20_000)])])
    assert abs(chosen(keys, fraction).mean() - fraction) < 4 * np.sqrt(
        fraction * (1 - fraction) / 20_000
    )


def test_training_and_evaluation_share_no_sample(own_run: Callable[..., Run]) -> None:
    run = own_run({"a.tar": SHARDS["a"]}, held_out=0.3)
    index = build_index(run, INPUTS)
    training, evaluation = (
        set(pack(Mixture(each, 0), 0).samples) for each in (index, held_out(index))
    )
    assert not training & evaluation and training | evaluation == set(range(60))
    assert 0.1 < len(evaluation) / 60 < 0.5


def test_more_shards_keep_the_choice(own_run: Callable[..., Run]) -> None:
    def kept(run: Run) -> set[str]:
        index = held_out(build_index(run, INPUTS))
        return {index.keys[row] for row in pack(Mixture(index, 0), 0).samples}

    before = kept(own_run({"b.tar": SHARDS["b"]}, held_out=0.2))
    after = kept(own_run({"a.tar": SHARDS["a"], "b.tar": SHARDS["b"]}, held_out=0.2))
    assert before == {key for key in after if key.startswith("b")} and len(after) > len(before)


def test_nothing_held_out_changes_nothing(own_run: Callable[..., Run]) -> None:
    run = own_run({"a.tar": SHARDS["a"]})
    index = build_index(run, INPUTS)
    assert index.drawn is None
    with pytest.raises(DataError, match="No sample is held out"):
        held_out(index)
    data = run.file.data.model_copy(update={"held_out": 0.3})
    split = read_index(
        run.model_copy(update={"file": run.file.model_copy(update={"data": data})}), INPUTS
    )
    assert split.fingerprint != index.fingerprint
    packed = [pack(Mixture(each, 0), 0) for each in (index, replace(split, drawn=None))]
    assert np.array_equal(packed[0].samples, packed[1].samples)
