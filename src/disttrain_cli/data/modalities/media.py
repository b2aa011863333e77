"""Types of files in samples: how they are recognised, and the sizes of each in the index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disttrain_cli.data.clips import read_clip_header
from disttrain_cli.data.headers import Read, read_whole, usual_jpeg
from disttrain_cli.data.videos import is_installed, read_video_header
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.video_processor import NHZ

MOST_BYTES = 256 * 1024 * 1024  # a larger file is refused
HEAD_BYTES = 4096  # of an image, read at once; most headers end before


@dataclass(frozen=True)
class Media:
    """A type of file.

    Attributes:
        name: `type` of a segment in a sample's json; `item`: the modality that reads it.
        what: the name in messages.
        suffixes: of files in tars.
        columns: usual names of columns in tables.
        read_sizes: function of a reader and the file's size in bytes that returns (width and height
            in pixels, duration in ms and rate, or any two numbers that the modality's `Head` reads;
            for videos four, `spec.video_processor.Film`); ValueError with the reason if the file is
            not of this type.
    """

    name: str
    item: str
    what: str
    suffixes: tuple[str, ...]
    columns: tuple[str, ...]
    read_sizes: Callable[[Read, int], Numbers]


def image_sizes(read: Read, file_bytes: int) -> tuple[int, int]:
    """Return width and height in pixels; ValueError also if the end of the file is missing."""
    check_bytes(file_bytes, "image")
    head = read(0, HEAD_BYTES)
    if usual := usual_jpeg(head, read, file_bytes):
        return usual

    def part(offset: int, size: int) -> bytes:
        return head[offset : offset + size] if offset + size <= len(head) else read(offset, size)

    header = read_whole(part, file_bytes)
    return header.width_px, header.height_px


def sound_sizes(read: Read, file_bytes: int) -> tuple[int, int]:
    """Return the duration in ms and the samples per second."""
    check_bytes(file_bytes, "sound")
    header = read_clip_header(read, file_bytes)
    return header.duration_ms, header.rate_hz


def video_sizes(read: Read, file_bytes: int) -> Numbers:
    """Return width and height in pixels, frames, and their rate.

    If videos cannot be read, the numbers are placeholders: a run that reads videos has been refused
    before.
    """
    check_bytes(file_bytes, "video")
    if not is_installed():
        return (1, 1, 1, NHZ)
    header = read_video_header(read, file_bytes)
    return (*header[:3], round(header.fps * NHZ))


def check_bytes(file_bytes: int, what: str) -> None:
    """Raise ValueError if a file exceeds the size limit."""
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
