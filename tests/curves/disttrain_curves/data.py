"""How curves get from files to arrays, without torch."""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.modalities.media import Media
from disttrain_cli.spec.heads import Grid, Head, Rows


class CurveInput(Head):
    """A curve is cut into patches of so many points, the last one filled up with zeros."""

    kind: ClassVar[int] = 9
    what: ClassVar[str] = "curves"
    alike: ClassVar[bool] = False

    item: Literal["curve"] = "curve"
    points: int  # of a patch
    longest: int  # points of a curve
    merge: int = 1  # patches that one LLM token stands for

    def grids(self, sizes: Any) -> Any:
        """One column, and a row for each patch."""
        tokens = -(-np.asarray(sizes)[:, 0] // (self.points * self.merge))
        return np.stack([tokens * self.merge, np.ones_like(tokens)], axis=1)

    def misfit(self, width: int, height: int) -> str | None:
        return f"a curve of {width} points" if width > self.longest else None

    def size(self, area: Any) -> Any:
        """Patches."""
        return area

    def rows(self, column: str) -> Rows:
        return Rows(0, {"patches": 1, "tokens": self.merge}[column])

    @property
    def largest(self) -> Grid:
        return self.longest // (self.points * self.merge), 1

    def grid_of(self, rows: int, columns: int) -> Grid:
        return rows * columns * self.merge, 1

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        return (grid[0] * self.points,)


def numbers_in(data: bytes) -> NDArray[np.float32]:
    """The numbers of a curve; ValueError where it is none."""
    try:
        curve = np.array([float(number) for number in data.decode().split()], np.float32)
    except ValueError:
        raise ValueError("no curve: not a list of numbers") from None
    if not len(curve) or not np.isfinite(curve).all():
        raise ValueError("no curve of finite numbers")
    return curve


class Curves:
    """[points]"""

    media = Media(
        "curve",
        "curve",
        "curve",
        ("curve",),
        ("curve", "series"),
        lambda read, file_bytes: (len(numbers_in(read(0, file_bytes))), 1),
    )

    def blank(self, head: Head, grid: Grid) -> NDArray[Any]:
        return np.zeros(head.shape_of(grid), np.float32)

    def decode(self, data: bytes, head: Head, grid: Grid, out: NDArray[Any]) -> None:
        curve = numbers_in(data)
        out[: len(curve)] = curve

    def check(self, data: bytes, head: Head, grid: Grid) -> None:
        numbers_in(data)

    def example(self, head: Head, grid: Grid) -> Callable[[], object] | None:
        return partial(numbers_in, b"0.5\n" * head.shape_of(grid)[0])


CURVES = Curves()
