"""Tiling rules of published image processors, and the texts written around tiles."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from disttrain_cli.spec.cutting import Cut, Size, Written
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.joined_tiles import JoinedTiles


class NearestRatio(Strict):
    """InternVL's rule: the grid of tiles with the nearest aspect ratio.

    The image is stretched to the grid; if it has several tiles, the entire image follows as one
    more. As transformers' `GotOcr2ImageProcessor` (Chen et al. 2024, arXiv 2404.16821, section
    3.2).
    """

    rule: Literal["nearest_ratio"] = "nearest_ratio"
    least: int = Field(1, ge=1, description="Minimum number of tiles of an image.")
    most: int = Field(
        ge=1, description="Maximum number of tiles of an image, without the overview tile."
    )
    begin: str = Field("<img>", description="Text before the tiles.")
    end: str = Field("</img>", description="Text after the tiles.")

    def cut(self, image: Size, tile: Size, alone: bool) -> Cut:
        """Return the tiles of an image of this size."""
        columns, rows = _nearest(image, tile, self.least, self.most) if self.most > 1 else (1, 1)
        resized = (columns * tile[0], rows * tile[1])
        return Cut((resized,), rows, columns, "image" if columns * rows > 1 else "")

    def written(self, cut: Cut) -> Written:
        """Return the texts around the tiles."""
        return (self.begin, *[""] * (cut.parts - 1), self.end)


class LongestEdge(Strict):
    """Rule of Idefics3 and SmolVLM: the longer side is resized, both sides rounded up to tiles.

    The longer side becomes `longest_px`; if there are several tiles, the resized image follows as
    one more. As transformers' `Idefics3ImageProcessor` (Laurençon et al. 2024, arXiv 2408.12637,
    section 3.2).
    """

    rule: Literal["longest_edge"] = "longest_edge"
    longest_px: int = Field(ge=1, description="Length of the longer side before tiling.")
    splits: bool = Field(True, description="True if images are tiled.")
    around: str = "<fake_token_around_image>"
    whole: str = Field("<global-img>", description="Text before the overview tile.")

    def cut(self, image: Size, tile: Size, alone: bool) -> Cut:
        """Return the tiles of an image of this size.

        Raises:
            ValueError: a side would have no pixel.
        """
        first = _below(_at_longest(image, self.longest_px), MOST_PX)
        if not self.splits:
            return Cut((first, tile), 1, 1)
        resized = _whole_tiles(first, tile[0])
        columns, rows = (side // tile[0] for side in resized)
        if not min(columns, rows):
            raise ValueError(f"an image of {image[0]} × {image[1]} pixels is too narrow to be cut")
        return Cut((first, resized), rows, columns, "resized" if columns * rows > 1 else "")

    def written(self, cut: Cut) -> Written:
        """Return the texts around the tiles."""
        if not cut.whole:
            return (self.around + self.whole, self.around)
        texts = list(self._rows(cut))
        return (*texts, f"\n\n{self.around}{self.whole}", self.around)

    def _rows(self, cut: Cut) -> Iterator[str]:
        for row in range(cut.rows):
            for column in range(cut.columns):
                ends = "\n" if row and not column else ""
                yield f"{ends}{self.around}<row_{row + 1}_col_{column + 1}>"


RULES = (NearestRatio, LongestEdge, JoinedTiles)
Tiling = Annotated[
    NearestRatio | LongestEdge | JoinedTiles,
    Field(discriminator="rule"),
    # inlined, as schemas that contain it are parts of others
    WithJsonSchema({"anyOf": [rule.model_json_schema() for rule in RULES]}),
]

#: Longest side under Idefics3's rule, whatever the folder says.
MOST_PX = 4096


@lru_cache
def _grids(least: int, most: int) -> list[tuple[int, int]]:
    """Return (columns, rows) with `least` to `most` tiles, those of few tiles first."""
    sides = range(1, most + 1)
    grids = [(columns, rows) for columns in sides for rows in sides]
    fitting = [grid for grid in grids if least <= grid[0] * grid[1] <= most]
    return sorted(fitting, key=lambda grid: grid[0] * grid[1])


@lru_cache(maxsize=4096)
def _nearest(image: Size, tile: Size, least: int, most: int) -> tuple[int, int]:
    """Return the columns and rows with the nearest aspect ratio.

    Of equally near ones that with more tiles, as long as half their area is less than the image's.
    """
    ratio, best, nearest = image[0] / image[1], (1, 1), math.inf
    for columns, rows in _grids(least, most):
        far = abs(ratio - columns / rows)
        enough = image[0] * image[1] > 0.5 * tile[1] * tile[0] * columns * rows
        if far < nearest or (far == nearest and enough):
            nearest, best = far, (columns, rows)
    return best


def _at_longest(image: Size, longest_px: int) -> Size:
    """Return the size with `longest_px` as the longer side, the other one even, or 1."""
    width, height = image
    ratio = width / height
    if width >= height:
        other = int(longest_px / ratio)
        return longest_px, max(other + other % 2, 1)
    other = int(longest_px * ratio)
    return max(other + other % 2, 1), longest_px


def _below(image: Size, longest_px: int) -> Size:
    """Return the size reduced to `longest_px` as the longer side, if that is longer."""
    width, height = image
    ratio = width / height
    if max(image) <= longest_px:
        return image
    if width >= height:
        return longest_px, max(int(longest_px / ratio), 1)
    return max(int(longest_px * ratio), 1), longest_px


def _whole_tiles(image: Size, tile_px: int) -> Size:
    """Return both sides rounded up to whole tiles, the longer one first."""
    width, height = image
    ratio = width / height

    def up(side: float) -> int:
        return math.ceil(side / tile_px) * tile_px

    if width >= height:
        wide = up(width)
        return wide, up(int(wide / ratio))
    high = up(height)
    return up(int(high * ratio)), high
