"""Records of a JSON file with images next to it: conversations, captions and documents.

The file is a list of records or has one on each line, which its content decides, whatever its name.
The contents of a record are in `chats`.

The location of a text is its record in the JSON (byte offset, length); that of an image is its
index among the images of the record, and the length of its file. A name that leads out of the
folder of images is a bad sample; a data URI contains the image itself.
"""

from __future__ import annotations

import base64
import errno
import functools
import io
import json
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO, NamedTuple

from disttrain_cli.data.modalities.registry import MEDIA
from disttrain_cli.data.sources.chats import (
    compact,
    conversation,
    file_names,
    texts_of,
    unread_keys,
)
from disttrain_cli.data.sources.files import (
    File,
    HeldFile,
    LocalFile,
    join,
    missing_file,
    open_file,
    without_query,
)
from disttrain_cli.data.sources.samples import (
    LONG,
    MAX_TEXT_BYTES,
    ChatForm,
    Compact,
    Location,
    Measured,
    Sample,
    Segment,
    Shard,
    Skipped,
    file_segment,
    is_held,
    media_of,
    shown_name,
    text_segment,
)
from disttrain_cli.data.sources.turn_forms import SPOKEN, TURNS, with_turns
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import TEXT
from disttrain_cli.spec.runfile.data import URL, is_url

HEAD_BYTES = 64  # of a file, which usually show if it is a list
CHUNK_BYTES = 4 * 1024 * 1024  # of the JSON, read at once

SPEAKERS = {who for who, _ in SPOKEN}
DECODER = json.JSONDecoder()
#: A complete path or URL, or one that leads up.
LEADS_OUT = re.compile(rf"^[/\\]|{URL.pattern}|\0|(^|[/\\])\.\.($|[/\\])")
SPACES = " \t\r\n"
SPACE = re.compile(f"[{SPACES}]*")


class Record(NamedTuple):
    """A record and its bytes in the JSON, or the reason why it is not valid.

    `cut`: the file ends inside it; `line`: its number in the file, from 1, if a record is a line.
    """

    location: Location
    value: Any
    wrong: str = ""
    cut: bool = False
    line: int = 0


class DamagedList(ValueError):
    """A JSON list that cannot be read from byte `at` on."""

    def __init__(self, reason: str, at: int) -> None:
        super().__init__(reason)
        self.at = at


class LlavaShard:
    """An open JSON with its folder of images."""

    def __init__(self, shard: Shard, chat: ChatForm | None = None) -> None:
        self._file, self._folder, self._chat = open_file(shard.path), shard.images, chat

    def file(self, media: str, location: Location, record: Location) -> bytes:
        name = self._name(location, record)
        file = open_image(self._folder, name)
        if file.size != location.size:
            raise ValueError(
                f"{shown_name(name)} has {file.size} bytes, {location.size} when it was indexed"
            )
        data = file.read(0, location.size)
        if len(data) < location.size:
            raise ValueError(f"{shown_name(name)} is truncated")
        return data

    def file_name(self, media: str, location: Location, record: Location) -> str:
        return shown_name(self._name(location, record))

    def _name(self, location: Location, record: Location) -> str:
        return file_names(self._record(record))[location.offset]

    def texts(
        self, record: Location, files: Sequence[Measured] = ()
    ) -> list[str | tuple[int, ...]]:
        return texts_of(self._record(record), self._chat, files)

    def _record(self, location: Location) -> Any:
        data = self._file.read(*location)
        if len(data) < location.size:
            raise ValueError("the JSON is truncated")
        return with_turns(json.loads(data))


def read_llava(
    shard: Shard, label: str, chat: ChatForm | None = None
) -> Iterator[Sample | Compact | Skipped]:
    """Read the samples of one JSON, in its order.

    Only headers of images are read; a list is read in pieces. Records of a nested list (QwenLM's
    packed data) are separate samples.
    """
    try:
        file = open_file(shard.path)
    except OSError as error:
        yield Skipped(label, "", f"cannot be opened: {error.strerror}", None, cut=True)
        return
    named_so, at = without_query(shard.path).endswith(".json"), 0
    good = good_bytes = mappings = 0
    early = list[Skipped]()  # skipped before the first sample
    is_list = True
    try:
        is_list = _is_list(file, named_so)
        records = _list(file.stream()) if is_list else _lines(file)
        for number, record in enumerate(records):
            at = sum(record.location)
            mappings += isinstance(record.value, dict)
            name = record.value.get("id") if isinstance(record.value, dict) else None
            place = f"line {record.line}" if record.line else f"record {number}"
            key = str(name) if isinstance(name, str | int) else place
            try:
                if record.wrong:
                    raise ValueError(record.wrong)
                if record.location.size > MAX_TEXT_BYTES:
                    raise ValueError(
                        f"a record of {record.location.size} bytes, at most {MAX_TEXT_BYTES} are"
                        " read"
                    )
                sample = _sample(key, record, shard.images, chat)
            except ValueError as error:
                reason = str(error) if key == place else f"{place}: {error}"
                size = record.location.size if record.wrong and record.line else 0
                samples = None if record.cut else 1
                one = Skipped(label, key, reason, samples, 0 if record.cut else size, record.cut)
                if good:
                    yield _by_size(one, good_bytes / good)
                else:
                    early.append(one)
                continue
            good += 1
            good_bytes += record.location.size
            if early:
                yield from (_by_size(one, good_bytes) for one in early)
                early.clear()
            yield sample
        if early and not is_list and mappings < 2:
            # a page of a server, or a mapping that may hold any number of records
            early = [early[0]._replace(samples=None, unread_bytes=0, cut=True)]
        yield from early
    except (OSError, ValueError, RecursionError) as error:
        yield from early
        reason, at = f"not a complete list of records: {error}", getattr(error, "at", at)
        yield Skipped(label, "", reason, None, file.size - at, cut=True)


def _by_size(one: Skipped, mean: float) -> Skipped:
    """Return the entry of a line that is no JSON; a large one counts as several, by its size."""
    large = one.unread_bytes > 2 * mean
    return one._replace(samples=None) if large else one._replace(unread_bytes=0)


def open_image(folder: str, name: str) -> File:
    """Open an image below `folder`, by a relative or absolute name, or one contained in its name.

    A name contains an image as `data:` URI, or as base64 alone.

    Raises:
        ValueError: there is no such image, or the name leads out of the folder.
    """
    if is_held(name):
        return HeldFile(_held(name))
    remote = is_url(folder)
    if not remote and name.startswith(("/", "file://")):
        name = name.removeprefix("file://").removeprefix(os.path.join(os.path.abspath(folder), ""))
    if LEADS_OUT.search(name):
        raise missing_file(name, "points outside of the folder of images")
    path = join(folder, name)
    try:
        if remote:
            return open_file(path)
        inside = "/" not in name or _below(os.path.dirname(path), folder)
        if inside:
            try:
                return LocalFile(path, os.O_NOFOLLOW)
            except OSError as error:
                if error.errno != errno.ELOOP:  # not a link
                    raise
                inside = _below(path, folder)
        if not inside:
            raise missing_file(name, "points outside of the folder of images through a link")
        return LocalFile(path)
    except OSError as error:
        raise missing_file(name, f"cannot be opened: {error.strerror or error}") from None


def _held(name: str) -> bytes:
    """Return the bytes of an image that its name contains, as a data URI or as base64 alone."""
    head, _, content = name.rpartition(",")
    if head and not head.lower().endswith(";base64"):
        raise ValueError("an image in a data URI must be in base64")
    try:
        content = "".join(content.split())
        return base64.b64decode(content + "=" * (-len(content) % 4), validate=True)
    except ValueError:
        raise ValueError(f"{shown_name(name)} is not valid base64") from None


@functools.lru_cache(maxsize=4096)
def _below(path: str, folder: str) -> bool:
    """Return True if a path stays in a folder when links are followed."""
    real = os.path.realpath(folder)
    return os.path.commonpath([os.path.realpath(path), real]) == real


def _sample(key: str, record: Record, folder: str, chat: ChatForm | None) -> Sample | Compact:
    """Return the sample of a record and its images; ValueError with the reason."""
    usual = None if chat else compact(record.value)
    if usual is None:
        record = record._replace(value=with_turns(record.value))
        return Sample(key, _segments(record, folder, chat), unread_keys(record.value, chat))
    form, texts, names, unread = usual
    files = array(LONG)
    for number, name in enumerate(names):
        size, (width, height, *_) = _measured(name, folder)
        files.extend((number, size, width, height))
    return Compact([key], form, texts, array(LONG, record.location), files, unread)


def _segments(record: Record, folder: str, chat: ChatForm | None) -> list[Segment]:
    known: dict[str, tuple[int, Numbers]] = {}  # bytes and sizes of images

    def measured(name: str) -> tuple[int, Numbers]:
        if name not in known:
            known[name] = _measured(name, folder)
        return known[name]

    segments, image = list[Segment](), -1
    for part in conversation(
        record.value, chat, measure=lambda names: [measured(name)[1] for name in names]
    ):
        if part.kind == TEXT:
            segments.append(text_segment(part, record.location))
            continue
        image += part.part == 0
        size, numbers = measured(part.value)
        segments.append(file_segment(part.kind, Location(image, size), numbers, part))
    return segments


def _measured(name: str, folder: str) -> tuple[int, Numbers]:
    """Return (bytes, sizes) of an image or video; ValueError with the reason."""
    file = open_image(folder, name)
    try:
        return file.size, MEDIA[media_of(name)].read_sizes(file.read, file.size)
    except ValueError as error:
        raise ValueError(f"{shown_name(name)}: {error}") from None


def _is_list(file: File, named_so: bool) -> bool:
    """Return True if a file is a list of records, not one record per line.

    The first line decides, and the file's name if that leaves it open.
    """
    if named_so and file.read(0, HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        return True  # whatever the line says: it may be all of the file
    with file.stream() as stream:
        line = stream.readline(MAX_TEXT_BYTES).removeprefix(b"\xef\xbb\xbf")
    try:
        return not isinstance(json.loads(line), dict) and named_so
    except (ValueError, RecursionError):  # a line is not a record by itself
        return named_so or line.startswith(b"[")


def _lines(file: File) -> Iterator[Record]:
    offset = number = 0
    with file.stream() as stream:
        while line := stream.readline(MAX_TEXT_BYTES + 1):
            number += 1
            start, offset, end = offset, offset + len(line), line
            while offset - start > MAX_TEXT_BYTES and end and not end.endswith(b"\n"):
                end = stream.readline(MAX_TEXT_BYTES)  # the rest of a line that is too long
                offset += len(end)
            location = Location(start, offset - start)
            value, wrong = None, ""
            if location.size > MAX_TEXT_BYTES:
                wrong = "not valid JSON: it contains zero bytes" if b"\0" in line else ""
            elif line.strip():
                try:
                    value = json.loads(line)
                except (ValueError, RecursionError) as error:
                    wrong = f"not valid JSON: {error}"
            if isinstance(value, list) and value:
                inside = _list(io.BytesIO(line), location.offset)
                yield from (_of_list(record)._replace(line=number) for record in inside)
            elif line.strip():
                cut = bool(wrong) and not end.endswith(b"\n")
                yield Record(location, value, wrong, cut, number)


def _list(stream: BinaryIO, start: int = 0) -> Iterator[Record]:
    """Yield the records of a JSON list, and of the lists in it, read in pieces.

    Args:
        start: byte of the file at which the stream begins.

    Raises:
        DamagedList: it is no list, or damaged.
    """
    with stream:
        window = _Window(stream, start)
        if window.text.startswith("\xef\xbb\xbf"):  # a byte order mark
            window.at = 3
        if window.next() != "[":
            raise window.damage("the JSON is not a list")
        window.at += 1
        if window.next() == "]":
            window.at += 1
        else:
            yield from window.elements()
        if window.next():
            raise window.damage("data after the end of the list")


def _of_list(record: Record) -> Record:
    """Return an element of a nested list or of a line's list; a turn is marked as no record."""
    value = record.value if isinstance(record.value, dict) else {}
    if not value.keys().isdisjoint(SPEAKERS) and value.keys().isdisjoint(TURNS):
        return record._replace(wrong="turns without a record: write them in `messages`")
    return record


class _Window:
    """The part of a JSON that is read and not used yet.

    Bytes are decoded as Latin-1, so that indices in the text are offsets in the file.
    """

    def __init__(self, stream: BinaryIO, start: int) -> None:
        self._stream, self._done = stream, False
        # `text[at]` is next; `text[0]` is at byte `start` of the file
        self.text, self.at, self.start = "", 0, start
        self._fill()

    def next(self) -> str:
        """Return the next non-space character, "" at the end of the file."""
        while True:
            if self.text[self.at : self.at + 1] in SPACES:
                self.at = SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            if self.at < len(self.text) or self._done:
                return self.text[self.at : self.at + 1]
            self._fill()

    def elements(self, inside: bool = False) -> Iterator[Record]:
        """Yield the elements of a list up to its end, those of a nested list one by one.

        Raises:
            DamagedList: there is no end.
        """
        while True:
            if self.next() != "[" or inside:
                record = self._element()
                yield _of_list(record) if inside else record
            else:
                begin = self.start + self.at
                self.at += 1
                if self.next() == "]":
                    self.at += 1
                    yield Record(Location(begin, self.start + self.at - begin), [])
                else:
                    yield from self.elements(inside=True)
            mark = self.next()
            if mark not in ("]", ","):
                raise self.damage("no comma or end of the list")
            self.at += 1
            if mark == "]":
                return

    def damage(self, reason: str) -> DamagedList:
        """Return the error that the JSON is damaged at the next character."""
        at = self.start + self.at
        return DamagedList(f"{reason} at byte {at}", at)

    def _element(self) -> Record:
        """Return the next element of the list; DamagedList if there is none."""
        if self.next() in ("", "]"):
            raise self.damage("no record")
        while True:
            try:
                value, end = DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or self._done:  # else a number may continue
                    break
            except ValueError as error:
                if self._done or len(self.text) - self.at > MAX_TEXT_BYTES:
                    offset = self.start + getattr(error, "pos", self.at)
                    raise DamagedList(
                        f"not valid JSON at byte {offset}", self.start + self.at
                    ) from None
            self._fill()
        text = self.text[self.at : end]
        location = Location(self.start + self.at, end - self.at)
        self.at = end
        if text.isascii():
            return Record(location, value)
        try:
            return Record(location, json.loads(text.encode("latin-1")))
        except UnicodeDecodeError as error:
            return Record(location, None, f"not valid UTF-8: {error}")

    def _fill(self) -> None:
        piece = self._stream.read(CHUNK_BYTES)
        self._done = not piece
        self.start += self.at
        self.text, self.at = self.text[self.at :] + piece.decode("latin-1"), 0
