"""Sizes from headers equal the decoded ones; what is no image, or too large, is refused."""

import struct

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.headers import ImageHeader, read_header, read_whole, usual_jpeg
from tests.data.dataset import PROPERTY, encoded


def header(data: bytes) -> ImageHeader:
    return read_header(lambda offset, length: data[offset : offset + length])


def whole(data: bytes) -> bool:
    try:
        read_whole(lambda offset, length: data[offset : offset + length], len(data))
    except ValueError as error:
        assert str(error).startswith("truncated")
        return False
    return True


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("size", [(16, 16), (33, 250), (300, 17)])
def test_size_of_every_format(suffix: str, size: tuple[int, int]) -> None:
    data = encoded(*size, suffix)
    assert header(data)[1:3] == size
    assert whole(data) and not whole(data[:-12])


def test_webp_kinds_and_segments_before_the_frame() -> None:
    pixels = np.zeros((20, 45, 3), np.uint8)
    lossless = cv2.imencode(".webp", pixels, [cv2.IMWRITE_WEBP_QUALITY, 101])[1].tobytes()
    lossy = cv2.imencode(".webp", pixels, [cv2.IMWRITE_WEBP_QUALITY, 60])[1].tobytes()
    assert {lossless[12:16], lossy[12:16]} == {b"VP8L", b"VP8 "}
    extended = (
        b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0\0\0\0\0"
        + (44).to_bytes(3, "little")
        + (19).to_bytes(3, "little")
    )
    assert {header(d)[1:3] for d in (lossless, lossy, extended)} == {(45, 20)}
    jpeg = encoded(40, 24)
    with_segment = jpeg[:2] + b"\xff\xe1" + struct.pack(">H", 60002) + bytes(60000) + jpeg[2:]
    assert header(with_segment) == ("jpeg", 40, 24, False, 1)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "^an empty file, not a JPEG"),
        (b"hello, this is a text and no image", "^not a JPEG"),
        (b"\n<!DOCTYPE html><html>404</html>", "^a web page or SVG, not a JPEG"),
        (b"GIF89a" + bytes(40), "^a GIF, not"),
        (b"\0\0\0\x1cftypavif" + bytes(40), "^an AVIF, not"),
        (b"\0\0\0\x18ftypheic" + bytes(40), "^a HEIC, not"),
        (b"\xff\xd8\xff\xe0", "cut short|damaged"),
        (b"\xff\xd8" + bytes(40), "damaged"),
        (b"\xff\xd8\xff\xda" + bytes(40), "without a frame"),
        (
            b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 100_000, 100_000) + bytes(8),
            "oversized",
        ),
        (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 0, 5) + bytes(8), "0x5"),
    ],
)
def test_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        header(data)


@pytest.mark.parametrize("more", [0, 5000, 3 * 2**20])
def test_a_film_behind_a_jpeg_does_not_hide_its_end(more: int) -> None:
    """Motion photos; the end of the thumbnail in a header is not that of the picture."""
    jpeg, film = encoded(300, 200), b"\0\0\0\x18ftypmp42" + bytes(more)
    thumbnail = b"\xff\xe1" + struct.pack(">H", 2 + len(jpeg)) + jpeg
    assert whole(jpeg + film) and not whole(jpeg[:-300] + film)
    assert not whole(jpeg[:2] + thumbnail + jpeg[2:-300]) and whole(jpeg[:2] + thumbnail + jpeg[2:])


USUAL = encoded(40, 24)
SCAN = USUAL.index(b"\xff\xda")
CHANGES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 40), st.integers(0, SCAN + 20)),
        st.sampled_from([0, 1, 0x7F, 0xC0, 0xC4, 0xD9, 0xDA, 0xE1, 0xFF]),
    ),
    max_size=4,
)


@PROPERTY
@given(changes=CHANGES, size=st.one_of(st.just(len(USUAL)), st.integers(0, len(USUAL))))
def test_a_usual_jpeg_is_what_it_is_when_walked(changes: list[tuple[int, int]], size: int) -> None:
    content = bytearray(USUAL)
    for place, value in changes:
        content[place] = value
    data = bytes(content[:size])

    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    if usual := usual_jpeg(data[:4096], read, len(data)):
        assert usual == read_whole(read, len(data))[1:3]


@pytest.mark.parametrize(
    ("height", "width"), [(0, 24), (24, 0), (20_000, 20_000), (1, 65_535), (300, 200)]
)
def test_sides_of_a_usual_jpeg(height: int, width: int) -> None:
    frame = next(at for at in range(SCAN) if USUAL[at : at + 2] == b"\xff\xc0") + 5
    data = USUAL[:frame] + struct.pack(">HH", height, width) + USUAL[frame + 4 :]
    sizes = usual_jpeg(data, lambda offset, length: data[offset : offset + length], len(data))
    assert sizes == ((width, height) if 0 < height * width < 10**8 else None)
