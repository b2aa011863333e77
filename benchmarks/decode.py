"""Decode, resize and normalise one JPEG of 1024x768 to 512x512 on one core, four ways, alternating.

`disttrain` is what a training rank calls; `bare loop` the same decode, resize and normalise calls without its
checks; `Pillow` the usual transform: decode, bilinear resize, then torchvision's arithmetic (ToTensor, Normalize)
in torch; `Pillow, NumPy` the same with disttrain's normalise, so that only decoding and resizing differ.
CPU seconds of the process; a ratio above 1 means that disttrain is faster. The picture is noise with the spectrum
of photographs (amplitude 1/f), colour a quarter as strong as brightness, seed 0, as JPEG of quality 90 and 60:
entropy decoding, the same library in all four ways, grows with the bytes.
"""

from __future__ import annotations

import functools
import io
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Tables, alternate, main, paired_ratio
from disttrain_cli.data.decoding import decode_image
from disttrain_cli.spec.inputs import ImageInput

WIDTH, HEIGHT, SIDE = 1024, 768, 512
IMAGE = ImageInput(module="encoder", patch_px=16, max_pixels=SIDE * SIDE)
GRID = (SIDE // IMAGE.patch_px, SIDE // IMAGE.patch_px)


def picture(quality: int) -> bytes:
    """The JPEG file."""
    import cv2

    random = np.random.default_rng(0)
    rows, columns = np.meshgrid(np.fft.fftfreq(HEIGHT), np.fft.rfftfreq(WIDTH), indexing="ij")
    amplitude = 1 / np.maximum(np.hypot(rows, columns), 1 / WIDTH)

    def plane(deviation: float) -> NDArray[np.float64]:
        noise = np.fft.irfft2(amplitude * np.exp(2j * np.pi * random.random(amplitude.shape)), (HEIGHT, WIDTH))
        return np.clip(128 + deviation * noise / noise.std(), 0, 255)

    pixels = cv2.cvtColor(np.stack([plane(48), plane(12), plane(12)], axis=2).astype(np.uint8), cv2.COLOR_YCrCb2BGR)
    return cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1].tobytes()


def normalised(rgb: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[H, W, 3] bytes to [3, H, W] floats around 0."""
    planes = np.ascontiguousarray(rgb.transpose(2, 0, 1)).astype(np.float32)
    planes *= np.float32(1 / (255 * IMAGE.std))
    planes -= np.float32(IMAGE.mean / IMAGE.std)
    return planes


def bare(data: bytes, cv2: Any) -> NDArray[np.float32]:
    """The OpenCV calls alone."""
    pixels = cv2.imdecode(np.frombuffer(data, dtype=np.uint8), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    return normalised(cv2.resize(pixels, (SIDE, SIDE), interpolation=cv2.INTER_AREA)[:, :, ::-1])


def pillow(data: bytes) -> NDArray[np.uint8]:
    """[H, W, 3] by Pillow."""
    from PIL import Image

    return np.array(Image.open(io.BytesIO(data)).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def pillow_torch(data: bytes, torch: Any) -> Any:
    """The transform as torchvision writes it, operation by operation."""
    planes = torch.from_numpy(pillow(data)).permute(2, 0, 1).contiguous().to(torch.float32).div(255)
    mean, std = (torch.full((3, 1, 1), value) for value in (IMAGE.mean, IMAGE.std))
    return planes.clone().sub_(mean).div_(std)


def compared(data: bytes, images: int, rounds: int) -> list[dict[str, Any]]:
    """Rows: milliseconds per image of each way, and how much faster disttrain is."""
    import cv2
    import torch

    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    ways = {"disttrain": lambda: decode_image(data, GRID, IMAGE), "bare loop": lambda: bare(data, cv2),
            "Pillow": lambda: pillow_torch(data, torch), "Pillow, NumPy": lambda: normalised(pillow(data))}
    assert np.array_equal(ways["disttrain"](), ways["bare loop"]()), "not the same work"

    def loop(way: Any) -> None:
        for _ in range(images):
            way()

    seconds = alternate({name: functools.partial(loop, way) for name, way in ways.items()}, rounds)
    return [{"way": name, "ms per image": 1e3 * median(own) / images,
             "speed of disttrain over it": paired_ratio(own, seconds["disttrain"])} for name, own in seconds.items()]


def measure(small: bool = False) -> Tables:
    """One table per picture."""
    images, rounds = (1, 1) if small else (10, 15)
    tables = {}
    for quality in (90, 60):
        data = picture(quality)
        title = f"JPEG of {WIDTH}x{HEIGHT}, quality {quality} ({len(data) // 1024} KiB), to {SIDE}x{SIDE}, one core"
        tables[title] = compared(data, images, rounds)
    return tables


if __name__ == "__main__":
    main(__doc__, measure)
