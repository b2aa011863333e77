"""Image files to pixel arrays: decoded no larger than needed, resized to whole patches.

JPEG is decoded by simplejpeg (libjpeg-turbo), which reports most of the damage that OpenCV paints
over; PNG and WebP by OpenCV. The content decides the format. The model sees:

- 8 bits of sRGB: deeper PNGs are rounded to 8 bits, CMYK converted without a profile, colour
  profiles ignored.
- Transparent pixels over white, as on most pages. The first picture of an animation.
- Upright images: the orientation in a file's metadata is applied, also to the header's width and
  height, from which the index computes the patches (`headers`).

An image of a published model with its own processor is decoded at its full size and resized by that
processor's rule (`processing`).

Every function raises ValueError with the reason if the bytes are no complete image within
`headers.MAX_PIXELS`. Per pixel of the file, a call holds up to 3 bytes of a JPEG (9 if it is
progressive, less if it is decoded smaller), 6 of a PNG or WebP, 10 with transparency, 16 with
transparency and 16 bits; per pixel of the result, 9 more.
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.headers import MAX_PIXELS, ImageHeader, read_whole
from disttrain_cli.data.muting import mute_libraries
from disttrain_cli.data.processing import processed, tiles
from disttrain_cli.spec.heads import Grid, ImageInput, TargetInput

Bytes = NDArray[np.uint8]

#: Largest image whose colour channels are separated by numpy instead of OpenCV.
FEW_PIXELS = 128 * 128

#: A progressive JPEG has about ten scans, each of which goes over the whole image: a file with many
#: more would stall the decoder.
MAX_SCANS = 64

#: Some cameras and programs leave a few bytes before the end marker. Many bytes there mean that
#: decoding lost the bit stream.
_FEW_LEFT_OVER = re.compile(r"data: \d extraneous bytes before marker 0xd9")


def decode_image(
    data: bytes, grid: tuple[int, int], image: ImageInput, out: Bytes | None = None
) -> Bytes:
    """Decode an image to read to [C, H, W]: RGB, resized to `grid` (rows, columns) patches.

    `ImageInput.affine` normalises the result. It is written into `out`, if that is passed, once
    nothing can fail any more.
    """
    height, width = grid[0] * image.patch_px, grid[1] * image.patch_px
    if image.processor is not None:
        return _planes(
            processed(_decoded(data, image.channels), image.processor, height, width), out
        )
    return _planes(_resized(_decoded(data, image.channels, height, width), height, width), out)


def decode_pixels(data: bytes) -> Bytes:
    """Decode an image of full size to [H, W, RGB], upright."""
    return np.ascontiguousarray(_decoded(data, 3)[..., ::-1])


def decode_tiles(
    data: bytes, image: ImageInput, parts: int, outs: Sequence[tuple[int, Bytes]]
) -> None:
    """Decode some of the `parts` [C, H, W] that an image is cut into, into `outs`.

    `outs` has pairs of a part's number and its array. Without `outs`, the image is decoded only to
    raise its errors. An array of `outs` may be smaller than a tile: it has whole patches, as the
    tower's convolution reads them.
    """
    pixels = _decoded(data, image.channels)
    if not outs:
        return
    assert image.processor is not None
    tile = tiles(pixels, image.processor, parts)
    cut = [(tile(part), out) for part, out in outs]
    for of_part, out in cut:
        height, width = out.shape[1:]
        _planes(of_part[:height, :width], out)


def decode_target(data: bytes, target: TargetInput, grid: Grid, out: Bytes | None = None) -> Bytes:
    """Decode an image to generate to [C, H, W] in RGB.

    It is centre-cropped to the aspect ratio of `grid` and resized. `out` is as in `decode_image`.
    """
    rows, columns = target.image_px(grid)
    pixels = _decoded(data, target.channels, rows, columns)
    height, width = pixels.shape[:2]
    own_height = max(1, min(height, round(width * rows / columns)))
    own_width = max(1, min(width, round(height * columns / rows)))
    top, left = (height - own_height) // 2, (width - own_width) // 2
    middle = pixels[top : top + own_height, left : left + own_width]
    return _planes(_resized(middle, rows, columns), out)


@functools.cache
def _cv2() -> Any:
    """Return OpenCV without its threads (the loader's threads share the cores) and its messages."""
    import cv2

    cv2.setNumThreads(0)
    cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    mute_libraries()
    return cv2


def _decoded(
    data: bytes, channels: int, height: int = MAX_PIXELS, width: int = MAX_PIXELS
) -> Bytes:
    """Decode to [H, W, C], BGR or grey, of at least `height` x `width` if the file is that large.

    Without `height` and `width`, the full size is decoded.
    """

    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    header = read_whole(read, len(data))
    shrink = 1
    if header.format == "jpeg":
        larger = min(header.height_px // height, header.width_px // width)
        shrink = max(by for by in (1, 2, 4, 8) if by <= max(1, larger))
        pixels = _jpeg(data, header, channels, shrink)
    else:
        pixels = _png_or_webp(data, channels)
    stored_height, stored_width = header.stored_px
    expected = (-(-stored_height // shrink), -(-stored_width // shrink))
    if pixels.shape[:2] != expected:
        raise ValueError(
            f"decoded to {pixels.shape[1]}x{pixels.shape[0]} pixels, not"
            f" {expected[1]}x{expected[0]}"
        )
    return upright(pixels, header.orientation)


def upright(pixels: Bytes, orientation: int) -> Bytes:
    """Turn an image or frame [H, W, C] upright by its orientation (EXIF 2.3, tag 0x0112)."""
    if orientation == 1:
        return pixels
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)


def _jpeg(data: bytes, header: ImageHeader, channels: int, shrink: int) -> Bytes:
    """Decode a JPEG to [H, W, C] at full, half, quarter or eighth size.

    Other eighths are slower than the full size (no vector code).
    """
    import simplejpeg

    if header.progressive and data.count(b"\xff\xda") > MAX_SCANS:
        raise ValueError(f"JPEG of more than {MAX_SCANS} scans")
    decode = functools.partial(
        simplejpeg.decode_jpeg,
        data,
        "BGR" if channels == 3 else "GRAY",
        min_height=-(-header.stored_px[0] // shrink),
        min_width=-(-header.stored_px[1] // shrink),
        min_factor=shrink,
    )
    try:
        return decode()
    except ValueError as error:
        if not _FEW_LEFT_OVER.search(str(error)):
            raise
        return decode(strict=False)


def _png_or_webp(data: bytes, channels: int) -> Bytes:
    cv2 = _cv2()
    try:
        pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_UNCHANGED)
    except cv2.error as error:
        raise ValueError(f"cannot be decoded: {error}") from None
    if pixels is None:
        raise ValueError("cannot be decoded")
    if pixels.ndim == 2 and (clear := _transparent_grey(data)) is not None:
        pixels[pixels == clear] = np.iinfo(pixels.dtype).max
    if pixels.dtype == np.uint16:
        pixels = cv2.convertScaleAbs(pixels, alpha=1 / 257)
    if pixels.ndim == 2:
        return pixels[:, :, None] if channels == 1 else cv2.cvtColor(pixels, cv2.COLOR_GRAY2BGR)
    if pixels.shape[2] == 4:
        pixels = _over_white(pixels)
    return pixels if channels == 3 else cv2.cvtColor(pixels, cv2.COLOR_BGR2GRAY)[:, :, None]


def _transparent_grey(data: bytes) -> int | None:
    """Return the value of a grey PNG's transparent pixels in OpenCV's output; None if it has none.

    OpenCV does not report which pixels are transparent (PNG specification, section 11.3.2.1).
    """
    bits, colour_type = data[24:26]
    at, kind, size = 8, b"", 0
    while colour_type == 0 and kind not in (b"tRNS", b"IDAT"):
        size, kind = struct.unpack_from(">I4s", data, at)
        at += 12 + size
    if (kind, size) != (b"tRNS", 2):
        return None
    most = (1 << bits) - 1
    value = int.from_bytes(data[at - 6 : at - 4]) & most
    return value * (255 // most) if bits < 8 else value


def _over_white(pixels: Bytes) -> Bytes:
    """Blend [H, W, BGRA] over white."""
    cv2 = _cv2()
    out, alpha = np.empty((*pixels.shape[:2], 3), np.uint8), np.ascontiguousarray(pixels[:, :, 3])
    for color in range(3):
        out[:, :, color] = 255 - cv2.multiply(255 - pixels[:, :, color], alpha, scale=1 / 255)
    return out


def _resized(pixels: Bytes, height: int, width: int) -> Bytes:
    """Resize to [height, width, C], close to antialiased bicubic and several times as fast.

    Up to a factor of 2, an image is interpolated to twice the target size, where nothing aliases,
    and each 2 x 2 pixels are averaged: cubic for small factors, else linear. At factors above 2
    (PNG and WebP; JPEG was decoded smaller), pixels are averaged by area.
    """
    if pixels.shape[:2] == (height, width):
        return pixels
    cv2 = _cv2()
    factors = pixels.shape[0] / height, pixels.shape[1] / width
    largest = max(factors)
    if largest <= 1.05:
        out = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_CUBIC)
    elif largest <= 2:
        twice = [
            size if factor == 2 else 2 * size
            for size, factor in zip((height, width), factors, strict=True)
        ]
        # linear halves an axis as the mean of two
        how = cv2.INTER_CUBIC if largest <= 1.55 else cv2.INTER_LINEAR
        out = cv2.resize(
            cv2.resize(pixels, twice[::-1], interpolation=how),
            (width, height),
            interpolation=cv2.INTER_LINEAR,
        )
    else:
        out = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)
    return out if out.ndim == 3 else out[:, :, None]


def _planes(pixels: Bytes, out: Bytes | None) -> Bytes:
    """Convert [H, W, BGR] to [RGB, H, W]."""
    planes = np.empty((pixels.shape[2], *pixels.shape[:2]), np.uint8) if out is None else out
    # one strided pass costs less than separating the colour channels
    if pixels.shape[0] * pixels.shape[1] <= FEW_PIXELS:
        planes[:] = pixels.transpose(2, 0, 1)[::-1]
    else:
        planes[:] = _cv2().split(pixels)[::-1]
    return planes
