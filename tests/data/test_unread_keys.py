"""Keys and columns that no reader knows are counted by name, in every form of dataset."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.unread_keys import MOST_NAMES, OTHERS, described, merged
from tests.data.chat_folders import write_folder
from tests.data.dataset import INPUTS, encoded, make_run, write_tar

WIDE = INPUTS.model_copy(update={"vocabulary": 640, "sequence_length": 256})
RECORDS: list[dict[str, Any]] = [
    {
        "id": 1,
        "source": "web",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": "no"}]},
            {"role": "assistant", "content": "Hello", "mood": "good"},
        ],
    },
    {
        "id": 2,
        "source": "",
        "score": 0,
        "messages": [
            {"role": "user", "content": "Hi", "mood": "bad", "name": None},
            {"role": "assistant", "content": "Hello", "mood": "good"},
        ],
    },
    {
        "id": 3,
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}],
    },
]
COUNTED = {"turn key `mood`": 2, "`score`": 1, "`source`": 1, "part key `cache_control`": 1}


def write(folder: Path, form: str) -> None:
    folder.mkdir()
    lines = list(map(json.dumps, RECORDS))
    if form == "json":
        (folder / "a.json").write_text(f"[{','.join(lines)}]")
    elif form == "jsonl":
        (folder / "a.jsonl").write_text("\n".join(lines))
    else:
        write_tar(folder / "a.tar", [(f"{n}.json", line.encode()) for n, line in enumerate(lines)])


@pytest.mark.parametrize("template", [False, True])
@pytest.mark.parametrize("form", ["json", "jsonl", "tar"])
def test_keys_of_records_turns_and_parts(tmp_path: Path, form: str, template: bool) -> None:
    write(tmp_path / "data", form)
    tokenizer = str(write_folder(tmp_path / "tokens", "vision")) if template else "bytes"
    run = make_run(tmp_path, [{"path": "data"}], tokenizer=tokenizer)
    assert build_index(run, WIDE).unread_keys == [COUNTED]
    assert read_index(run, WIDE).unread_keys == [COUNTED]


def test_members_of_tars_and_keys_of_their_json(tmp_path: Path) -> None:
    picture = encoded(20, 30)
    caption = json.dumps({"caption": "a", "width": 20, "sha256": None}).encode()
    segments = [{"type": "text", "value": "a", "lang": "en"}, {"type": "text", "value": "b"}]
    files = [
        *(("0.jpg", picture), ("0.png", picture), ("0.json", caption), ("0.cls", b"7")),
        ("1.json", json.dumps({"segments": segments, "id": 1, "crawl": 3}).encode()),
    ]
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "a.tar", files)
    names = ["member `.cls`", "member `.png`", "segment key `lang`", "`crawl`", "`width`"]
    run = make_run(tmp_path, [{"path": "data"}])
    assert build_index(run, INPUTS).unread_keys == [dict.fromkeys(names, 1)]


def test_columns_and_sources(tmp_path: Path) -> None:
    for name in ("pairs", "chats", "texts"):
        (tmp_path / name).mkdir()
    picture = pa.array([encoded(20, 30)] * 3, pa.binary())
    pairs = pa.table({"image": picture, "text": ["a"] * 3, "license": ["x"] * 3})
    pq.write_table(pairs, tmp_path / "pairs" / "a.parquet")
    turn = {"role": "assistant", "content": "a", "mood": None}
    table = pa.table({"messages": [[turn], [turn | {"mood": "b"}]], "origin": ["x"] * 2})
    pq.write_table(table, tmp_path / "chats" / "a.parquet")
    (tmp_path / "texts" / "a.jsonl").write_text('{"text": "a", "id": 1}\n' * 2)
    run = make_run(tmp_path, [{"path": "pairs"}, {"path": "chats"}, {"path": "texts"}])
    index = build_index(run, INPUTS)
    counted = [{"`license`": 3}, {"`origin`": 2, "turn key `mood`": 1}, {}]
    assert index.unread_keys == counted
    assert described(counted) == [
        "ignored in data.sources[0]: `license` in 3 records",
        "ignored in data.sources[1]: `origin` in 2 records, turn key `mood` in 1",
    ]
    assert described([{"`a`": 1200}]) == ["ignored: `a` in 1,200 records"]


def test_names_are_bounded_and_printable(tmp_path: Path) -> None:
    records = [
        {"text": "a", f"key {number}\x1b" + "x" * 99: 1, "lang": "en"} for number in range(2000)
    ]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    (counts,) = build_index(make_run(tmp_path, [{"path": "data"}]), INPUTS).unread_keys
    assert counts["`lang`"] == 2000 and sum(counts.values()) == 4000
    assert len(counts) == MOST_NAMES + 1 and counts[OTHERS] == 2000 - MOST_NAMES + 1
    assert all(name.isprintable() and len(name) < 60 for name in counts)
    assert merged([counts, {"`lang`": 1, "b": 5}])[OTHERS] == counts[OTHERS] + 1
