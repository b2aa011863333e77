"""Samples without an object for each segment are those of the plain way, record for record: the
same segments, errors and rows of the index, in any order among others."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.indexing.index_rows import shard_rows
from disttrain_cli.data.sources import Compact, Sample, Shard, Skipped, llava, read_shard
from disttrain_cli.data.sources import rows as room
from disttrain_cli.data.tokenizer import ByteTokenizer
from tests.data.dataset import INPUTS, PROPERTY, encoded
from tests.data.sources.forms import read_one_by_one

PICTURES = {"a.jpg": encoded(40, 24, ".jpg"), "b.png": encoded(24, 60, ".png"), "cut.jpg": b"\xff"}
#: Without images, with few tokens, and as it is.
MODELS = [
    INPUTS.model_copy(update={"heads": [INPUTS.target]}),
    INPUTS.model_copy(update={"sequence_length": 20}),
    INPUTS,
]
SAID = st.lists(
    st.sampled_from(["", " ", "a", "wörd", "<image>", "<video>", "\n", "\ud800", chr(0x10FFFD)]),
    max_size=4,
).map("".join)
WHO = st.sampled_from(["human", "gpt", "user", "assistant", "system", "tool", ["gpt"], None])
TURN = st.one_of(
    st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt"]), "value": SAID}),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system"]), "content": SAID}
    ),
    st.fixed_dictionaries(
        {"from": WHO, "value": SAID},
        optional={
            "weight": st.sampled_from([0, 1, 2]),
            "loss": st.booleans(),
            "role": WHO,
            "tool_calls": st.just([1]),
        },
    ),
    st.fixed_dictionaries({"role": WHO, "content": st.lists(st.just({"type": "image"}))}),
    st.sampled_from(["hi", 7, None, [], {}]),
)
#: Most are of one kind, as they are found.
TURNS = st.one_of(
    st.lists(
        st.fixed_dictionaries({"from": st.sampled_from(["human", "gpt"]), "value": SAID}),
        max_size=5,
    ),
    st.lists(TURN, max_size=3),
)
NAMES = st.sampled_from(["a.jpg", "b.png", "cut.jpg", "gone.jpg", "../a.jpg"])
RECORD = st.one_of(
    st.fixed_dictionaries(
        {"conversations": TURNS},
        optional={
            "id": st.one_of(st.integers(), st.text(max_size=3), st.none()),
            "image": st.one_of(NAMES, st.lists(NAMES, max_size=2), st.just(3), st.none()),
            "images": st.lists(NAMES, max_size=2),
            "system": st.sampled_from(["", "be nice", 5]),
            "tools": st.just([1]),
            "messages": TURNS,
            "video": st.sampled_from([None, "a.mp4"]),
            "source": st.sampled_from([None, "", 0, "web"]),
            "label": st.sampled_from([True, 3, None]),
            "weight": st.sampled_from([0, 1]),
            "rejected": st.sampled_from(["", "no", None]),
            "file_name": NAMES,
        },
    ),
    st.fixed_dictionaries({"messages": TURNS}, optional={"images": st.lists(NAMES, max_size=2)}),
    st.fixed_dictionaries({"text": SAID}, optional={"image": NAMES}),
    st.sampled_from([{}, {"conversations": {}}]),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    for name, content in PICTURES.items():
        (path / name).write_bytes(content)
    return path


def read(shard: Shard) -> Iterator[Any]:
    return read_shard(shard, "shard")


def described(shard: Shard) -> tuple[list[Any], list[Any]]:
    """(samples and what is left out, in order; rows and what is left out for each model)."""
    found = list(read_one_by_one(shard, "shard"))
    rows = []
    for inputs in MODELS:
        table, skipped, *counts = shard_rows(read(shard), "shard", inputs, ByteTokenizer())
        rows.append((table.to_pydict(), skipped, *map(Counter, counts)))
    return found, rows


def compared(shard: Shard, room: Any, name: str, plain: Any) -> list[Any]:
    """Samples of a shard, which are the same where the plain way takes the place of a function."""
    brief = described(shard)
    kinds = list(read(shard))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(room, name, plain)
        assert not any(isinstance(one, Compact) for one in read(shard))
        assert described(shard) == brief
    return kinds


@pytest.mark.slow
@PROPERTY
@given(records=st.lists(RECORD, max_size=6), lines=st.booleans())
def test_conversations(folder: Path, records: list[Any], lines: bool) -> None:
    content = "\n".join(map(json.dumps, records)) if lines else json.dumps(records)
    path = folder / f"chat.json{'l' * lines}"
    path.write_text(content)
    shard = Shard("llava", str(path), path.name, str(folder))
    compared(shard, llava, "compact", lambda record: None)


def test_usual_ones_are_compact(folder: Path) -> None:
    """Else the other tests show nothing."""
    turns = [
        {"from": "human", "value": "<image> what?"},
        {"from": "gpt", "value": "a dög"},
        {"from": "human", "value": "sure?"},
        {"from": "gpt", "value": "yes"},
    ]
    records = [
        {"id": 1, "image": "a.jpg", "conversations": turns, "source": "x"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]},
        {"id": 3, "image": "a.jpg", "conversations": turns[1:]},
    ]
    path = folder / "usual.json"
    path.write_text(json.dumps(records))
    shard = Shard("llava", str(path), path.name, str(folder))
    found = compared(shard, llava, "compact", lambda record: None)
    assert [type(one) for one in found] == [Compact, Compact, Skipped]


CELLS = st.fixed_dictionaries(
    {
        "image": st.sampled_from([*PICTURES.values(), b"", None]),
        "text": st.sampled_from(["a", "", "wörd", "x" * 30, None]),
    }
)


def one_by_one(
    batch: Any, columns: Any, first: int, label: str, chat: Any
) -> Iterator[Sample | Skipped]:
    """The plain way of `rows._together`."""
    for row, cells in enumerate(room._pairs(batch, columns), first):
        try:
            yield room._sample(f"row {row}", row, cells, columns, chat)
        except ValueError as error:
            yield Skipped(label, f"row {row}", str(error))


@pytest.mark.slow
@PROPERTY
@given(
    rows=st.lists(CELLS, max_size=12),
    group=st.integers(1, 8),
    form=st.sampled_from(
        [pa.binary(), pa.large_binary(), pa.struct([("path", pa.string()), ("bytes", pa.binary())])]
    ),
)
def test_pairs_of_a_table(folder: Path, rows: list[Any], group: int, form: pa.DataType) -> None:
    path = folder / "pairs.parquet"
    images = [row["image"] for row in rows]
    if pa.types.is_struct(form):
        images = [None if image is None else {"bytes": image} for image in images]
    texts = pa.array([row["text"] for row in rows], pa.string())
    table = pa.table({"image": pa.array(images, form), "text": texts})
    pq.write_table(table, path, row_group_size=group)
    shard = Shard("parquet", str(path), path.name)
    found = compared(shard, room, "_together", one_by_one)
    usable = [row for row in rows if len(row["image"] or b"") > 1 and row["text"]]
    compact = [one for one in found if isinstance(one, Compact)]
    assert sum(len(one.keys) for one in compact) == len(usable)
    assert len(compact) <= 1 + len(rows) - len(usable)


def test_what_is_left_out_is_in_the_order_of_rows(folder: Path) -> None:
    texts = ["long " * 30 if row % 3 == 0 else None if row % 3 == 1 else "a" for row in range(1100)]
    path = folder / "many.parquet"
    images = pa.array([PICTURES["a.jpg"]] * len(texts), pa.binary())
    pq.write_table(pa.table({"image": images, "text": texts}), path)
    shard = Shard("parquet", str(path), path.name)
    table, skipped, *_ = shard_rows(read(shard), "shard", INPUTS, ByteTokenizer())
    rows = range(len(texts))
    assert [one.key for one in skipped] == [f"row {row}" for row in rows if row % 3 < 2]
    assert table.column("key").to_pylist() == [f"row {row}" for row in rows if row % 3 == 2]


def test_rows_of_empty_lists_are_named(folder: Path) -> None:
    path = folder / "lists.parquet"
    lists = {"images": pa.array([[], [None]], pa.list_(pa.binary())), "texts": [[], ["a"]]}
    pq.write_table(pa.table(lists), path)
    shard = Shard("parquet", str(path), path.name)
    reading = INPUTS.model_copy(update={"heads": [INPUTS.image]})
    table, skipped, *_ = shard_rows(read(shard), "shard", reading, ByteTokenizer())
    assert [one.key for one in skipped] == ["row 0"] and len(table) == 1
