"""Parquet and Arrow: columns are found or asked for, damage is named, the rest is read."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from disttrain_cli.data.sources import RowGroups, Sample, Shard, Skipped, open_shard, tables
from disttrain_cli.data.sources.columns import find_columns
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, TEXT
from tests.data.dataset import encoded
from tests.data.sources.forms import (
    PICTURES,
    hf_images,
    list_table,
    pair_table,
    pairs,
    read_one_by_one,
    write_arrow,
    write_parquet,
)


def read(path: Path) -> tuple[dict[str, Sample], dict[str, str]]:
    found = list(read_one_by_one(Shard(path.suffix[1:], str(path), path.name), path.name))
    return (
        {one.key: one for one in found if not isinstance(one, Skipped)},
        {one.key: one.reason for one in found if isinstance(one, Skipped)},
    )


def schema(text: str = "", image: str = "", other: str = "") -> pa.Schema:
    kinds = ((text, pa.string()), (image, pa.binary()), (other, pa.int64()))
    return pa.schema([(name, kind) for names, kind in kinds for name in names.split()])


@pytest.mark.parametrize(
    ("columns", "image", "texts"),
    [
        (schema("words text", "pixels", "label"), "pixels", ("text",)),
        (schema("url TEXT key", "JPG mask"), "JPG", ("TEXT",)),
        (schema("url caption sha256", "jpg"), "jpg", ("caption",)),
        (schema("caption Text", "image"), "image", ("Text", "caption")),
        (
            pa.schema(
                [("img", pa.struct([("bytes", pa.large_binary())])), ("txt", pa.large_string())]
            ),
            "img",
            ("txt",),
        ),
        (pa.schema([("text", pa.binary()), ("image", pa.binary())]), "image", ("text",)),
    ],
)
def test_columns_by_type_and_usual_name(
    columns: pa.Schema, image: str, texts: tuple[str, ...]
) -> None:
    assert find_columns(columns, "x")[:3] == ({"image": image}, texts, False)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (schema("text"), "text"),
        (schema("text id dump url date language", other="token_count"), "text"),  # FineWeb
        (schema("text timestamp url"), "text"),  # C4
        (schema("text", other="image_count"), "text"),
    ],
)
def test_a_corpus_of_texts_alone(columns: pa.Schema, text: str) -> None:
    assert find_columns(columns, "x")[:3] == ({}, (text,), False)


@pytest.mark.parametrize(
    "columns",
    [
        schema("file_name", "image"),
        schema("source_url", "image"),
        schema("id", "image"),
        schema("prompt", "image"),
        schema("answer", "image"),
        schema("blip_caption", "image"),
        schema("question answer", "image"),
        schema("problem answer solution", "image", "level"),
        schema("story", other="number"),
        schema("content path lang"),
        schema("sentence"),
        schema("name", "audio"),
        pa.schema(
            [("dialog", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])))]
        ),
    ],
)
def test_no_column_is_taken_for_texts_because_it_is_the_only_one(columns: pa.Schema) -> None:
    strings = [field.name for field in columns if field.type != pa.binary()]
    with pytest.raises(DataError, match="no column has a name of texts or turns") as caught:
        find_columns(columns, "shard.parquet")
    assert all(f"{name} (" in str(caught.value) for name in columns.names)
    assert "data.sources[].text" in caught.value.next_step and strings[0] in caught.value.next_step


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
@pytest.mark.parametrize("name", ["blip_caption", "source_url", "caption"])
def test_the_run_file_names_the_texts(tmp_path: Path, write: Any, name: str) -> None:
    path = write(
        tmp_path / f"a.{'parquet' if write is write_parquet else 'arrow'}",
        pa.table({"image": PICTURES[:2], "text": ["a", "b"], name: ["one", "two"]}),
    )
    shard = Shard(path.suffix[1:], str(path), path.name, text=name)
    samples = [one for one in read_one_by_one(shard, "x") if isinstance(one, Sample)]
    opened = open_shard(shard, RowGroups())
    assert [opened.texts(one.segments[1].location) for one in samples] == [["one"], ["two"]]
    assert [one.unread for one in samples] == [("`text`",)] * 2
    corpus = Shard(path.suffix[1:], str(path), path.name, text="images")
    with pytest.raises(DataError, match="there is no column `images`"):
        list(read_one_by_one(corpus, "x"))


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_texts_alone_are_read_and_read_again(tmp_path: Path, write: Any) -> None:
    path = write(
        tmp_path / f"a.{'parquet' if write is write_parquet else 'arrow'}",
        pa.table({"text": ["one", None, "thrée"], "url": ["http://x"] * 3}),
    )
    samples, skipped = read(path)
    assert skipped == {"row 1": "the text is missing"}
    opened = open_shard(Shard(path.suffix[1:], str(path), path.name), RowGroups())
    assert [
        (key, opened.texts(one.segments[0].location), one.segments[0].trained)
        for key, one in samples.items()
    ] == [("row 0", ["one"], True), ("row 2", ["thrée"], True)]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (schema("text Text", "image"), ["several columns may contain `text`: text, Text"]),
        (schema("text", "image", "caption"), ["`caption` contains no strings", "caption (int64)"]),
        (schema("txt sentence transcript", "audio"), ["txt, transcript, sentence"]),
        (schema("caption"), ["no column contains the images of `caption`"]),
        (
            schema("text", "x y"),
            ["several columns may contain the image bytes: x, y", "y (binary)"],
        ),
        (schema("text", "image jpg"), ["image, jpg"]),
        (schema("", "image", "text"), ["`text` contains no strings", "text (int64)"]),
        (schema("", "image"), ["no column has a name of texts or turns", "image (binary)"]),
        (
            schema("caption url"),
            ["no column contains image bytes", "`url` seems to name images", "img2dataset"],
        ),
        (schema("TEXT URL", other="WIDTH HEIGHT"), ["`URL` seems to name images", "img2dataset"]),
        (schema("text image_url"), ["`image_url` seems to name images", "img2dataset"]),
        (schema("text image"), ["no column contains image bytes", "`image` seems to name images"]),
        (schema("text", other="image"), ["no column contains image bytes"]),
        (
            pa.schema([("images", pa.list_(pa.string())), ("texts", pa.list_(pa.string()))]),
            ["URLs", "img2dataset"],
        ),
    ],
)
def test_what_is_ambiguous_is_asked_for(columns: pa.Schema, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        find_columns(columns, "shard.parquet")
    assert all(word in str(caught.value) for word in [*words, "shard.parquet"])


def test_bad_rows_of_pairs(tmp_path: Path) -> None:
    good, words = encoded(20, 20), ["fine", None, "x", "x", "x", "x"]
    pictures = [good, good, None, b"a text file", b"", encoded(30, 20, ".png")]
    images = [*hf_images(pictures)[:2], {"bytes": None, "path": "a.jpg"}, *hf_images(pictures)[3:]]
    table = pa.table({"image": images, "text": words})
    samples, skipped = read(write_parquet(tmp_path / "a.parquet", table))
    assert list(samples) == ["row 0", "row 5"] and samples["row 5"].segments[0].width_px == 30
    assert skipped == {
        "row 1": "the text is missing",
        "row 2": "the image is missing",
        "row 3": "not a JPEG, PNG or WebP image",
        "row 4": "an empty file, not a JPEG, PNG or WebP image",
    }


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
@pytest.mark.parametrize("type_", [pa.string(), pa.large_string(), pa.string_view(), None])
def test_texts_beside_an_image_that_is_null(tmp_path: Path, write: Any, type_: Any) -> None:
    """A text is a document, as where it stands alone; a caption or a transcript is none."""
    turns = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    texts = pa.array(["a document", "of it", None, turns, None, " ", "[document]"], type_)
    texts = texts if type_ else texts.dictionary_encode()
    path = tmp_path / f"a.{'parquet' if write is write_parquet else 'arrow'}"
    images = hf_images([None, PICTURES[0], None, None, PICTURES[0], None, None])
    empty = {"bytes": None, "path": None}
    for absent in (None, empty):
        table = pa.table(
            {
                "image": [absent if image is None else image for image in images],
                "text": texts,
                "caption": [None, None, "of it", None, None, None, None],
                "number": range(7),
            }
        )
        samples, skipped = read(write(path, table))
        assert {
            key: [(one.kind, one.text, one.trained) for one in sample.segments]
            for key, sample in samples.items()
        } == {
            "row 0": [(TEXT, "a document", True)],
            "row 1": [(IMAGE, "", False), (TEXT, "of it", True)],
            "row 3": [(TEXT, "USER: q ASSISTANT:", False), (TEXT, " a", True)],
            "row 6": [(TEXT, "[document]", True)],
        }
        assert skipped == {
            "row 2": "the image is missing",
            "row 4": "the text is missing",
            "row 5": "the text is empty",
        }
        assert {one.unread for one in samples.values()} == {("`number`",)}
        opened = open_shard(Shard(path.suffix[1:], str(path), path.name), RowGroups())
        assert [
            opened.texts(samples[key].segments[0].location) for key in ("row 0", "row 3", "row 6")
        ] == [["a document"], ["USER: q ASSISTANT:", " a"], ["[document]"]]


@pytest.mark.parametrize("name", ["text", "sentence"])
def test_texts_beside_a_sound_that_is_null(tmp_path: Path, name: str) -> None:
    file = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    table = pa.table({"audio": pa.array([None], file), name: ["said"]})
    samples, skipped = read(write_parquet(tmp_path / "a.parquet", table))
    texts = [[one.text for one in sample.segments] for sample in samples.values()]
    assert texts == ([["said"]] if name == "text" else [])
    assert skipped == ({} if name == "text" else {"row 0": "the clip is missing"})


@pytest.mark.parametrize(
    ("name", "column", "beside", "fine"),
    [
        ("text", "", {"jpg": PICTURES[:2]}, b"fine"),
        ("text", "text", {}, b'["fine"]'),
        ("dialog", "dialog", {}, b'["fine"]'),
        ("messages", "", {}, b'[{"role": "assistant", "content": "A."}]'),
    ],
)
def test_texts_that_are_no_utf8(
    tmp_path: Path, name: str, column: str, beside: dict[str, Any], fine: bytes
) -> None:
    texts = pa.array([fine, b'["\xff"]'], pa.binary()).view(pa.string())
    path = write_arrow(tmp_path / "a.arrow", pa.table({name: texts, **beside}))
    found = list(read_one_by_one(Shard("arrow", str(path), path.name, text=column), path.name))
    assert [one.key for one in found] == ["row 0", "row 1"]
    assert isinstance(found[1], Skipped) and found[1].reason == "text is not UTF-8"


def test_documents_of_few_values_and_empty_ones(tmp_path: Path) -> None:
    write_parquet(
        tmp_path / "a.parquet",
        pa.table({"text": pa.array(["a", "", "b", "a"]).dictionary_encode()}),
    )
    samples, skipped = read(tmp_path / "a.parquet")
    assert [sample.segments[0].text for sample in samples.values()] == ["a", "b", "a"]
    assert skipped == {"row 1": "the text is empty"}


@pytest.mark.parametrize("name", ["images", "pictures"])
def test_lists_of_images_stand_before_their_text(tmp_path: Path, name: str) -> None:
    """As in a JSON."""
    table = pa.table(
        {
            name: pa.array([PICTURES[:2], [], None], pa.list_(pa.binary())),
            "text": ["two", "none", "null"],
        }
    )
    samples, skipped = read(write_parquet(tmp_path / "a.parquet", table))
    assert not skipped
    kinds = [[segment.kind for segment in one.segments] for one in samples.values()]
    assert kinds == [[IMAGE, IMAGE, TEXT], [TEXT], [TEXT]]


def test_bad_rows_of_lists(tmp_path: Path) -> None:
    rows: list[tuple[list[bytes | None] | None, list[str | None] | None]] = [
        ([None, PICTURES[0]], ["a", None]),
        ([None], [None]),
        ([PICTURES[0]], ["both"]),
        ([None, None], ["short"]),
        (None, ["no list"]),
        ([], []),
        ([PICTURES[1], None], [None, "last"]),
    ]
    table = pa.table(
        {
            "images": pa.array([images for images, _ in rows], pa.list_(pa.binary())),
            "texts": pa.array([texts for _, texts in rows], pa.list_(pa.string())),
        }
    )
    for samples, skipped in (
        read(write_arrow(tmp_path / "a.arrow", table, rows=3)),
        read(write_parquet(tmp_path / "a.parquet", table, rows=4)),
    ):
        assert list(samples) == ["row 0", "row 5", "row 6"] and not samples["row 5"].segments
        assert [(s.kind, s.location) for s in samples["row 6"].segments] == [
            (IMAGE, (6, 0)),
            (TEXT, (6, 1)),
        ]
        assert "position 0" in skipped["row 1"] and "position 0" in skipped["row 2"]
        assert (
            skipped["row 3"] == "`images` has 2 entries, `texts` 1"
            and "None entries" in skipped["row 4"]
        )


def test_images_of_lists_with_a_path_alone(tmp_path: Path) -> None:
    images = [[{"bytes": None, "path": path}, *hf_images(PICTURES[:1])] for path in ("a.jpg", None)]
    table = pa.table({"images": images, "texts": [["of it", None]] * 2})
    samples, skipped = read(write_parquet(tmp_path / "a.parquet", table))
    assert [one.kind for one in samples["row 1"].segments] == [TEXT, IMAGE]
    assert skipped == {"row 0": "`images[0]` has a path and no bytes"}


def damaged(path: Path, places: Iterable[int]) -> Path:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0xFF
    path.write_bytes(bytes(content))
    return path


def test_parquet_cut_short_or_no_parquet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", pair_table())
    whole = path.read_bytes()
    for content in (whole[:-100], whole[:50], b"", b"no parquet" * 50):
        path.write_bytes(content)
        samples, skipped = read(path)
        assert not samples and "not a complete Parquet file" in skipped[""]


def test_a_damaged_row_group_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pair_table(), path, row_group_size=2, compression="zstd", use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    damaged(path, range(column.data_page_offset, column.data_page_offset + 12))
    samples, skipped = read(path)
    assert list(samples) == ["row 0", "row 1", "row 4", "row 5"]
    assert list(skipped) == ["rows 2 to 3"] and "damaged Parquet" in skipped["rows 2 to 3"]


@pytest.mark.parametrize("run_bytes", [0, tables.RUN_BYTES])
def test_rows_before_the_damage_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_bytes: int
) -> None:
    """Whatever row groups are read together, and however many rows at a time."""
    monkeypatch.setattr(tables, "RUN_BYTES", run_bytes)
    texts = [f"text {number} " + "x" * 400 for number in range(60)]
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"jpg": [PICTURES[0]] * 60, "text": texts}),
        path,
        row_group_size=20,
        use_dictionary=False,
        compression="none",
        data_page_size=4000,
        write_batch_size=1,
        write_page_checksum=False,
    )
    place = path.read_bytes().index(texts[33].encode()) - 4
    damaged(path, range(place, place + 4))  # its length
    for rows in (2, 7, 1024):
        monkeypatch.setattr(tables, "BATCH_ROWS", (rows, rows))
        samples, skipped = read(path)
        (left_out,) = skipped
        first = int(left_out.split()[1])
        assert 20 < first <= 33 and left_out == f"rows {first} to 39"
        assert list(samples) == [f"row {row}" for row in (*range(first), *range(40, 60))]
        assert [one.segments[1].text for one in samples.values()] == texts[:first] + texts[40:]


def test_no_row_is_read_twice_where_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tables.read_rows

    def failing(*given: Any) -> Iterator[Any]:
        for one in real(*given):
            if isinstance(one, Sample) and one.key == "row 5":
                raise OSError("a library's own")
            yield one

    monkeypatch.setattr(tables, "read_rows", failing)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": [f"text {row}" for row in range(20)]}), path, row_group_size=4)
    found = list(read_one_by_one(Shard("parquet", str(path), path.name), path.name))
    kept = [*(f"row {row}" for row in range(5)), "rows 5 to 7"]
    assert [one.key for one in found] == [*kept, *(f"row {row}" for row in range(8, 20))]


@pytest.mark.parametrize("whole", [False, True])
def test_arrow_cut_short(tmp_path: Path, whole: bool) -> None:
    path = write_arrow(tmp_path / "a.arrow", list_table(), rows=1, whole=whole)
    path.write_bytes(path.read_bytes()[:-2000])
    samples, skipped = read(path)
    assert len(samples) < 4 and "not a complete Arrow file" in skipped[""]
    assert whole or samples  # the file format has its footer at the end


def test_pictures_are_told_by_content(tmp_path: Path) -> None:
    """A JPEG may be called a PNG; what claims gigapixels is named, whatever it is called."""
    bomb = (
        b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
        + (60_000).to_bytes(4, "big") * 2
        + b"\x08\x02"
        + bytes(200)
    )
    large = b"\xff\xd8\xff\xc0\x00\x11\x08\xff\xff\xff\xff" + bytes(20)
    table = pa.table({"png": [PICTURES[0], bomb, large], "text": ["a", "b", "c"]})
    samples, skipped = read(write_parquet(tmp_path / "a.parquet", table))
    assert list(samples) == ["row 0"]
    assert "60000x60000 pixels" in skipped["row 1"] and "65535x65535" in skipped["row 2"]


def test_an_empty_file_has_no_samples(tmp_path: Path) -> None:
    for path in (
        write_parquet(tmp_path / "a.parquet", pair_table().slice(0, 0)),
        write_arrow(tmp_path / "a.arrow", pair_table().slice(0, 0)),
    ):
        assert read(path) == ({}, {})


def test_batches_and_chunks_do_not_matter(tmp_path: Path) -> None:
    one = read(write_parquet(tmp_path / "a.parquet", pair_table(struct=False), rows=1))
    all_ = read(write_parquet(tmp_path / "b.parquet", pair_table(), rows=100))
    assert one == all_ and len(one[0]) == len(pairs())
