"""Synthetic pictures and sounds on which decoding is measured if there is no data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

JPEG_QUALITY = 90


def smooth_jpeg(side_px: int) -> bytes:
    """Return a square picture of smooth colours and some noise, in about a photo's file size."""
    import cv2

    random = np.random.default_rng(0)
    smooth = cv2.resize(
        random.uniform(0.0, 255.0, (8, 8, 3)), (side_px, side_px), interpolation=cv2.INTER_CUBIC
    )
    pixels = np.clip(smooth + random.normal(0.0, 8.0, smooth.shape), 0.0, 255.0).astype(np.uint8)
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])[1])


def noise(samples: int) -> NDArray[np.float32]:
    """Return white noise of `samples` samples."""
    return np.random.default_rng(0).uniform(-0.5, 0.5, samples).astype(np.float32)
