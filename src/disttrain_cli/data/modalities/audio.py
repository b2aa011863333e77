"""Audio clips for an encoder: log-mel features, padded with silence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.clips import decode_clip
from disttrain_cli.data.examples import noise
from disttrain_cli.data.log_mel import HOP, SILENCE, decode_features, log_mel
from disttrain_cli.data.modalities.media import SOUND_FILES
from disttrain_cli.spec.heads import AudioInput, Grid, Head


class Audio:
    """Clips for an encoder as arrays [mel bins, frames]."""

    media = SOUND_FILES

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        assert isinstance(head, AudioInput)
        return np.full((head.mel_bins, head.frames), SILENCE, np.float32)

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        assert isinstance(head, AudioInput)
        decode_features(data, head, out)

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        assert isinstance(head, AudioInput)
        decode_clip(data, head.longest_ms)

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        """Return a call without the decoding of a file."""
        assert isinstance(head, AudioInput)
        return partial(log_mel, noise(head.frames * HOP), head, self.blank(head, grid))
