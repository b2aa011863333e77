"""What every form of dataset is read into: samples of segments with their sizes, and what is left
out, by name."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from disttrain_cli.data.clips import ClipHeader, read_clip_header
from disttrain_cli.data.headers import ImageHeader, Read, is_whole, read_header

MAX_TEXT_BYTES = 16 * 1024 * 1024  # a larger json, txt or record is no sample
MAX_IMAGE_BYTES = 256 * 1024 * 1024  # a larger image or sound file is none
HEAD_BYTES = 4096  # of an image that are read at once; most headers end before
MOST_SHOWN = 200  # characters of a name in a message


class Skipped(NamedTuple):
    """A sample or image that is left out, and why. A shard's own damage has no key."""

    shard: str
    key: str
    reason: str


class Place(NamedTuple):
    """Where a segment lies in its shard: two numbers, whose meaning is the form's own."""

    offset: int
    size: int


class Segment(NamedTuple):
    """A piece of a sample. `trained`: the tokens of this text are labels; `ended`: EOS follows
    inside the sample.

    A clip has its duration in ms in the place of the width, its samples per second in that of the
    height; a piece of a document (`data.documents`) its first character, and how many it has.
    """

    kind: int
    place: Place
    text: str = ""
    width_px: int = 0
    height_px: int = 0
    trained: bool = False
    ended: bool = False


class Sample(NamedTuple):
    """One sample of a shard."""

    key: str
    segments: list[Segment]


class Part(NamedTuple):
    """A segment as a sample's json says it: a text, or the name of an image or sound file."""

    kind: int
    value: str
    trained: bool = True
    ended: bool = False


class Shard(NamedTuple):
    """One file of a source: a local path or a URL, and its name relative to the source."""

    form: str
    path: str
    name: str
    images: str = ""  # folder of the images that a LLaVA JSON names


class OpenShard(Protocol):
    """A shard whose samples are read again in any order, by any thread.

    `record` is the place of a sample's first text, (-1, 0) where it has none. All methods raise
    OSError (DataError for a URL) where the file cannot be read, ValueError or IndexError where what
    lies there is not what was indexed, and pyarrow's own errors (ValueErrors, OSErrors).
    """

    def image(self, place: Place, record: Place) -> bytes:
        """The image file at `place`."""

    def clip(self, place: Place, record: Place) -> bytes:
        """The sound file at `place`."""

    def texts(self, record: Place) -> list[str]:
        """All texts of a sample, in order."""


def read_size(read: Read, file_bytes: int) -> ImageHeader:
    """Format and size in pixels of an image file of so many bytes; ValueError where it is none, or
    its end is missing.
    """
    if file_bytes > MAX_IMAGE_BYTES:
        raise ValueError(
            f"oversized image file: {file_bytes} bytes, at most {MAX_IMAGE_BYTES} are read"
        )
    head = read(0, HEAD_BYTES)

    def part(offset: int, size: int) -> bytes:
        return head[offset : offset + size] if offset + size <= len(head) else read(offset, size)

    header = read_header(part)
    if not is_whole(part, file_bytes):
        raise ValueError(f"truncated {header.format} file")
    return header


def read_duration(read: Read, file_bytes: int) -> ClipHeader:
    """Duration of a sound file of so many bytes; ValueError with the reason where it is none."""
    if file_bytes > MAX_IMAGE_BYTES:
        raise ValueError(
            f"oversized sound file: {file_bytes} bytes, at most {MAX_IMAGE_BYTES} are read"
        )
    return read_clip_header(read, file_bytes)


def clean(text: str) -> str:
    """JSON may escape half a character, which no tokenizer takes."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def printable(name: str, most: int | float = MOST_SHOWN) -> str:
    """A name or reason as one line that no terminal takes for a command: control characters are
    written out."""
    if len(name) <= most and name.isprintable():
        return name
    shown = name if most == math.inf else name[: int(most)]
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)
    return escaped + ("…" if len(name) > most else "")
