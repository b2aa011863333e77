"""What rows of a Parquet or Arrow file say, of the columns that hold images, sounds and texts
(`columns`).

The location of a segment is its row in the file and its position in the row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from disttrain_cli.data.modalities.registry import MEDIA
from disttrain_cli.data.sources.chats import conversation, texts_of, unread_keys
from disttrain_cli.data.sources.columns import LISTS, Columns
from disttrain_cli.data.sources.files import missing_file
from disttrain_cli.data.sources.samples import (
    LONG,
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
    text_segment,
)
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import IMAGE, KINDS, TEXT

if TYPE_CHECKING:
    import pyarrow as pa


def read_rows(
    batch: pa.RecordBatch, columns: Columns, first: int, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Samples of consecutive rows, of which the first is row `first` of the file."""
    read: Callable[[str, int, Any], Sample] = _sample
    if columns.conversations:
        rows, read = _turns(batch, columns), partial(_said, chat)
    elif columns.interleaved:
        rows = _interleaved(batch, columns)
    elif columns.files and "video" not in columns.files:
        yield from _together(batch, columns, first, label)
        return
    else:
        rows = _pairs(batch, columns)
    for row, cells in enumerate(rows, first):
        key = f"row {row}"
        try:
            sample = read(key, row, cells)
            yield sample._replace(unread=(*columns.unread, *sample.unread))
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


def file_name(columns: Columns, media: str, location: Location) -> str:
    """Name of the file at a location of a table, for messages."""
    return f"{columns.files.get(media, media)}[{location.size}]"


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
            raise missing_file(name, f"is in no column: {media}s are binary or {{bytes, path}}")
        file = files[media][name]
        try:
            return MEDIA[media].read_sizes(partial(_part, file), len(file))
        except ValueError as error:
            raise ValueError(f"{media} {name}: {error}") from None

    named = {"images": [*files["image"]] or None, "videos": [*files["video"]] or None}
    segments = list[Segment]()
    for part in conversation(
        {**record, **named}, chat, measure=lambda names: [numbers_of(name) for name in names]
    ):
        if part.kind == TEXT:
            segments.append(text_segment(part, Location(row, 0)))
        else:
            place = Location(row, int(part.value))
            segments.append(file_segment(IMAGE, place, numbers_of(part.value), part))
    return Sample(key, segments, unread_keys({**record, **named}, chat))


def _pairs(batch: pa.RecordBatch, columns: Columns) -> Iterator[Any]:
    media = [*columns.files, ""]
    for cells in zip(*(_views(batch.column(name)) for name in columns.names), strict=True):
        if missing := _missing(columns, cells):
            yield missing
        elif len(cells) == 1 and not cells[0]:
            yield "the text is empty"
        else:
            yield [(name, 0, cell) for name, cell in zip(media, cells, strict=True)]


def _missing(columns: Columns, cells: Sequence[memoryview | None]) -> str:
    """What a row of a pair lacks, as messages say it."""
    names = [*(MEDIA[name].what for name in columns.files), "text"]
    missing = [what for what, cell in zip(names, cells, strict=True) if cell is None]
    return f"the {missing[0]} is missing" if missing else ""


def _together(
    batch: pa.RecordBatch, columns: Columns, first: int, label: str
) -> Iterator[Compact | Skipped]:
    """The same as of `_pairs` and `_sample`, where no file is a video."""
    media = [MEDIA[name] for name in columns.files]
    form = bytes((*(KINDS[one.item] for one in media), TEXT | TRAINED))
    made = Compact([], form, [], array(LONG), array(LONG), columns.unread)
    views = [_views(batch.column(name)) for name in columns.names]
    for row, cells in enumerate(zip(*views, strict=True), first):
        key = f"row {row}"
        try:
            if not all(cells) and (missing := _missing(columns, cells)):
                raise ValueError(missing)
            *values, text = cells
            files = list[int]()
            for one, value in zip(media, values, strict=True):
                width, height = one.read_sizes(partial(_part, value), len(value))[:2]
                files += (row, 0, width, height)
            made.texts.append(_text(text))
        except ValueError as error:
            if made.keys:
                yield made
            made = Compact([], form, [], array(LONG), array(LONG), columns.unread)
            yield Skipped(label, key, str(error))
            continue
        made.keys.append(key)
        made.records.extend((row, 0))
        made.files.extend(files)
    if made.keys:
        yield made


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
    if isinstance(cells, str):
        raise ValueError(cells)
    segments = list[Segment]()
    for name, at, value in cells:
        place = Location(row, at)
        if name:
            segments.append(file_segment(KINDS[MEDIA[name].item], place, _numbers(name, value)))
        else:
            segments.append(Segment(TEXT, place, _text(value), trained=True))
    return Sample(key, segments)


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

    if isinstance(values, pa.StructArray) and not values.null_count:
        values = values.field("bytes")
    elif pa.types.is_struct(values.type):
        values = pc.struct_field(values, "bytes")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    narrow = isinstance(values, pa.BinaryArray | pa.StringArray)  # offsets of 32 bits
    if not narrow:
        values = values.cast(pa.large_binary())
    _, offsets, data = values.buffers()
    if not len(values):
        return []
    ends = np.frombuffer(offsets, dtype=np.int32 if narrow else np.int64)[
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
