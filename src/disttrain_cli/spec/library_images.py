"""Modality spec of images for a vision tower that runs as one layer, as the library's own processor
prepares them.

An item is an image with all its tiles; its grid is (rows in the LLM, 1). Its tokens in the LLM are
those from its first row to its last, with what the processor writes between them; the text before
and after belongs to the sample's text (`cutting.Written`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field

from disttrain_cli.spec.cutting import Size, Written
from disttrain_cli.spec.heads import LARGE_IMAGE_PX, Grid, Head, Numbers, Rows
from disttrain_cli.spec.library_processor import ROW, LibraryProcessor, library_processor
from disttrain_cli.spec.places import Places

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from disttrain_cli.spec.library_processor import Inputs

#: Sides of the square images among which one of about a number of rows is searched.
SIDES_PX = tuple(round(16 * 2 ** (step / 4)) for step in range(33))  # 16 to 4096


#: Sides of the square images at which costs are counted.
SPREAD_PX = (SIDES_PX[0], 724, 1024)

#: Kinds of inputs: one that an image does not have, integers, floating-point values, flags.
ABSENT, NUMBERS, VALUES, FLAGS = -1, 0, 1, 2


class Packed(NamedTuple):
    """Inputs of an image as two arrays."""

    values: NDArray[np.float32]  # [E] of all floating-point inputs, one after another
    #: [I] rows in the LLM; then by input: its kind, its number of dimensions, its shape, and,
    #: unless it is among the values, its numbers
    table: NDArray[np.int64]


class LibraryImages(Head):
    """Preprocessing of images by the processor of a published folder."""

    kind: ClassVar[int] = 1
    what: ClassVar[str] = "images to read"

    item: Literal["image"] = "image"
    form: Literal["library"] = "library"
    folder: str = Field(description="Folder of the published model, with its processor.")
    image_token: int = Field(ge=0, description="Id of the token of an image's row in the LLM.")
    inputs: tuple[str, ...] = Field(
        min_length=1, description="Outputs of the processor that the tower reads."
    )
    digest: str = Field(description="Hash of the processor's files.")
    mrope: bool = Field(
        False, description="The LLM's tokens have three positions, of images from the library."
    )

    @cached_property
    def processor(self) -> LibraryProcessor:
        """The folder's processor."""
        return library_processor(Path(self.folder), self.image_token)

    @property
    def alike(self) -> bool:
        return False

    @property
    def packed(self) -> bool:
        return True

    @property
    def cuts(self) -> bool:
        return True

    @property
    def placeholder(self) -> str:
        return self.processor.placeholder

    def written(self, files: Sequence[Numbers]) -> list[Written]:
        spelled = [self.processor.spelled(_size(numbers)) for numbers in files]
        return [(one.before, one.after) for one in spelled]

    def grids(self, sizes: Any) -> Any:
        import numpy as np

        rows = self.processor.rows([_size(numbers) for numbers in np.asarray(sizes)])
        return np.array([(count, 1) for count in rows], dtype=np.int64).reshape(-1, 2)

    def misfit(self, width: int, height: int, *film: int) -> str | None:
        if film:
            return "a video: this model's videos are not read"
        try:
            self.processor.spelled((width, height))
        except ValueError as error:
            return f"an image of {width} × {height} pixels: {error}"
        return None

    def tokens_of(self, sizes: Any, part: Any, parts: Any) -> Any:
        import numpy as np

        each = [len(self.processor.spelled(_size(numbers)).ids) for numbers in np.asarray(sizes)]
        return np.array(each, dtype=np.int64)

    def places(self, numbers: Numbers, parts: int) -> list[Places]:
        import numpy as np

        return [Places(np.flatnonzero(np.array(self.ids(numbers)) == ROW))]

    def ids(self, numbers: Numbers) -> tuple[int, ...] | None:
        return self.processor.spelled(_size(numbers)).ids

    def positions(self, numbers: Numbers) -> NDArray[np.int64]:
        """Return [3, tokens] positions of a file's tokens, from those of its first."""
        import numpy as np

        if not self.mrope:  # counted like those of text
            return np.tile(np.arange(len(self.ids(numbers) or ())), (3, 1))
        return self.processor.turned(_size(numbers))

    def size(self, area: Any) -> Any:
        """Return the rows in the LLM."""
        return area

    def rows(self, column: str) -> Rows:
        """Return the rows of "tokens"."""
        return {"tokens": Rows(0, 1)}[column]

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Return the number of values of an image of about as many rows."""
        return (len(self.example(grid[0] * grid[1]).values),)

    def grid_of(self, rows: int, columns: int) -> Grid:
        """Return the grid of a square image of about rows · columns times the fewest rows."""
        fewest = self.processor.spelled((SIDES_PX[0],) * 2).rows
        return self.processor.spelled(self.example_px(rows * columns * fewest)).rows, 1

    @cached_property
    def spread(self) -> tuple[Grid, Grid, Grid]:
        """Grids of a small, a medium and a large image, as far as the processor keeps their sizes.

        Some have a budget that every image fills.
        """
        small, medium, large = (self.processor.spelled((px, px)).rows for px in SPREAD_PX)
        return (small, 1), (medium, 1), (large, 1)

    @property
    def largest(self) -> Grid:
        """Grid of a square image of `LARGE_IMAGE_PX`, in multiples of the fewest rows."""
        side = round(LARGE_IMAGE_PX**0.5)
        fewest, most = (self.processor.spelled((px, px)).rows for px in (SIDES_PX[0], side))
        return max(1, most // fewest), 1

    def pack(self, made: Inputs, rows: int) -> Packed:
        """Return the inputs of an image of `rows` rows as two arrays."""
        import numpy as np

        values, table = [], [rows]
        for name in self.inputs:
            if name not in made:  # tiles that a small image has not, say
                table += [ABSENT, 0]
                continue
            given = made[name]
            kind = {"f": VALUES, "b": FLAGS}.get(given.dtype.kind, NUMBERS)
            table += [kind, given.ndim, *given.shape]
            if kind == VALUES:
                values.append(given.reshape(-1).astype(np.float32))
            else:
                table += given.reshape(-1).astype(np.int64).tolist()
        together = np.concatenate(values) if values else np.zeros(0, np.float32)
        return Packed(together, np.array(table, dtype=np.int64))

    def blank(self, size: Size) -> Packed:
        """Return the inputs of a black image."""
        return self.pack(self.processor.blank(size), self.processor.spelled(size).rows)

    def example(self, rows: int) -> Packed:
        """Return the inputs of a black square image of about as many rows.

        Where it has others, the tower repeats or omits some of its rows.
        """
        return self.blank(self.example_px(rows))

    def example_px(self, rows: int) -> Size:
        """Return the size of the square image whose rows are nearest to a number."""
        side = min(SIDES_PX, key=lambda px: (abs(self.processor.spelled((px, px)).rows - rows), px))
        return side, side


def _size(numbers: Numbers) -> Size:
    return int(numbers[0]), int(numbers[1])
