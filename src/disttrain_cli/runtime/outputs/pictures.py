"""The images of a prompt as items of the model: whole, or in the parts that the model's processor
cuts them into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from disttrain_cli.data.decoding import decode_image, decode_tiles
from disttrain_cli.data.headers import ImageHeader, read_header
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.cutting import Written
from disttrain_cli.spec.heads import Grid, ImageInput


@dataclass(frozen=True)
class Picture:
    """An image of a prompt."""

    file: bytes
    size_px: tuple[int, int]  # width, height
    around: Written  # the texts around its parts

    @property
    def parts(self) -> int:
        """How many items it is."""
        return len(self.around) - 1

    def grid(self, head: ImageInput) -> Grid:
        """Of each of its parts."""
        return head.grid(*self.size_px)

    def tokens(self, head: ImageInput) -> list[int]:
        """Of each of its parts in the LLM."""
        sizes, parts = np.array([self.size_px] * self.parts), np.full(self.parts, self.parts)
        counts: list[int] = head.tokens_of(sizes, np.arange(self.parts), parts).tolist()
        return counts

    def places(self, head: ImageInput, begins: Sequence[int]) -> list[Ints]:
        """Of each part the places of its rows, -1 of those that the LLM does not see; the tokens of
        the parts begin at `begins`."""
        joined = head.places(self.size_px, self.parts)
        if joined is not None:
            return [np.where(own < 0, own, own + begins[0]) for own in joined]
        counts = self.tokens(head)
        return [np.arange(at, at + count) for at, count in zip(begins, counts, strict=True)]

    def planes(self, head: ImageInput) -> list[Any]:
        """Bytes [C, H, W] of each part; ValueError where it cannot be decoded."""
        grid = self.grid(head)
        if not head.cuts:
            return [decode_image(self.file, grid, head)]
        outs = [(part, np.zeros(head.shape_of(grid), np.uint8)) for part in range(self.parts)]
        decode_tiles(self.file, head, self.parts, outs)
        return [out for _, out in outs]


def pictures_of(files: Sequence[bytes], head: ImageInput) -> list[Picture]:
    """The images of one prompt; ValueError where one is none, or the model does not read it."""
    sizes = [(header.width_px, header.height_px) for header in map(header_of, files)]
    for size in sizes:
        if reason := head.misfit(*size):
            raise ValueError(reason)
    written = head.written(sizes)
    return [Picture(*one) for one in zip(files, sizes, written, strict=True)]


def in_order(pictures: Sequence[Picture]) -> Iterator[tuple[Picture, int]]:
    """Every part of every image."""
    return ((one, part) for one in pictures for part in range(one.parts))


def header_of(image: bytes) -> ImageHeader:
    """Format and size of an image file; ValueError where it is none."""
    return read_header(lambda offset, length: image[offset : offset + length])
