"""A small audio dataset: tones with captions that name them, as WAV files in a WebDataset tar.

A clip is one to three tones, each low, middle or high, at one of several sample rates: its caption
cannot be predicted without the audio.
"""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np

from disttrain_cli.data.sample_data import Files, write_shard

TONES_HZ = {"low": 220.0, "middle": 660.0, "high": 1980.0}
RATES_HZ = (8_000, 16_000, 22_050)
TONE_S = 0.25


def write_sample_audio(folder: Path, seed: int = 0, clips: int = 240) -> list[str]:
    """Write the dataset; return its source paths relative to `folder`.

    The same seed gives the same bytes.

    Raises:
        DataError: a file of the same name has other content.
        SpecError: the folder cannot be written.
    """
    random = np.random.default_rng([seed, 1])
    write_shard(
        folder / "tones" / "00000.tar",
        [_sample(f"{number:06d}", random) for number in range(clips)],
    )
    return ["tones"]


def _sample(key: str, random: np.random.Generator) -> Files:
    names = [str(name) for name in random.choice(list(TONES_HZ), size=int(random.integers(1, 4)))]
    caption = f"Heard: {', '.join(names)}."
    return [
        (f"{key}.wav", tones(names, int(random.choice(RATES_HZ)), random)),
        (f"{key}.txt", caption.encode()),
    ]


def tones(names: list[str], rate_hz: int, random: np.random.Generator) -> bytes:
    """Return a WAV file (16 bit, one channel) of consecutive named tones with a little noise."""
    times = np.arange(int(TONE_S * rate_hz)) / rate_hz
    signal = np.concatenate([0.4 * np.sin(2 * np.pi * TONES_HZ[name] * times) for name in names])
    signal += 0.005 * random.standard_normal(len(signal))
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate_hz)
        file.writeframes((signal * 32767).astype("<i2").tobytes())
    return buffer.getvalue()
