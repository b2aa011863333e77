"""Images resized as a published model's image processor resizes them, by the same filter of the
same library (PIL)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.image_processor import ImageProcessor
from disttrain_cli.spec.tiling import Size

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
    cut = processor.tiling.cut(image, processor.tile)
    if cut.parts != parts:
        raise ValueError(f"an image of {cut.parts} parts, {parts} when it was indexed")

    @cache
    def canvas() -> Bytes:
        made = pixels
        for size in cut.resized:
            made = _resized(made, size, processor)
        return made

    def tile(part: int) -> Bytes:
        if part == cut.rows * cut.columns:
            return _resized(pixels if cut.whole == "image" else canvas(), (wide, high), processor)
        top, left = part // cut.columns * high, part % cut.columns * wide
        return canvas()[top : top + high, left : left + wide]

    return tile


def _resized(pixels: Bytes, size: Size, processor: ImageProcessor) -> Bytes:
    """[height, width, C] of that width and height."""
    from PIL import Image

    if size == (pixels.shape[1], pixels.shape[0]):
        return pixels
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    how = Image.Resampling[processor.resample.upper()]
    return np.asarray(image.resize(size, how)).reshape(size[1], size[0], -1)
