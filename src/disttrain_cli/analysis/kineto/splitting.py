"""Complete events from a JSON file that is read in chunks: a few MB in memory for any file size.

A chunk is cut after its last `}` that is followed by `, {`, and decoded. A parser that starts at an
event and ends outside of every string and object has met a true boundary, so a cut in the wrong
place (`}, {` inside a string or inside arguments) is a decoding error, never a wrong event. A chunk
that cannot be decoded is scanned string by string and bracket by bracket; an event whose quotes or
braces do not match is counted and skipped up to where another event seems to begin.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from disttrain_cli.analysis.json_members import Members
from disttrain_cli.analysis.kineto.events import Event, decode, decode_patiently, mend, mend_bytes

_SPACE = b" \t\r\n"
_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|["{}\[\]]', re.DOTALL)
_NEXT = re.compile(rb"\s*,\s*\{")
_BEGINS = re.compile(rb'(?<=,)\s*(\{)\s*"\Z')
QUOTE, OPEN, OPEN_ARRAY, CLOSE_ARRAY = b'"{[]'
_CUTS_TRIED = 3
_MOST_DOUBTS = 8
#: Longer events are skipped.
MOST_BYTES = 64 * 2**20


@dataclass
class Reading:
    """Contents of a file other than its events, filled while they are read."""

    header: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    unreadable: int = 0
    truncated: bool = False
    problem: str = ""
    failure: str = ""  # read error of the disk


@dataclass
class Batch:
    """Decoded events, and their text (to read numbers again, exactly)."""

    events: list[Event]
    text: bytes


def split_events(chunks: Iterator[bytes], reading: Reading) -> Iterator[Batch]:
    """Yield every event of a trace once, in the order of the file.

    Args:
        chunks: the bytes of the file.
        reading: filled with the other keys of the object, and with what could not be read.
    """
    buffer, bare = _to_the_array(chunks, reading)
    if reading.problem:
        return
    longest = 0
    for chunk in chain((b"",), chunks):
        buffer += chunk
        longest = max(longest, len(chunk))
        batch, used = _decode_chunk(buffer)
        ended = False
        if batch is None:
            batch, used, ended = _walk(buffer, reading, 0 < 3 * longest < len(buffer))
        yield _counted(batch, reading)
        buffer = buffer[used:]
        if ended:
            break
        if len(buffer) > MOST_BYTES:
            reading.unreadable += 1
            reading.truncated = True
            return
    else:
        batch, used, ended = _walk(buffer, reading, True)
        yield _counted(batch, reading)
        buffer = buffer[used:]
    if ended:
        _read_tail(buffer[1:], chunks, reading)
    else:  # Chrome's array form may lack its end
        reading.truncated = not bare or bool(buffer.strip(_SPACE + b","))


def _counted(batch: Batch, reading: Reading) -> Batch:
    reading.events += len(batch.events)
    return batch


def _decode_chunk(buffer: bytes) -> tuple[Batch | None, int]:
    """Return the events up to a boundary near the end and their bytes; (None, 0) on failure."""
    end, last = len(buffer), 0
    for _ in range(_CUTS_TRIED):
        end = _last_boundary(buffer, end)
        if end < 0:
            break
        piece = buffer[:end].lstrip(_SPACE + b",")
        try:
            return Batch(decode(piece), piece), end
        except (ValueError, RecursionError):
            last, end = end, end - 1
    if last:
        try:
            piece = mend_bytes(buffer[:last].lstrip(_SPACE + b","))
            return Batch(decode(piece), piece), last
        except (ValueError, RecursionError):
            pass
    return None, 0


def _last_boundary(buffer: bytes, end: int) -> int:
    """Return the end of the last object before `end` that another one follows, or −1.

    It is a guess from the text nearby.
    """
    while True:
        at = buffer.rfind(b"}", 0, end)
        if at < 0 or _NEXT.match(buffer, at + 1):
            return at + 1 if at >= 0 else -1
        end = at


def _walk(buffer: bytes, reading: Reading, final: bool) -> tuple[Batch, int, bool]:
    """Scan `buffer` for complete events; return them, their bytes, and True if the array ended.

    Args:
        buffer: text from an event on.
        reading: counts broken events.
        final: do not wait for the end of a broken event: continue at the next one.
    """
    events: list[tuple[Event, bytes]] = []
    at, ended = 0, False
    while True:
        at, ended, next_event = _walk_on(buffer, at, events, reading, final)
        if next_event is None:
            return (
                Batch([event for event, _ in events], b",".join(text for _, text in events)),
                at,
                ended,
            )
        reading.unreadable += 1
        at = next_event


def _walk_on(
    buffer: bytes, at: int, events: list[tuple[Event, bytes]], reading: Reading, final: bool
) -> tuple[int, bool, int | None]:
    """Scan from `at` until the text or the array ends, or an event turns out to be broken.

    Returns the end of the complete events, True if the array ended there, and where another event
    seems to begin after a broken one. Signs of that: an object that follows a comma inside an
    object (a brace is missing), and strings that end like the beginning of an event (a quote is
    missing, so that text outside of strings seems inside).
    """
    open_brackets = bytearray()
    start, before, doubts = at, at, list[int]()
    for token in _TOKEN.finditer(buffer, at):
        kind, first, end = buffer[token.start()], token.start(), token.end()
        if kind == QUOTE:
            if end - first == 1:
                break
            begins = _BEGINS.search(buffer, first, end)
            if begins and open_brackets:
                doubts.append(begins.start(1))
                if len(doubts) > _MOST_DOUBTS:
                    break
        elif kind in b"{[":
            if not open_brackets:
                start, doubts = first, []
            elif open_brackets[-1] == kind == OPEN and buffer[before:first].strip(_SPACE) == b",":
                return at, False, first
            open_brackets.append(kind)
        elif not open_brackets:
            if kind == CLOSE_ARRAY:
                return first, True, None
        else:
            open_brackets.pop()
            if not open_brackets:
                event = _decode_one(buffer[start:end])
                if event is not None:
                    events.append(event)
                elif doubts:
                    return at, False, doubts[0]
                else:
                    reading.unreadable += 1
                at = end
        before = end
    broken = bool(doubts) and (final or len(doubts) > _MOST_DOUBTS)
    return at, False, doubts[0] if broken else None


def _decode_one(text: bytes) -> tuple[Event, bytes] | None:
    try:
        return decode(text)[0], text
    except (ValueError, RecursionError):
        event, text = decode_patiently(text), mend(text)
        return None if event is None else (event, text)


def _to_the_array(chunks: Iterator[bytes], reading: Reading) -> tuple[bytes, bool]:
    """Return the text after the `[` of the events, and True if the array is the whole document."""
    members = Members(chunks)
    if members.begins == b"[":
        return members.rest, True
    for key in members:
        if key == b"traceEvents" and members.rest.startswith(b"["):
            _read_header(members, reading)
            return members.rest[1:], False
    reading.problem = (
        "is empty"
        if not members.begins
        else "contains no traceEvents"
        if members.begins == b"{"
        else "is not JSON"
    )
    return b"", False


def _read_tail(text: bytes, chunks: Iterator[bytes], reading: Reading) -> None:
    """Read keys of the object after the array; a truncated tail loses only its own keys."""
    members = Members(chunks, text)
    for _ in members:
        pass
    _read_header(members, reading)


def _read_header(members: Members, reading: Reading) -> None:
    for key, value in members.values.items():
        reading.header |= _object(b'{"' + key + b'": ' + value + b"}")


def _object(text: bytes) -> dict[str, Any]:
    for written in (bytes, mend):  # mending takes ten times as long
        try:
            return dict(json.loads(written(text), strict=False))
        except (ValueError, RecursionError):
            pass
    return {}


def read_chunks(read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
    """Yield chunks of `size` bytes until there are none."""
    while chunk := read(size):
        yield chunk
