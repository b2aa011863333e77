"""A small real dataset: scikit-learn's 1,797 handwritten digits as JPEGs in WebDataset tars.

`interleaved/`: texts about digits with images to read and images to generate, all of skewed number
and size; `captions/`: one image and its caption per sample. Sizes suit sequences of 256 bytes and
patches of 16 pixels per token: a sample takes 20 to 254 tokens.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.errors import DataError
from disttrain_cli.spec.extras import install_command
from disttrain_cli.spec.whole import write_whole

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
INTERLEAVED_SHARDS = 4
CAPTIONS = 320  # scans in the caption shard
SAMPLE_TOKENS = 254  # bytes of text and image tokens that a sample may take
TARGET_TOKENS = 8  # counted for an image to be generated
TOKEN_PX = 16
IMAGE_TOKENS = 64  # of the largest image after scaling

READ_COUNTS = (0, 1, 2, 3, 4, 6, 8)
READ_SHARES = (0.50, 0.26, 0.12, 0.05, 0.03, 0.02, 0.02)
TARGET_COUNTS = (0, 1, 2, 3, 4)
TARGET_SHARES = (0.30, 0.44, 0.15, 0.07, 0.04)

Files = list[tuple[str, bytes]]


def write_sample_data(folder: Path, seed: int = 0) -> list[str]:
    """Write the dataset; return its source paths relative to `folder`.

    The same seed gives the same bytes.

    Raises:
        DataError: scikit-learn is not installed, or a file of the same name has other content.
        SpecError: the folder cannot be written.
    """
    digits = load_scans()
    random = np.random.default_rng(seed)
    order = random.permutation(len(digits.images))
    scans = iter([(digits.images[i], int(digits.target[i])) for i in order])
    captions = [_caption(number, *next(scans), random) for number in range(CAPTIONS)]
    interleaved = list(_interleaved(scans, random))
    for shard in range(INTERLEAVED_SHARDS):
        write_shard(
            folder / "interleaved" / f"{shard:05d}.tar", interleaved[shard::INTERLEAVED_SHARDS]
        )
    write_shard(folder / "captions" / "00000.tar", captions)
    return ["interleaved", "captions"]


def load_scans() -> Any:
    """Load scikit-learn's scanned digits.

    They are `images` [1797, 8, 8] of ink 0 … 16, `data` the same flat, `target` the digits.

    Raises:
        DataError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            "The sample dataset needs scikit-learn, which is not installed",
            next_step=f"Install it with: {install_command('demo')}",
        ) from None
    return load_digits()


def _caption(number: int, scan: Any, digit: int, random: np.random.Generator) -> Files:
    key = f"{number:06d}"
    data, _ = scan_jpeg(scan, random, IMAGE_TOKENS)
    return [
        (f"{key}.jpg", data),
        (f"{key}.txt", f"{digit}, a handwritten {WORDS[digit]}.".encode()),
    ]


def _interleaved(scans: Iterator[tuple[Any, int]], random: np.random.Generator) -> Iterator[Files]:
    """Yield samples until every scan is used."""
    left = list(scans)
    number = 0
    while left:
        reads = int(random.choice(READ_COUNTS, p=READ_SHARES))
        targets = int(random.choice(TARGET_COUNTS, p=TARGET_SHARES))
        reads = min(reads, len(left))
        targets = min(targets, len(left) - reads)
        yield _sample(
            f"{number:06d}",
            [left.pop() for _ in range(reads)],
            [left.pop() for _ in range(targets)],
            random,
        )
        number += 1


def _sample(
    key: str,
    reads: list[tuple[Any, int]],
    targets: list[tuple[Any, int]],
    random: np.random.Generator,
) -> Files:
    """Return a sample: images to read with their names, facts, and images to generate.

    The text before an image to generate requests it.
    """
    files: Files = []
    segments: list[dict[str, Any]] = []
    left = SAMPLE_TOKENS - sum(TARGET_TOKENS + len(_request(digit)) + 2 for _, digit in targets)

    def add(scan: Any, generate: bool, most_tokens: int) -> int:
        data, tokens = scan_jpeg(scan, random, most_tokens, square=generate)
        name = f"{key}.{len(files)}.jpg"
        files.append((name, data))
        segments.append({"type": "image", "file": name, "generate": generate})
        return tokens

    for index, (scan, digit) in enumerate(reads):
        after = len(reads) - index - 1  # images that still need at least a token and their sentence
        text = f"{digit}, a {WORDS[digit]}.\n"
        left -= len(text)
        left -= add(scan, False, min(IMAGE_TOKENS, left - 24 * after))
        segments.append({"type": "text", "value": text})
    wanted = int(random.lognormal(-0.6, 1.0)) + (not reads and not targets)
    facts = ""
    for fact in (_fact([digit for _, digit in reads], random) for _ in range(wanted)):
        if len(facts) + len(fact) <= left:
            facts += fact
    if facts:
        segments.append({"type": "text", "value": facts})
    for scan, digit in targets:
        segments.append({"type": "text", "value": _request(digit)})
        add(scan, True, IMAGE_TOKENS)
        segments.append({"type": "text", "value": f"{digit}\n"})
    return [(f"{key}.json", json.dumps({"segments": segments}).encode()), *files]


def _request(digit: int) -> str:
    return f"Draw a {WORDS[digit]}."


def _fact(shown: list[int], random: np.random.Generator) -> str:
    """Return one sentence: about several digits shown, or counting, spelling, adding."""
    kind = int(random.integers(4))
    first, second = (int(digit) for digit in random.integers(0, 10, size=2))
    if kind == 0 and len(shown) > 1:
        return f"The largest is {WORDS[max(shown)]}, the smallest is {WORDS[min(shown)]}.\n"
    if kind == 1:
        return f"{WORDS[first].capitalize()} is spelled {'-'.join(WORDS[first])}.\n"
    if kind == 2 and first != second:
        low, high = min(first, second), max(first, second)
        return f"Count: {', '.join(WORDS[low : high + 1])}.\n"
    return f"{first} plus {second} is {first + second}.\n"


def scan_jpeg(
    scan: Any, random: np.random.Generator, most_tokens: int, square: bool = False
) -> tuple[bytes, int]:
    """Encode a scan of 8 x 8 as JPEG of log-normal size between 16 and 256 pixels.

    Returns:
        (JPEG, its image tokens).
    """
    import cv2

    side = 38 * random.lognormal(0, 0.65)
    shape = 1.0 if square else random.lognormal(0, 0.25)
    width, height = (int(np.clip(side * factor, 16, 256)) for factor in (shape, 1 / shape))
    tokens = _tokens(width, height)
    if tokens > most_tokens:  # shrink to the sample's remaining tokens
        scale = max(1, most_tokens) ** 0.5 * TOKEN_PX / max(width, height)
        width, height = (max(TOKEN_PX, int(size * scale)) for size in (width, height))
        tokens = _tokens(width, height)
    ink = np.clip(255 - scan * (255 / 16), 0, 255).astype(np.uint8)
    picture = cv2.resize(ink, (width, height), interpolation=cv2.INTER_CUBIC)
    return cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes(), tokens


def _tokens(width: int, height: int) -> int:
    """Return an upper bound of the image's tokens, where a token represents 16 x 16 pixels."""
    return min(IMAGE_TOKENS, -(-width // TOKEN_PX) * -(-height // TOKEN_PX))


def write_shard(path: Path, samples: list[Files]) -> None:
    """Write samples to a tar without times and owners, so that equal data gives equal bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in (file for sample in samples for file in sample):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    data = buffer.getvalue()
    if not path.exists():
        write_whole(path, data)
    elif path.is_dir() or path.read_bytes() != data:
        raise DataError(
            f"{path} exists and is not the sample data",
            "It was not changed.",
            "Choose another folder, or move the file away first.",
        )
