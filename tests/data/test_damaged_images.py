"""Damaged, lying and hostile image files: a ValueError with the reason or an image of the right
shape, nothing else."""

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from disttrain_cli.data.decoding import MAX_SCANS, decode_image, decode_target
from tests.data.dataset import INPUTS, PROPERTY, encoded

IMAGE, TARGET = INPUTS.image, INPUTS.target
assert IMAGE is not None and TARGET is not None


def stored(kind: str, **options: object) -> bytes:
    """64x48: more than a few bytes of everything."""
    file, random = io.BytesIO(), np.random.default_rng(3)
    coarse = Image.fromarray(random.integers(0, 256, (6, 8, 3)).astype(np.uint8))
    coarse.resize((64, 48), Image.Resampling.BICUBIC).save(file, kind, **options)
    return file.getvalue()


FILES = {
    "jpeg": stored("JPEG"),
    "progressive": stored("JPEG", progressive=True),
    "png": stored("PNG"),
    "webp": stored("WEBP"),
    "lossless": stored("WEBP", lossless=True),
}


def outcome(data: bytes) -> str:
    """The reason why it is refused, or nothing; whatever decodes must have the promised shape and
    range."""
    reasons = set()
    for decode in (
        lambda: decode_image(data, (6, 8), IMAGE),
        lambda: decode_target(data, TARGET, (1, 1)),
    ):
        try:
            planes = decode()
        except ValueError as error:
            assert str(error)
            reasons.add(str(error))
        else:
            assert planes.shape in ((3, 48, 64), (3, 16, 16))
            assert planes.dtype == np.uint8
    return "; ".join(sorted(reasons))


@pytest.mark.parametrize("name", FILES)
def test_whole_files_are_not_refused(name: str) -> None:
    assert not outcome(FILES[name])


@pytest.mark.parametrize("name", FILES)
def test_cut_anywhere(name: str) -> None:
    """Whatever is missing at the end; a JPEG or PNG whose end marker is cut in two too."""
    data = FILES[name]
    for end in [*range(0, len(data), max(1, len(data) // 150)), len(data) - 1]:
        assert outcome(data[:end]), f"{end} of {len(data)} bytes are no image"


@pytest.mark.parametrize(("name", "noticed"), [("jpeg", 0.4), ("progressive", 0.9), ("png", 1.0)])
def test_a_hole_is_noticed_though_both_ends_are_whole(name: str, noticed: float) -> None:
    """Not always in a JPEG, whose code may go on at another place as if nothing had been."""
    data = FILES[name]
    body = data.index(b"IDAT" if name == "png" else b"\xff\xda") + 32
    begins = range(body, len(data) - 100, len(data) // 60)
    assert (
        np.mean([bool(outcome(data[:begin] + data[begin + 40 :])) for begin in begins]) >= noticed
    )


@pytest.mark.parametrize("name", FILES)
@PROPERTY
@given(
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_flipped_bytes(name: str, flips: list[tuple[int, int]]) -> None:
    """Refused or decoded to the right shape; a changed PNG that is not refused would have no
    checksums."""
    data = bytearray(FILES[name])
    for place, value in flips:
        data[place % len(data)] = value
    outcome(bytes(data))


def test_a_few_bytes_left_over_at_the_end_of_a_jpeg_are_forgiven() -> None:
    data = FILES["jpeg"]
    forgiven = decode_image(data[:-2] + b"abcdef" + data[-2:], (6, 8), IMAGE)
    assert np.array_equal(forgiven, decode_image(data, (6, 8), IMAGE))
    assert "extraneous bytes" in outcome(data[:-2] + b"x" * 40 + data[-2:])


def test_a_motion_photo_is_the_picture_before_the_film() -> None:
    data = FILES["jpeg"]
    film = b"\0\0\0\x18ftypmp42" + bytes(20_000)
    assert np.array_equal(
        decode_image(data + film, (6, 8), IMAGE), decode_image(data, (6, 8), IMAGE)
    )
    assert "truncated jpeg" in outcome(data[:-200] + film)


@PROPERTY
@given(head=st.sampled_from([data[:40] for data in FILES.values()]), rest=st.binary(max_size=400))
def test_anything_after_a_header(head: bytes, rest: bytes) -> None:
    outcome(head + rest)


def with_png_size(data: bytes, width: int, height: int) -> bytes:
    """Another size in the header, its checksum made to fit."""
    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]


def with_jpeg_size(data: bytes, width: int, height: int) -> bytes:
    at = (
        next(
            place
            for place in range(len(data))
            if data[place : place + 2] in (b"\xff\xc0", b"\xff\xc2")
        )
        + 5
    )
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def test_bombs_are_refused_by_their_header() -> None:
    canvas = b"RIFF\x1e\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0" + b"\xff\x3f\0" * 2 + bytes(8)
    for bomb in (
        with_png_size(FILES["png"], 60_000, 60_000),
        with_jpeg_size(FILES["jpeg"], 65_000, 65_000),
        canvas,
    ):
        assert "oversized" in outcome(bomb)


@pytest.mark.parametrize(("width", "height"), [(64, 96), (128, 48), (2000, 1500)])
def test_headers_that_promise_more_than_there_is(width: int, height: int) -> None:
    assert outcome(with_png_size(FILES["png"], width, height))
    assert outcome(with_jpeg_size(FILES["jpeg"], width, height))
    assert outcome(with_jpeg_size(FILES["progressive"], width, height))


def test_a_png_chunk_that_claims_gigabytes() -> None:
    """A decoder would set them aside before it finds that they are not there."""
    data = FILES["png"]
    assert "truncated png" in outcome(data[:33] + struct.pack(">I", 2**32 - 1) + data[37:])


def test_a_webp_whose_canvas_is_not_its_picture() -> None:
    plain = FILES["webp"]
    canvas = b"VP8X\x0a\0\0\0\0\0\0\0" + (99).to_bytes(3, "little") + (47).to_bytes(3, "little")
    file = b"RIFF" + struct.pack("<I", len(plain) - 8 + len(canvas)) + b"WEBP" + canvas + plain[12:]
    assert outcome(file)


def test_endless_scans_are_refused() -> None:
    data = FILES["progressive"]
    scan = data.rindex(b"\xff\xda")
    assert f"more than {MAX_SCANS} scans" in outcome(
        data[:-2] + data[scan:-2] * MAX_SCANS + data[-2:]
    )


def test_other_files_are_no_images() -> None:
    for data in (b"", b"text" * 100, b"<html>" * 50, b"GIF89a" + bytes(50), encoded(8, 8)[2:]):
        assert "not a JPEG, PNG or WebP" in outcome(data)
