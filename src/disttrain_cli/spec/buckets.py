"""Sizes of images to generate, and the assignment of images to them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from disttrain_cli.spec.files import Strict


class Buckets(Strict):
    """List of sizes of about equal area.

    Every image is assigned to the size of the nearest aspect ratio, is resized to cover it, and
    cropped at both ends (as in NovelAI's aspect ratio bucketing, 2022).
    """

    grids: list[tuple[int, int]] = Field(
        min_length=1, description="Rows and columns of patches of each size."
    )
    patch_px: int = Field(ge=1, description="Side of a patch in pixels of the image.")
    patch: int = Field(ge=1, description="Side of a patch in what is denoised.")

    def nearest(self, sizes_px: Any) -> Any:
        """Return grids [N, 2] (rows, columns), int64, for images of these widths, heights [N, 2].

        Among equally near ones the first is used.
        """
        import numpy as np

        grids = np.array(self.grids, dtype=np.int64)
        width, height = np.maximum(1, np.asarray(sizes_px, dtype=np.int64)).reshape(-1, 2).T
        ratios = np.log(width / height)
        own = np.log(grids[:, 1] / grids[:, 0])
        return grids[np.abs(ratios[:, None] - own).argmin(axis=1)]

    def image_px(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of images of a grid."""
        return grid[0] * self.patch_px, grid[1] * self.patch_px

    def denoised(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return height and width of the denoised tensor for a grid."""
        return grid[0] * self.patch, grid[1] * self.patch

    @property
    def largest(self) -> tuple[int, int]:
        """Grid with the most patches."""
        return max(self.grids, key=lambda grid: grid[0] * grid[1])
