"""Tiles of LLaVA-NeXT and LLaVA-OneVision, whose rows in the LLM are those of the joined picture.

The image is resized into the best of some resolutions and cut; the entire image precedes these as
one tile. Tokens of the tiles are joined to one picture, the border without image is removed, and a
learned `image_newline` ends each row of tokens (Liu et al. 2024, LLaVA-NeXT; Li et al. 2024, arXiv
2408.03326, section 3.2).

Every tile has the same encoder rows: `side`² tokens, row by row, then `side` times `image_newline`,
one for each row of the tile. `places` returns which of them the LLM sees, and at which positions.
If the joined picture is larger than OneVision's largest area, its model interpolates it (bilinear):
an LLM token is then a weighted sum of up to four rows, and a row contributes to up to four tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from pydantic import Field

from disttrain_cli.spec.cutting import Cut, Size, Written
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.places import UNSEEN, Places

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float32]

#: Largest ratio of a picture's features to its largest area (per side) without interpolation.
MOST_OVER = 1.1
#: Most lines of an interpolated picture to which one line contributes.
NEAR = 2


class JoinedTiles(Strict):
    """Rule of LLaVA-NeXT and LLaVA-OneVision.

    As transformers' `LlavaNextImageProcessor` and `LlavaOnevisionImageProcessor`.
    """

    rule: Literal["joined"] = "joined"
    resolutions: tuple[tuple[int, int], ...] = Field(
        min_length=1, description="Heights and widths to which an image may be tiled."
    )
    background: tuple[int, ...] | None = Field(
        None,
        description="If set, only a sample's single image is tiled: several images are padded to"
        " squares and resized (OneVision).",
    )
    most_tiles: int | None = Field(
        None,
        ge=1,
        description="Maximum number of tiles; features of larger images are interpolated.",
    )

    def cut(self, image: Size, tile: Size, alone: bool) -> Cut:
        """Return the tiles of an image of this size; `alone`: its sample has no other image."""
        if self.background is not None and not alone:
            return Cut((tile,), 1, 1, square=self.background)
        best = _best(image, self.resolutions)
        rows, columns = best[1] // tile[1], best[0] // tile[0]
        return Cut((_inside(image, best),), rows, columns, "image", True, best)

    def written(self, cut: Cut) -> Written:
        """Return empty texts: placeholders alone are written."""
        return ("",) * (cut.parts + 1)

    def interpolated(self, rows: int, columns: int, side: int) -> tuple[int, int]:
        """Return the rows and columns of a joined picture's features after interpolation.

        `side`: tokens per side of a tile.
        """
        if self.most_tiles is None:
            return rows, columns
        over = math.sqrt(rows * columns / (self.most_tiles * side**2))
        return (rows, columns) if over <= MOST_OVER else (int(rows // over), int(columns // over))

    def misfit(self, image: Size, cut: Cut, side: int) -> str | None:
        """Return why an image with these tiles of `side` tokens is not read; None if it is."""
        seen = _seen(image, cut, side)
        size = self.interpolated(seen.rows, seen.columns, side)
        if not cut.whole or min(size) or size == (seen.rows, seen.columns):
            return None
        return (
            f"an image of {image[0]} × {image[1]} pixels has {seen.rows} × {seen.columns} features,"
            f" too narrow to be interpolated (anyres_max_{self.most_tiles})"
        )


class Seen(NamedTuple):
    """Tokens of a joined picture without its border: first row and column, and counts."""

    top: int
    left: int
    rows: int
    columns: int


def places(image: Size, cut: Cut, side: int, rule: JoinedTiles) -> list[Places]:
    """Return the LLM positions of the side² + side rows of each tile of an image."""
    import numpy as np

    overview = np.full(side**2 + side, UNSEEN)
    overview[: side**2] = np.arange(side**2)
    if not cut.whole:
        overview[side**2] = side**2
        return [_alone(overview)]
    seen = _seen(image, cut, side)
    size = rule.interpolated(seen.rows, seen.columns, side)
    rows, of_rows = _lines(cut.rows * side, seen.top, seen.rows, size[0])
    columns, of_columns = _lines(cut.columns * side, seen.left, seen.columns, size[1])
    # columns of the joined picture, followed by one of newlines
    rows, columns = rows[:, None, :, None], columns[None, :, None, :]
    there = (rows != UNSEEN) & (columns != UNSEEN)
    at = np.where(there, side**2 + rows * (size[1] + 1) + columns, UNSEEN)
    shares = (of_rows[:, None, :, None] * of_columns[None, :, None, :]).astype(np.float32)
    ends = np.full(cut.rows * side, UNSEEN)
    ends[seen.top : seen.top + size[0]] = side**2 + (np.arange(size[0]) + 1) * (size[1] + 1) - 1
    tiles = [_alone(overview)]
    for row in range(cut.rows):
        inside = slice(row * side, (row + 1) * side)
        for column in range(cut.columns):
            own = inside, slice(column * side, (column + 1) * side)
            last = column == cut.columns - 1
            newlines = _alone(ends[inside] if last else np.full(side, UNSEEN))
            tiles.append(
                Places(
                    np.concatenate([at[own].reshape(side**2, -1), newlines.at]),
                    np.concatenate([shares[own].reshape(side**2, -1), newlines.shares]),
                )
            )
    return tiles


def _alone(at: Ints) -> Places:
    """Return positions of rows that are one token each."""
    import numpy as np

    others = ((0, 0), (0, NEAR**2 - 1))
    return Places(
        np.pad(at[:, None], others, constant_values=UNSEEN),
        np.pad((at != UNSEEN).astype(np.float32)[:, None], others),
    )


def _lines(lines: int, first: int, seen: int, target: int) -> tuple[Ints, Floats]:
    """Return [lines, 2] the output lines to which each input line contributes, and its weights.

    `seen` lines from `first` on are interpolated to `target` (bilinear, as in torch).
    """
    import numpy as np

    centres = (np.arange(target) + 0.5) * (seen / max(1, target)) - 0.5
    distances = np.abs(np.arange(-first, lines - first)[:, None] - centres)
    inside = (np.arange(lines) >= first) & (np.arange(lines) < first + seen)
    every = np.pad(np.maximum(0, 1 - distances) * inside[:, None], ((0, 0), (0, NEAR)))
    found = np.argsort(-every, axis=1, kind="stable")[:, :NEAR]
    shares = np.take_along_axis(every, found, axis=1)
    return np.where(shares > 0, found, UNSEEN), shares


@lru_cache(maxsize=4096)
def tokens(image: Size, cut: Cut, side: int, rule: JoinedTiles) -> tuple[int, ...]:
    """Return the tokens of an image by tile: each counts for the first tile that contributes."""
    import numpy as np

    placed = places(image, cut, side, rule)
    owners = np.full(max(int(one.at.max()) for one in placed) + 1, UNSEEN)
    for tile, one in reversed(list(enumerate(placed))):
        owners[one.seen] = tile
    return tuple(np.bincount(owners, minlength=len(placed)).tolist())


def _seen(image: Size, cut: Cut, side: int) -> Seen:
    """Return the joined picture without its border (transformers' `unpad_image`)."""
    width, height = image
    rows, columns = cut.rows * side, cut.columns * side
    if width / height > columns / rows:
        border = (rows - int(round(height * (columns / width), 7))) // 2
        return Seen(border, 0, rows - 2 * border, columns)
    border = (columns - int(round(width * (rows / height), 7))) // 2
    return Seen(0, border, rows, columns - 2 * border)


@lru_cache(maxsize=4096)
def _best(image: Size, resolutions: Sequence[tuple[int, int]]) -> Size:
    """Return the resolution that keeps most of the image, among such the one that wastes least."""
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
    """Return the largest size of the image's aspect ratio inside another."""
    by_width, by_height = into[0] / image[0], into[1] / image[1]
    if by_width < by_height:
        return into[0], min(math.ceil(image[1] * by_width), into[1])
    return min(math.ceil(image[0] * by_height), into[0]), into[1]
