"""The columns of an index say what its Parquet file does and what follows from it; they are made
once, and again where anything changed."""

import os
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from disttrain_cli.data.columns import HEADER
from disttrain_cli.data.index import index_columns
from disttrain_cli.data.index.sample_index import (
    COUNTED,
    DERIVED,
    OF_FILMS,
    OF_PARTS,
    Index,
    read_index,
)
from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile import Run
from tests.data.dataset import INPUTS, interleaved, text, write_tar

MakeRun = Callable[..., Run]


def check_derived(index: Index) -> None:
    """Columns that were derived shard by shard are what follows from all of the index at once."""
    computed = replace(index, known={})
    assert set(COUNTED) <= set(index.known)
    for name in (*DERIVED, *OF_PARTS, *OF_FILMS, *COUNTED):
        assert np.array_equal(getattr(index, name), getattr(computed, name)), name


def same(one: Index, other: Index) -> bool:
    return all(
        np.array_equal(getattr(one, field.name), getattr(other, field.name))
        for field in fields(Index)
        if isinstance(getattr(one, field.name), np.ndarray)
    ) and list(one.keys) == list(other.keys)


@pytest.fixture
def two(own_run: MakeRun) -> Run:
    """Two shards: in the first, a text is longer than a sequence."""
    return own_run(
        {
            "a.tar": [interleaved("long", text("word " * 90)), interleaved("one", text("one"))],
            "b.tar": [interleaved(f"k{n}", text("x" * (n + 1))) for n in range(8)],
        },
        held_out=0.3,
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the folders of columns that are made."""
    names, real = list[str](), index_columns.writing_columns

    def writing(folder: Path) -> Any:
        names.append(folder.name)
        return real(folder)

    monkeypatch.setattr(index_columns, "writing_columns", writing)
    return names


def test_of_every_form(index: Index) -> None:
    check_derived(index)


def test_made_once_and_found_again(two: Run, made: list[str]) -> None:
    index = build_index(two, INPUTS)
    check_derived(index)
    assert index.pieces is not None and 0 < index.held_count < len(index)
    assert same(read_index(two, INPUTS), index) and same(open_index(two, INPUTS), index)
    assert len(made) == 1


def test_again_where_the_index_changed(two: Run, made: list[str]) -> None:
    before = build_index(two, INPUTS)
    write_tar(two.folder / "own" / "c.tar", [interleaved("more", text("more"))])
    after = open_index(two, INPUTS)
    assert len(after) == len(before) + 1 and after.keys[-1] == "more"
    check_derived(after)
    data = two.file.data.model_copy(update={"held_out": 0.0})
    whole = two.model_copy(update={"file": two.file.model_copy(update={"data": data})})
    assert read_index(whole, INPUTS).drawn is None
    assert len(made) == 3
    assert [path.name for path in two.dir.columns.glob("[0-9a-f]*")] == made[-1:]
    assert list(before.keys) == list(after.keys)[:-1]  # what is open stays readable
    two.dir.index.unlink()
    with pytest.raises(DataError, match="There is no sample index"):
        read_index(two, INPUTS)


@pytest.mark.parametrize("damaged", ["lengths", "keys", HEADER, ""])
def test_what_is_cut_off_is_made_anew(two: Run, made: list[str], damaged: str) -> None:
    index = build_index(two, INPUTS)
    expected = list(index.keys), index.lengths.tolist()
    path = two.dir.columns / made[0] / damaged
    if damaged:
        os.truncate(path, path.stat().st_size - 1)
    else:
        shutil.rmtree(path)
    again = read_index(two, INPUTS)
    assert (list(again.keys), again.lengths.tolist()) == expected and len(made) == 2
