"""Files of a prompt as items of the model: whole, or in parts cut by its processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from disttrain_cli.data import clips, videos
from disttrain_cli.data.films import film_of
from disttrain_cli.data.headers import ImageHeader, read_header
from disttrain_cli.data.modalities.media import sound_sizes
from disttrain_cli.data.modalities.modality import InParts, Packing
from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.parts import written_around
from disttrain_cli.spec.cutting import Written
from disttrain_cli.spec.heads import Grid, Head, ImageInput, Item, Numbers
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.library_images import LibraryItems, Packed
from disttrain_cli.spec.places import Places
from disttrain_cli.spec.video_processor import Film


@dataclass(frozen=True)
class Picture:
    """Image, video or clip of a prompt."""

    file: bytes
    numbers: Numbers  # as in the index
    around: Written  # the texts around its parts
    head: Head  # of the first encoder that reads it

    @property
    def item(self) -> Item:
        """Its modality."""
        return self.head.item

    @property
    def parts(self) -> int:
        """Number of its items."""
        return len(self.around) - 1

    @property
    def grid(self) -> Grid:
        """Grid of each of its parts."""
        rows, columns = self.head.grids(np.array([self.numbers]))[0].tolist()
        return rows, columns

    def times(self) -> list[int | None]:
        """Return each part's time offset in positions; None for images and a video's first part."""
        if not isinstance(self.head, ImageInput) or not self.is_video or self.head.video is None:
            return [None] * self.parts
        return [None, *self.head.video.times(Film(*self.numbers))[1:]]

    @property
    def is_video(self) -> bool:
        """True if it is a video."""
        return len(self.numbers) > 2

    def tokens(self) -> list[int]:
        """Return the LLM tokens of each of its parts."""
        sizes, parts = np.array([self.numbers] * self.parts), np.full(self.parts, self.parts)
        counts: list[int] = self.head.tokens_of(sizes, np.arange(self.parts), parts).tolist()
        return counts

    def ids(self, part: int, placeholder: int) -> list[int]:
        """Return the token ids of a part; rows of models with no ids of their own `placeholder`."""
        if not isinstance(self.head, LibraryItems):
            return [placeholder] * self.tokens()[part]
        row = self.head.row_id(self.numbers)
        return [row if id_ < 0 else id_ for id_ in self.head.ids(self.numbers)]

    def places(self, begins: Sequence[int]) -> list[Places]:
        """Return the token positions of each part's rows; the parts' tokens begin at `begins`."""
        joined = self.head.places(self.numbers, self.parts)
        if joined is not None:
            return [own.moved(begins[0]) for own in joined]
        return [
            Places(np.arange(at, at + count))
            for at, count in zip(begins, self.tokens(), strict=True)
        ]

    def packed(self) -> Packed:
        """Return its inputs, of a packed modality; raises ValueError if it cannot be decoded."""
        return cast(Packing, MODALITIES[self.item]).pack(self.file, self.head)

    def planes(self, head: Head) -> list[Any]:
        """Return an encoder's input for each part; raises ValueError if it cannot be decoded."""
        modality = MODALITIES[self.item]
        outs = [(part, modality.blank(head, self.grid)) for part in range(self.parts)]
        if head.cuts:
            parts = self.parts
            cast(InParts, modality).decode_parts(self.file, head, self.grid, parts, outs)
        else:
            modality.decode(self.file, head, self.grid, outs[0][1])
        return [out for _, out in outs]

    def check(self) -> None:
        """Raise ValueError if it cannot be decoded."""
        MODALITIES[self.item].check(self.file, self.head, self.grid)


def pictures_of(
    files: Sequence[bytes], inputs: ModelInputs, sizes: Sequence[Numbers] | None = None
) -> list[Picture]:
    """Return the images, videos and clips of one prompt.

    Args:
        sizes: numbers of each, as in the index; None = read from the files' headers.

    Raises:
        ValueError: a file is none of them, or the model does not read it.
    """
    heads = [_head(file, inputs) for file in files]
    sizes = sizes or [_numbers(file, head) for file, head in zip(files, heads, strict=True)]
    for size, head in zip(sizes, heads, strict=True):
        if reason := head.misfit(*size):
            raise ValueError(reason)
    kinds = [KINDS[head.item] for head in heads]
    written = written_around(list(zip(kinds, sizes, strict=True)), inputs)
    return [Picture(*one) for one in zip(files, sizes, written, heads, strict=True)]


def in_order(pictures: Sequence[Picture]) -> Iterator[tuple[Picture, int]]:
    """Yield every part of every file, as (file, index of the part)."""
    return ((one, part) for one in pictures for part in range(one.parts))


def suffix_of(file: bytes) -> str:
    """Return the usual suffix of an image, video or sound file.

    Raises:
        ValueError: it is none of them.
    """
    if (sound := clips.suffix_of(file)) is not None:
        return sound
    return videos.suffix_of(file) if videos.is_video(file) else _header(file).format


def _head(file: bytes, inputs: ModelInputs) -> Head:
    item = "image" if clips.suffix_of(file) is None else "audio"
    head = next(iter(inputs.of(item)), None)
    if head is None:
        raise ValueError(f"this model reads no {'audio' if item == 'audio' else 'images'}")
    return head


def _numbers(file: bytes, head: Head) -> Numbers:
    if head.item == "audio":
        return sound_sizes(lambda offset, length: file[offset : offset + length], len(file))
    if getattr(head, "video", None) is not None and videos.is_video(file):
        return film_of(file)
    header = _header(file)
    return header.width_px, header.height_px


def _header(image: bytes) -> ImageHeader:
    return read_header(lambda offset, length: image[offset : offset + length])
