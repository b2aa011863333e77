"""LLaVA-NeXT's and LLaVA-OneVision's tiles, whose rows in the LLM are those of the joined picture.

The image is resized into the best of some resolutions and cut; the whole image goes before as one
tile. Tokens of the tiles are joined to one picture, the border that held no image is left out, and
a learned `image_newline` ends each row of tokens (Liu et al. 2024, LLaVA-NeXT; Li et al. 2024,
arXiv 2408.03326, section 3.2).

Every tile has the same rows of the encoder's: `side`² tokens, row by row, then `side` times
`image_newline`, one for each row of the tile. Which of them the LLM sees, and where, `places` says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from pydantic import Field

from disttrain_cli.spec.cutting import Cut, Size, Written
from disttrain_cli.spec.files import Strict

UNSEEN = -1  # the place of a row that the LLM does not see
#: How much wider than its largest area a picture of features may be before it is interpolated.
MOST_OVER = 1.1


class JoinedTiles(Strict):
    """The rule of LLaVA-NeXT and LLaVA-OneVision, as transformers' `LlavaNextImageProcessor` and
    `LlavaOnevisionImageProcessor`."""

    rule: Literal["joined"] = "joined"
    resolutions: tuple[tuple[int, int], ...] = Field(
        min_length=1, description="Heights and widths that an image may be cut at."
    )
    background: tuple[int, ...] | None = Field(
        None,
        description=(
            "Where given, only the one image of a sample is cut: several are filled up to squares"
            " with it and resized (OneVision)."
        ),
    )
    most_tiles: int | None = Field(
        None, ge=1, description="Of larger pictures the model interpolates features."
    )

    def cut(self, image: Size, tile: Size, alone: bool) -> Cut:
        """Tiles of an image of this size; `alone`: its sample has no other."""
        if self.background is not None and not alone:
            return Cut((tile,), 1, 1, square=self.background)
        best = _best(image, self.resolutions)
        rows, columns = best[1] // tile[1], best[0] // tile[0]
        return Cut((_inside(image, best),), rows, columns, "image", True, best)

    def written(self, cut: Cut) -> Written:
        """Nothing: placeholders alone."""
        return ("",) * (cut.parts + 1)

    def too_large(self, image: Size, cut: Cut, side: int) -> str | None:
        """Why an image is not read that is cut so, in tiles of `side` tokens, if it is not."""
        if self.most_tiles is None or not cut.whole:
            return None
        seen = _seen(image, cut, side)
        if math.sqrt(seen.rows * seen.columns / (self.most_tiles * side**2)) <= MOST_OVER:
            return None
        return (
            f"an image of {image[0]} × {image[1]} pixels has {seen.rows} × {seen.columns} features,"
            f" which the model would interpolate (anyres_max_{self.most_tiles}): not computed here"
        )


class Seen(NamedTuple):
    """The tokens of a joined picture that are left: the first row and column, and how many."""

    top: int
    left: int
    rows: int
    columns: int


def places(image: Size, cut: Cut, side: int) -> list[Any]:
    """Of each tile the places [side² + side] of its rows among the tokens of its image, `UNSEEN`
    where the LLM does not see them; int64 arrays."""
    import numpy as np

    if not cut.whole:
        behind = np.full(side, UNSEEN)
        behind[0] = side**2
        return [np.concatenate([np.arange(side**2), behind])]
    seen = _seen(image, cut, side)
    whole = np.concatenate([np.arange(side**2), np.full(side, UNSEEN)])
    rows = np.arange(cut.rows * side) - seen.top
    columns = np.arange(cut.columns * side) - seen.left
    # of the joined picture with a column of newlines behind
    first = side**2 + np.where((rows >= 0) & (rows < seen.rows), rows * (seen.columns + 1), UNSEEN)
    there = (first >= side**2)[:, None] & ((columns >= 0) & (columns < seen.columns))
    joined = np.where(there, first[:, None] + columns, UNSEEN)
    ends = np.where(first >= side**2, first + seen.columns, UNSEEN)
    tiles = [whole]
    for row in range(cut.rows):
        inside = slice(row * side, (row + 1) * side)
        for column in range(cut.columns):
            own = joined[inside, column * side : (column + 1) * side].reshape(-1)
            last = column == cut.columns - 1
            tiles.append(np.concatenate([own, ends[inside] if last else np.full(side, UNSEEN)]))
    return tiles


@lru_cache(maxsize=4096)
def tokens(image: Size, cut: Cut, side: int) -> tuple[int, ...]:
    """How many rows of each tile the LLM sees."""
    return tuple(int((one != UNSEEN).sum()) for one in places(image, cut, side))


def _seen(image: Size, cut: Cut, side: int) -> Seen:
    """What is left of the joined picture without its border (transformers' `unpad_image`)."""
    width, height = image
    rows, columns = cut.rows * side, cut.columns * side
    if width / height > columns / rows:
        border = (rows - int(round(height * (columns / width), 7))) // 2
        return Seen(border, 0, rows - 2 * border, columns)
    border = (columns - int(round(width * (rows / height), 7))) // 2
    return Seen(0, border, rows, columns - 2 * border)


@lru_cache(maxsize=4096)
def _best(image: Size, resolutions: Sequence[tuple[int, int]]) -> Size:
    """Of these heights and widths the one that keeps most of the image, of such the one that wastes
    least."""
    width, height = image
    best, most, wasted = (0, 0), 0, math.inf
    for high, wide in resolutions:
        scale = min(wide / width, high / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        waste = wide * high - kept
        if kept > most or (kept == most and waste < wasted):
            best, most, wasted = (wide, high), kept, waste
    return best


def _inside(image: Size, into: Size) -> Size:
    """The largest size of the image's ratio inside another."""
    by_width, by_height = into[0] / image[0], into[1] / image[1]
    if by_width < by_height:
        return into[0], min(math.ceil(image[1] * by_width), into[1])
    return min(math.ceil(image[0] * by_height), into[0]), into[1]
