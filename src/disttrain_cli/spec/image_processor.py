"""Resizing rule of a published image processor: size of an image, and filter, from its fields."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.tiling import Tiling

#: Filters in the order of PIL's numbers, which a preprocessor_config.json's `resample` uses.
Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]

#: Largest aspect ratio of an image under a pixel budget (transformers' smart_resize).
MOST_RATIO = 200


class PixelBudget(NamedTuple):
    """Image size requested by a content part, by the keys of qwen-vl-utils; None = not set.

    `resized_height` and `resized_width` are the size itself, and have priority over the bounds.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None

    @property
    def stated(self) -> str:
        """Keys that have a value, for messages."""
        return ", ".join(
            f"`{key}` {value}" for key, value in self._asdict().items() if value is not None
        )


class ImageProcessor(Strict):
    """Rule of a published image processor.

    budget: both sides whole blocks, their product within the budget (transformers' `smart_resize`).
    stretch: one size, whatever the aspect ratio. crop: the shorter side to `shortest_px`, then a
    centre crop. tiles: cut into parts of one size, each an item (`tiling`).
    """

    resize: Literal["budget", "stretch", "crop", "tiles"]
    resample: Filter = "bicubic"
    min_pixels: int = Field(0, ge=0, description="budget: smaller images are enlarged to it.")
    max_pixels: int | None = Field(None, ge=1, description="budget: larger ones are reduced.")
    height_px: int | None = Field(
        None, ge=1, description="stretch, crop: size of the result; tiles: of a tile."
    )
    width_px: int | None = Field(
        None, ge=1, description="stretch, crop: size of the result; tiles: of a tile."
    )
    shortest_px: int | None = Field(
        None, ge=1, description="crop: length of the shorter side before the centre crop."
    )
    patch_px: int | None = Field(None, ge=1, description="budget: side length of its patches.")
    merge: int | None = Field(None, ge=1, description="budget: patches per side of a block.")
    tokens: int | None = Field(None, ge=1, description="tiles: number of placeholders per tile.")
    tiling: Tiling | None = Field(None, description="tiles: rule of tiling.")

    @model_validator(mode="after")
    def _numbers(self) -> ImageProcessor:
        fixed = self.height_px is not None and self.width_px is not None
        if fixed == (self.resize == "budget") or (self.max_pixels is None) != fixed:
            raise ValueError(
                "height_px and width_px are the size of the result; a budget has max_pixels instead"
            )
        if (self.resize == "tiles") != (self.tiling is not None):
            raise ValueError("tiles need a tiling, and nothing else has one")
        if self.resize == "crop" and (
            self.shortest_px is None
            or self.shortest_px < max(self.height_px or 0, self.width_px or 0)
        ):
            raise ValueError("the shorter side must not be smaller than the crop")
        return self

    @property
    def fixed_px(self) -> tuple[int, int] | None:
        """Height and width of every image or tile; None if they differ."""
        if self.height_px is None or self.width_px is None:
            return None
        return self.height_px, self.width_px

    @property
    def most_pixels(self) -> int:
        """Pixels of the largest image."""
        height, width = self.fixed_px or (0, 0)
        return height * width or self.max_pixels or 0

    @property
    def tile(self) -> tuple[int, int]:
        """Width and height of a tile."""
        height, width = self.fixed_px or (0, 0)
        return width, height

    def misfit(self, width_px: int, height_px: int) -> str | None:
        """Return why an image of this size cannot be resized; None if it can."""
        if self.tiling is not None:
            try:
                self.tiling.cut((width_px, height_px), self.tile, alone=True)
            except ValueError as error:
                return str(error)
        long, short = max(width_px, height_px), min(width_px, height_px)
        if self.resize != "budget" or long <= MOST_RATIO * short:
            return None
        return (
            f"an image of {width_px} × {height_px} pixels: one side is more than {MOST_RATIO} times"
            " the other"
        )

    def grids(self, sizes_px: Any, patch_px: int, merge: int, max_pixels: int) -> Any:
        """Return [N, 2] patches (rows, columns) of [N, 2] widths and heights, int64 arrays."""
        import numpy as np

        width, height = np.asarray(sizes_px, dtype=np.int64).reshape(-1, 2).T
        if self.fixed_px is not None:
            each = [side // patch_px // merge * merge for side in self.fixed_px]
            return np.tile(np.array(each, dtype=np.int64), (len(width), 1))
        # the operations of `smart_resize` in their order, so that they round alike
        block_px = patch_px * merge
        rows, columns = (np.rint(side / block_px) for side in (height, width))
        pixels = rows * columns * block_px**2
        shrink = np.sqrt((height * width) / max_pixels)
        grow = np.sqrt(self.min_pixels / (height * width))

        def within(side: Any, rounded: Any) -> Any:
            smaller = np.maximum(1, np.floor(side / shrink / block_px))
            larger = np.ceil(side * grow / block_px)
            return np.where(
                pixels > max_pixels, smaller, np.where(pixels < self.min_pixels, larger, rounded)
            )

        both = np.stack([within(height, rows), within(width, columns)], axis=1)
        return both.astype(np.int64) * merge

    def budgeted(
        self, size: tuple[int, int], budget: PixelBudget, block_px: int, max_pixels: int
    ) -> tuple[int, int]:
        """Return width and height, whole blocks, of an image with a budget of its own.

        As qwen-vl-utils' `fetch_image`. A bound that the budget does not set is the processor's,
        and yields to the one that it sets.

        Raises:
            ValueError: the budget is invalid, or not within `max_pixels`.
        """
        if self.resize != "budget":
            raise ValueError("the model's image processor resizes all images by one rule")
        least, most, height, width = budget
        if (height is None) != (width is None):
            raise ValueError("`resized_height` and `resized_width` go together")
        if height is not None and width is not None:
            size = (width, height)
            sides_px = [max(1, round(side / block_px)) * block_px for side in size]
            least = sides_px[0] * sides_px[1]
        else:
            if most is not None and most < block_px**2:
                raise ValueError(f"a token of the image covers {block_px**2} pixels")
            if most is not None and least is not None and least > most:
                raise ValueError("`min_pixels` must not be more than `max_pixels`")
            most = min(most or max_pixels, max_pixels)
            sides_px = self._within(size, least or min(self.min_pixels, most), most, block_px)
        if reason := self.misfit(*size):
            raise ValueError(reason)
        if least is not None and least > max_pixels:
            raise ValueError(
                f"an image has at most {max_pixels} pixels here (data.max_image_pixels, and the"
                " model's processor)"
            )
        return sides_px[0], sides_px[1]

    def _within(self, size: tuple[int, int], least: int, most: int, block_px: int) -> list[int]:
        """Return width and height of an image between these bounds."""
        bounds = self.model_copy(update={"min_pixels": least})
        rows, columns = bounds.grids([size], block_px, 1, most)[0].tolist()
        return [columns * block_px, rows * block_px]

    def cut(
        self, width_px: int, height_px: int, wanted_px: tuple[int, int]
    ) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return (width, height) to resize an image to, and (top, left) of the crop in it.

        The crop has `wanted_px` (height, width). A side that is no multiple of the patch loses its
        last pixels, as the tower's convolution omits them.
        """
        if self.resize == "budget":
            return (wanted_px[1], wanted_px[0]), (0, 0)
        assert self.height_px is not None and self.width_px is not None
        if self.resize in ("stretch", "tiles"):  # the entire image as one tile
            return (self.width_px, self.height_px), (0, 0)
        short, long = sorted((width_px, height_px))
        assert self.shortest_px is not None
        longer = int(self.shortest_px * long / short)
        width, height = (
            (self.shortest_px, longer) if width_px <= height_px else (longer, self.shortest_px)
        )
        return (width, height), ((height - self.height_px) // 2, (width - self.width_px) // 2)
