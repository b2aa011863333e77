"""Images resized as a published model's image processor resizes them, by the same filter of the
same library (PIL)."""

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
    """[height, width, C] of an image [H, W, C] of any order of channels."""
    size, (top, left) = processor.cut(pixels.shape[1], pixels.shape[0], (height, width))
    return _resized(pixels, size, processor)[top : top + height, left : left + width]


def tiles(pixels: Bytes, processor: ImageProcessor, parts: int) -> Callable[[int], Bytes]:
    """What gives the part of that number [height, width, C] of an image [H, W, C] that becomes
    `parts` of them; ValueError where it becomes another number."""
    assert processor.tiling is not None
    (wide, high), image = processor.tile, (pixels.shape[1], pixels.shape[0])
    cut = processor.tiling.cut(image, processor.tile, alone=parts > 1)
    if cut.parts != parts:
        raise ValueError(f"an image of {cut.parts} parts, {parts} when it was indexed")

    @cache
    def resized() -> Bytes:
        made = pixels if cut.square is None else _squared(pixels, cut.square)
        for size in cut.resized:
            made = _resized(made, size, processor)
        return made if cut.canvas is None else _amid(made, cut.canvas)

    def tile(part: int) -> Bytes:
        place = cut.place(part)
        if place is None:
            return _resized(pixels if cut.whole == "image" else resized(), (wide, high), processor)
        top, left = place[0] * high, place[1] * wide
        return resized()[top : top + high, left : left + wide]

    return tile


def _squared(pixels: Bytes, color: tuple[int, ...]) -> Bytes:
    """[side, side, BGR or grey] with an image in the middle of a colour (RGB)."""
    side = max(pixels.shape[:2])
    return _amid(pixels, (side, side), color[::-1])


def _amid(pixels: Bytes, size: Size, color: Any = 0) -> Bytes:
    """An image in the middle of a larger one of one colour."""
    canvas = np.full((size[1], size[0], pixels.shape[2]), color, np.uint8)
    height, width = pixels.shape[:2]
    top, left = (size[1] - height) // 2, (size[0] - width) // 2
    canvas[top : top + height, left : left + width] = pixels
    return canvas


def _resized(pixels: Bytes, size: Size, processor: ImageProcessor) -> Bytes:
    """[height, width, C] of that width and height."""
    from PIL import Image

    if size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    how = Image.Resampling[processor.resample.upper()]
    return np.asarray(image.resize(size, how)).reshape(size[1], size[0], -1)
