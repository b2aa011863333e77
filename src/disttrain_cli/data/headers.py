"""Image files (JPEG, PNG, WebP) without decoding a pixel: sizes from header bytes, and whether the
end is there."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

#: Larger images are refused before anything is decoded (a few bytes can claim gigabytes of pixels).
MAX_PIXELS = 100_000_000

ORIENTATION, SHORT = 0x0112, 3  # a tag of EXIF, and the type of its value
MOST_TAGS = 256  # of EXIF that are looked at

MARKER = struct.Struct(">BBH")  # 0xFF, code and length of a segment of a JPEG
FRAME = struct.Struct(">BBHxHH")  # of a frame header also height and width
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # codes of frame headers
EXIF, SCAN = 0xE1, 0xDA
ALONE = frozenset((0xD9, 0xFF))  # codes of markers that end a JPEG, and fill
WALKED_BYTES = 4096  # of a JPEG in which all segments up to the first scan mostly lie
END = b"\xff\xd9"  # of a JPEG
TAIL_BYTES = 4096  # of a JPEG in which its end marker mostly lies
PIECE_BYTES = 2**20  # read at once, where it does not

#: How what is often found in place of an image begins.
OTHERS = {
    rb"\Z": "an empty file",
    rb"\s*<": "a web page or SVG",
    rb"GIF8": "a GIF",
    rb"BM": "a BMP",
    rb"II\*\0|MM\0\*": "a TIFF",
    rb"....ftypavi[fs]": "an AVIF",
    rb"....ftyp(hei|hev|mif1|msf1)": "a HEIC",
}

#: Reads (offset, length) of one image file; shorter at its end.
Read = Callable[[int, int], bytes]
#: (code, place) of segments of a JPEG.
Segments = Iterator[tuple[int, int]]


class ImageHeader(NamedTuple):
    """What an image file says of itself; width and height are those of the upright image."""

    format: Literal["jpeg", "png", "webp"]
    width_px: int
    height_px: int
    progressive: bool = False
    orientation: int = 1  # how a JPEG is stored (EXIF 2.3, tag 0x0112), 1 to 8; 1 = upright

    @property
    def stored_px(self) -> tuple[int, int]:
        """Height and width as they are stored; orientations from 5 swap them."""
        sides = (self.height_px, self.width_px)
        return sides[::-1] if self.orientation >= 5 else sides


def read_header(read: Read) -> ImageHeader:
    """Format and size of an image file; ValueError with the reason where it is none or too
    large."""
    return _header(read, _jpeg_segments(read))


def read_whole(read: Read, size: int) -> ImageHeader:
    """The same of a file of so many bytes that ends as its format says; ValueError also where it
    does not: decoders fill what is missing without telling.

    Behind the end of a JPEG may be more: cameras append films, depth maps, further pictures.
    """
    segments = _jpeg_segments(read)  # walked once
    header = _header(read, segments)
    if not _is_whole(read, size, header.format, segments):
        raise ValueError(f"truncated {header.format} file")
    return header


def usual_jpeg(head: bytes, read: Read, size: int) -> tuple[int, int] | None:
    """Width and height as `read_whole` finds them in a file of so many bytes that begins with
    `head`, in less than half the time; None where that has to look closer: at other formats, at
    EXIF, at whatever is damaged or cut."""
    if head[:2] != b"\xff\xd8":
        return None
    at, sides, last = 2, (0, 0), len(head) - FRAME.size
    while at <= last:
        marker, code, length, height, width = FRAME.unpack_from(head, at)
        if marker != 0xFF or code == EXIF or code in ALONE:
            return None
        if code == SCAN:
            ends = at <= size - len(END) and read(size - len(END), len(END)) == END
            return sides if ends and 0 < sides[0] * sides[1] <= MAX_PIXELS else None
        if code in FRAMES and sides == (0, 0):
            sides = width, height
        at += 2 + length
    return None


def _header(read: Read, segments: Segments) -> ImageHeader:
    head = read(0, 32)
    try:
        if head.startswith(b"\xff\xd8"):
            header = _jpeg(read, segments)
        elif head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
            header = ImageHeader("png", *struct.unpack(">II", head[16:24]))
        elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            header = _webp(head)
        else:
            what = next(
                (f"{name}, " for magic, name in OTHERS.items() if re.match(magic, head, re.DOTALL)),
                "",
            )
            raise ValueError(f"{what}not a JPEG, PNG or WebP image")
    except struct.error:
        raise ValueError("image header cut short") from None
    if header.width_px < 1 or header.height_px < 1:
        raise ValueError(f"image of {header.width_px}x{header.height_px} pixels")
    if header.width_px * header.height_px > MAX_PIXELS:
        size = f"{header.width_px}x{header.height_px}"
        raise ValueError(f"oversized image: {size} pixels, at most {MAX_PIXELS} are read")
    return header


def _is_whole(read: Read, size: int, format_: str, segments: Segments) -> bool:
    try:
        if format_ == "jpeg":
            return _jpeg_ends(read, size, segments)
        if format_ == "png":
            return _png_ends(read, size)
    except struct.error:
        return False
    return size >= 8 and size >= int.from_bytes(read(4, 4), "little") + 8


def _jpeg_segments(read: Read) -> Segments:
    """(code, place) of the segments up to the first scan (ITU T.81, B.1.1.3); damage raises
    struct.error, ValueError.
    """
    head, at = read(0, WALKED_BYTES), 2
    while True:
        inside = at + 4 <= len(head)
        marker, code, length = (
            MARKER.unpack_from(head, at) if inside else MARKER.unpack(read(at, 4))
        )
        if marker != 0xFF:
            raise ValueError("damaged JPEG header")
        if code == 0xFF:  # fill byte
            at += 1
            continue
        yield code, at
        if code in (0xD9, 0xDA):
            return
        at += 2 + length


def _jpeg(read: Read, segments: Segments) -> ImageHeader:
    orientation = 1
    for code, at in segments:
        if code == EXIF and orientation == 1:
            orientation = _orientation(read, at + 4)
        if code in FRAMES:
            height, width = struct.unpack(">HH", read(at + 5, 4))
            width, height = (height, width) if orientation >= 5 else (width, height)
            progressive = code in (0xC2, 0xC6, 0xCA, 0xCE)
            return ImageHeader("jpeg", width, height, progressive, orientation)
    raise ValueError("JPEG without a frame header")


def _orientation(read: Read, at: int) -> int:
    """The orientation that EXIF in an APP1 segment at `at` gives; 1 where it gives none."""
    head = read(at, 14)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(head[6:10])
    if order is None or not head.startswith(b"Exif\0\0"):
        return 1
    try:
        tags = at + 6 + struct.unpack(f"{order}I", head[10:])[0]
        (count,) = struct.unpack(f"{order}H", read(tags, 2))
        for first in range(tags + 2, tags + 2 + 12 * min(count, MOST_TAGS), 12):
            tag, kind, values, value = struct.unpack(f"{order}HHIH", read(first, 10))
            if tag == ORIENTATION:
                return value if (kind, values) == (SHORT, 1) and 1 <= value <= 8 else 1
    except struct.error:  # as PIL, which then sees no orientation either
        pass
    return 1


def _jpeg_ends(read: Read, size: int, segments: Segments) -> bool:
    """Whether an end marker follows the first scan, which the segments that are left lead to:
    looked for at the end of the file, then everywhere."""
    *_, (_, scan) = segments
    if size - len(END) >= scan and read(size - len(END), len(END)) == END:
        return True
    end = max(scan, size - TAIL_BYTES)
    pieces = [
        (end, size),
        *((at, min(at + PIECE_BYTES, size)) for at in range(scan, end, PIECE_BYTES)),
    ]
    return any(END in read(first, last + 1 - first) for first, last in pieces)


def _png_ends(read: Read, size: int) -> bool:
    """Whether the chunks lead to the last one; a decoder may set aside whatever length a damaged
    one claims."""
    at = 8
    while at + 12 <= size:
        length, kind = struct.unpack(">I4s", read(at, 8))
        if kind == b"IEND":
            return True
        at += 12 + length
    return False


def _webp(head: bytes) -> ImageHeader:
    """Sizes of the three kinds of WebP (RFC 9649, 2.5 to 2.7)."""
    chunk = head[12:16]
    if chunk == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        return ImageHeader("webp", width, height)
    if chunk == b"VP8L":
        (bits,) = struct.unpack("<I", head[21:25])
        return ImageHeader("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if chunk == b"VP8 ":
        width, height = struct.unpack("<HH", head[26:30])
        return ImageHeader("webp", width & 0x3FFF, height & 0x3FFF)
    raise ValueError("unknown kind of WebP")
