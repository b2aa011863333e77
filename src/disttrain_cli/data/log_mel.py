"""Log-mel spectrograms of audio clips, as in Whisper's training (Radford et al. 2023, section 2.2).

Equal to transformers' WhisperFeatureExtractor, which needs torch or a Python loop over the frames:
Hann windows of 25 ms every 10 ms, power, triangular filters on Slaney's mel scale, log10, clipped
to 8 below the loudest, (x + 4) / 4.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.clips import decode_clip
from disttrain_cli.spec.heads import AudioInput
from disttrain_cli.spec.library_calls import RATE_HZ

WINDOW, HOP = 400, 160  # samples at 16 kHz: 25 ms, 10 ms
FLOOR = 1e-10  # power below which everything is silence
DEPTH = 8.0  # dynamic range below the loudest, in powers of ten
#: The features of a clip without any sound.
SILENCE = (np.log10(FLOOR) + 4.0) / 4.0


def decode_features(data: bytes, audio: AudioInput, out: NDArray[np.float32]) -> None:
    """Write the features [mel bins, frames] of a sound file to `out`.

    `out` is written once nothing can fail any more.

    Raises:
        ValueError: it is no complete sound file, or longer than the encoder's limit.
        DataError: `soundfile` is not installed.
    """
    log_mel(decode_clip(data, audio.longest_ms), audio, out)


def log_mel(samples: NDArray[np.float32], audio: AudioInput, out: NDArray[np.float32]) -> None:
    """Write the features [mel bins, frames] of samples at 16 kHz to `out`.

    A shorter clip is padded with silence.
    """
    window = audio.frames * HOP
    whole = np.zeros(window, np.float32)
    whole[: len(samples)] = samples[:window]
    heard = min(audio.frames, -(-(len(samples) + WINDOW // 2) // HOP))  # frames that touch a sample
    padded = np.pad(whole, WINDOW // 2, mode="reflect")
    frames_TW = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: heard * HOP : HOP]
    power_TF = np.abs(np.fft.rfft(frames_TW * np.hanning(WINDOW + 1)[:-1])) ** 2
    log_TM = np.log10(np.maximum(power_TF @ filter_bank(audio.mel_bins), FLOOR))
    loudest = max(log_TM.max(initial=np.log10(FLOOR)), np.log10(FLOOR))
    out[:] = (max(np.log10(FLOOR), loudest - DEPTH) + 4.0) / 4.0
    out[:, :heard] = ((np.maximum(log_TM, loudest - DEPTH) + 4.0) / 4.0).T


@functools.cache
def filter_bank(bins: int) -> NDArray[np.float64]:
    """Return triangular filters [1 + WINDOW / 2 frequencies, bins].

    They are evenly wide on Slaney's mel scale, and each has the area 2 / its width.
    """
    frequencies = np.linspace(0.0, RATE_HZ / 2, 1 + WINDOW // 2)
    corners = _hz(np.linspace(0.0, _mel(RATE_HZ / 2), bins + 2))
    widths = np.diff(corners)
    slopes = corners - frequencies[:, None]
    rising, falling = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (corners[2:] - corners[:-2]))


LINEAR_HZ = 1000.0
LINEAR_MELS = 15.0  # linear up to here, logarithmic above (Slaney 1998, Auditory Toolbox)
MELS_PER_E = 27.0 / np.log(6.4)


def _mel(hz: float) -> float:
    return LINEAR_MELS + np.log(hz / LINEAR_HZ) * MELS_PER_E


def _hz(mels: NDArray[np.float64]) -> NDArray[np.float64]:
    linear = mels * (LINEAR_HZ / LINEAR_MELS)
    return np.where(
        mels < LINEAR_MELS, linear, LINEAR_HZ * np.exp((mels - LINEAR_MELS) / MELS_PER_E)
    )
