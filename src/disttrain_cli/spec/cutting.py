"""Result of a tiling rule for an image."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: Width and height in pixels.
Size = tuple[int, int]

#: Texts before, between and after the parts of a file: one more than parts.
Written = tuple[str, ...]

#: Texts of a file that is a single item.
ALONE: Written = ("", "")


class Cut(NamedTuple):
    """Division of an image into tiles.

    Attributes:
        resized: sizes to which it is resized, one after the other.
        rows, columns: tiles of the last of them.
        whole: source of one additional tile: the image, the resized one, or none.
        whole_first: True if that tile precedes the others.
        canvas: size of a black canvas on which the resized image is centred before it is cut.
        square: red, green and blue bytes with which the image is first padded to a square.
    """

    resized: tuple[Size, ...]
    rows: int
    columns: int
    whole: Literal["image", "resized", ""] = ""
    whole_first: bool = False
    canvas: Size | None = None
    square: tuple[int, ...] | None = None

    @property
    def parts(self) -> int:
        """Number of tiles."""
        return self.rows * self.columns + bool(self.whole)

    def place(self, part: int) -> tuple[int, int] | None:
        """Return row and column of a tile; None for the additional one."""
        number = part - (self.whole_first and bool(self.whole))
        return divmod(number, self.columns) if 0 <= number < self.rows * self.columns else None
