"""Pictures are upright as PIL's `exif_transpose` makes them, whatever their format and wherever
their orientation is stated; the index has the sizes of the upright picture."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from disttrain_cli.data.decoding import decode_image, decode_target, decode_tiles
from disttrain_cli.data.headers import read_header, read_whole
from disttrain_cli.data.modalities.media import image_sizes
from disttrain_cli.spec.buckets import Buckets
from disttrain_cli.spec.heads import ImageInput, TargetInput
from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.tiling import NearestRatio
from tests.data.dataset import PROPERTY

HEAD = ImageInput(module="vision", patch_px=8, max_pixels=1 << 20)
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (4, 6, 3), np.uint8).repeat(8, 0).repeat(8, 1)  # 48 x 32
PICTURE = Image.fromarray(PIXELS)
FORMATS: dict[str, dict[str, Any]] = {
    "JPEG": {"quality": 100, "subsampling": 0},
    "progressive JPEG": {"quality": 100, "subsampling": 0, "progressive": True},
    "PNG": {},
    "lossy WEBP": {"quality": 100},
    "WEBP": {"lossless": True, "exact": True},
}
XMP = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="%d"/></x:xmpmeta>'
XMP_ELEMENT = b"<x:xmpmeta><tiff:Orientation>%d</tiff:Orientation></x:xmpmeta>"


def directory(orientation: int, order: str = "<", kind: int = 3, count: int = 1) -> bytes:
    """EXIF whose tags are a maker, an orientation and a resolution unit."""
    value = {
        1: bytes([orientation % 256]),
        3: struct.pack(f"{order}H", orientation),
        4: struct.pack(f"{order}I", orientation),
        8: struct.pack(f"{order}h", orientation),
        11: struct.pack(f"{order}f", orientation),
    }[kind]
    tags = [
        (0x010F, 2, 4, b"us\0\0"),
        (0x0112, kind, count, value.ljust(4, b"\0")),
        (0x0128, 3, 1, struct.pack(f"{order}HH", 2, 0)),
    ]
    begin = b"II*\0" if order == "<" else b"MM\0*"
    packed = b"".join(struct.pack(f"{order}HHI4s", *tag) for tag in tags)
    return begin + struct.pack(f"{order}IH", 8, len(tags)) + packed + bytes(4)


def stored(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, kind.split()[-1], **FORMATS[kind], **options)
    return file.getvalue()


def segments(jpeg: bytes, *contents: bytes, before: bytes = b"\xff\xdb") -> bytes:
    """A JPEG with APP1 segments before the first marker of this kind."""
    made = b"".join(b"\xff\xe1" + struct.pack(">H", len(one) + 2) + one for one in contents)
    place = jpeg.index(before)
    return jpeg[:place] + made + jpeg[place:]


def chunks(png: bytes, *contents: tuple[bytes, bytes], end: bool = False) -> bytes:
    """A PNG with these chunks behind its header, or at its end."""
    made = b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in contents
    )
    place = png.index(b"IEND") - 4 if end else 33
    return png[:place] + made + png[place:]


def extended(webp: bytes, flags: int, *contents: tuple[bytes, bytes], first: bool = False) -> bytes:
    """A WebP of the extended form with these chunks behind, or before, its picture."""
    size = (47).to_bytes(3, "little") + (31).to_bytes(3, "little")
    made = b"".join(
        name + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for name, data in contents
    )
    body = b"VP8X\x0a\0\0\0" + bytes([flags, 0, 0, 0]) + size
    body += made + webp[12:] if first else webp[12:] + made
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def raw_profile(exif: bytes) -> bytes:
    """As ImageMagick writes it."""
    return b"\nexif\n%8d\n" % len(exif) + exif.hex().encode() + b"\n"


def read_of(data: bytes) -> Callable[[int, int], bytes]:
    return lambda offset, length: data[offset : offset + length]


def check(data: bytes, tolerance: int = 2) -> None:
    """A file is seen as PIL sees it, by header and decoder."""
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    height, width = expected.shape[:2]
    header = read_whole(read_of(data), len(data))
    assert (header.width_px, header.height_px) == (width, height)
    assert read_header(read_of(data)) == header
    assert image_sizes(read_of(data), len(data)) == (width, height)
    ours = decode_image(data, (height // 8, width // 8), HEAD).transpose(1, 2, 0)
    assert np.abs(ours.astype(int) - expected).max() <= tolerance


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", FORMATS)
def test_every_orientation_of_every_format(kind: str, orientation: int, order: str) -> None:
    exif = directory(orientation, order)
    data = stored(kind, exif=exif if kind == "PNG" else b"Exif\0\0" + exif)
    check(data, tolerance=6 if kind == "lossy WEBP" else 2)


E6, E8, E9 = directory(6), directory(8, ">"), directory(9)
MARKED, JPEG, PNG, WEBP = b"Exif\0\0", stored("JPEG"), stored("PNG"), stored("WEBP")
XMP_NAME = b"http://ns.adobe.com/xap/1.0/\0"
ITXT = b"XML:com.adobe.xmp\0\0\0\0\0"
PLACES = {
    "XMP before EXIF": segments(JPEG, XMP_NAME + XMP % 8, MARKED + E6),
    "EXIF before XMP": segments(JPEG, MARKED + E6, XMP_NAME + XMP % 8),
    "XMP alone": segments(JPEG, XMP_NAME + XMP % 5),
    "an element of XMP": segments(JPEG, XMP_NAME + XMP_ELEMENT % 7),
    "XMP where EXIF has no orientation": segments(
        JPEG, MARKED + E6.replace(b"\x12\x01", b"\x1a\x01"), XMP_NAME + XMP % 3
    ),
    "XMP where EXIF has one out of range": segments(JPEG, MARKED + E9, XMP_NAME + XMP % 3),
    "XMP of no orientation": segments(JPEG, XMP_NAME + XMP % 9),
    "extended XMP": segments(JPEG, b"http://ns.adobe.com/xmp/extension/\0" + XMP % 6),
    "EXIF far behind": segments(JPEG, b"else" * 9000, b"else" * 9000, MARKED + E6),
    "EXIF behind the frame header": segments(JPEG, MARKED + E6, before=b"\xff\xc4"),
    "EXIF in two segments": segments(JPEG, MARKED + E6[:20], MARKED + E6[20:]),
    "EXIF of two pictures": segments(JPEG, MARKED + E6, MARKED + E8),
    "a mark twice": segments(JPEG, MARKED + MARKED + E8),
    "no mark": segments(JPEG, E8),
    "a directory cut off": segments(JPEG, MARKED + E8[:30]),
    "a directory that is nowhere": segments(JPEG, MARKED + E8[:4] + b"\0\1\0\0" + E8[8:]),
    "zero": segments(JPEG, MARKED + directory(0)),
    "far out of range": segments(JPEG, MARKED + directory(6000)),
    "a long": segments(JPEG, MARKED + directory(6, ">", kind=4)),
    "a signed short": segments(JPEG, MARKED + directory(6, "<", kind=8)),
    "a float": segments(JPEG, MARKED + directory(6, ">", kind=11)),
    "a byte": segments(JPEG, MARKED + directory(6, "<", kind=1)),
    "two values": segments(JPEG, MARKED + directory(6, "<", count=2)),
    "no value": segments(JPEG, MARKED + directory(6, "<", count=0)),
    "eXIf": chunks(PNG, (b"eXIf", E6)),
    "eXIf with a mark": chunks(PNG, (b"eXIf", MARKED + E6)),
    "eXIf behind the pixels": chunks(PNG, (b"eXIf", E8), end=True),
    "two eXIf": chunks(PNG, (b"eXIf", E6), (b"eXIf", E8)),
    "a raw profile": chunks(
        PNG, (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw_profile(MARKED + E6)))
    ),
    "a raw profile, plain": chunks(PNG, (b"tEXt", b"Raw profile type exif\0" + raw_profile(E8))),
    "a raw profile, international": chunks(
        PNG, (b"iTXt", b"Raw profile type exif\0\0\0\0\0" + raw_profile(E8))
    ),
    "a raw profile beside eXIf": chunks(
        PNG, (b"eXIf", E8), (b"tEXt", b"Raw profile type exif\0" + raw_profile(E6))
    ),
    "a raw profile of another type": chunks(
        PNG, (b"tEXt", b"Raw profile type APP1\0" + raw_profile(MARKED + E6))
    ),
    "XMP of a PNG": chunks(PNG, (b"iTXt", ITXT + XMP % 6)),
    "XMP of a PNG, packed": chunks(
        PNG, (b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(XMP % 7))
    ),
    "XMP behind the pixels": chunks(PNG, (b"iTXt", ITXT + XMP % 8), end=True),
    "other texts": chunks(PNG, (b"tEXt", b"Comment\0" + XMP % 6), (b"zTXt", b"x"), (b"iTXt", b"")),
    "EXIF of a WebP": extended(WEBP, 0x08, (b"EXIF", E6)),
    "EXIF of a WebP with a mark": extended(WEBP, 0x08, (b"EXIF", MARKED + E8)),
    "EXIF before the picture": extended(WEBP, 0x08, (b"EXIF", E8), first=True),
    "EXIF that no flag announces": extended(WEBP, 0x04, (b"EXIF", E6)),
    "two EXIF of a WebP": extended(WEBP, 0x08, (b"EXIF", E6), (b"EXIF", E8)),
    "XMP of a WebP": extended(WEBP, 0x04, (b"XMP ", XMP % 8 + b" ")),
    "XMP beside EXIF of a WebP": extended(WEBP, 0x0C, (b"XMP ", XMP % 8), (b"EXIF", E6)),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("place", PLACES)
def test_wherever_it_is_stated(place: str) -> None:
    check(PLACES[place])


def test_the_cases_turn_pictures() -> None:
    turned = {name for name, data in PLACES.items() if read_header(read_of(data)).orientation > 1}
    kept = {"no mark", "a directory cut off", "a directory that is nowhere", "zero", "a byte"}
    kept |= {"XMP where EXIF has one out of range", "XMP of no orientation", "extended XMP"}
    kept |= {"far out of range", "no value", "a raw profile of another type", "other texts"}
    assert turned == PLACES.keys() - kept - {"EXIF that no flag announces"}


@pytest.mark.parametrize("exif", [b"", b"no TIFF at all", b"II*\0", b"II+\0" + bytes(9)])
def test_unreadable_exif_turns_nothing(exif: bytes) -> None:
    """PIL refuses some of these pictures; all other programs show them as they are stored."""
    for data in (
        segments(JPEG, MARKED + exif),
        chunks(PNG, (b"eXIf", exif)),
        extended(WEBP, 0x08, (b"EXIF", exif)),
        chunks(PNG, (b"tEXt", b"Raw profile type exif\0\nexif\n 2\nzz")),
        chunks(PNG, (b"zTXt", b"Raw profile type exif\0\0" + exif)),
    ):
        assert read_whole(read_of(data), len(data)).orientation == 1


def test_metadata_that_would_fill_memory_is_refused() -> None:
    bomb = zlib.compress(bytes(2**21))
    data = chunks(PNG, (b"zTXt", b"Raw profile type exif\0\0" + bomb))
    with pytest.raises(ValueError, match="metadata of more than 1048576 bytes"):
        read_whole(read_of(data), len(data))


@pytest.mark.filterwarnings("ignore::UserWarning")
@PROPERTY
@given(noise=st.binary(max_size=60), place=st.integers(0, 60), order=st.sampled_from("<>"))
def test_any_exif_is_seen_as_pil_sees_it(noise: bytes, place: int, order: str) -> None:
    """Where PIL reads it; and nothing else than ValueError is raised where it does not."""
    whole = directory(6, order)
    exif = whole[:place] + noise + whole[place + len(noise) :]
    data = segments(JPEG, MARKED + exif)
    ours = read_header(read_of(data)).orientation
    try:
        given_ = Image.open(io.BytesIO(data)).getexif().get(0x0112, 1)
    except Exception:
        assert ours == 1
        return
    assert ours == (given_ if given_ in range(2, 9) else 1)


@pytest.mark.parametrize("kind", FORMATS)
def test_targets_and_tiles_are_upright(kind: str) -> None:
    data = stored(kind, exif=MARKED + E6)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    target = TargetInput(
        module="g",
        size_px=32,
        context_tokens=4,
        latent_pixels=4,
        buckets=Buckets(grids=[(4, 6), (6, 4)], patch_px=8, patch=1),
    )
    grid = target.grids(np.array([upright.size]))[0]
    assert target.image_px(tuple(grid.tolist())) == (48, 32)
    drawn = decode_target(data, target, tuple(grid.tolist())).transpose(1, 2, 0)
    assert np.abs(drawn.astype(int) - np.asarray(upright)).max() <= 6
    processor = ImageProcessor(
        resize="tiles", height_px=16, width_px=16, tiling=NearestRatio(most=6)
    )
    head = ImageInput(module="e", patch_px=8, max_pixels=1 << 20, processor=processor)
    parts = len(head.written([upright.size])[0]) - 1
    outs = [(part, np.zeros((3, 16, 16), np.uint8)) for part in range(parts)]
    decode_tiles(data, head, parts, outs)
    assert parts == 7
    first = np.asarray(upright.resize((32, 48), Image.Resampling.BICUBIC))[:16, :16]
    assert np.abs(outs[0][1].transpose(1, 2, 0).astype(int) - first).max() <= 6
