"""Turns in columns of tables: in whatever type they are, a row means what the same record of a JSON
means."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from disttrain_cli.data.sources import RowGroups, Sample, Shard, Skipped, open_shard
from disttrain_cli.data.sources.columns import find_columns
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, TEXT
from tests.data.sources.forms import (
    PICTURES,
    hf_images,
    read_one_by_one,
    write_arrow,
    write_parquet,
)

LLAVA = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "A cät."}]
OPENAI = [
    {"role": "user", "content": "<image>\nWhat is it?"},
    {"role": "assistant", "content": "A cät."},
]
#: What both say of one image.
SAID = [("USER: ", False), "image", ("\nWhat is it? ASSISTANT:", False), (" A cät.", True)]
TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
JSONS = [json.dumps(turn) for turn in OPENAI]
BY_KEY = {key: [turn[key] for turn in LLAVA] for key in ("from", "value")}
#: Both, as `datasets` joins them: every turn has all keys.
PADDED = [
    *({"from": None, "value": None, **turn, "tool_calls": None, "loss": None} for turn in OPENAI)
]
IN_PARTS = [
    {
        "role": "user",
        "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "A cät."}]},
]


def read(path: Path, text: str = "") -> tuple[list[list[Any]], dict[str, str]]:
    """(what each sample says, and says again when it is read again; why others are left out)."""
    form = "llava" if path.suffix.startswith(".json") else path.suffix[1:]
    shard = Shard(form, str(path), path.name, str(path.parent), text=text)
    found = list(read_one_by_one(shard, path.name))
    opened, said = open_shard(shard, RowGroups()), []
    for one in found:
        if isinstance(one, Skipped):
            continue
        texts = [segment for segment in one.segments if segment.kind == TEXT]
        assert opened.texts(texts[0].location) == [segment.text for segment in texts]
        files = [segment for segment in one.segments if segment.kind == IMAGE]
        assert [opened.file("image", one.location, texts[0].location) for one in files] == [
            PICTURES[number] for number in range(len(files))
        ]
        said.append(
            [
                (segment.text, segment.trained) if segment.kind == TEXT else "image"
                for segment in one.segments
            ]
        )
    return said, {one.key: one.reason for one in found if isinstance(one, Skipped)}


def read_samples(path: Path) -> list[Sample]:
    shard = Shard(path.suffix[1:], str(path), path.name)
    return [one for one in read_one_by_one(shard, path.name) if isinstance(one, Sample)]


def written(folder: Path, table: pa.Table) -> Iterator[Path]:
    yield write_parquet(folder / "a.parquet", table)
    yield write_arrow(folder / "a.arrow", table)


def nested(value: Any) -> str:
    return json.dumps({"messages": value, "lang": "en"})


@pytest.mark.parametrize("name", ["conversations", "messages", "Messages", "dialog"])
@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (LLAVA, None),
        (OPENAI, None),
        (OPENAI, pa.large_list(TURN)),
        (OPENAI, pa.list_(TURN, 2)),
        (OPENAI, pa.list_(pa.struct([*TURN, ("name", pa.string()), ("weight", pa.float64())]))),
        (PADDED, None),
        (json.dumps(LLAVA), pa.string()),
        (json.dumps(OPENAI, indent=1), pa.large_string()),
        ("\n " + json.dumps(OPENAI), pa.dictionary(pa.int32(), pa.string())),
        (json.dumps(OPENAI).encode(), pa.binary()),
        (nested(OPENAI), pa.string()),
        (nested(json.dumps(LLAVA)), pa.string()),
        (JSONS, pa.list_(pa.string())),
        (json.dumps(JSONS), pa.string()),
        (BY_KEY, None),
        (json.dumps(BY_KEY), pa.string()),
        ({"messages": OPENAI}, None),
    ],
)
def test_every_type_of_turns(tmp_path: Path, name: str, value: Any, type_: Any) -> None:
    cells = pa.array([value, None], type_)
    images = hf_images([PICTURES[0], None])
    for table in (
        pa.table({"id": [1, 2], "image": images, name: cells}),
        pa.table({name: cells, "images": [images[:1], []]}),
        pa.table({"image": pa.array([PICTURES[0], None], pa.binary()), name: cells}),
        pa.table({name: cells, "images": pa.array([PICTURES[:1], None], pa.list_(pa.binary()))}),
        pa.table({name: cells, "image": images, "text": ["the rendered text", None]}),
    ):
        for path in written(tmp_path, table):
            said, skipped = read(path, name if name == "dialog" else "")
            assert said == [SAID] and list(skipped) == ["row 1"]


def test_string_views(tmp_path: Path) -> None:
    cells = pa.array([json.dumps(OPENAI), "[]"], pa.string_view())
    images = pa.array([PICTURES[0], None], pa.binary_view())
    said, skipped = read(
        write_arrow(tmp_path / "a.arrow", pa.table({"messages": cells, "image": images}))
    )
    assert said == [SAID] and list(skipped) == ["row 1"]


def test_parts_of_turns(tmp_path: Path) -> None:
    table = pa.table({"messages": [IN_PARTS], "images": [hf_images(PICTURES[:1])]})
    for path in written(tmp_path, table):
        parts = [("USER: ", False), "image", ("What? ASSISTANT:", False), (" A cät.", True)]
        assert read(path) == ([parts], {})


def test_pairs_of_the_cauldron(tmp_path: Path) -> None:
    """`images` without marks stand before the first question."""
    pairs = [
        {"user": "What?", "assistant": "A cat.", "source": "x"},
        {"user": "Sure?", "assistant": "Yes."},
    ]
    table = pa.table(
        {
            "images": [hf_images(PICTURES[:2]), [], hf_images(PICTURES[:1]), []],
            "texts": [pairs, pairs[:1], [{"user": "<image> a", "assistant": "b"}], []],
            "source": ["x"] * 4,
        }
    )
    for path in written(tmp_path, table):
        said, skipped = read(path)
        assert said == [
            [
                ("USER: ", False),
                *["image"] * 2,
                ("What? ASSISTANT:", False),
                (" A cat.", True),
                ("USER: Sure? ASSISTANT:", False),
                (" Yes.", True),
            ],
            [("USER: What? ASSISTANT:", False), (" A cat.", True)],
        ]
        assert skipped == {
            "row 2": "2 occurrences of <image> for 1 images",
            "row 3": "`messages` must be a list with at least one turn",
        }


#: Records of all kinds: what they mean as JSON they mean as rows.
RECORDS: list[dict[str, Any]] = [
    {"messages": OPENAI[1:], "text": "rendered"},
    {"conversations": LLAVA[1:], "messages": OPENAI[1:]},
    {"conversations": LLAVA[1:], "messages": [{"role": "assistant", "content": "Another."}]},
    {"text": "a document"},
    {"text": json.dumps(OPENAI[1:])},
    {"text": nested(OPENAI[1:])},
    {"text": '{"messages": 3}'},
    {"text": "[1, 2]"},
    {"caption": "alone"},
    {"messages": OPENAI[1:], "system": "Be brief."},
    {"messages": json.dumps(OPENAI[1:]), "system": "Be brief."},
    {"messages": "no turns"},
    {"messages": "[]"},
    {"messages": OPENAI[1:], "tools": '[{"name": "f"}]'},
    {"messages": json.dumps({"messages": OPENAI[1:], "tools": [{"name": "f"}]})},
    {"messages": OPENAI[1:], "rejected": "no"},
    {"messages": OPENAI[1:], "label": False},
    {"messages": OPENAI[1:], "label": None},
    {"messages": OPENAI[1:], "audios": ["a.wav"]},
    {"messages": OPENAI[1:], "images": ["missing.jpg"]},
    {"text": "a document", "rejected": "no"},
    {"text": "a document", "question": "q", "answer": "a"},
    {"text": "a document", "question": "q", "answer": None},
    {"text": "a document", "dialog": OPENAI},
    {"text": ""},
    {"text": None, "caption": None},
    {"messages": [{"role": "assistant", "content": "A.", "loss": False}]},
    {"messages": [*OPENAI[1:], {"role": "assistant", "content": "B.", "train": False}]},
]


@pytest.mark.parametrize("record", RECORDS, ids=range(len(RECORDS)))
def test_a_row_means_what_the_record_means(tmp_path: Path, record: dict[str, Any]) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_text(json.dumps(record))
    said, skipped = read(lines)
    for path in written(tmp_path, pa.Table.from_pylist([record])):
        try:
            of_row, left_out = read(path)
        except DataError as error:  # of its columns
            of_row, left_out = [], {"": error.what}
        assert of_row == said and len(left_out) == len(skipped)
        own = ("missing.jpg", "caption", '""', "null")  # texts of a table alone, or of its columns
        if not any(word in lines.read_text() for word in own):
            assert list(left_out.values()) == list(skipped.values())


def test_rows_with_and_without_turns(tmp_path: Path) -> None:
    """As datasets are joined: what a record lacks is null."""
    table = pa.table(
        {
            "messages": pa.array([OPENAI, None, None, None], pa.list_(TURN)),
            "text": [None, "a document", None, ""],
            "caption": [None, "never", "a caption", None],
            "image": hf_images([PICTURES[0], None, PICTURES[0], None]),
            "tools": pa.array([None] * 4, pa.string()),
        }
    )
    for path in written(tmp_path, table):
        said, skipped = read(path)
        assert said == [SAID, [("a document", True)], ["image", ("a caption", True)]]
        assert list(skipped) == ["row 3"]


def test_texts_and_captions_of_pairs(tmp_path: Path) -> None:
    """`text` is read, and the caption where it is null; texts that are turns are turns."""
    said = json.dumps(OPENAI)
    table = pa.table(
        {
            "caption": ["one", "two", "three", "four", "five", "six"],
            "image": hf_images([PICTURES[0]] * 6),
            "text": pa.array(["a", None, "", " \n\t", said, "[image]"]).dictionary_encode(),
        }
    )
    for path in written(tmp_path, table):
        samples, skipped = read(path)
        texts = ["a", "two", "[image]"]
        captions = [["image", (text, True)] for text in texts]
        assert samples == [*captions[:2], SAID, captions[2]]
        assert skipped == dict.fromkeys(["row 2", "row 3"], "the text is empty")


@pytest.mark.parametrize("images", [False, True])
def test_columns_that_change_what_a_text_means(tmp_path: Path, images: bool) -> None:
    columns: dict[str, Any] = {
        "text": ["a", "b", "c", "d"],
        "rejected": [None, "worse", "", None],
        "Prompt": [None, None, "what?", "what?"],
        "response": [None, None, "that", None],
        "label": [1, 2, 3, 4],
        "tools": ["x"] * 4,
    }
    if images:
        columns["image"] = hf_images([PICTURES[0]] * 4)
    for path in written(tmp_path, pa.table(columns)):
        said, skipped = read(path)
        assert [one[-1] for one in said] == [("a", True), ("d", True)]
        assert list(skipped) == ["row 1", "row 2"]
        assert "`rejected`" in skipped["row 1"]
        assert "a text next to `prompt` and `response`" in skipped["row 2"]
        assert read(path, "text")[1] == {}  # the run file says that it is meant


def test_columns_of_files_beside_turns() -> None:
    def files(**kinds: pa.DataType) -> dict[str, str]:
        return find_columns(pa.schema([("messages", pa.list_(TURN)), *kinds.items()]), "x").files

    file = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    assert files(picture=file) == {"image": "picture"}
    assert files(mask=file, image=file) == {"image": "image"}
    assert files(videos=pa.list_(file), images=pa.list_(file)) == {
        "image": "images",
        "video": "videos",
    }
    assert files(audio=file) == {}  # refused by row
    for kinds in ({"image": file, "images": pa.list_(file)}, {"mask": file, "picture": file}):
        with pytest.raises(DataError, match=f"several .*: {', '.join(kinds)}"):
            files(**kinds)


def test_clips_and_named_images_beside_turns_are_refused(tmp_path: Path) -> None:
    table = pa.table(
        {
            "messages": [OPENAI[1:]] * 3,
            "audio": [None, {"bytes": b"RIFF", "path": None}, None],
            "image": ["a.jpg", None, None],
        }
    )
    for path in written(tmp_path, table):
        said, skipped = read(path)
        assert len(said) == 1 and "`audio`" in skipped["row 1"]
        assert "occurrences" in skipped["row 0"]


FILE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.mark.parametrize(
    ("images", "said"),
    [
        ([None, {"bytes": PICTURES[0], "path": None}], "<image>\nWhat is it?"),
        ([{"bytes": PICTURES[0], "path": None}, None], "<image>\nWhat is it?"),
        ([{"bytes": PICTURES[0], "path": None}, {"bytes": None, "path": "a.jpg"}], "<image>q"),
        ([None, {"bytes": PICTURES[0], "path": None}], [{"type": "image", "index": 0}]),
        ([None, {"bytes": PICTURES[0], "path": None}], [{"type": "image", "index": 1}]),
        ([None], "q"),
    ],
)
@pytest.mark.parametrize("type_", [FILE, pa.binary()])
def test_images_keep_their_numbers(tmp_path: Path, images: Any, said: Any, type_: Any) -> None:
    """A list with a null is refused, as that of a JSON is."""
    null = next(at for at, one in enumerate(images) if not (one and one["bytes"]))
    if type_ != FILE:
        images = [one and one["bytes"] for one in images]
    answer = [{"type": "text", "text": "a"}] if isinstance(said, list) else "a"
    turns = [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
    pairs = pa.array([[{"user": "q", "assistant": "a"}]])
    for column in ({"messages": [turns]}, {"texts": pairs}, {"text": ["a document"]}):
        table = pa.table({"images": pa.array([images], pa.list_(type_)), **column})
        for path in written(tmp_path, table):
            samples, skipped = read(path)
            assert samples == [] and f"`images[{null}]` is null" in skipped["row 0"]


@pytest.mark.parametrize("key", ["image", "images"])
@pytest.mark.parametrize("turns", [LLAVA, OPENAI, PADDED])
def test_images_that_are_named(tmp_path: Path, key: str, turns: Any) -> None:
    """As where a JSON of LLaVA was turned into a table."""
    names = ["a.jpg", None] if key == "image" else [["a.jpg"], None]
    alone = [turn | {"content": "q"} if "content" in turn else turn for turn in turns]
    alone = [turn | {"value": "q"} if turn.get("value") else turn for turn in alone]
    table = pa.table({key: names, "conversations": [turns, alone]})
    for path in written(tmp_path, table):
        samples, skipped = read(path)
        assert len(samples) == 1 and "image" not in samples[0]
        assert skipped == {
            "row 0": "the file a.jpg is named but not in the table: images of tables are read as"
            " bytes, binary or {bytes, path}"
        }


def test_an_image_without_bytes_beside_turns(tmp_path: Path) -> None:
    images = [{"bytes": None, "path": "a.jpg"}, {"bytes": None, "path": None}, None]
    table = pa.table({"image": pa.array(images, FILE), "messages": [OPENAI[1:]] * 3})
    for path in written(tmp_path, table):
        samples, skipped = read(path)
        assert len(samples) == 2 and skipped == {"row 0": "the image is missing"}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"file_name": pa.string(), "text": pa.string()}, "metadata.jsonl"),
        ({"audio": FILE, "text": pa.string(), "rejected": pa.string()}, "`rejected` may change"),
        ({"audios": pa.list_(FILE), "text": pa.string()}, "`audios` contains lists"),
        ({"messages": pa.int64(), "id": pa.string()}, "no column has a name of texts or turns"),
        (
            {"Messages": pa.string(), "messages": pa.string()},
            "several columns may contain `messages`",
        ),
    ],
)
def test_columns_that_are_refused(columns: dict[str, pa.DataType], words: str) -> None:
    with pytest.raises(DataError, match=words):
        find_columns(pa.schema(columns.items()), "data/metadata.parquet")


def test_named_columns() -> None:
    form = pa.schema(
        [
            ("dialog", pa.list_(TURN)),
            ("caption", pa.string()),
            ("image", pa.struct([("bytes", pa.binary())])),
            ("number", pa.int64()),
            ("messages", pa.string()),
        ]
    )
    assert find_columns(form, "x", "dialog").record == {"conversations": "dialog"}
    assert find_columns(form, "x", "caption")[:2] == ({"image": "image"}, ("caption",))
    assert find_columns(form, "x", "messages")[:2] == ({"image": "image"}, ("messages",))
    for name in ("number", "image"):
        with pytest.raises(
            DataError, match=f"`{name}`, which data.sources.. text names|contains neither"
        ):
            find_columns(form, "x", name)


NULL = pa.null()
FEW = pa.dictionary(pa.int32(), NULL)
PICTURE = {"bytes": PICTURES[0], "path": None}
CAPTIONED = ["image", ("T", True)]
NOTHING = pa.struct([("bytes", NULL), ("path", NULL)])


@pytest.mark.parametrize(
    ("row", "types", "said"),
    [
        ({"image": PICTURE, "text": "T"}, {"caption": NULL}, CAPTIONED),
        ({"image": PICTURE, "caption": "T"}, {"text": NULL}, CAPTIONED),
        ({"image": PICTURE, "caption": "T"}, {"text": FEW, "messages": NULL}, CAPTIONED),
        ({"image": PICTURE, "text": "T"}, {"system": NULL, "label": NULL, "tools": FEW}, CAPTIONED),
        ({"image": PICTURE, "text": "T"}, {"images": NULL, "conversations": NULL}, CAPTIONED),
        ({"images": [PICTURE], "text": "T"}, {"caption": NULL, "rejected": NULL}, CAPTIONED),
        ({"text": "T"}, {"image": NULL}, [("T", True)]),
        ({"txt": "T"}, {"image": NULL, "audio": NULL}, [("T", True)]),
        ({"text": "T"}, {"image": NOTHING}, [("T", True)]),
        ({"text": "T", "images": []}, {"images": pa.list_(NULL)}, [("T", True)]),
        ({"text": "T", "images": []}, {"images": pa.list_(NOTHING)}, [("T", True)]),
        ({"text": "T", "images": [None]}, {"images": pa.list_(NULL)}, "`images[0]` is null"),
        ({"text": "T"}, {"messages": NULL, "caption": FEW}, [("T", True)]),
        ({"text": "T"}, {"messages": pa.list_(NULL)}, [("T", True)]),
        ({"text": "T", "messages": []}, {"messages": pa.list_(NULL)}, "at least one turn"),
        ({"messages": OPENAI[1:]}, {"system": NULL, "image": NULL}, [(" A cät.", True)]),
        ({"messages": OPENAI, "image": PICTURE}, {"text": NULL, "label": NULL}, SAID),
        ({"images": [None], "texts": ["T"]}, {"images": pa.list_(NULL)}, [("T", True)]),
        ({"image": PICTURE}, {"text": NULL}, "the text is missing"),
        ({"image": PICTURE}, {"messages": NULL}, "`text`"),
        ({"caption": "T"}, {"image": NULL}, "the image is missing"),
        ({"sentence": "T"}, {"audio": NULL}, "the clip is missing"),
    ],
)
def test_columns_that_are_null_in_a_shard(
    tmp_path: Path, row: dict[str, Any], types: dict[str, pa.DataType], said: Any
) -> None:
    """As a shard has them of which no row has a value, beside shards that have."""
    table = pa.Table.from_pylist([row])
    for name, type_ in types.items():
        cells = [row.get(name)]
        column = pa.array([0], pa.int32()) if type_ == FEW else pa.array(cells, type_)
        if type_ == FEW:
            column = pa.DictionaryArray.from_arrays(column, pa.nulls(1))
        table = table.drop_columns([name]) if name in row else table
        table = table.append_column(name, column)
    files = [write_arrow(tmp_path / "a.arrow", table)]
    if FEW not in types.values():  # which Parquet does not have
        files.append(write_parquet(tmp_path / "a.parquet", table))
    for path in files:
        samples, skipped = read(path)
        if isinstance(said, str):
            assert samples == [] and said in skipped["row 0"]
        elif row.get("messages") == OPENAI[1:]:
            assert samples[0][-1:] == said and skipped == {}
        else:
            assert (samples, skipped) == ([said], {})
        assert all(one.unread == () for one in read_samples(path))


def test_a_named_column_that_is_null_in_a_shard(tmp_path: Path) -> None:
    table = pa.table({"image": [PICTURE], "text": ["no"], "blip": pa.nulls(1)})
    for path in written(tmp_path, table):
        assert read(path, "blip") == ([], {"row 0": "the text is missing"})
