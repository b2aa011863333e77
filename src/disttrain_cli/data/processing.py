"""Images resized as by a published model's image processor, with the same filter of PIL."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.cutting import Size
from disttrain_cli.spec.image_processor import ImageProcessor

Bytes = NDArray[np.uint8]


def processed(pixels: Bytes, processor: ImageProcessor, height: int, width: int) -> Bytes:
    """Resize and crop an image [H, W, C], in any order of channels, to [height, width, C]."""
    size, (top, left) = processor.cut(pixels.shape[1], pixels.shape[0], (height, width))
    return _resized(pixels, size, processor)[top : top + height, left : left + width]


def tiles(pixels: Bytes, processor: ImageProcessor, parts: int) -> Callable[[int], Bytes]:
    """Return a function from a part's number to the part [height, width, C] of an image [H, W, C].

    Raises:
        ValueError: the image is not cut into `parts` parts.
    """
    assert processor.tiling is not None
    (wide, high), image = processor.tile, (pixels.shape[1], pixels.shape[0])
    cut = processor.tiling.cut(image, processor.tile, alone=parts > 1)
    if cut.parts != parts:
        raise ValueError(f"an image of {cut.parts} parts, {parts} when it was indexed")

    @cache
    def resized() -> Bytes:
        picture = pixels if cut.square is None else _squared(pixels, cut.square)
        for size in cut.resized:
            picture = _resized(picture, size, processor)
        return picture if cut.canvas is None else _amid(picture, cut.canvas)

    def tile(part: int) -> Bytes:
        place = cut.place(part)
        if place is None:
            return _resized(pixels if cut.whole == "image" else resized(), (wide, high), processor)
        top, left = place[0] * high, place[1] * wide
        return resized()[top : top + high, left : left + wide]

    return tile


def _squared(pixels: Bytes, color: tuple[int, ...]) -> Bytes:
    """Centre an image on a square [side, side, BGR or grey] of one colour (RGB)."""
    side = max(pixels.shape[:2])
    return _amid(pixels, (side, side), color[::-1])


def _amid(pixels: Bytes, size: Size, color: Any = 0) -> Bytes:
    """Centre an image on a larger one of a single colour."""
    canvas = np.full((size[1], size[0], pixels.shape[2]), color, np.uint8)
    height, width = pixels.shape[:2]
    top, left = (size[1] - height) // 2, (size[0] - width) // 2
    canvas[top : top + height, left : left + width] = pixels
    return canvas


def _resized(pixels: Bytes, size: Size, processor: ImageProcessor) -> Bytes:
    """Resize an image to [height, width, C]."""
    from PIL import Image

    if size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    how = Image.Resampling[processor.resample.upper()]
    return np.asarray(image.resize(size, how)).reshape(size[1], size[0], -1)
