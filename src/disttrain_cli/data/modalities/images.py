"""Images that an encoder reads: RGB bytes, resized to whole patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.decoding import decode_image, decode_tiles
from disttrain_cli.data.examples import smooth_jpeg
from disttrain_cli.data.modalities.media import IMAGE_FILES
from disttrain_cli.spec.heads import Grid, Head, ImageInput


class Images:
    """[C, rows · patch, columns · patch]; `ImageInput.affine` normalises them."""

    media = IMAGE_FILES

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        assert isinstance(head, ImageInput)
        rows, columns = grid
        return np.zeros((head.channels, rows * head.patch_px, columns * head.patch_px), np.uint8)

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        assert isinstance(head, ImageInput)
        decode_image(data, grid, head, out)

    def decode_parts(
        self,
        data: bytes,
        head: Head,
        grid: Grid,
        parts: int,
        outs: Sequence[tuple[int, NDArray[Any]]],
    ) -> None:
        assert isinstance(head, ImageInput)
        decode_tiles(data, head, parts, outs)

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        assert isinstance(head, ImageInput)
        if head.cuts:
            decode_tiles(data, head, 0, ())
        else:
            decode_image(data, grid, head)

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        """Of a head that cuts, a picture as large as one tile."""
        assert isinstance(head, ImageInput)
        if head.cuts:
            picture, out = smooth_jpeg(max(grid) * head.patch_px), self.blank(head, grid)
            return partial(decode_tiles, picture, head, 1, [(0, out)])
        return partial(decode_image, smooth_jpeg(max(grid) * head.patch_px), grid, head)
