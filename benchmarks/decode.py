"""Decode, resize and normalise on one core, in turns: what a preprocessing thread does, against the
usual ways.

First the case aimed at, a JPEG of 1024x768 to 512x512. `disttrain` is what a preprocessing thread
calls for every image, writing into the slot's array; `bare loop` the same decode, resize and
normalise calls without its checks; `Pillow` the usual transform (open, convert to RGB, resize, then
torchvision's arithmetic, ToTensor and Normalize, in torch), with Pillow's antialiased filters; `in
a DataLoader` the same in one worker of a torch DataLoader, batches of 8 collated and sent, of which
only the worker's time is counted and not the time of receiving them. Then other sizes and formats,
and how close each resize is to Pillow's antialiased bicubic one, in dB (PSNR).

CPU seconds of the process; a ratio above 1 means that disttrain is faster. The picture is noise
with the spectrum of photographs (amplitude 1/f), colour a quarter as strong as brightness, seed 0,
as JPEG of quality 90 and 60: entropy decoding, the same library in all ways, grows with the bytes.
The photographs are scikit-learn's two samples.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import Tables, main, paired_ratio
from disttrain_cli.data.decoding import decode_image
from disttrain_cli.spec.heads import ImageInput

WIDTH, HEIGHT, SIDE = 1024, 768, 512
IMAGE = ImageInput(module="encoder", patch_px=16, max_pixels=SIDE * SIDE)
BATCH = 8

Pixels = NDArray[np.uint8]


def noise(width: int, height: int) -> Pixels:
    """[H, W, BGR]: amplitude 1/f, in three independent planes of brightness and colour."""
    import cv2

    random = np.random.default_rng(0)
    rows, columns = np.meshgrid(np.fft.fftfreq(height), np.fft.rfftfreq(width), indexing="ij")
    amplitude = 1 / np.maximum(np.hypot(rows, columns), 1 / width)

    def plane(deviation: float) -> NDArray[np.float64]:
        waves = np.fft.irfft2(
            amplitude * np.exp(2j * np.pi * random.random(amplitude.shape)), (height, width)
        )
        return np.clip(128 + deviation * waves / waves.std(), 0, 255)

    planes = np.stack([plane(48), plane(12), plane(12)], axis=2).astype(np.uint8)
    return np.asarray(cv2.cvtColor(planes, cv2.COLOR_YCrCb2BGR), np.uint8)


def prepared(
    data: bytes, grid: tuple[int, int], image: ImageInput, out: NDArray[np.float32] | None = None
) -> NDArray[np.float32]:
    """What a worker decodes, normalised as the rank does it."""
    scale, shift = np.array(image.affine, dtype=np.float32).T[..., None, None]
    planes = np.multiply(decode_image(data, grid, image), scale, out=out)
    planes -= shift
    return planes


def picture(quality: int, width: int = WIDTH, height: int = HEIGHT, suffix: str = ".jpg") -> bytes:
    """A file of noise; `quality` is for JPEG and WebP."""
    import cv2

    options = {
        ".jpg": [cv2.IMWRITE_JPEG_QUALITY, quality],
        ".webp": [cv2.IMWRITE_WEBP_QUALITY, quality],
        ".png": [],
    }
    return bytes(cv2.imencode(suffix, noise(width, height), options[suffix])[1])


def normalised(planes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[3, H, W] bytes to floats around 0."""
    out = np.multiply(planes, np.float32(1 / (255 * IMAGE.std[0])), dtype=np.float32)
    out -= np.float32(IMAGE.mean[0] / IMAGE.std[0])
    return out


def bare(data: bytes, out: NDArray[np.float32]) -> NDArray[np.float32]:
    """The calls alone, for this size."""
    import cv2
    import simplejpeg

    twice = cv2.resize(
        simplejpeg.decode_jpeg(data, "BGR"), (SIDE, 2 * SIDE), interpolation=cv2.INTER_LINEAR
    )
    for plane, own in zip(out, reversed(cv2.split(cv2.resize(twice, (SIDE, SIDE)))), strict=True):
        np.multiply(own, np.float32(1 / (255 * IMAGE.std[0])), out=plane)
        plane -= np.float32(IMAGE.mean[0] / IMAGE.std[0])
    return out


def pillow(data: bytes, height: int = SIDE, width: int = SIDE, kind: str = "BILINEAR") -> Pixels:
    """[H, W, 3] by Pillow."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    return np.array(image.resize((width, height), Image.Resampling[kind]))


def transform(data: bytes, kind: str, height: int = SIDE, width: int = SIDE) -> Any:
    """The transform as torchvision writes it, operation by operation."""
    import torch

    planes = torch.from_numpy(pillow(data, height, width, kind)).permute(2, 0, 1).contiguous()
    mean, std = (torch.full((3, 1, 1), value) for value in (IMAGE.mean[0], IMAGE.std[0]))
    return planes.to(torch.float32).div(255).clone().sub_(mean).div_(std)


class Files:
    """A dataset of one file, many times; every item comes with the CPU seconds of its worker so
    far."""

    def __init__(self, data: bytes, kind: str, batches: int) -> None:
        self.data, self.kind, self.items = data, kind, batches * BATCH

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> tuple[float, Any]:
        return time.process_time(), transform(self.data, self.kind)


def in_worker(data: bytes, kind: str, batches: int) -> Callable[[], float]:
    """Seconds per image of a DataLoader's worker, from the start of its first batch to that of its
    last."""
    from torch.utils.data import DataLoader

    loader: Any = DataLoader(Files(data, kind, batches), batch_size=BATCH, num_workers=1)  # type: ignore[arg-type]

    def seconds() -> float:
        clocks = [float(clock[0]) for clock, _ in loader]
        return (clocks[-1] - clocks[0]) / (len(clocks) - 1) / BATCH

    return seconds


def in_process(call: Callable[[], object], images: int) -> Callable[[], float]:
    """Seconds per image of a call in this process, after one that brings back what a worker's fork
    took away."""

    def seconds() -> float:
        call()
        begin = time.process_time()
        for _ in range(images):
            call()
        return (time.process_time() - begin) / images

    return seconds


def compared(
    ways: dict[str, Callable[[], float]], rounds: int, column: str
) -> list[dict[str, Any]]:
    """Rows of ways that measure themselves, in turns, after a round that is not counted; the first
    is ours."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for counted in [False] + [True] * rounds:
        for name, way in ways.items():
            taken = way()
            if counted:
                seconds[name].append(taken)
    ours = next(iter(seconds.values()))
    return [
        {
            column: name,
            "ms per image": 1e3 * median(own),
            "speed of disttrain over it": paired_ratio(own, ours),
        }
        for name, own in seconds.items()
    ]


def aimed_at(data: bytes, small: bool) -> list[dict[str, Any]]:
    """The first case, every way."""
    rounds, images, batches = (1, 1, 2) if small else (15, 10, 4)
    out = np.zeros((3, SIDE, SIDE), np.float32)
    grid = (SIDE // IMAGE.patch_px, SIDE // IMAGE.patch_px)
    assert np.array_equal(prepared(data, grid, IMAGE), bare(data, out)), "not the same work"
    ways = {
        "disttrain": in_process(lambda: prepared(data, grid, IMAGE, out), images),
        "bare loop": in_process(lambda: bare(data, out), images),
    }
    for kind in ("BILINEAR", "BICUBIC"):
        ways[f"Pillow, {kind.lower()}"] = in_process(partial(transform, data, kind), images)
        ways[f"Pillow, {kind.lower()}, in a DataLoader"] = in_worker(data, kind, batches)
    return compared(ways, rounds, "way")


def other_files(small: bool) -> list[dict[str, Any]]:
    """Other sizes and formats against Pillow's bilinear transform in this process."""
    cases = [
        (640, 480, 480, 640, ".jpg"),
        (640, 480, 224, 224, ".jpg"),
        (1024, 768, 768, 1024, ".jpg"),
        (2048, 1536, 1024, 1024, ".jpg"),
        (4000, 3000, 512, 512, ".jpg"),
        (1024, 768, 512, 512, ".png"),
        (1024, 768, 512, 512, ".webp"),
    ]
    rows = []
    for width, height, rows_px, columns_px, suffix in cases[:1] if small else cases:
        data = picture(85, width, height, suffix)
        out = np.zeros((3, rows_px, columns_px), np.float32)
        grid = (rows_px // IMAGE.patch_px, columns_px // IMAGE.patch_px)
        images = 1 if small else max(1, 8_000_000 // (width * height))
        ways = {
            "disttrain": partial(prepared, data, grid, IMAGE, out),
            "Pillow": partial(transform, data, "BILINEAR", rows_px, columns_px),
        }
        ours, theirs = compared(
            {name: in_process(call, images) for name, call in ways.items()},
            1 if small else 7,
            "way",
        )
        rows.append(
            {
                "file": f"{width}x{height}{suffix}",
                "KiB": len(data) // 1024,
                "to": f"{columns_px}x{rows_px}",
                "ms per image": ours["ms per image"],
                "speed over Pillow": theirs["speed of disttrain over it"],
            }
        )
    return rows


def closeness(small: bool) -> list[dict[str, Any]]:
    """dB between each resize and Pillow's antialiased bicubic one; PNG, so that nothing else
    differs."""
    import cv2
    from sklearn.datasets import load_sample_images

    pictures = {"noise": noise(640, 480)}
    if not small:
        pictures |= {
            name: np.ascontiguousarray(pixels[:416, :, ::-1])
            for name, pixels in zip(
                ("photograph 1", "photograph 2"), load_sample_images().images, strict=True
            )
        }
    rows = []
    for name, pixels in pictures.items():
        data = cv2.imencode(".png", pixels)[1].tobytes()
        for factor in (1.02, 1.2, 1.5, 1.75, 2, 3):
            height, width = (round(size / factor / 8) * 8 for size in pixels.shape[:2])
            grid, image = (
                (height // 8, width // 8),
                ImageInput(module="encoder", patch_px=8, max_pixels=10**7),
            )
            want, bilinear = (
                normalised(pillow(data, height, width, kind).transpose(2, 0, 1))
                for kind in ("BICUBIC", "BILINEAR")
            )
            area = cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA)[
                :, :, ::-1
            ].transpose(2, 0, 1)
            rows.append(
                {
                    "picture": name,
                    "factor": factor,
                    "disttrain": decibels(prepared(data, grid, image), want),
                    "OpenCV, area": decibels(normalised(area), want),
                    "Pillow, bilinear": decibels(bilinear, want),
                }
            )
    return rows


def decibels(values: NDArray[np.float32], want: NDArray[np.float32]) -> float:
    """PSNR of values in -1..1."""
    return 10 * math.log10(
        4 / max(1e-12, float(np.mean(np.square(values - want, dtype=np.float64))))
    )


def measure(small: bool = False) -> Tables:
    """One table per picture, then those of other files and of closeness."""
    import cv2
    import torch

    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    tables = {}
    for quality in (90,) if small else (90, 60):
        data = picture(quality)
        title = (
            f"JPEG of {WIDTH}x{HEIGHT}, quality {quality} ({len(data) // 1024} KiB), to"
            f" {SIDE}x{SIDE}, one core"
        )
        tables[title] = aimed_at(data, small)
    tables["Other files, one core, against Pillow's bilinear transform"] = other_files(small)
    tables["dB to Pillow's antialiased bicubic resize, by how much smaller the image becomes"] = (
        closeness(small)
    )
    return tables


if __name__ == "__main__":
    main(__doc__, measure)
