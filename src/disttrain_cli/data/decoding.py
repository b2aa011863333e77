"""Image bytes to normalised arrays (OpenCV): decoded no larger than needed, resized to whole patches.

Every function raises ValueError with the reason where the bytes are no whole image within the pixel limit.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.headers import is_whole, read_header
from disttrain_cli.spec.inputs import ImageInput, TargetInput

Floats = NDArray[np.float32]


def decode_image(data: bytes, grid: tuple[int, int], image: ImageInput) -> Floats:
    """[C, H, W] of an image to read: resized to `grid` (rows, columns) patches, (x / 255 - mean) / std, RGB."""
    height, width = grid[0] * image.patch_px, grid[1] * image.patch_px
    pixels = _resized(_decoded(data, image.channels, height, width), height, width)
    return _normalised(pixels, image.mean, image.std)


def decode_target(data: bytes, target: TargetInput) -> Floats:
    """[C, S, S] of an image to generate: the middle square, resized, in -1..1, RGB."""
    side = target.size_px
    pixels = _decoded(data, target.channels, side, side)
    height, width = pixels.shape[:2]
    square = min(height, width)
    top, left = (height - square) // 2, (width - square) // 2
    return _normalised(_resized(pixels[top : top + square, left : left + square], side, side), 0.5, 0.5)


@functools.cache
def _cv2() -> Any:
    """OpenCV without threads of its own: the loader's threads share the cores."""
    import cv2

    cv2.setNumThreads(0)
    return cv2


def _decoded(data: bytes, channels: int, height: int, width: int) -> NDArray[np.uint8]:
    """[H, W, C] BGR, at least `height` x `width` where the file is; JPEG at a half, quarter or eighth of its size."""
    cv2 = _cv2()
    header = read_header(lambda offset, length: data[offset : offset + length])
    if not is_whole(data):
        raise ValueError(f"truncated {header.format} file")
    color = channels == 3
    mode = cv2.IMREAD_COLOR if color else cv2.IMREAD_GRAYSCALE
    if header.format == "jpeg":
        shrink = min(header.height_px // height, header.width_px // width)
        for factor in (8, 4, 2):
            if shrink >= factor:
                mode = getattr(cv2, f"IMREAD_REDUCED_{'COLOR' if color else 'GRAYSCALE'}_{factor}")
                break
    try:
        pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), mode | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise ValueError(f"cannot be decoded: {error}") from None
    if pixels is None:
        raise ValueError("cannot be decoded")
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _resized(pixels: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if pixels.shape[:2] == (height, width):
        return pixels
    cv2 = _cv2()
    smaller = pixels.shape[0] * pixels.shape[1] > height * width
    out = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA if smaller else cv2.INTER_LINEAR)
    return out if out.ndim == 3 else out[:, :, None]


def _normalised(pixels: NDArray[np.uint8], mean: float, std: float) -> Floats:
    """[H, W, BGR] bytes to [RGB, H, W] floats: (x / 255 - mean) / std."""
    planes = np.ascontiguousarray(pixels[:, :, ::-1].transpose(2, 0, 1)).astype(np.float32)
    planes *= np.float32(1 / (255 * std))
    planes -= np.float32(mean / std)
    return planes
