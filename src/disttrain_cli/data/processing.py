"""Images resized as a published model's image processor resizes them, by the same filter of the
same library (PIL)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.image_processor import ImageProcessor

Bytes = NDArray[np.uint8]


def processed(pixels: Bytes, processor: ImageProcessor, height: int, width: int) -> Bytes:
    """[height, width, C] of an image [H, W, C] of any order of channels."""
    from PIL import Image

    (wide, high), (top, left) = processor.cut(pixels.shape[1], pixels.shape[0], (height, width))
    if (high, wide) != pixels.shape[:2]:
        image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
        how = Image.Resampling[processor.resample.upper()]
        pixels = np.asarray(image.resize((wide, high), how)).reshape(high, wide, -1)
    return pixels[top : top + height, left : left + width]
