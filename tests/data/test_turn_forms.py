"""The same conversations in every form of dataset and every form of turns have the same rows of the
index, and are read again as they were indexed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.indexing.building import build_index, open_index
from disttrain_cli.data.reading import ShardReader
from disttrain_cli.data.sources.turn_forms import turns_in, with_turns
from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE
from tests.cases import first_fast
from tests.data.chat_folders import write_folder
from tests.data.dataset import INPUTS, PROPERTY, encoded, make_run, write_tar

WIDE = INPUTS.model_copy(update={"vocabulary": 640, "sequence_length": 256})
PICTURES = [encoded(24, 30, shade=40 * number) for number in range(2)]
#: (question, answer) of conversations of 0, 1 and 2 images, which stand before the first question.
TALKS = [[("Is it?", "A cät.")], [("What?", "A mat."), ("Sure?", "Yes.")], [("Both?", "Two.")]]


def openai(number: int) -> list[dict[str, Any]]:
    marks = "<image>" * number
    turns = []
    for question, answer in TALKS[number]:
        turns.append({"role": "user", "content": marks + question})
        turns.append({"role": "assistant", "content": answer})
        marks = ""
    return turns


def llava(number: int) -> list[dict[str, Any]]:
    sides = {"user": "human", "assistant": "gpt"}
    return [{"from": sides[turn["role"]], "value": turn["content"]} for turn in openai(number)]


def of_each(form: Callable[[int], Any]) -> list[Any]:
    return [form(number) for number in range(3)]


def write_table(folder: Path, **columns: Any) -> None:
    images = [[{"bytes": one, "path": None} for one in PICTURES[:number]] for number in range(3)]
    pq.write_table(pa.table({"images": images, **columns}), folder / "a.parquet")


def write_lines(folder: Path, **columns: Any) -> None:
    for number, picture in enumerate(PICTURES):
        (folder / f"{number}.jpg").write_bytes(picture)
    names = [[f"{at}.jpg" for at in range(number)] for number in range(3)]
    rows = [
        {"images": own, **dict(zip(columns, row, strict=True))}
        for own, row in zip(names, zip(*columns.values(), strict=True), strict=True)
    ]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_members(folder: Path, suffix: str, form: Callable[[int], Any]) -> None:
    files = [("0.jpg", PICTURES[0]), ("1.jpg", PICTURES[1])]
    records = [{"images": [name for name, _ in files[:n]], "messages": form(n)} for n in range(3)]
    texts = [(f"t{n}.{suffix}", json.dumps(one).encode()) for n, one in enumerate(records)]
    write_tar(folder / "a.tar", [*files, *texts])


def pairs(number: int) -> list[dict[str, str]]:
    return [{"user": question, "assistant": answer} for question, answer in TALKS[number]]


FORMS: dict[str, Callable[[Path], None]] = {
    "table": lambda folder: write_table(folder, messages=of_each(openai)),
    "table of strings": lambda folder: write_table(
        folder, conversations=list(map(json.dumps, of_each(llava)))
    ),
    "table of mappings in strings": lambda folder: write_table(
        folder, messages=[json.dumps({"messages": turns}) for turns in of_each(openai)]
    ),
    "table of texts": lambda folder: write_table(
        folder, text=list(map(json.dumps, of_each(openai)))
    ),
    "named column": lambda folder: write_table(
        folder, dialog=of_each(llava), text=["rendered"] * 3, caption=["c"] * 3
    ),
    "named column of strings": lambda folder: write_table(
        folder, dialog=list(map(json.dumps, of_each(llava))), text=["rendered"] * 3
    ),
    "pairs": lambda folder: write_table(folder, texts=of_each(pairs), source=["x"] * 3),
    "lines": lambda folder: write_lines(folder, conversations=of_each(llava)),
    "lines of strings": lambda folder: write_lines(
        folder, messages=list(map(json.dumps, of_each(openai)))
    ),
    "lines of texts": lambda folder: write_lines(
        folder, text=list(map(json.dumps, of_each(llava)))
    ),
    "members": lambda folder: write_members(folder, "json", openai),
    "members of strings": lambda folder: write_members(
        folder, "json", lambda number: json.dumps(llava(number))
    ),
    "members of texts": lambda folder: write_members(folder, "txt", openai),
}


@pytest.mark.slow
@pytest.mark.parametrize("template", first_fast(["vision", "headers", ""]))
def test_all_forms_mean_the_same(tmp_path: Path, template: str) -> None:
    tokens = str(write_folder(tmp_path / "tokens", template)) if template else "bytes"
    expected: list[Any] = []
    for form, write in FORMS.items():
        (tmp_path / form / "data").mkdir(parents=True)
        write(tmp_path / form / "data")
        source = {"path": "data"} | ({"text": "dialog"} if form.startswith("named") else {})
        run = make_run(tmp_path / form, [source], tokenizer=tokens, max_bad_fraction=0.5)
        index = build_index(run, WIDE)
        beside = 2 if form == "members of texts" else 0  # images without a text of their own
        assert len(index.skipped) == beside and (index.templated is None) == (not template), form
        reader = ShardReader(index, read_tokenizer(run))
        texts = [reader.texts(sample) for sample in range(3)]
        images = [
            reader.file(int(np.searchsorted(index.segment_start, at, side="right")) - 1, int(at))
            for at in np.flatnonzero(index.kinds == IMAGE)
        ]
        assert images == [PICTURES[0], *PICTURES], form
        said = [index.kinds.tolist(), index.tokens.tolist(), index.trained.tolist(), texts]
        expected = expected or said
        assert said == expected, form


def test_another_named_column_is_another_index(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    pq.write_table(
        pa.table({"one": ["a", "b"], "two": ["cc", "dd"]}), tmp_path / "data" / "a.parquet"
    )
    said = []
    for name in ("one", "two", "one"):
        run = make_run(tmp_path, [{"path": "data", "text": name}])
        index = open_index(run, INPUTS)
        assert index.unread_keys == [{f"`{'two' if name == 'one' else 'one'}`": 2}]
        said.append(ShardReader(index, read_tokenizer(run)).texts(0))
    assert said == [[[97]], [[99, 99]], [[97]]]
    with pytest.raises(DataError, match="no column has a name of texts or turns"):
        open_index(make_run(tmp_path, [{"path": "data"}]), INPUTS)


@pytest.mark.parametrize("name", ["a.jsonl", "a.tar"])
def test_a_column_is_named_of_tables_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "data").mkdir()
    if name == "a.tar":
        write_tar(tmp_path / "data" / name, [("1.jpg", PICTURES[0]), ("1.txt", b"a")])
    else:
        (tmp_path / "data" / name).write_text('{"text": "a"}')
    with pytest.raises(DataError, match="has no columns") as caught:
        build_index(make_run(tmp_path, [{"path": "data", "text": "caption"}]), INPUTS)
    assert "data.sources[0].text" in caught.value.why


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "messages", "user", "x"]), inner, max_size=3
        )
        | inner.map(json.dumps)
    ),
    max_leaves=8,
)


@given(VALUES)
@PROPERTY
def test_any_value_is_turns_or_stays(value: Any) -> None:
    for record in ({"messages": value}, {"text": value}, value):
        said = with_turns(record)
        if said is not record:
            assert isinstance(said, dict)
            assert with_turns(said) == said
    turns = turns_in(value)
    assert turns is None or all(isinstance(turn, dict) for turn in turns)


@pytest.mark.parametrize(
    "text",
    ['{"messages": "Hi"}', '{"messages": 3}', "[1]", "[]", "{}", '["a"]', "[image]", '[{"a": 1}]'],
)
def test_texts_that_look_like_json_stay(text: str) -> None:
    record = {"text": text}
    assert with_turns(record) is record
