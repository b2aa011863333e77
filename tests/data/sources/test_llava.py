"""Conversations: what cannot be used is named, images stay inside their folder, lists are read in
pieces."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.sources import (
    RowGroups,
    Sample,
    Shard,
    Skipped,
    list_source,
    llava,
    open_shard,
)
from disttrain_cli.data.sources.chats import conversation
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, TEXT
from tests.data.dataset import PROPERTY, encoded
from tests.data.sources.forms import read_one_by_one, write_llava


def turns(*said: str, **record: Any) -> dict[str, Any]:
    return {
        "id": "x",
        "conversations": [
            {"from": ("human", "gpt")[n % 2], "value": value} for n, value in enumerate(said)
        ],
        **record,
    }


def read(
    folder: Path, content: bytes | list[Any], name: str = "chat.json"
) -> tuple[list[str], dict[str, str]]:
    """(keys of the samples, reasons by key) of a JSON in a folder with a.jpg and sub/b.png."""
    write_llava(folder)
    (folder / name).write_bytes(
        content if isinstance(content, bytes) else json.dumps(content).encode()
    )
    found = list(read_one_by_one(Shard("llava", str(folder / name), name, str(folder)), name))
    skipped = [one for one in found if isinstance(one, Skipped)]
    assert all(one.shard == name for one in skipped)
    return [one.key for one in found if not isinstance(one, Skipped)], {
        one.key: one.reason for one in skipped
    }


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (turns("<image>", "a"), "1 occurrences of <image> for 0 images"),
        (turns("no mark", "a", image="a.jpg"), "0 occurrences of <image> for 1 images"),
        (turns("<image><image>", "a", image=["a.jpg"]), "2 occurrences"),
        (turns("<image>", "a", image="gone.jpg"), "gone.jpg cannot be opened: No such file"),
        (turns("<image>", "a", image="sub"), "sub cannot be opened: not a regular file"),
        (turns("<image>", "a", image="chat.json"), "chat.json: not a JPEG"),
        (turns("<image>", "a", image={"file": "a.jpg"}), "`image` must be"),
        (turns("<image>", "a", image=[1]), "`image` must be"),
        ({"id": "x"}, "`conversations` or `messages` with at least"),
        ({"id": "x", "text": ""}, "non-empty"),
        ({"id": "x", "text": ["a"]}, "`text` must be"),
        ({"id": "x", "text": "a", "file_name": "../secret.jpg"}, "points outside"),
        ({"id": "x", "conversations": []}, "at least one turn"),
        (turns("a", "b", system=5), "system must have"),
        (
            {"id": "x", "messages": [{"role": "user", "content": [{"type": "tool"}]}]},
            "messages[0] has a part of the type 'tool', which is not supported",
        ),
        (
            {"id": "x", "messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "1 occurrences of <image> for 0 images",
        ),
        (turns("<image>", "a", images="gone.jpg"), "gone.jpg cannot be opened"),
        ({"id": "x", "caption": "of nothing"}, "or a `text`"),
        ({"id": "x", "file_name": "a.jpg", "caption": None}, "`caption` must be"),
        ({"id": "x", "conversations": ["hi"]}, r"conversations[0] must have"),
        (
            {"id": "x", "conversations": [{"from": "tool", "value": "be nice"}]},
            "conversations[0] is of 'tool', which is not supported",
        ),
        (
            {"id": "x", "conversations": [{"from": ["gpt"], "value": "be nice"}]},
            "(system, human, gpt, user, assistant)",
        ),
        (
            {"id": "x", "conversations": [{"from": "gpt", "value": None}]},
            "`value` or `content` (a text",
        ),
    ],
)
def test_bad_records_are_named_and_the_rest_is_read(
    tmp_path: Path, record: dict[str, Any], reason: str
) -> None:
    keys, skipped = read(
        tmp_path, [turns("1", "2") | {"id": "before"}, record, turns("3", "4") | {"id": 7}]
    )
    assert keys == ["before", "7"] and list(skipped) == ["x"] and reason in skipped["x"]


@pytest.mark.parametrize(
    "name",
    [
        "../secret.jpg",
        "/etc/passwd",
        "sub/../../secret.jpg",
        "..",
        "\\secret.jpg",
        "link.jpg",
        "outside/secret.jpg",
        "a\0.jpg",
        "sub/..\\..\\secret.jpg",
    ],
)
def test_names_that_lead_out_of_the_folder_are_not_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.jpg").write_bytes(encoded(20, 20))
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "link.jpg").symlink_to(tmp_path / "secret.jpg")
    (folder / "outside").symlink_to(tmp_path, target_is_directory=True)
    keys, skipped = read(folder, [turns("<image>", "a", image=name)])
    assert not keys and "outside of the folder" in skipped["x"]


def test_links_inside_the_folder_are_followed(tmp_path: Path) -> None:
    write_llava(tmp_path)
    (tmp_path / "link.jpg").symlink_to(tmp_path / "a.jpg")
    assert read(tmp_path, [turns("<image>", "a", image="link.jpg")])[0] == ["x"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_whole_paths_inside_the_folder_are_followed(tmp_path: Path, scheme: str) -> None:
    write_llava(tmp_path)
    record = turns("<image>", "a", image=f"{scheme}{tmp_path / 'a.jpg'}")
    assert read(tmp_path, [record])[0] == ["x"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{\n"id": 1}', "the JSON is not a list"),
        (b"", "the JSON is not a list"),
        (b"null", "the JSON is not a list"),
        (b"[", "no record at byte 1"),
        (b'[{"id": 1}', "no comma or end"),
        (b'[{"id": 1} {"id": 2}]', "no comma or end"),
        (b'[{"id": 1},]', "no record at byte 11"),
        (b"[" * 100_000, "not a complete list"),
        (b'[{"a":' * 100_000, "not a complete list"),
    ],
)
def test_files_that_are_no_list(tmp_path: Path, content: bytes, reason: str) -> None:
    keys, skipped = read(tmp_path, content)
    assert not keys and reason in skipped[""]


def test_a_list_cut_short_keeps_what_is_whole(tmp_path: Path) -> None:
    whole = json.dumps([turns("a", "b") | {"id": f"{n}"} for n in range(5)]).encode()
    keys, skipped = read(tmp_path, whole[:-30])
    assert keys == ["0", "1", "2", "3"] and "not a complete list" in skipped[""]


def test_what_is_no_record_is_named(tmp_path: Path) -> None:
    keys, skipped = read(
        tmp_path,
        b"\n".join([b"null", b"12", b"[]", json.dumps(turns("a", "b")).encode()]),
        "a.jsonl",
    )
    assert keys == ["x"] and all(
        skipped[f"line {n}"] == "a record must be a mapping" for n in (1, 2, 3)
    )


def test_broken_lines_are_named_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llava, "MAX_TEXT_BYTES", 1000)
    lines = [json.dumps(turns("a", "b") | {"id": f"{n}"}).encode() for n in range(3)]
    long = json.dumps(turns("a" * 5000, "b")).encode()
    keys, skipped = read(
        tmp_path,
        b"\n".join([lines[0], b"{broken", b"", long, lines[1], b"\xff\xfe", lines[2]]),
        "chat.jsonl",
    )
    assert keys == ["0", "1", "2"]
    assert "not valid JSON" in skipped["line 2"] and "at most 1000" in skipped["line 4"]
    assert "not valid JSON" in skipped["line 6"]


@given(
    st.lists(st.text(max_size=12), min_size=1, max_size=6),
    st.integers(1, 40),
    st.booleans(),
    st.sampled_from([None, 1]),
)
@PROPERTY
def test_pieces_of_any_length_give_the_same_records(
    said: list[str], chunk: int, ascii_only: bool, indent: int | None
) -> None:
    import tempfile

    from disttrain_cli.data.sources.files import LocalFile

    records = [turns(value, "answer") | {"number": 10 * n} for n, value in enumerate(said)]
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(llava, "CHUNK_BYTES", chunk)
        path = Path(folder, "chat.json")
        data = json.dumps(records, ensure_ascii=ascii_only, indent=indent).encode(
            "utf-8", "replace"
        )
        path.write_bytes(b"\xef\xbb\xbf" * (chunk > 20) + b" \n" + data + b"\n")
        found = list(llava._list(LocalFile(str(path)).stream()))
        assert [record.value for record in found] == json.loads(data)
        content = path.read_bytes()
        assert [
            json.loads(content[record.location.offset : sum(record.location)]) for record in found
        ] == json.loads(data)


def test_turns_are_written_as_user_and_assistant() -> None:
    parts = conversation(turns("a", "b", "<image>", "d<image>", image=["one", "two"]))
    assert [(part.value, part.trained, part.ended) for part in parts if part.kind == TEXT] == [
        ("USER: a ASSISTANT:", False, False),
        (" b", True, True),
        ("USER: ", False, False),
        (" ASSISTANT:", False, False),
        (" d", True, False),
    ]
    assert [part.value for part in parts if part.kind == IMAGE] == ["one", "two"]


def test_what_the_system_says_stands_first_and_is_not_trained() -> None:
    record = turns("<image>hi", "hello", image="a.jpg")
    record["conversations"].insert(0, {"from": "system", "value": "Be brief."})
    assert [part[:3] for part in conversation(record)] == [
        (TEXT, "Be brief. USER: ", False),
        (IMAGE, "a.jpg", True),
        (TEXT, "hi ASSISTANT:", False),
        (TEXT, " hello", True),
    ]


SAME = [
    turns("<image>hi", "hello", "more", "end", image="a.jpg", system="Be brief."),
    {
        "images": ["a.jpg"],
        "messages": [
            {"role": role, "content": text}
            for role, text in (
                ("system", "Be brief."),
                ("user", "<image>hi"),
                ("assistant", "hello"),
                ("user", "more"),
                ("assistant", "end"),
            )
        ],
    },
    {
        "conversations": None,
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {"role": "user", "content": [{"type": "image", "path": "a.jpg"}, {"text": "hi"}]},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": ["more"]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "e"}, {"type": "text", "text": "nd"}],
            },
        ],
    },
    {
        "image": "a.jpg",
        "conversations": [
            {"from": who, "value": text}
            for who, text in (
                ("system", "Be brief."),
                ("user", "<image>hi"),
                ("assistant", "hello"),
                ("human", "more"),
                ("gpt", "end"),
            )
        ],
    },
]


@pytest.mark.parametrize("record", SAME)
def test_the_same_conversation_in_every_dialect(record: dict[str, Any]) -> None:
    assert [part[:4] for part in conversation(record)] == [
        (TEXT, "Be brief. USER: ", False, False),
        (IMAGE, "a.jpg", True, False),
        (TEXT, "hi ASSISTANT:", False, False),
        (TEXT, " hello", True, True),
        (TEXT, "USER: more ASSISTANT:", False, False),
        (TEXT, " end", True, False),
    ]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("form", ["lines", "list", "pretty list"])
def test_whether_it_is_a_list_the_content_says(tmp_path: Path, name: str, form: str) -> None:
    records = [{"id": f"{n}", "text": f"text {n}"} for n in range(3)]
    lines = "\n".join(map(json.dumps, records))
    content = {
        "lines": lines,
        "list": f"[\n{lines.replace(chr(10), ',' + chr(10))}]",
        "pretty list": json.dumps(records, indent=1),
    }[form]
    assert read(tmp_path, content.encode(), name)[0] == ["0", "1", "2"]


@pytest.mark.parametrize("name", ["corpus.jsonl", "corpus.json"])
def test_a_text_corpus_is_read_whole_and_trained(tmp_path: Path, name: str) -> None:
    records = [
        {"text": "First wörds."},
        {"id": 7, "text": "More.", "url": "http://x", "meta": {"a": [1]}},
    ]
    content = json.dumps(records) if name.endswith(".json") else "\n".join(map(json.dumps, records))
    (tmp_path / name).write_text(content)
    shards = list_source(str(tmp_path), "data.sources[0].path").shards
    samples = [one for one in read_one_by_one(shards[0], name) if not isinstance(one, Skipped)]
    assert [
        (one.key, [s[2] for s in one.segments], [s.trained for s in one.segments])
        for one in samples
    ] == [
        ("record 0" if name.endswith(".json") else "line 1", ["First wörds."], [True]),
        ("7", ["More."], [True]),
    ]
    opened = open_shard(shards[0], RowGroups())
    assert [opened.texts(one.segments[0].location) for one in samples] == [
        ["First wörds."],
        ["More."],
    ]


def test_an_imagefolder_is_read_with_its_captions(tmp_path: Path) -> None:
    for kind in ("cats", "dogs"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "1.jpg").write_bytes(encoded(20, 30))
        line = {
            "file_name": "1.jpg",
            ("text" if kind == "cats" else "caption"): f"a picture of {kind}",
        }
        (tmp_path / kind / "metadata.jsonl").write_text(json.dumps(line) + "\n")
    shards = list_source(str(tmp_path), "data.sources[0].path").shards
    assert [shard.name for shard in shards] == ["cats/metadata.jsonl", "dogs/metadata.jsonl"]
    (sample,) = read_one_by_one(shards[0], "x")
    assert isinstance(sample, Sample) and [s.kind for s in sample.segments] == [IMAGE, TEXT]
    assert sample.segments[0][3:5] == (20, 30) and sample.segments[1].text == "a picture of cats"
    (captioned,) = read_one_by_one(shards[1], "x")
    assert isinstance(captioned, Sample) and captioned.segments[1].text == "a picture of dogs"
    opened = open_shard(shards[0], RowGroups())
    assert opened.file(
        "image", sample.segments[0].location, sample.segments[1].location
    ) == encoded(20, 30)


def test_pictures_alone_need_texts(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.JPG").write_bytes(encoded(20, 30))
    with pytest.raises(DataError, match="images without texts") as caught:
        list_source(str(tmp_path), "data.sources[0].path")
    assert "metadata.jsonl" in caught.value.next_step
