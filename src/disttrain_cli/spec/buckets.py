"""Sizes of images to generate, and which of them an image is brought to."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from disttrain_cli.spec.files import Strict


class Buckets(Strict):
    """A list of sizes of about equal area: every image goes to the one whose aspect ratio is
    nearest to its own, is resized to cover it, and loses what sticks out at both ends (as NovelAI's
    aspect ratio bucketing, 2022)."""

    grids: list[tuple[int, int]] = Field(
        min_length=1, description="Rows and columns of patches of each size."
    )
    patch_px: int = Field(ge=1, description="Side of a patch in pixels of the image.")
    patch: int = Field(ge=1, description="Side of a patch in what is denoised.")

    def nearest(self, sizes_px: Any) -> Any:
        """Grids [N, 2] (rows, columns) of images of these widths and heights [N, 2], int64; of
        equally near ones the first."""
        import numpy as np

        grids = np.array(self.grids, dtype=np.int64)
        width, height = np.maximum(1, np.asarray(sizes_px, dtype=np.int64)).reshape(-1, 2).T
        ratios = np.log(width / height)
        own = np.log(grids[:, 1] / grids[:, 0])
        return grids[np.abs(ratios[:, None] - own).argmin(axis=1)]

    def image_px(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Height and width of images of a grid."""
        return grid[0] * self.patch_px, grid[1] * self.patch_px

    def denoised(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Height and width of what is denoised of them."""
        return grid[0] * self.patch, grid[1] * self.patch

    @property
    def largest(self) -> tuple[int, int]:
        """The grid of most patches."""
        return max(self.grids, key=lambda grid: grid[0] * grid[1])
