"""Types of files that samples consist of beside texts: how they are recognised, and the two numbers
of each that the index keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disttrain_cli.data.clips import read_clip_header
from disttrain_cli.data.headers import Read, read_whole, usual_jpeg
from disttrain_cli.data.videos import is_installed, read_video_header
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.video_processor import NHZ

MOST_BYTES = 256 * 1024 * 1024  # a larger file is none
HEAD_BYTES = 4096  # of an image that are read at once; most headers end before


@dataclass(frozen=True)
class Media:
    """A type of file.

    Attributes:
        name: `type` of a segment in a sample's json; `item`: the modality that it is read as.
        what: as messages name one.
        suffixes: of files in tars.
        columns: usual names of columns in tables.
        read_sizes: (width and height in pixels, duration in ms and rate, or whatever the modality's
            head makes of two numbers; of videos four, `spec.video_processor.Film`) of a file of so
            many bytes; ValueError with the reason where it is none.
    """

    name: str
    item: str
    what: str
    suffixes: tuple[str, ...]
    columns: tuple[str, ...]
    read_sizes: Callable[[Read, int], Numbers]


def image_sizes(read: Read, file_bytes: int) -> tuple[int, int]:
    """Width and height in pixels; also where the end of the file is missing it is no image."""
    check_bytes(file_bytes, "image")
    head = read(0, HEAD_BYTES)
    if usual := usual_jpeg(head, read, file_bytes):
        return usual

    def part(offset: int, size: int) -> bytes:
        return head[offset : offset + size] if offset + size <= len(head) else read(offset, size)

    header = read_whole(part, file_bytes)
    return header.width_px, header.height_px


def sound_sizes(read: Read, file_bytes: int) -> tuple[int, int]:
    """Duration in ms and samples per second."""
    check_bytes(file_bytes, "sound")
    header = read_clip_header(read, file_bytes)
    return header.duration_ms, header.rate_hz


def video_sizes(read: Read, file_bytes: int) -> Numbers:
    """Width and height in pixels, frames, and their rate. Where nothing can read videos, numbers of
    none: a run that reads them has found that out before."""
    check_bytes(file_bytes, "video")
    if not is_installed():
        return (1, 1, 1, NHZ)
    header = read_video_header(read, file_bytes)
    return (*header[:3], round(header.fps * NHZ))


def check_bytes(file_bytes: int, what: str) -> None:
    """ValueError where a file is larger than any that is read."""
    if file_bytes > MOST_BYTES:
        raise ValueError(
            f"oversized {what} file: {file_bytes} bytes, at most {MOST_BYTES} are read"
        )


IMAGE_FILES = Media(
    "image",
    "image",
    "image",
    ("jpg", "jpeg", "png", "webp"),
    ("image", "jpg", "jpeg", "png", "webp", "img"),
    image_sizes,
)
SOUND_FILES = Media(
    "audio",
    "audio",
    "clip",
    ("wav", "flac", "ogg", "mp3"),
    ("audio", "wav", "flac", "ogg", "mp3", "sound", "speech"),
    sound_sizes,
)
VIDEO_FILES = Media(
    "video",
    "image",
    "video",
    ("mp4", "mov", "mkv", "webm", "avi"),
    ("video", "mp4", "mov", "mkv", "webm", "avi"),
    video_sizes,
)
