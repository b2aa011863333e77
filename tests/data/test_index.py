"""The index says what the shards hold, names what it skips, and refuses data that changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.data.index import Index, build_index, open_index, read_index
from disttrain_cli.errors import DataError, MismatchError, SpecError
from disttrain_cli.spec.index import COLUMNS, IMAGE, TARGET, TEXT
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import INPUTS, encoded, image, interleaved, make_run, text, write_dataset, write_tar

MakeRun = Callable[..., Run]


def test_rows(own_run: MakeRun) -> None:
    run = own_run({"a.tar": [interleaved("s", text("häh"), image("s.0.jpg"), image("s.1.png", True), text("!")),
                             ("s.0.jpg", encoded(64, 32)), ("s.1.png", encoded(99, 99, ".png"))]})
    index = build_index(run, INPUTS)
    assert index.kinds.tolist() == [TEXT, IMAGE, TARGET, TEXT]
    assert index.tokens.tolist() == [4, 8, 4, 1]
    assert index.grids.tolist() == [[0, 0], [4, 8], [0, 0], [0, 0]]
    assert index.lengths.tolist() == [4 + 8 + 4 + 1 + 2]
    assert index.label_tokens.tolist() == [4 + 1 + 1]
    assert index.keys == ["s"]


def test_reading_back_is_the_same(run: Run, index: Index) -> None:
    import pyarrow.parquet as pq

    assert tuple(pq.read_schema(run.dir.index).names) == COLUMNS
    again = read_index(run, INPUTS)
    assert again.fingerprint == index.fingerprint and again.keys == index.keys and len(index) == 46
    for name in ("source", "shard", "segment_start", "kinds", "tokens", "offsets", "sizes", "grids"):
        assert np.array_equal(getattr(again, name), getattr(index, name))


def test_fingerprint_follows_content_not_place(tmp_path: Path, index: Index) -> None:
    write_dataset(tmp_path)
    run = make_run(tmp_path)
    assert build_index(run, INPUTS).fingerprint == index.fingerprint
    weighted = make_run(tmp_path, [{"path": "mixed", "weight": 2}, {"path": "captions"}])
    assert build_index(weighted, INPUTS).fingerprint != index.fingerprint


def test_images_without_a_module_are_left_out(own_run: MakeRun) -> None:
    run = own_run({"a.tar": [interleaved("0", text("a"), image("0.jpg")), ("0.jpg", encoded(20, 20)),
                             interleaved("1", image("0.jpg"))]}, max_bad_fraction=0.5)
    index = build_index(run, INPUTS.model_copy(update={"image": None}))
    assert index.kinds.tolist() == [TEXT] and [s.key for s in index.skipped] == ["1"]


def test_images_without_any_text_are_refused(own_run: MakeRun) -> None:
    run = own_run({"a.tar": [interleaved("0", image("0.jpg"), text("")), ("0.jpg", encoded(20, 20))]})
    with pytest.raises(DataError, match="no text"):
        build_index(run, INPUTS)
    assert not run.dir.index.exists()


def test_an_index_is_built_where_none_fits(run: Run, index: Index, own_run: MakeRun) -> None:
    assert open_index(run, INPUTS).fingerprint == index.fingerprint
    new = own_run({"a.tar": [interleaved("0", text("ab"))]})
    assert open_index(new, INPUTS).keys == ["0"] and new.dir.index.exists()
    longer = INPUTS.model_copy(update={"sequence_length": 256})
    assert open_index(new, longer).inputs == longer


def test_too_long_samples_are_named(own_run: MakeRun) -> None:
    files = [interleaved("fits", text("a" * 126)), interleaved("long", text("a" * 127))]
    index = build_index(own_run({"a.tar": files}, max_bad_fraction=0.5), INPUTS)
    assert index.keys == ["fits"] and index.skipped[0].key == "long" and "129 of at most 128" in index.skipped[0].reason


def test_stops_past_the_bad_fraction(own_run: MakeRun) -> None:
    files = [*(interleaved(f"{n}", text("fine")) for n in range(9)), ("broken.json", b"{")]
    assert len(build_index(own_run({"a.tar": files}, max_bad_fraction=0.1), INPUTS)) == 9
    with pytest.raises(DataError, match="1 of 10 samples") as caught:
        build_index(own_run({"a.tar": files}, max_bad_fraction=0.09), INPUTS)
    assert "a.tar/broken: not valid JSON" in str(caught.value)


def test_nothing_usable(own_run: MakeRun) -> None:
    with pytest.raises(DataError, match="no usable sample"):
        build_index(own_run({"a.tar": []}, max_bad_fraction=1), INPUTS)


@pytest.mark.parametrize("change", ["content", "time", "new", "gone"])
def test_changed_data_is_refused(tmp_path: Path, change: str) -> None:
    write_dataset(tmp_path)
    run = make_run(tmp_path)
    build_index(run, INPUTS)
    shard = tmp_path / "mixed" / "00000.tar"
    if change == "content":
        shard.write_bytes(shard.read_bytes() + bytes(512))
    elif change == "time":
        os.utime(shard, (1, 1))
    elif change == "new":
        write_tar(shard.with_name("00002.tar"), [])
    else:
        shard.unlink()
    with pytest.raises(MismatchError, match="changed since it was indexed") as caught:
        read_index(run, INPUTS)
    assert ("00002.tar: new" if change == "new" else "00000.tar") in str(caught.value)
    assert "files " in str(caught.value) and ", now " in str(caught.value)
    assert "disttrain profile" in str(caught.value)


def test_other_model_or_sources_are_refused(run: Run, index: Index) -> None:
    with pytest.raises(MismatchError, match="another run file") as caught:
        read_index(run, INPUTS.model_copy(update={"sequence_length": 256}))
    assert "model inputs" in str(caught.value)
    with pytest.raises(MismatchError, match=r"data\.sources"):
        read_index(make_run(run.folder, [{"path": "mixed"}]), INPUTS)


def test_missing_and_damaged_index(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(DataError, match="no sample index"):
        read_index(run, INPUTS)
    run.dir.index.parent.mkdir(parents=True)
    run.dir.index.write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match="Cannot read the sample index"):
        read_index(run, INPUTS)


def test_vocabulary_must_hold_the_tokenizer(run: Run) -> None:
    with pytest.raises(SpecError, match="does not fit the model") as caught:
        build_index(run, INPUTS.model_copy(update={"vocabulary": 256}))
    assert "261" in str(caught.value)
