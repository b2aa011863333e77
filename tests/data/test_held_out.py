"""Samples are held out by source, shard and key: the same ones whatever else there is, never in a
training sequence, and as many as asked for at any size of the shards."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.held_out import chosen, hashes
from disttrain_cli.data.index.sample_index import Index, held_out, read_index
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.packing import pack
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile import Run
from tests.cases import first_fast
from tests.data.dataset import INPUTS, PROPERTY, interleaved, make_run, text, write_tar

MASK = (1 << 64) - 1
SHARDS = {
    name: [interleaved(f"{name}{n:03d}", text("Words, and more words. " * 3)) for n in range(60)]
    for name in "ab"
}


def plain_hash(key: bytes) -> int:
    """As `hashes`, of one key and with Python's integers."""
    state = plain_mix(0, len(key))
    for at in range(0, len(key), 8):
        state = plain_mix(state, int.from_bytes(key[at : at + 8], "little"))
    return state


def plain_mix(*values: int) -> int:
    state = 0
    for value in values:
        state = ((state ^ value) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


@given(st.lists(st.text(max_size=20), max_size=40), st.integers(0, 40))
@PROPERTY
def test_a_key_has_one_hash_wherever_it_stands(keys: list[str], cut: int) -> None:
    whole = hashes(pa.array(keys, pa.string()))
    assert [plain_hash(key.encode()) for key in keys] == whole.tolist()
    parts = [pa.array(keys, pa.string())[:cut], pa.array(keys, pa.string())[cut:]]
    assert np.array_equal(whole, np.concatenate([hashes(part) for part in parts]))
    by_key = dict(zip(keys, whole.tolist(), strict=True))
    assert [by_key[key] for key in keys] == whole.tolist() and len(set(by_key.values())) == len(
        by_key
    )


def test_hashes_stay_what_they_are() -> None:
    """Another hash would put samples into training that were held out before."""
    assert hashes(pa.array(["", "000017", "ä"]), 7).tolist() == [
        13309476754707697221,
        303214299996668046,
        15010351823225053340,
    ]
    keys = [f"row {row}" for row in range(40)]
    assert np.flatnonzero(choice(keys, 0.1, source=1, shard="a.parquet")).tolist() == [5, 26, 32]


def choice(keys: list[str], fraction: float, source: int = 0, shard: str = "a") -> Any:
    pieces = np.zeros(len(keys), dtype=bool)
    return chosen(pa.chunked_array([keys], pa.string()), source, shard, fraction, pieces)


def is_share(chosen: Any, fraction: float) -> bool:
    """True if the share is right within four standard deviations of a binomial."""
    return abs(np.mean(chosen) - fraction) < 4 * np.sqrt(fraction * (1 - fraction) / len(chosen))


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5])
@pytest.mark.parametrize(
    ("shards", "keys"),
    [
        (1, [f"{number:08d}" for number in range(20_000)]),
        (400, [f"row {row}" for row in range(4)]),
        (800, ["row 0"]),
        (200, [f"record {number}" for number in range(100)]),
        (400, [f"{number:04d}" for number in range(20)]),
        (400, ["same"] * 10),
        (1, ["same"] * 20_000),
    ],
)
def test_the_share_is_right_at_any_shard_size(
    fraction: float, shards: int, keys: list[str]
) -> None:
    """Over all samples, and over those of each key."""
    of_shards = np.stack([choice(keys, fraction, 3, f"{number:05d}.x") for number in range(shards)])
    assert is_share(of_shards.ravel(), fraction)
    if shards > 1:
        assert all(is_share(column, fraction) for column in of_shards.T)
        # held-out samples of a shard vary as independent draws do
        spread = of_shards.sum(axis=1).var() / (len(keys) * fraction * (1 - fraction))
        assert 0.6 < spread < 1.5


def test_sources_shards_and_keys_are_chosen_independently() -> None:
    """Of two shards or sources with the same keys, the share of samples held out of both is the
    product."""
    keys = [f"row {row}" for row in range(20_000)]
    one, shard, source = (
        choice(keys, 0.3, source=number, shard=name)
        for number, name in ((0, "a"), (0, "b"), (1, "a"))
    )
    for other in (shard, source):
        assert is_share(one & other, 0.09)


def write_shards(folder: Path, form: str) -> int:
    """A dataset whose keys repeat from shard to shard; how many samples it has."""
    folder.mkdir()
    shards, rows = {"rows": (40, 4), "row": (20, 1), "tars": (40, 4), "same id": (1, 400)}.get(
        form, (4, 40)
    )
    for shard in range(shards):
        texts = [f"shard {shard} row {row} word" for row in range(rows)]
        if form == "tars":
            files = [interleaved(f"{row:04d}", text(said)) for row, said in enumerate(texts)]
            write_tar(folder / f"{shard:03d}.tar", files)
        elif form.startswith("row"):
            pq.write_table(pa.table({"text": texts}), folder / f"{shard:03d}.parquet")
        else:
            same = {"id": 7} if form == "same id" else {}
            records = [{**same, "text": said} for said in texts]
            (folder / f"{shard:03d}.json").write_text(json.dumps(records))
    return shards * rows


@pytest.mark.parametrize("form", first_fast(["rows", "row", "tars", "lists", "same id"], 2))
def test_shards_with_the_same_keys(tmp_path: Path, form: str) -> None:
    count = write_shards(tmp_path / "data", form)
    index = build_index(make_run(tmp_path, [{"path": "data"}], held_out=0.3), INPUTS)
    assert index.drawn is not None and len(index) == count
    assert is_share(~index.drawn, 0.3)


def held(index: Index) -> set[tuple[int, str, str]]:
    assert index.drawn is not None
    return {
        (int(index.source[row]), index.shards[index.shard[row]].name, index.keys[row])
        for row in np.flatnonzero(~index.drawn).tolist()
    }


@pytest.mark.slow
def test_the_choice_stays_where_shards_sources_and_folders_change(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", "rows")
    before = held(build_index(make_run(tmp_path, [{"path": "data"}], held_out=0.3), INPUTS))
    (tmp_path / "data").rename(tmp_path / "moved")
    pq.write_table(pa.table({"text": ["more"] * 50}), tmp_path / "moved" / "0.parquet")
    write_shards(tmp_path / "others", "tars")
    sources = [{"path": "moved"}, {"path": "others", "name": "others"}]
    after = held(build_index(make_run(tmp_path, sources, held_out=0.3), INPUTS))
    assert before == {one for one in after if one[0] == 0 and one[1] != "0.parquet"}


@pytest.mark.slow
def test_a_file_of_two_sources_is_held_out_of_both(tmp_path: Path) -> None:
    write_shards(tmp_path / "data", "rows")
    os.symlink(tmp_path / "data" / "003.parquet", tmp_path / "linked.parquet")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    sources = [{"path": name} for name in ("data", "data", "data/007.parquet", "linked.parquet")]
    run = make_run(tmp_path, [*sources, {"path": "copy"}], held_out=0.3)
    index = build_index(run, INPUTS)
    of_all = held(index)
    by_source = [{one[1:] for one in of_all if one[0] == source} for source in range(5)]
    assert by_source[0] == by_source[1] and by_source[0] != by_source[4]
    for source, first in ((2, "007.parquet"), (3, "003.parquet")):
        assert {(first, key) for _, key in by_source[source]} == {
            one for one in by_source[0] if one[0] == first
        }
    assert held(read_index(run, INPUTS)) == of_all == held(open_index(run, INPUTS))


@pytest.mark.parametrize("same", [False, True])
def test_pieces_of_a_document_stay_together(tmp_path: Path, same: bool) -> None:
    """Also where all documents of a shard have one name."""
    (tmp_path / "data").mkdir()
    records = [
        {"id": 7 if same else number, "text": "word " * (60 if number % 3 else 3)}
        for number in range(300)
    ]
    (tmp_path / "data" / "a.json").write_text(json.dumps(records))
    index = build_index(make_run(tmp_path, [{"path": "data"}], held_out=0.3), INPUTS)
    assert index.drawn is not None and index.pieces is not None and len(index) > 450
    documents = np.cumsum(index.pieces[:, 0] == 0) - 1
    first = np.searchsorted(documents, documents)
    assert np.array_equal(index.drawn, index.drawn[first])
    assert is_share(~index.drawn[np.flatnonzero(index.pieces[:, 0] == 0)], 0.3)


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
