"""Images for a generator to learn: RGB bytes, centre-cropped, or latents."""

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

#: Types of the arrays, by `TargetInput.cached_latents`.
DTYPES = {False: "u1", "fp32": "<f4", "bf16": "<u2"}


class Targets:
    """Images for a generator as arrays [C, H, W]; `TargetInput.affine` normalises bytes.

    With latents, the files are those of `data.latents`; bf16, which NumPy does not support, is
    stored as 16-bit integers.
    """

    media = IMAGE_FILES

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        assert isinstance(head, TargetInput)
        return np.zeros(head.shape_of(grid), DTYPES[head.cached_latents])

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        assert isinstance(head, TargetInput)
        if head.cached_latents:
            out[:] = np.frombuffer(data, out.dtype, out.size).reshape(out.shape)
        else:
            decode_target(data, head, grid, out)

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        assert isinstance(head, TargetInput)
        decode_target(data, head.pixels, grid)

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        assert isinstance(head, TargetInput)
        return partial(decode_target, smooth_jpeg(max(head.image_px(grid))), head, grid)
