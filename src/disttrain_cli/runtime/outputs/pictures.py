"""Images and videos of a prompt as items of the model: whole, or in parts cut by its processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disttrain_cli.data import videos
from disttrain_cli.data.films import film_of
from disttrain_cli.data.headers import ImageHeader, read_header
from disttrain_cli.data.modalities.images import Images
from disttrain_cli.spec.cutting import Written
from disttrain_cli.spec.heads import Grid, ImageInput, Numbers
from disttrain_cli.spec.places import Places
from disttrain_cli.spec.video_processor import Film


@dataclass(frozen=True)
class Picture:
    """Image or video of a prompt."""

    file: bytes
    numbers: Numbers  # as in the index
    around: Written  # the texts around its parts

    @property
    def parts(self) -> int:
        """Number of its items."""
        return len(self.around) - 1

    def grid(self, head: ImageInput) -> Grid:
        """Return the grid of each of its parts."""
        rows, columns = head.grids(np.array([self.numbers]))[0].tolist()
        return rows, columns

    def times(self, head: ImageInput) -> list[int | None]:
        """Return each part's time offset in positions; None for images and a video's first part."""
        if not self.is_video or head.video is None:
            return [None] * self.parts
        return [None, *head.video.times(Film(*self.numbers))[1:]]

    @property
    def is_video(self) -> bool:
        """True if it is a video."""
        return len(self.numbers) > 2

    def tokens(self, head: ImageInput) -> list[int]:
        """Return the LLM tokens of each of its parts."""
        sizes, parts = np.array([self.numbers] * self.parts), np.full(self.parts, self.parts)
        counts: list[int] = head.tokens_of(sizes, np.arange(self.parts), parts).tolist()
        return counts

    def places(self, head: ImageInput, begins: Sequence[int]) -> list[Places]:
        """Return the token positions of each part's rows; the parts' tokens begin at `begins`."""
        joined = head.places(self.numbers, self.parts)
        if joined is not None:
            return [own.moved(begins[0]) for own in joined]
        counts = self.tokens(head)
        return [Places(np.arange(at, at + count)) for at, count in zip(begins, counts, strict=True)]

    def planes(self, head: ImageInput) -> list[Any]:
        """Return bytes [C, H, W] of each part; raises ValueError if it cannot be decoded."""
        grid, images = self.grid(head), Images()
        outs = [(part, images.blank(head, grid)) for part in range(self.parts)]
        if head.cuts:
            images.decode_parts(self.file, head, grid, self.parts, outs)
        else:
            images.decode(self.file, head, grid, outs[0][1])
        return [out for _, out in outs]


def pictures_of(
    files: Sequence[bytes], head: ImageInput, sizes: Sequence[Numbers] | None = None
) -> list[Picture]:
    """Return the images and videos of one prompt.

    Args:
        sizes: numbers of each, as in the index; None = read from the files' headers.

    Raises:
        ValueError: a file is neither, or the model does not read it.
    """
    sizes = sizes or [_numbers(file, head) for file in files]
    for size in sizes:
        if reason := head.misfit(*size):
            raise ValueError(reason)
    written = head.written(sizes)
    return [Picture(*one) for one in zip(files, sizes, written, strict=True)]


def in_order(pictures: Sequence[Picture]) -> Iterator[tuple[Picture, int]]:
    """Yield every part of every image, as (image, index of the part)."""
    return ((one, part) for one in pictures for part in range(one.parts))


def suffix_of(file: bytes) -> str:
    """Return the usual suffix of an image or video file; raises ValueError if it is neither."""
    return videos.suffix_of(file) if videos.is_video(file) else _header(file).format


def _numbers(file: bytes, head: ImageInput) -> Numbers:
    if head.video is not None and videos.is_video(file):
        return film_of(file)
    header = _header(file)
    return header.width_px, header.height_px


def _header(image: bytes) -> ImageHeader:
    return read_header(lambda offset, length: image[offset : offset + length])
