"""Image files (JPEG, PNG, WebP) without decoding a pixel: size, orientation, truncation.

Images are turned upright as by `PIL.ImageOps.exif_transpose`, with which transformers and datasets
read images: the orientation is that of the EXIF metadata, else of the XMP metadata.
"""

from __future__ import annotations

import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

#: Larger images are refused before anything is decoded (a few bytes can claim gigabytes of pixels).
MAX_PIXELS = 100_000_000
MAX_METADATA_BYTES = 16 * 2**20  # of EXIF or XMP
MAX_UNPACKED_BYTES = 2**20  # of compressed metadata, as PIL

ORIENTATION, SHORT = 0x0112, 3  # an EXIF tag, and the type of its value
EXIF_MARK = b"Exif\0\0"  # precedes EXIF in a JPEG, sometimes elsewhere
XMP_MARK = b"http://ns.adobe.com/xap/1.0/\0"  # precedes XMP in a JPEG
XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
RAW_EXIF, XMP_TEXT = b"Raw profile type exif", b"XML:com.adobe.xmp"  # keywords of PNG texts

MARKER = struct.Struct(">BBH")  # 0xFF, code and length of a JPEG segment
FRAME = struct.Struct(">BBHxHH")  # with height and width, of a frame header
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # codes of frame headers
APP1, SCAN = 0xE1, 0xDA
ALONE = frozenset((0xD9, 0xFF))  # codes of markers that end a JPEG, and of fill bytes
WALKED_BYTES = 4096  # of a JPEG; they usually hold all segments up to the first scan
END = b"\xff\xd9"  # of a JPEG
TAIL_BYTES = 4096  # of a JPEG; they usually hold its end marker
PIECE_BYTES = 2**20  # read at a time, if they do not

WEBP_EXIF, WEBP_XMP = 0x08, 0x04  # flags of VP8X

#: First bytes of files that often replace images.
OTHERS = {
    rb"\Z": "an empty file",
    rb"version https://git-lfs": "a Git LFS pointer (git lfs pull brings the file)",
    rb"\s*<": "a web page or SVG",
    rb"GIF8": "a GIF",
    rb"BM": "a BMP",
    rb"II\*\0|MM\0\*": "a TIFF",
    rb"....ftypavi[fs]": "an AVIF",
    rb"....ftyp(hei|hev|mif1|msf1)": "a HEIC",
    rb"\0\0\0\x0cjP  |\xff\x4f\xff\x51": "a JPEG 2000",
    rb"\0\0\0\x0cJXL |\xff\x0a": "a JPEG XL",
    rb"\0\0\x01\0": "an icon (ICO)",
    rb"%PDF": "a PDF",
}

#: Reads (offset, length) of one image file; shorter at its end.
Read = Callable[[int, int], bytes]
#: True if a file of this size ends as its format requires.
IsWhole = Callable[[int], bool]


class ImageHeader(NamedTuple):
    """Header of an image file; width and height are those of the upright image."""

    format: Literal["jpeg", "png", "webp"]
    width_px: int
    height_px: int
    progressive: bool = False
    orientation: int = 1  # how it is stored (EXIF 2.3, tag 0x0112), 1 to 8; 1 = upright

    @property
    def stored_px(self) -> tuple[int, int]:
        """Height and width as stored; orientations from 5 on swap them."""
        sides = (self.height_px, self.width_px)
        return sides[::-1] if self.orientation >= 5 else sides


def read_header(read: Read) -> ImageHeader:
    """Return format and size of an image file.

    Raises:
        ValueError: it is no image of these formats, or too large; the message has the reason.
    """
    return _header(read)[0]


def read_whole(read: Read, size: int) -> ImageHeader:
    """Return the header of a complete file of `size` bytes; ValueError also if it is truncated.

    Decoders fill what is missing without an error. More data may follow the end of a JPEG: cameras
    append films, depth maps, further pictures.
    """
    header, is_whole = _header(read)
    if not is_whole(size):
        raise ValueError(f"truncated {header.format} file")
    return header


def usual_jpeg(head: bytes, read: Read, size: int) -> tuple[int, int] | None:
    """Return width and height of a common JPEG file of `size` bytes that begins with `head`.

    The result is that of `read_whole` in less than half the time; None for files that need its
    closer look: other formats, EXIF, damage, truncation.
    """
    if head[:2] != b"\xff\xd8":
        return None
    at, sides, last = 2, (0, 0), len(head) - FRAME.size
    while at <= last:
        marker, code, length, height, width = FRAME.unpack_from(head, at)
        if marker != 0xFF or code == APP1 or code in ALONE:
            return None
        if code == SCAN:
            ends = at <= size - len(END) and read(size - len(END), len(END)) == END
            return sides if ends and 0 < sides[0] * sides[1] <= MAX_PIXELS else None
        if code in FRAMES and sides == (0, 0):
            sides = width, height
        at += 2 + length
    return None


def _header(read: Read) -> tuple[ImageHeader, IsWhole]:
    head = read(0, 32)
    try:
        if head.startswith(b"\xff\xd8"):
            header, is_whole = _jpeg(read)
        elif head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
            header, is_whole = _png(read, head)
        elif head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            header, is_whole = _webp(read, head)
        else:
            what = next(
                (f"{name}, " for magic, name in OTHERS.items() if re.match(magic, head, re.DOTALL)),
                "",
            )
            raise ValueError(f"{what}not a JPEG, PNG or WebP image")
    except struct.error:
        raise ValueError("image header cut short") from None
    return header, is_whole


def _stored(
    format_: Literal["jpeg", "png", "webp"], width: int, height: int, progressive: bool = False
) -> ImageHeader:
    """Return a header of these properties; ValueError if no image can have them."""
    if width < 1 or height < 1:
        raise ValueError(f"image of {width}x{height} pixels")
    if width * height > MAX_PIXELS:
        raise ValueError(f"oversized image: {width}x{height} pixels, at most {MAX_PIXELS} are read")
    return ImageHeader(format_, width, height, progressive)


def _upright(header: ImageHeader, exif: bytes, xmp: bytes) -> ImageHeader:
    """Return the header of a stored file with its orientation applied."""
    orientation = _exif_orientation(exif) if exif else None
    if orientation is None and (match := XMP_ORIENTATION.search(xmp)):
        orientation = int(match[1])
    if orientation is None or not 2 <= orientation <= 8:
        return header
    turned = header._replace(orientation=orientation)
    height, width = turned.stored_px  # swapped, or as they are
    return turned._replace(width_px=width, height_px=height)


def _exif_orientation(exif: bytes) -> int | None:
    """Return the value of the orientation tag, 0 if it is not a number; None without a tag.

    PIL, ten times as slow, decides unless the directory is complete and of the usual form.
    """
    plain = exif.removeprefix(EXIF_MARK).removeprefix(EXIF_MARK)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(plain[:4], "")
    try:
        (tags,) = struct.unpack_from(f"{order}I", plain, 4)
        (count,) = struct.unpack_from(f"{order}H", plain, tags)
        directory = plain[tags + 2 : tags + 2 + 12 * count]
        if order and len(directory) == 12 * count:
            for tag, kind, values, value in struct.iter_unpack(f"{order}HHIH2x", directory):
                if tag == ORIENTATION:
                    if (kind, values) == (SHORT, 1):
                        return int(value)
                    break
            else:
                return None
    except struct.error:
        pass
    return _exif_orientation_by_pil(exif)


def _exif_orientation_by_pil(exif: bytes) -> int | None:
    """Return the orientation as PIL reads it; None if it cannot read the metadata."""
    from PIL import Image

    given = Image.Exif()
    try:
        with warnings.catch_warnings(action="ignore"):
            given.load(exif)
            value = given.get(ORIENTATION)
    except Exception:  # of PIL's parser: SyntaxError, struct.error and others
        return None
    if value is None:
        return None
    return next((number for number in range(2, 9) if value == number), 0)


def _metadata(read: Read, at: int, length: int) -> bytes:
    """Read EXIF, XMP or a text."""
    if length > MAX_METADATA_BYTES:
        raise ValueError(f"metadata of {length} bytes, at most {MAX_METADATA_BYTES} are read")
    return read(at, length)


def _jpeg_segments(read: Read) -> Iterator[tuple[int, int, int]]:
    """Yield (code, offset, length) of the segments up to the first scan (ITU T.81, B.1.1.3).

    Raises:
        struct.error, ValueError: the file is damaged.
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
        yield code, at, length
        if code in (0xD9, SCAN):
            return
        at += 2 + length


def _jpeg(read: Read) -> tuple[ImageHeader, IsWhole]:
    exif, xmp, stored, scan = b"", b"", None, 0
    for code, scan, length in _jpeg_segments(read):
        if code == APP1:
            data = _metadata(read, scan + 4, max(0, length - 2))
            if data.startswith(EXIF_MARK):  # one may go on in the next segment
                exif = exif + data.removeprefix(EXIF_MARK) if exif else data
            elif data.startswith(XMP_MARK):
                xmp = data
        elif code in FRAMES and stored is None:
            height, width = struct.unpack(">HH", read(scan + 5, 4))
            stored = _stored("jpeg", width, height, code in (0xC2, 0xC6, 0xCA, 0xCE))
    if stored is None:
        raise ValueError("JPEG without a frame header")
    return _upright(stored, exif, xmp), partial(_jpeg_ends, read, scan)


def _jpeg_ends(read: Read, scan: int, size: int) -> bool:
    """Return True if an end marker follows the first scan.

    It is searched for at the end of the file, then everywhere.
    """
    if size - len(END) >= scan and read(size - len(END), len(END)) == END:
        return True
    end = max(scan, size - TAIL_BYTES)
    pieces = [
        (end, size),
        *((at, min(at + PIECE_BYTES, size)) for at in range(scan, end, PIECE_BYTES)),
    ]
    return any(END in read(first, last + 1 - first) for first, last in pieces)


def _png(read: Read, head: bytes) -> tuple[ImageHeader, IsWhole]:
    """Return the header of a PNG and a check that its chunks are complete.

    The chunks are those of the PNG specification, section 5. A decoder may allocate whatever length
    a damaged chunk claims.
    """
    stored = _stored("png", *struct.unpack(">II", head[16:24]))
    exif, xmp, at, end = b"", b"", 8, None
    while end is None and len(chunk := read(at, 8)) == 8:
        length, kind = struct.unpack(">I4s", chunk)
        if kind == b"eXIf":
            exif = _metadata(read, at + 8, length)
        elif kind in (b"tEXt", b"zTXt", b"iTXt"):
            keyword, text = _png_text(kind, _metadata(read, at + 8, length))
            if keyword == RAW_EXIF:
                exif = exif or _unhexed(text)
            elif keyword == XMP_TEXT:
                xmp = text
        at += 12 + length
        if kind == b"IEND":
            end = at
    return _upright(stored, exif, xmp), lambda size: end is not None and end <= size


def _png_text(kind: bytes, chunk: bytes) -> tuple[bytes, bytes]:
    """Return (keyword, content) of a text chunk (PNG specification, section 11.3.3).

    The content is empty if it is damaged.
    """
    keyword, _, text = chunk.partition(b"\0")
    packed = kind == b"zTXt"
    if kind == b"iTXt":
        packed, (*_, text) = text[:1] != b"\0", text[2:].split(b"\0", 2)
    elif packed:
        text = text[1:]
    if packed and keyword in (RAW_EXIF, XMP_TEXT):
        unpacker = zlib.decompressobj()
        try:
            text = unpacker.decompress(text, MAX_UNPACKED_BYTES)
        except zlib.error:
            return keyword, b""
        if unpacker.unconsumed_tail:
            raise ValueError(f"metadata of more than {MAX_UNPACKED_BYTES} bytes, unpacked")
    return keyword, text


def _unhexed(profile: bytes) -> bytes:
    """Decode EXIF as ImageMagick writes it into texts.

    Lines of hexadecimal digits follow a name and a length.
    """
    try:
        return bytes.fromhex(b"".join(profile.split(b"\n")[3:]).decode("ascii"))
    except ValueError:
        return b""


def _webp(read: Read, head: bytes) -> tuple[ImageHeader, IsWhole]:
    """Return the header of the three kinds of WebP (RFC 9649, 2.5 to 2.7)."""
    end = int.from_bytes(head[4:8], "little") + 8

    def is_whole(size: int) -> bool:
        return size >= 8 and end <= size

    kind = head[12:16]
    if kind == b"VP8X":
        width, height = (int.from_bytes(head[at : at + 3], "little") + 1 for at in (24, 27))
        stored = _stored("webp", width, height)
        return _upright(stored, *_webp_metadata(read, head[20:21], end)), is_whole
    if kind == b"VP8L":
        (bits,) = struct.unpack("<I", head[21:25])
        return _stored("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1), is_whole
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", head[26:30])
        return _stored("webp", width & 0x3FFF, height & 0x3FFF), is_whole
    raise ValueError("unknown kind of WebP")


def _webp_metadata(read: Read, flags: bytes, end: int) -> tuple[bytes, bytes]:
    """Return (EXIF, XMP) of the first chunks of these names, as libwebp reads them.

    A chunk is read only if the file's flags announce it.
    """
    wanted = {b"EXIF": WEBP_EXIF, b"XMP ": WEBP_XMP}
    left = {name for name, flag in wanted.items() if flags and flags[0] & flag}
    got, at = dict.fromkeys(wanted, b""), 12
    while left and at + 8 <= end and len(chunk := read(at, 8)) == 8:
        kind, length = struct.unpack("<4sI", chunk)
        if kind in left:
            left.remove(kind)
            got[kind] = _metadata(read, at + 8, length)
        at += 8 + length + length % 2
    return got[b"EXIF"], got[b"XMP "]
