"""Audio clips for an encoder: log-mel features, padded with silence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.clips import LONGEST_MS, decode_clip, in_whole_ms
from disttrain_cli.data.examples import noise
from disttrain_cli.data.log_mel import HOP, SILENCE, decode_features, log_mel
from disttrain_cli.data.modalities.media import SOUND_FILES
from disttrain_cli.spec.heads import AudioInput, Grid, Head, Numbers
from disttrain_cli.spec.library_calls import RATE_HZ
from disttrain_cli.spec.library_images import LibraryClips, Packed


class Audio:
    """Clips for an encoder as arrays [mel bins, frames]."""

    media = SOUND_FILES

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        assert isinstance(head, AudioInput)
        return np.full((head.mel_bins, head.frames), SILENCE, np.float32)

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        assert isinstance(head, AudioInput)
        decode_features(data, head, out)

    def pack(self, data: bytes, head: Head) -> Packed:
        """Return an audio tower's input for a clip, which ends with silence up to the next ms."""
        assert isinstance(head, LibraryClips)
        samples = in_whole_ms(decode_clip(data, LONGEST_MS))
        numbers = len(samples) * 1000 // RATE_HZ, RATE_HZ
        return head.pack(head.processor.inputs(samples), head.rows_in_llm(numbers))

    def blank_packed(self, head: Head, numbers: Numbers) -> Packed:
        assert isinstance(head, LibraryClips)
        return head.blank(numbers)

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        if isinstance(head, LibraryClips):
            self.pack(data, head)
            return
        assert isinstance(head, AudioInput)
        decode_clip(data, head.longest_ms)

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        """Return a call without the decoding of a file."""
        if isinstance(head, LibraryClips):
            ms, _ = head.example_size(grid[0] * grid[1])
            return partial(head.processor.inputs, noise(ms * RATE_HZ // 1000))
        assert isinstance(head, AudioInput)
        return partial(log_mel, noise(head.frames * HOP), head, self.blank(head, grid))
