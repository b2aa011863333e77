"""Rows of a Parquet or Arrow file, read from its columns of images, sounds and texts (`columns`).

The location of a segment is its row in the file and its position in the row; that of a text of a
conversation the row and the number of images before the turns (`Row.before`), that of a document or
caption the row and 1 if it has images or videos.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise, repeat
from typing import TYPE_CHECKING, Any, NamedTuple

from disttrain_cli.data.modalities.registry import MEDIA
from disttrain_cli.data.sources.chats import (
    MARK,
    WRITTEN_FILM,
    WRITTEN_MARKS,
    compact,
    conversation,
    has_turns,
    text_pieces,
    texts_of,
    unread_keys,
)
from disttrain_cli.data.sources.columns import LISTS, PAIRS, Columns, is_list
from disttrain_cli.data.sources.files import missing_file
from disttrain_cli.data.sources.refusals import check_text
from disttrain_cli.data.sources.samples import (
    LONG,
    MAX_TEXT_BYTES,
    TRAINED,
    ChatForm,
    Compact,
    Location,
    Measured,
    Sample,
    Segment,
    Skipped,
    clean,
    file_segment,
    holds,
    media_of,
    text_segment,
)
from disttrain_cli.data.sources.turn_forms import TEXTS, TURNS, turns_in, with_turns
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import KINDS, TEXT

if TYPE_CHECKING:
    import pyarrow as pa


EMPTY = "the text is empty"
JSON = (b"[", b"{")  # first characters of a text that may be turns
HEAD_BYTES = 64  # of a text, which usually suffice to decide


class Row(NamedTuple):
    """A row as a JSON record.

    Attributes:
        files: images and videos by type and name.
        before: number of images before the turns, without marks.
    """

    record: dict[str, Any]
    files: Mapping[str, Mapping[str, memoryview]]
    before: int = 0


def read_rows(
    batch: pa.RecordBatch, columns: Columns, first: int, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Yield the samples of consecutive rows, the first of which is row `first` of the file."""
    of_pairs = columns.texts and columns.files and not columns.interleaved
    if of_pairs and "video" not in columns.files:
        yield from _together(batch, columns, first, label, chat)
        return
    if columns.interleaved:
        rows = _interleaved(batch, columns)
    else:
        rows = _pairs(batch, columns) if columns.texts else _records(batch, columns)
    for row, cells in enumerate(rows, first):
        key = f"row {row}"
        try:
            yield _sample(key, row, cells, columns, chat)
        except ValueError as error:
            yield Skipped(label, key, str(error))


def file_at(column: pa.Array, location: Location) -> bytes:
    """Return the image or sound file at a location of a column that has only the location's row.

    Raises:
        ValueError: there is no file.
    """
    values, _ = _flat(column)
    data = _views(values)[location.size]
    if data is None:
        raise ValueError("there is no file")
    return bytes(data)


def file_name(columns: Columns, media: str, location: Location) -> str:
    """Return the name of the file at a location of a table, for messages."""
    return f"{columns.files.get(media, media)}[{location.size}]"


def texts_at(
    columns: Columns,
    cells: list[pa.Array],
    chat: ChatForm | None = None,
    files: Sequence[Measured] = (),
    before: int = 0,
) -> list[str | tuple[int, ...]]:
    """Return all texts of the only row of the columns `of_texts`.

    Args:
        files: sizes of the row's images.
        before: number of images before the turns; in a text without turns not 0 if it has files.
    """
    if not columns.texts:
        record = _record(columns, [_values(cell)[0] for cell in cells], before)
        if has_turns(record):
            return texts_of(record, chat, files)
        said = clean(next(record[name] for name in TEXTS if record.get(name) is not None))
        return [*text_pieces(said)] if before else [said]
    if columns.interleaved:
        return [str(text, "utf-8") for text in _views(_flat(cells[0])[0]) if text is not None]
    (value,) = _views(_first(cells))
    if value is None:
        raise ValueError("there is no text")
    text = _text(value)
    if (turns := _conversation(text)) is not None:
        return texts_of(turns, chat, files)
    return [*text_pieces(text)] if before else [text]


def _records(batch: pa.RecordBatch, columns: Columns) -> Iterator[Row | str]:
    """Yield each row of a table of conversations, or why it cannot be read."""
    texts = zip(*(_values(batch.column(name)) for name in columns.record.values()), strict=True)
    of_media = [
        _lists(batch.column(columns.files[name])) if name in columns.files else [[]] * len(batch)
        for name in ("image", "video")
    ]
    for row, (cells, *of_row) in enumerate(zip(texts, *of_media, strict=True)):
        files = dict[str, dict[str, memoryview]]()
        try:
            for media, own in zip(("image", "video"), of_row, strict=True):
                if None in own:
                    _check_null(batch, columns, media, row)
                files[media] = {str(at): file for at, file in enumerate(own) if file is not None}
            before = len(files["image"]) if PAIRS in columns.record else 0
            yield Row(_record(columns, cells, before), files, before)
        except ValueError as error:
            yield str(error)


def _check_null(batch: pa.RecordBatch, columns: Columns, media: str, row: int) -> None:
    """Raise ValueError if a file without bytes is not simply absent.

    Its path is given, or it is in a list, where the indices of later files would change.
    """
    name = columns.files[media]
    value = _value(batch.column(name)[row])
    if isinstance(value, list):
        at = next(at for at, one in enumerate(value) if _bytes(one) is None)
        raise ValueError(f"`{name}[{at}]` is null or has no bytes: {media}s are numbered by it")
    if holds(value):
        raise ValueError(f"the {MEDIA[media].what} is missing")


def _bytes(file: Any) -> Any:
    return file.get("bytes") if isinstance(file, dict) else file


def _record(columns: Columns, cells: Sequence[Any], before: int) -> dict[str, Any]:
    """Return the record of a row from the cells of its columns; ValueError if one cannot be read.

    Images of pairs `{user, assistant}` have no marks: they precede the first question.
    """
    if wrong := next((cell for cell in cells if isinstance(cell, ValueError)), None):
        raise wrong
    record = dict(zip(columns.record, cells, strict=True))
    if PAIRS in record:
        pairs = record.pop(PAIRS)
        turns = turns_in(pairs) or pairs
        if before and turns:
            first = int(turns[0].get("role") == "system" and len(turns) > 1)
            said = {"type": "text", "text": turns[first].get("content")}
            turns[first] = {**turns[first], "content": [*[{"type": "image"}] * before, said]}
        record[TURNS[1]] = turns
    return with_turns(record)


def _values(column: pa.Array) -> list[Any]:
    """Return the cells of a column as JSON values; the error in place of an unreadable cell."""
    try:
        return list(column.to_pylist())
    except ValueError:
        return [_value(cell) for cell in column]


def _value(cell: pa.Scalar) -> Any:
    try:
        return cell.as_py()
    except ValueError as error:
        return ValueError("text is not UTF-8") if isinstance(error, UnicodeError) else error


def _lists(column: pa.Array) -> Iterator[list[memoryview | None]]:
    """Yield the files of each row of a column of files or of lists of files."""
    values, counts = _flat(column)
    files = iter(_views(values))
    for count in counts:
        yield [next(files) for _ in range(count or 0)]


def _said(chat: ChatForm | None, key: str, row: int, given: Row) -> Sample | Compact:
    """Return the sample of a conversation; ValueError with the reason."""
    files = given.files

    def numbers_of(name: str) -> Numbers:
        media = media_of(name)
        if name not in files.get(media, {}):
            raise missing_file(
                name,
                f"is named but not in the table: {media}s of tables are read as bytes, binary or"
                " {bytes, path}",
            )
        file = files[media][name]
        try:
            return MEDIA[media].read_sizes(partial(_part, file), len(file))
        except ValueError as error:
            raise ValueError(f"{media} {name}: {error}") from None

    record = given.record | {f"{media}s": [*own] for media, own in files.items() if own}
    usual = None if chat or given.before else compact(record)
    if usual is not None:
        form, texts, names, unread = usual
        numbers = array(LONG)
        for name in names:
            sides = numbers_of(name)  # refuses a name that is no number
            numbers.extend((row, int(name), *sides))
        return Compact([key], form, texts, array(LONG, (row, 0)), numbers, unread)
    segments = list[Segment]()
    before = given.before if has_turns(record) else int(any(files.values()))
    for part in conversation(
        record, chat, measure=lambda names: [numbers_of(name) for name in names]
    ):
        if part.kind == TEXT:
            segments.append(text_segment(part, Location(row, before)))
        else:
            sides = numbers_of(part.value)  # refuses a name that is no number
            place = Location(row, int(part.value))
            segments.append(file_segment(part.kind, place, sides, part))
    return Sample(key, segments, unread_keys(record, chat))


def _pairs(batch: pa.RecordBatch, columns: Columns) -> Iterator[Any]:
    for row, cells in enumerate(_cells(batch, columns)):
        try:
            yield _pair(batch, columns, row, cells)
        except ValueError as error:
            yield str(error)


def _pair(batch: pa.RecordBatch, columns: Columns, row: int, cells: Sequence[Any]) -> Any:
    """Return a text and the row's files that are not null, or the turns that the text holds.

    Raises:
        ValueError: it cannot be read; the message has the reason.
    """
    text = cells[-1]
    if None in cells:
        _check_missing(batch, columns, row, cells)
    if not (begin := (bytes(text[:HEAD_BYTES]).lstrip() or bytes(text).lstrip())[:1]):
        raise ValueError(EMPTY)
    if begin in JSON and (said := _conversation(_text(text))) is not None:
        return _row(columns, said, cells)
    pictured = not {"image", "video"}.isdisjoint(columns.files)
    if pictured and WRITTEN_MARKS.search(marked := _text(text)):
        return _row(columns, {TEXTS[0]: marked}, cells)
    media = (*columns.files, "")
    return [(name, 0, cell) for name, cell in zip(media, cells, strict=True) if cell is not None]


def _cells(batch: pa.RecordBatch, columns: Columns) -> Iterator[tuple[Any, ...]]:
    """Yield the files and the text of each row."""
    files = (_views(batch.column(name)) for name in columns.files.values())
    texts = _views(_first([batch.column(name) for name in columns.texts]))
    return zip(*files, texts, strict=True)


def _first(columns: list[pa.Array]) -> pa.Array:
    """Return, for each row, the first text that is not null."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if len(columns) == 1 or not columns[0].null_count:
        return columns[0]
    return pc.coalesce(*(_stored(column).cast(pa.large_binary()) for column in columns))


def _check_missing(batch: pa.RecordBatch, columns: Columns, row: int, cells: Sequence[Any]) -> None:
    """Raise ValueError if a row lacks its text, or a file that it names or that its text needs.

    A text without files is a document; a caption is not.
    """
    *files, text = cells
    if text is None:
        raise ValueError("the text is missing")
    for media, file in zip(columns.files, files, strict=True):
        if file is None:
            _check_null(batch, columns, media, row)
    texts = (name for name in columns.texts if batch.column(name)[row].is_valid)
    if not any(file is not None for file in files) and next(texts) in columns.captions:
        raise ValueError(f"the {MEDIA[next(iter(columns.files))].what} is missing")


def _conversation(text: str) -> dict[str, Any] | None:
    """Return the record of a text that consists of turns, None for other texts.

    Raises:
        ValueError: it is a JSON with another meaning.
    """
    record = {TEXTS[0]: text}
    said = with_turns(record)
    if said is record:
        check_text(record)
        return None
    return said


def _row(columns: Columns, said: dict[str, Any], cells: Sequence[Any]) -> Row:
    """Return the row of a text that consists of turns, with the row's files."""
    pairs = zip(columns.files, cells, strict=False)
    files = {name: {"0": cell} for name, cell in pairs if cell is not None}
    if other := next((name for name in files if name not in ("image", "video")), None):
        raise ValueError(f"`{columns.files[other]}`: audio next to turns is not read from tables")
    return Row(said, {name: files.get(name, {}) for name in ("image", "video")})


def _together(
    batch: pa.RecordBatch, columns: Columns, first: int, label: str, chat: ChatForm | None
) -> Iterator[Sample | Compact | Skipped]:
    """Yield the samples of `_pairs` and `_sample` for tables without videos.

    Rows with all their files and a text that is no JSON are joined into `Compact` objects.
    """
    media = [MEDIA[name] for name in columns.files]
    pictured = "image" in columns.files
    form = bytes((*(KINDS[one.item] for one in media), TEXT | TRAINED))
    made = Compact([], form, [], array(LONG), array(LONG), columns.unread)
    for at, cells in enumerate(_cells(batch, columns)):
        row = first + at
        key = f"row {row}"
        other: Sample | Compact | Skipped | None = None
        files = list[int]()
        try:
            if (
                not all(cells)
                or (text := _text(cells[-1])).lstrip()[:1] in ("", "[", "{")
                or (pictured and (MARK in text or WRITTEN_FILM in text))
            ):
                other = _sample(key, row, _pair(batch, columns, at, cells), columns, chat)
            else:
                for one, value in zip(media, cells, strict=False):
                    width, height = one.read_sizes(partial(_part, value), len(value))[:2]
                    files += (row, 0, width, height)
        except ValueError as error:
            other = Skipped(label, key, str(error))
        if other is not None:
            if made.keys:
                yield made
            made = Compact([], form, [], array(LONG), array(LONG), columns.unread)
            yield other
            continue
        made.keys.append(key)
        made.texts.append(text)
        made.records.extend((row, 0))
        made.files.extend(files)
    if made.keys:
        yield made


def _interleaved(batch: pa.RecordBatch, columns: Columns) -> Iterator[Any]:
    (image_values, image_counts), (text_values, text_counts) = (
        _flat(batch.column(name)) for name in LISTS
    )
    images, texts = iter(_views(image_values)), iter(_views(text_values))
    paths = iter(_paths_alone(image_values))
    for image_count, text_count in zip(image_counts, text_counts, strict=True):
        own_images, own_texts = (
            [next(values) for _ in range(count or 0)]
            for values, count in ((images, image_count), (texts, text_count))
        )
        named = [next(paths) for _ in own_images]
        if image_count is None or text_count is None or image_count != text_count:
            yield f"`images` has {image_count} entries, `texts` {text_count}"
        elif wrong := [
            at
            for at, (image, text) in enumerate(zip(own_images, own_texts, strict=True))
            if (image is None) == (text is None)
        ]:
            yield f"position {wrong[0]} must have either an image's bytes or a text"
        elif any(named):
            yield f"`images[{named.index(True)}]` has a path and no bytes"
        else:
            yield [
                ("", at, text) if text is not None else ("image", at, image)
                for at, (image, text) in enumerate(zip(own_images, own_texts, strict=True))
            ]


def _paths_alone(values: pa.Array) -> Iterable[bool]:
    """Return True for each image that has a path and no bytes."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_struct(values.type) or values.type.get_field_index("path") < 0:
        return repeat(False)
    of = {name: pc.struct_field(values, name) for name in ("bytes", "path")}
    return pc.and_(of["bytes"].is_null(), of["path"].is_valid()).to_pylist()


def _sample(
    key: str, row: int, cells: Any, columns: Columns, chat: ChatForm | None
) -> Sample | Compact:
    """Return the sample of a row; ValueError with the reason, which may replace the cells.

    A cell is the name of a type of file ("" for a text), its position, and its bytes.
    """
    if isinstance(cells, str):
        raise ValueError(cells)
    if isinstance(cells, Row):
        said = _said(chat, key, row, cells)
        return said._replace(unread=(*columns.unread, *said.unread))
    segments = list[Segment]()
    for name, at, value in cells:
        place = Location(row, at)
        if name:
            numbers = MEDIA[name].read_sizes(partial(_part, value), len(value))
            segments.append(file_segment(KINDS[MEDIA[name].item], place, numbers))
        else:
            segments.append(Segment(TEXT, place, _text(value), trained=True))
    return Sample(key, segments, columns.unread)


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
    """Return the flattened values of a column of lists, with the length of each list.

    A length is null if there is no list. For other columns, return the column itself.
    """
    import pyarrow.compute as pc

    column = _stored(column)
    if is_list(column.type):
        return column.flatten(), pc.list_value_length(column).to_pylist()
    return column, [1] * len(column)


def _stored(values: pa.Array) -> pa.Array:
    """Return plain values of a dictionary or an extension type."""
    import pyarrow as pa

    if isinstance(values.type, pa.BaseExtensionType):
        values = values.storage
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _views(values: pa.Array) -> list[memoryview | None]:
    """Return the bytes of each value, not copied; None = null.

    A struct's are in its field `bytes`.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(values, pa.StructArray) and not values.null_count:
        values = values.field("bytes")
    elif pa.types.is_struct(values.type):
        values = pc.struct_field(values, "bytes")
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    values = _stored(values)
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
