"""A small dataset of conversations about scikit-learn's scanned digits, with their pictures.

The conversations are in OpenAI's format, in WebDataset tars. Each shows one or two scans and has
one or two turns; its answers cannot be predicted without the images. Every scan is in one
conversation only, so that held-out conversations show new scans.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from disttrain_cli.data.sample_data import WORDS, Files, load_scans, scan_jpeg, write_shard

TALK_SHARDS = 4
MOST_TOKENS = 16  # of a picture, each of 16 x 16 pixels
Turn = tuple[str, str]  # a question and its answer


def write_sample_talks(folder: Path, seed: int = 0) -> list[str]:
    """Write the dataset; return its source paths relative to `folder`.

    The same seed gives the same bytes.

    Raises:
        DataError: scikit-learn is not installed, or a file of the same name has other content.
        SpecError: the folder cannot be written.
    """
    random = np.random.default_rng([seed, 2])
    digits = load_scans()
    order = random.permutation(len(digits.images))
    scans = iter([(digits.images[i], int(digits.target[i])) for i in order])
    talks = list(_talks(scans, random))
    for shard in range(TALK_SHARDS):
        write_shard(folder / "talks" / f"{shard:05d}.tar", talks[shard::TALK_SHARDS])
    return ["talks"]


def _talks(scans: Iterator[tuple[Any, int]], random: np.random.Generator) -> Iterator[Files]:
    """Yield conversations until every scan is used."""
    for number, first in enumerate(scans):
        make = TALKS[int(random.choice(len(TALKS), p=SHARES))]
        second = next(scans, None) if make is _two else None
        shown = [first] if second is None else [first, second]
        turns = (make if second or make is not _two else _one)([digit for _, digit in shown])
        yield _sample(f"{number:06d}", [scan for scan, _ in shown], turns, random)


def _one(digits: list[int]) -> list[Turn]:
    return [("Which digit is this?", f"It is {_a(digits[0])}.")]


def _parity(digits: list[int]) -> list[Turn]:
    parity = "odd" if digits[0] % 2 else "even"
    return [("Is it odd or even?", f"It is {parity}."), *_one(digits)]


def _two(digits: list[int]) -> list[Turn]:
    first, second = digits
    return [
        ("Which digits are these?", f"{_a(first).capitalize()} and {_a(second)}."),
        ("Which is the larger one?", f"The {WORDS[max(digits)]}."),
    ]


def _a(digit: int) -> str:
    return f"{'an' if WORDS[digit][0] in 'aeiou' and digit != 1 else 'a'} {WORDS[digit]}"


#: Topics of conversations, and the share of each.
TALKS: tuple[Callable[[list[int]], list[Turn]], ...] = (_one, _parity, _two)
SHARES = (0.6, 0.2, 0.2)


def _sample(key: str, scans: list[Any], turns: list[Turn], random: np.random.Generator) -> Files:
    """Return a conversation whose pictures precede its first question."""
    files: Files = [
        (f"{key}.{number}.jpg", scan_jpeg(scan, random, MOST_TOKENS)[0])
        for number, scan in enumerate(scans)
    ]
    messages: list[dict[str, Any]] = []
    for question, answer in turns:
        text = {"type": "text", "text": question}
        shown = [] if messages else [{"type": "image", "image": name} for name, _ in files]
        messages += [
            {"role": "user", "content": [*shown, text]},
            {"role": "assistant", "content": [{"type": "text", "text": answer}]},
        ]
    return [(f"{key}.json", json.dumps({"messages": messages}).encode()), *files]
