"""Which columns of a Parquet or Arrow file hold images, sounds and texts, and what a row of them
says.

Four forms. Conversations: a column `messages` or `conversations` of lists of turns, where no text
has a usual name, with the images of a column of them or of lists of them. Pairs: one column of
images (binary, or Hugging Face's struct {bytes, path}) or of sounds (the same, by its name), or one
of each, and one of texts; where there are several of a type, the usual names decide. Interleaved
(OBELICS): lists `images` and `texts` of equal length, at each position exactly one of the two is
not null. Texts alone: a column of texts where no other is named for images or sounds. The location
of a segment is its row in the file and its position in the row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain_cli.data.modalities.registry import MEDIA
from disttrain_cli.data.sources.chats import TURNS, conversation, texts_of
from disttrain_cli.data.sources.samples import (
    MAX_TEXT_BYTES,
    TRAINED,
    ChatForm,
    Compact,
    Location,
    Sample,
    Segment,
    Skipped,
    file_segment,
    media_of,
    shown_name,
    text_segment,
)
from disttrain_cli.errors import DataError
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import IMAGE, KINDS, TEXT

if TYPE_CHECKING:
    import pyarrow as pa

MEDIA_NAMES = tuple(name for media in MEDIA.values() for name in media.columns)
TEXT_NAMES = ("text", "caption", "txt")
SPOKEN_NAMES = (
    "transcription",
    "transcript",
    "sentence",
    "normalized_text",
)  # where there is none of the others
LISTS = ("images", "texts")
# names a column of URLs
ELSEWHERE = re.compile(r"image|img|picture|photo|thumbnail|audio|video", re.IGNORECASE)


class Columns(NamedTuple):
    """Names of the columns that are read."""

    files: dict[str, str]  # by type of file (`data.modalities.MEDIA`)
    text: str  # or turns
    interleaved: bool
    conversations: bool = False
    system: str = ""  # what the system says in conversations

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self.files.values(), *self.of_texts]

    @property
    def of_texts(self) -> list[str]:
        """Those without files."""
        return [self.text, self.system] if self.system else [self.text]


def find_columns(schema: pa.Schema, label: str) -> Columns:
    """The columns that hold the samples.

    Raises:
        DataError: there are none, or several that might be meant; all columns are named.
    """
    kinds = {field.name: _kind(field.type) for field in schema}
    if all(name in kinds for name in LISTS) and kinds["texts"] == "list of text":
        if kinds["images"] == "list of image":
            return Columns({"image": LISTS[0]}, LISTS[1], interleaved=True)
        if kinds["images"] == "list of text":
            raise _refused(
                label,
                schema,
                "`images` holds URLs or paths instead of image bytes",
                "Download them first, e.g. with img2dataset, and write their bytes into `images`.",
            )
    lists = [name for name, kind in kinds.items() if kind == "list of image"]
    usual = any(kind == "text" and name.lower() in TEXT_NAMES for name, kind in kinds.items())
    turns = [name for name in TURNS if name in kinds and _holds_turns(schema.field(name).type)]
    if turns and not usual:
        return _of_conversations(turns[0], kinds, label, schema)
    if lists and "image" not in kinds.values():
        raise _refused(
            label,
            schema,
            f"`{lists[0]}` holds lists of images, and there is no list `texts` of strings "
            "beside a list `images`",
            "Write texts and images in turn (`images` and `texts`), or conversations as JSON.",
        )
    binary = {name: kind for name, kind in kinds.items() if kind == "image"}
    files = {}
    for name, media in MEDIA.items():  # images are what has no name of another type
        of_type = {key: kind for key, kind in binary.items() if key.lower() in media.columns}
        if name != "image" and of_type:
            files[name] = _one(of_type, "image", media.columns, label, schema)
            binary = {key: kind for key, kind in binary.items() if key not in of_type}
    texts_alone = not files and not binary and not _pictures_elsewhere(kinds)
    if not texts_alone and (binary or not files):
        others = kinds if not files else binary
        files = {"image": _one(others, "image", MEDIA["image"].columns, label, schema), **files}
    spoken = "audio" in files and not usual
    text = _one(kinds, "text", SPOKEN_NAMES if spoken else TEXT_NAMES, label, schema)
    return Columns(files, text, interleaved=False)


def _of_conversations(turns: str, kinds: dict[str, str], label: str, schema: pa.Schema) -> Columns:
    kind = "list of image" if "list of image" in kinds.values() else "image"
    films = {"video", "videos"} | set(MEDIA["video"].columns)
    videos = {
        name: "image"
        for name, of in kinds.items()
        if name.lower() in films and of.endswith("image")
    }
    kinds = {name: of for name, of in kinds.items() if name not in videos}
    files = {}
    if kind in kinds.values():
        files["image"] = _one(kinds, kind, (*MEDIA["image"].columns, "images"), label, schema)
    if videos:
        files["video"] = _one(videos, "image", tuple(films), label, schema)
    system = "system" if kinds.get("system") == "text" else ""
    return Columns(files, turns, interleaved=False, conversations=True, system=system)


def read_rows(
    batch: pa.RecordBatch, columns: Columns, first: int, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Samples of consecutive rows, of which the first is row `first` of the file."""
    read: Callable[[str, int, Any], Sample | Compact] = _sample
    if columns.conversations:
        rows, read = _turns(batch, columns), partial(_said, chat)
    elif columns.interleaved:
        rows = _interleaved(batch, columns)
    else:
        rows = _pairs(batch, columns)
        if columns.files and "video" not in columns.files:
            kinds = (KINDS[MEDIA[name].item] for name in columns.files)
            read = partial(_pair, bytes((*kinds, TEXT | TRAINED)))
    for row, cells in enumerate(rows, first):
        key = f"row {row}"
        try:
            yield read(key, row, cells)
        except ValueError as error:
            yield Skipped(label, key, str(error))


def file_at(column: pa.Array, location: Location) -> bytes:
    """The image or sound file at a location of a column whose only row is the location's;
    ValueError where there is none."""
    values, _ = _flat(column)
    data = _views(values)[location.size]
    if data is None:
        raise ValueError("there is no file")
    return bytes(data)


def texts_at(
    columns: Columns,
    cells: list[pa.Array],
    chat: ChatForm | None = None,
    files: Sequence[Numbers] = (),
) -> list[str | tuple[int, ...]]:
    """All texts of the only row of the columns `of_texts`, whose images have these numbers."""
    if columns.conversations:
        return texts_of(_record(columns, [cell[0].as_py() for cell in cells]), chat, files)
    return [str(text, "utf-8") for text in _views(_flat(cells[0])[0]) if text is not None]


def _record(columns: Columns, cells: list[Any]) -> dict[str, Any]:
    """A conversation as a JSON has it, of the cells of `of_texts`."""
    return {columns.text: cells[0], "system": cells[1] if columns.system else None}


def _turns(batch: pa.RecordBatch, columns: Columns) -> Iterator[tuple[Any, Any]]:
    """(record, its files by their type and name) of each row."""
    texts = zip(*(batch.column(name).to_pylist() for name in columns.of_texts), strict=True)
    of_media = [
        _lists(batch.column(columns.files[name])) if name in columns.files else [[]] * len(batch)
        for name in ("image", "video")
    ]
    for cells, images, videos in zip(texts, *of_media, strict=True):
        files = {str(at): image for at, image in enumerate(images) if image is not None}
        films = {str(at): video for at, video in enumerate(videos) if video is not None}
        yield _record(columns, list(cells)), {"image": files, "video": films}


def _lists(column: pa.Array) -> Iterator[list[memoryview | None]]:
    """Files of each row of a column of them or of lists of them."""
    values, counts = _flat(column)
    files = iter(_views(values))
    for count in counts:
        yield [next(files) for _ in range(count or 0)]


def _said(chat: ChatForm | None, key: str, row: int, cells: tuple[Any, Any]) -> Sample:
    """A conversation; ValueError with the reason."""
    record, files = cells

    def numbers_of(name: str) -> Numbers:
        media = media_of(name)
        if name not in files[media]:
            raise ValueError(
                f"the {media} {shown_name(name)} is in no column: {media}s are binary or {{bytes,"
                " path}"
            )
        file = files[media][name]
        return MEDIA[media].read_sizes(partial(_part, file), len(file))

    named = {"images": [*files["image"]] or None, "videos": [*files["video"]] or None}
    segments = list[Segment]()
    for part in conversation(
        {**record, **named}, chat, measure=lambda names: [numbers_of(name) for name in names]
    ):
        if part.kind == TEXT:
            segments.append(text_segment(part, Location(row, 0)))
        else:
            place = Location(row, int(part.value))
            segments.append(file_segment(IMAGE, place, numbers_of(part.value), part.part))
    return Sample(key, segments)


def _pairs(batch: pa.RecordBatch, columns: Columns) -> Iterator[Any]:
    wanted = [
        *((name, MEDIA[name].what, column) for name, column in columns.files.items()),
        ("", "text", columns.text),
    ]
    for cells in zip(*(_views(batch.column(name)) for _, _, name in wanted), strict=True):
        missing = [what for (_, what, _), cell in zip(wanted, cells, strict=True) if cell is None]
        if missing:
            yield f"the {missing[0]} is missing"
        elif len(cells) == 1 and not cells[0]:
            yield "the text is empty"
        else:
            yield [(media, 0, cell) for (media, _, _), cell in zip(wanted, cells, strict=True)]


def _interleaved(batch: pa.RecordBatch, columns: Columns) -> Iterator[Any]:
    (image_values, image_counts), (text_values, text_counts) = (
        _flat(batch.column(name)) for name in LISTS
    )
    images, texts = iter(_views(image_values)), iter(_views(text_values))
    for image_count, text_count in zip(image_counts, text_counts, strict=True):
        own_images, own_texts = (
            [next(values) for _ in range(count or 0)]
            for values, count in ((images, image_count), (texts, text_count))
        )
        if image_count is None or text_count is None or image_count != text_count:
            yield f"`images` has {image_count} entries, `texts` {text_count}"
        elif wrong := [
            at
            for at, (image, text) in enumerate(zip(own_images, own_texts, strict=True))
            if (image is None) == (text is None)
        ]:
            yield f"position {wrong[0]} must have either an image's bytes or a text"
        else:
            yield [
                ("", at, text) if text is not None else ("image", at, image)
                for at, (image, text) in enumerate(zip(own_images, own_texts, strict=True))
            ]


def _sample(key: str, row: int, cells: Any) -> Sample:
    """A row; ValueError with the reason, which may stand in place of the cells.

    A cell is the name of a type of file ("" of a text), its position, and its bytes.
    """
    segments = list[Segment]()
    for name, at, value in _told(cells):
        place = Location(row, at)
        if name:
            segments.append(file_segment(KINDS[MEDIA[name].item], place, _numbers(name, value)))
        else:
            segments.append(Segment(TEXT, place, _text(value), trained=True))
    return Sample(key, segments)


def _pair(form: bytes, key: str, row: int, cells: Any) -> Compact:
    """The same of a row of files, none of them a video, and a text."""
    *files, (_, _, text) = _told(cells)
    numbers = [(row, at, *_numbers(name, value)[:2]) for name, at, value in files]
    return Compact(key, form, [_text(text)], Location(row, 0), numbers)


def _told(cells: Any) -> Any:
    """The cells of a row, unless a reason stands in their place."""
    if isinstance(cells, str):
        raise ValueError(cells)
    return cells


def _numbers(name: str, value: memoryview) -> Numbers:
    return MEDIA[name].read_sizes(partial(_part, value), len(value))


def _text(value: memoryview) -> str:
    if len(value) > MAX_TEXT_BYTES:
        raise ValueError(f"a text of {len(value)} bytes, at most {MAX_TEXT_BYTES} are read")
    try:
        return str(value, "utf-8")
    except UnicodeDecodeError:
        raise ValueError("text is not UTF-8") from None


def _part(data: memoryview, offset: int, size: int) -> bytes:
    return bytes(data[offset : offset + size])


def _flat(column: pa.Array) -> tuple[pa.Array, list[int | None]]:
    """Values of a column of lists laid out flat, with the length of each list (null: no list); or
    the column itself."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(column, pa.ListArray | pa.LargeListArray):
        return column.flatten(), pc.list_value_length(column).to_pylist()
    return column, [1] * len(column)


def _views(values: pa.Array) -> list[memoryview | None]:
    """Bytes of each value, not copied; None = null. A struct stands for its field `bytes`."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_struct(values.type):
        values = pc.struct_field(values, "bytes")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    values = values.cast(pa.large_binary())
    _, offsets, data = values.buffers()
    if not len(values):
        return []
    ends = np.frombuffer(offsets, dtype=np.int64)[
        values.offset : values.offset + len(values) + 1
    ].tolist()
    view = memoryview(data if data is not None else b"")
    cells = [view[a:b] for a, b in pairwise(ends)]
    if not values.null_count:
        return list(cells)
    return [
        cell if valid else None
        for cell, valid in zip(cells, values.is_valid().to_pylist(), strict=True)
    ]


def _holds_turns(type_: pa.DataType) -> bool:
    """Whether a column's type is that of lists of turns."""
    import pyarrow.types as types

    if not (types.is_list(type_) or types.is_large_list(type_)):
        return False
    inside = type_.value_type
    names = {field.name for field in inside} if types.is_struct(inside) else set()
    return {"from", "value"} <= names or {"role", "content"} <= names


def _kind(type_: pa.DataType) -> str:
    """image, text, list of image, list of text, or other."""
    import pyarrow.types as types

    if types.is_list(type_) or types.is_large_list(type_):
        inside = _kind(type_.value_type)
        return f"list of {inside}" if inside in ("image", "text") else "other"
    if types.is_dictionary(type_):
        return _kind(type_.value_type)
    if types.is_struct(type_):
        named = [field for field in type_ if field.name == "bytes"]
        return "image" if named and _kind(named[0].type) == "image" else "other"
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_binary_view(type_):
        return "image"
    if types.is_string(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        return "text"
    return "other"


def _pictures_elsewhere(kinds: dict[str, str]) -> list[str]:
    """Columns that seem to say where images or sounds are: of files, or of URLs beside captions or
    sizes.

    A `url` beside a `text` alone is where a page of a text corpus was found.
    """
    media = [
        name
        for name, kind in kinds.items()
        if name.lower() in (*MEDIA_NAMES, "images")
        or (kind in ("text", "list of text") and ELSEWHERE.search(name))
    ]
    lower = {name.lower() for name in kinds}
    captioned = "caption" in lower or {"width", "height"} <= lower
    urls = (
        [name for name, kind in kinds.items() if kind == "text" and "url" in name.lower()]
        if captioned
        else []
    )
    return [*(name for name in media if kinds[name] == "text"), *urls, *media]


def _one(
    kinds: dict[str, str], kind: str, names: tuple[str, ...], label: str, schema: pa.Schema
) -> str:
    """The only column of a kind, or the only one of them with a usual name."""
    columns = [name for name, kind_of in kinds.items() if kind_of == kind]
    usual = [name for name in columns if name.lower() in names]
    if len(usual) == 1 or len(columns) == 1:
        return (usual if len(usual) == 1 else columns)[0]
    what = "image bytes" if kind == "image" else "texts"
    if not columns:
        url = next(iter(_pictures_elsewhere(kinds)), None) if kind == "image" else None
        advice = (
            f"`{url}` seems to name pictures elsewhere: download them first, e.g. with img2dataset."
            if url
            else (
                "Images are binary or {bytes, path}, texts are strings; or lists `images` and"
                " `texts` of them."
            )
        )
        raise _refused(label, schema, f"no column holds {what}", advice)
    raise _refused(
        label,
        schema,
        f"several columns may hold the {what}: {', '.join(usual or columns)}",
        f"Keep one of them, or name one {' or '.join(names[:3])}.",
    )


def _refused(label: str, schema: pa.Schema, why: str, next_step: str) -> DataError:
    columns = ", ".join(f"{field.name} ({field.type})" for field in list(schema)[:40])
    return DataError(
        f"Cannot tell images and texts in {label}", f"{why}\ncolumns: {columns}", next_step
    )
