"""Decoding gives RGB of the promised shape and range, close to an exact reference, and refuses damaged files."""

from __future__ import annotations

import struct

import cv2
import numpy as np
import pytest

from disttrain_cli.data.decoding import decode_image, decode_target
from disttrain_cli.spec.inputs import ImageInput, TargetInput
from tests.data.dataset import INPUTS, encoded

IMAGE, TARGET = INPUTS.image, INPUTS.target
assert IMAGE is not None and TARGET is not None


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
@pytest.mark.parametrize("size", [(32, 48), (20, 17), (500, 700)])
def test_shape_range_and_channels(suffix: str, size: tuple[int, int]) -> None:
    assert IMAGE is not None
    planes = decode_image(encoded(*size, suffix, shade=255), (4, 6), IMAGE)
    assert planes.shape == (3, 32, 48) and planes.dtype == np.float32
    assert planes.min() >= -1 and planes.max() <= 1
    blue, green, red = planes[2], planes[1], planes[0]  # encoded() writes a gradient down, one across, and a shade
    assert red.mean() > 0.95
    assert blue[-1].mean() - blue[0].mean() > 1.5 and green[:, -1].mean() - green[:, 0].mean() > 1.5


def test_scaled_decoding_is_close_to_the_whole_one() -> None:
    assert IMAGE is not None
    data = encoded(1000, 800)
    whole = cv2.resize(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), (80, 64),
                       interpolation=cv2.INTER_AREA)
    expected = whole[:, :, ::-1].transpose(2, 0, 1) / 127.5 - 1
    assert np.abs(decode_image(data, (8, 10), IMAGE) - expected).mean() < 0.01


def test_mean_std_and_grey() -> None:
    grey = ImageInput(module="e", patch_px=8, channels=1, mean=0.25, std=0.5, max_pixels=4096)
    data = cv2.imencode(".png", np.full((8, 16, 3), 128, np.uint8))[1].tobytes()
    assert np.allclose(decode_image(data, (1, 2), grey), np.full((1, 8, 16), (128 / 255 - 0.25) / 0.5))


def test_target_is_the_middle_square() -> None:
    target = TargetInput(module="g", size_px=16, context_tokens=1, latent_pixels=1)
    pixels = np.zeros((40, 120, 3), np.uint8)
    pixels[:, 40:80] = 255
    planes = decode_target(cv2.imencode(".png", pixels)[1].tobytes(), target)
    assert planes.shape == (3, 16, 16) and planes.min() == 1 == planes.max()


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp"])
def test_truncated_and_damaged(suffix: str) -> None:
    assert IMAGE is not None and TARGET is not None
    data = encoded(64, 64, suffix)
    with pytest.raises(ValueError, match="truncated"):
        decode_image(data[:len(data) // 2], (4, 4), IMAGE)
    with pytest.raises(ValueError, match="not a JPEG"):
        decode_target(b"text" * 100, TARGET)


def test_bombs_are_refused_before_decoding() -> None:
    assert IMAGE is not None
    png = encoded(16, 16, ".png")
    bomb = png[:16] + struct.pack(">II", 60_000, 60_000) + png[24:]
    with pytest.raises(ValueError, match="oversized"):
        decode_image(bomb, (2, 2), IMAGE)
