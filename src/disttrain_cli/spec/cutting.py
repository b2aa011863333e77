"""What a rule of tiles says of an image."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: Width and height in pixels.
Size = tuple[int, int]

#: The texts before, between and behind the parts of a file: one more than parts.
Written = tuple[str, ...]

#: Of a file that is one item and nothing else.
ALONE: Written = ("", "")


class Cut(NamedTuple):
    """How an image becomes tiles.

    Attributes:
        resized: sizes that it is resized to, one after the other.
        rows, columns: tiles of the last of them.
        whole: what becomes one more tile beside the others: the image, the resized one, or none.
        whole_first: that tile goes before the others.
        canvas: what is resized lies in the middle of black of this size, which is cut.
        square: bytes of red, green and blue by which the image is filled up to a square first.
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
        """How many tiles there are."""
        return self.rows * self.columns + bool(self.whole)

    def place(self, part: int) -> tuple[int, int] | None:
        """Row and column of a tile; None of the whole."""
        number = part - (self.whole_first and bool(self.whole))
        return divmod(number, self.columns) if 0 <= number < self.rows * self.columns else None
