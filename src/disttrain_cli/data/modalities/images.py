"""Images for an encoder: RGB bytes, resized to whole patches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from disttrain_cli.data.decoding import decode_image, decode_pixels, decode_tiles
from disttrain_cli.data.examples import smooth_jpeg
from disttrain_cli.data.films import check_patches, decode_patches, sampled_frames
from disttrain_cli.data.modalities.media import IMAGE_FILES
from disttrain_cli.data.videos import is_video
from disttrain_cli.spec.heads import Grid, Head, ImageInput, Numbers
from disttrain_cli.spec.library_images import LibraryImages, Packed


class Images:
    """Images for an encoder as arrays [C, rows · patch, columns · patch].

    If the model reads videos, there are twice as many channels, the image twice.
    `ImageInput.affine` normalises them.
    """

    media = IMAGE_FILES

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        assert isinstance(head, ImageInput)
        return np.zeros(head.shape_of(grid), np.uint8)

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        assert isinstance(head, ImageInput)
        first = out[: head.channels]
        decode_image(data, grid, head, first)
        out.reshape(head.temporal, *first.shape)[1:] = first

    def decode_parts(
        self,
        data: bytes,
        head: Head,
        grid: Grid,
        parts: int,
        outs: Sequence[tuple[int, NDArray[Any]]],
    ) -> None:
        assert isinstance(head, ImageInput)
        if head.video is not None and is_video(data):
            decode_patches(data, head, parts, outs)
        elif head.processor is not None and head.processor.tiling is not None:
            decode_tiles(data, head, parts, outs)
        else:
            for _, out in outs:
                self.decode(data, head, grid, out)

    def pack(self, data: bytes, head: Head) -> Packed:
        assert isinstance(head, LibraryImages)
        if head.video is not None and is_video(data):
            content = sampled_frames(data, head.of_videos)
            return head.pack(head.of_videos.inputs(content), head.rows_in_llm(content.film))
        image = Image.fromarray(decode_pixels(data))
        return head.pack(head.processor.inputs(image), head.rows_in_llm(image.size))

    def blank_packed(self, head: Head, numbers: Numbers) -> Packed:
        assert isinstance(head, LibraryImages)
        return head.blank(numbers)

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        if isinstance(head, LibraryImages):
            self.pack(data, head)
            return
        assert isinstance(head, ImageInput)
        if head.video is not None and is_video(data):
            check_patches(data, head)
        elif head.cuts and head.video is None:
            decode_tiles(data, head, 0, ())
        else:
            decode_image(data, grid, head)

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        """Return a call that decodes an image, of a tile's size if the model cuts images."""
        if isinstance(head, LibraryImages):
            return partial(self.pack, smooth_jpeg(max(head.example_size(grid[0] * grid[1]))), head)
        assert isinstance(head, ImageInput)
        if head.cuts and head.video is None:
            picture, out = smooth_jpeg(max(grid) * head.patch_px), self.blank(head, grid)
            return partial(decode_tiles, picture, head, 1, [(0, out)])
        return partial(decode_image, smooth_jpeg(max(grid) * head.patch_px), grid, head)
