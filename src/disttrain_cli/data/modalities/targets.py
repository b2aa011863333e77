"""Images that a generator learns to draw: RGB bytes of the middle square, or latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.decoding import decode_target
from disttrain_cli.data.examples import smooth_jpeg
from disttrain_cli.data.modalities.media import IMAGE_FILES
from disttrain_cli.spec.heads import Grid, Head, TargetInput


class Targets:
    """[C, S, S]; `TargetInput.affine` normalises them."""

    media = IMAGE_FILES

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        assert isinstance(head, TargetInput)
        return np.zeros(head.shape, np.uint8)

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        assert isinstance(head, TargetInput)
        decode_target(data, head, out)

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        assert isinstance(head, TargetInput)
        decode_target(data, head)

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        assert isinstance(head, TargetInput)
        if head.cached_latents:
            return None
        return partial(decode_target, smooth_jpeg(head.size_px), head)
