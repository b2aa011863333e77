"""Modality specs: data requirements of encoders and generators, one class per modality.

A modality spec is called *head* in this code. Other packages add theirs (`spec.plugins`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, WithJsonSchema, model_validator

from disttrain_cli.spec import joined_tiles
from disttrain_cli.spec.buckets import Buckets
from disttrain_cli.spec.cutting import ALONE, Cut, Written
from disttrain_cli.spec.files import Strict
from disttrain_cli.spec.image_processor import ImageProcessor, PixelBudget
from disttrain_cli.spec.joined_tiles import JoinedTiles
from disttrain_cli.spec.places import Places
from disttrain_cli.spec.video_processor import TEMPORAL, Film, VideoProcessor
from disttrain_cli.spec.work import Work

FRAME_MS = 10  # of audio per column of a spectrogram

#: Items of a module: packed sequences, or the items of a modality ("image": images read, "audio":
#: clips, "target": images to generate).
Item = str

#: Most pixels of an image at which memory is recorded.
LARGE_IMAGE_PX = 1 << 18

#: Rows and columns.
Grid = tuple[int, int]

#: Numbers of a file's header: width and height in pixels, or duration in ms and samples per second;
#: for a video four (`spec.video_processor.Film`). For an image whose record has a pixel budget,
#: minus the width and height to which it is resized (`Head.budgeted`).
Numbers = tuple[int, ...]

#: Scale and shift of a byte x, by channel: x · scale - shift.
Affine = tuple[tuple[float, float], ...]


def number_of(name: str) -> int:
    """Return the index of an encoder or generator among its kind: 0 for "NAME", N for "NAME.N"."""
    return int(name.partition(".")[2] or 0)


class Rows(NamedTuple):
    """Rows of an item in a state tensor: `per_item`, plus one for each `every` of its size."""

    per_item: int
    every: int = 0  # 0 = none

    def of(self, size: Any) -> Any:
        """Return the rows of items of these sizes (int64 array, or a number)."""
        return self.per_item + (size // self.every if self.every else 0 * size)


class Head(Strict):
    """Modality spec of an encoder or generator; one class per modality.

    An item has a grid (rows, columns), known from its file's header, and an area, their product. If
    all items of a module are alike, their grid is (1, 1). A module's work grows with the *size* of
    an item: its patches, positions or latent pixels.
    """

    #: Number of the modality in the index's column `kinds`; unique.
    kind: ClassVar[int]
    #: Plural noun for several items in messages.
    what: ClassVar[str]
    item: str
    module: str

    @property
    def alike(self) -> bool:
        """True if all items of the module have one size."""
        return True

    @property
    def affine(self) -> Affine | None:
        """Conversion of bytes to the module's input; None if the data provide numbers."""
        return None

    @property
    def packed(self) -> bool:
        """True if items have no common shape: values and a table of numbers each (`Packed`)."""
        return False

    @property
    def cuts(self) -> bool:
        """True if a file may become several parts, each an item, or has texts around it."""
        return False

    @property
    def placeholders(self) -> Mapping[str, str]:
        """Texts that a chat template writes, by type of file; others are the token of its rows."""
        return {}

    def ids(self, numbers: Numbers) -> tuple[int, ...] | None:
        """Return the ids of all tokens of a file, -1 for its rows; None if all are rows."""
        return None

    @property
    def row_ids(self) -> Sequence[int]:
        """Ids of rows, where they are not the tokenizer's placeholders."""
        return ()

    def row_id(self, numbers: Numbers) -> int | None:
        """Return the id of a file's rows; None = the tokenizer's placeholder."""
        return None

    def written(self, files: Sequence[Numbers]) -> list[Written]:
        """Return the texts before, between and after the parts of each of a sample's files.

        There is one more text than parts; ValueError with the reason if the sample cannot be read.
        """
        return [ALONE] * len(files)

    def drawn(self, sizes: Any) -> Any:
        """Return the sizes [N, numbers] that stand for those drawn from a distribution."""
        return sizes

    def grids(self, sizes: Any) -> Any:
        """Return grids [N, 2] of items from two header numbers each [N, 2].

        The numbers are widths and heights in pixels, or durations in ms and samples per second.
        """
        import numpy as np

        return np.ones_like(sizes)

    def misfit(self, width: int, height: int) -> str | None:
        """Return why an item with these header numbers is not read; None if it is."""
        return None

    def budgeted(self, numbers: Numbers, budget: PixelBudget) -> Numbers:
        """Return the numbers of a file whose record has a pixel budget.

        Raises:
            ValueError: items have no budget, or not this one.
        """
        raise ValueError(f"{budget.stated}: {self.what} have no separate pixel budget")

    def tokens_of(self, sizes: Any, part: Any, parts: Any) -> Any:
        """Return LLM tokens [N] of items that are part `part` [N] of the `parts` [N] of a file.

        `sizes` are the files' numbers [N, 2].
        """
        return self.rows("tokens").of(self.size(self.grids(sizes).prod(axis=1)))

    def places(self, numbers: Numbers, parts: int) -> list[Places] | None:
        """Return the positions of each part's "tokens" rows among all tokens of the file.

        None if they follow each other.
        """
        return None

    def size(self, area: Any) -> Any:
        """Return the sizes of items of these areas: int64 array, or a number."""
        raise NotImplementedError

    def rows(self, column: str) -> Rows:
        """Return the rows of an item in a state tensor (`models.layer.TensorSpec.rows`).

        "tokens" are those in the LLM.
        """
        raise NotImplementedError

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Return the shape of the data for an item of this grid."""
        raise NotImplementedError

    def grid_of(self, rows: int, columns: int) -> Grid:
        """Return the grid of an item of rows × columns blocks, for measurements.

        A block is the unit in which grids grow. If items have one column only, it has rows ·
        columns blocks.
        """
        return 1, 1

    @property
    def period(self) -> int:
        """Number of blocks per side after which a block's cost repeats."""
        return 1

    @property
    def largest(self) -> Grid:
        """Rows and columns, in blocks, of the item at which memory is recorded; whole periods."""
        return 1, 1

    def work(self, count: float) -> Work:
        """Return the work of `count` items, if all are alike."""
        size = self.size(1)
        return Work(count, count * size, count * float(size) ** 2)


class ImageInput(Head):
    """Preprocessing of an image that the model reads (encoder)."""

    kind: ClassVar[int] = 1
    what: ClassVar[str] = "images to read"

    item: Literal["image"] = "image"
    patch_px: int = Field(ge=1, description="Side of a patch in pixels.")
    merge: int = Field(1, ge=1, description="Patches per side that form one LLM token.")
    channels: int = 3
    mean: tuple[float, ...] = Field(
        (0.5, 0.5, 0.5),
        description="Mean per channel, subtracted from pixel values scaled to 0..1.",
    )
    std: tuple[float, ...] = Field(
        (0.5, 0.5, 0.5),
        description="Standard deviation per channel, by which the difference is divided.",
    )
    max_pixels: int = Field(description="Pixel budget of one image.")
    extra_tokens: int = Field(
        1, ge=0, description="Number of rows that the encoder adds to every image (a class token)."
    )
    window: int = Field(
        1,
        ge=1,
        description="Patches per side of the attention windows of most blocks, in whole merge"
        " blocks; 1 = none: all attend to the whole image.",
    )
    processor: Annotated[
        ImageProcessor | None,
        WithJsonSchema({"anyOf": [ImageProcessor.model_json_schema(), {"type": "null"}]}),
    ] = Field(None, description="Resizing rule of the published model, if it has one.")
    video: Annotated[
        VideoProcessor | None,
        WithJsonSchema({"anyOf": [VideoProcessor.model_json_schema(), {"type": "null"}]}),
    ] = Field(
        None,
        description="Preparation of videos, if they are read: an item is then two frames of a"
        " video, or an image twice.",
    )

    @model_validator(mode="after")
    def _values_per_channel(self) -> ImageInput:
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(f"mean and std need a value for each of {self.channels} channels")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        return self

    @property
    def alike(self) -> bool:
        return False

    @property
    def affine(self) -> Affine:
        """Conversion of bytes to the encoder's input: (x / 255 - mean) / std."""
        return self.temporal * tuple(
            (1 / (255 * std), mean / std) for mean, std in zip(self.mean, self.std, strict=True)
        )

    @property
    def temporal(self) -> int:
        """Frames of an item, consecutive in its channels."""
        return 1 if self.video is None else TEMPORAL

    def grid_of(self, rows: int, columns: int) -> Grid:
        return rows * self.merge, columns * self.merge

    @property
    def period(self) -> int:
        """Whole windows."""
        return math.lcm(self.merge, self.window) // self.merge

    @property
    def largest(self) -> Grid:
        side_px = math.isqrt(min(self.max_pixels, LARGE_IMAGE_PX))
        period_px = self.period * self.merge * self.patch_px
        side = max(1, side_px // period_px) * self.period
        return side, side

    @property
    def cuts(self) -> bool:
        return self.video is not None or (
            self.processor is not None and self.processor.tiling is not None
        )

    def written(self, files: Sequence[Numbers]) -> list[Written]:
        return [self._written(numbers, len(files) == 1) for numbers in files]

    def _written(self, numbers: Numbers, alone: bool) -> Written:
        if len(numbers) > 2 and self.video is not None:
            return self.video.written(Film(*numbers))
        if self.processor is None or self.processor.tiling is None:
            return ALONE
        tiling, size = self.processor.tiling, (numbers[0], numbers[1])
        cut = self.cut(size, alone)
        if isinstance(tiling, JoinedTiles) and (reason := tiling.misfit(size, cut, self.tile_side)):
            raise ValueError(reason)
        return tiling.written(cut)

    def cut(self, size: tuple[int, int], alone: bool) -> Cut:
        """Return the tiling of an image of this size; `alone`: its sample has no other image."""
        assert self.processor is not None and self.processor.tiling is not None
        return self.processor.tiling.cut(size, self.processor.tile, alone)

    @property
    def joined(self) -> bool:
        """True if rows of tiles are those of a joined picture, with `image_newline` at their ends.

        See `spec.joined_tiles`.
        """
        return self.processor is not None and isinstance(self.processor.tiling, JoinedTiles)

    @property
    def tile_side(self) -> int:
        """Tokens per side of a tile."""
        assert self.processor is not None
        return self.processor.tile[0] // self.patch_px // self.merge

    @property
    def newlines(self) -> int:
        """Rows of `image_newline` after each image's own rows in "tokens"."""
        return self.tile_side if self.joined else 0

    def tokens_of(self, sizes: Any, part: Any, parts: Any) -> Any:
        if not self.joined:
            return super().tokens_of(sizes, part, parts)
        import numpy as np

        each = zip(sizes.tolist(), part.tolist(), parts.tolist(), strict=True)
        seen = [
            joined_tiles.tokens(*self._joining((width, height), count))[at]
            for (width, height), at, count in each
        ]
        return np.array(seen, dtype=np.int64)

    def places(self, numbers: Numbers, parts: int) -> list[Places] | None:
        if not self.joined:
            return None
        return joined_tiles.places(*self._joining((numbers[0], numbers[1]), parts))

    def _joining(
        self, size: tuple[int, int], parts: int
    ) -> tuple[tuple[int, int], Cut, int, JoinedTiles]:
        """Return the arguments of `joined_tiles.places` for an image in this many parts."""
        assert self.processor is not None and isinstance(self.processor.tiling, JoinedTiles)
        cut = self.cut(size, alone=parts > 1)
        return size, cut, self.tile_side, self.processor.tiling

    def misfit(self, width: int, height: int, *film: int) -> str | None:
        """Return why an image's aspect ratio or a video's frames do not suit the processor."""
        if film and self.video is not None:
            return self.video.misfit(Film(width, height, *film), self.patch_px * self.merge)
        if width < 0:  # size of a pixel budget
            return None
        return None if self.processor is None else self.processor.misfit(width, height)

    def budgeted(self, numbers: Numbers, budget: PixelBudget) -> Numbers:
        try:
            if len(numbers) > 2:
                raise ValueError("a video has no separate pixel budget")
            rule = self.processor or ImageProcessor(resize="budget", max_pixels=self.max_pixels)
            width, height = rule.budgeted(
                (numbers[0], numbers[1]), budget, self.patch_px * self.merge, self.max_pixels
            )
        except ValueError as error:
            raise ValueError(f"an image with {budget.stated}: {error}") from None
        return -width, -height

    def grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """Return the patches (rows, columns) of an image after resizing.

        They are whole merge blocks within the pixel budget; the aspect ratio is kept as far as
        whole blocks allow; never less than one block per side. A published processor's rule has
        priority over this one.
        """
        rows, columns = self.grids([[width_px, height_px]])[0].tolist()
        return rows, columns

    def grids(self, sizes_px: Any) -> Any:
        """Return `grid` of many images at once: [N, 2] patches (rows, columns) of [N, 2] sizes.

        Sizes are widths and heights, int64 arrays; or [N, 4], some of which are of videos, whose
        frames' grids are returned.
        """
        import numpy as np

        sizes_px = np.asarray(sizes_px, dtype=np.int64)
        if sizes_px.shape[1:] == (4,):
            return self._grids_with_films(sizes_px)
        budgeted = sizes_px[:, 0] < 0
        if budgeted.any():
            grids = self.grids(np.abs(sizes_px))
            grids[budgeted] = -sizes_px[budgeted, ::-1] // self.patch_px
            return grids
        if self.processor is not None:
            return self.processor.grids(sizes_px, self.patch_px, self.merge, self.max_pixels)
        width, height = sizes_px.T
        block_px = self.patch_px * self.merge
        scale = np.minimum(1.0, np.sqrt(self.max_pixels / (width * height)))
        rows, columns = (
            np.maximum(1, np.rint(side * scale / block_px)).astype(np.int64)
            for side in (height, width)
        )
        limit = max(1, self.max_pixels // (block_px * block_px))
        while (over := rows * columns > limit).any():
            shrink_rows = rows >= columns
            rows, columns = rows - (over & shrink_rows), columns - (over & ~shrink_rows)
        return np.stack([rows, columns], axis=1) * self.merge

    def _grids_with_films(self, numbers: Any) -> Any:
        """Return the grids of images (whose last two numbers are 0) and videos."""
        import numpy as np

        grids = self.grids(numbers[:, :2])
        films = np.flatnonzero(numbers[:, 2])
        if self.video is not None and len(films):
            each, places = np.unique(numbers[films], axis=0, return_inverse=True)
            block_px = self.patch_px * self.merge
            sizes = [self.video.size_px(Film(*film), block_px) for film in each.tolist()]
            grids[films] = np.array(sizes, np.int64)[places.reshape(-1)] // self.patch_px
        return grids

    def frames(self, grid: Any) -> tuple[int, int, int]:
        """Return frames, rows and columns of an image's LLM tokens, from its grid of patches."""
        rows, columns = grid
        return 1, int(rows) // self.merge, int(columns) // self.merge

    def patches(self, width_px: int, height_px: int) -> int:
        """Return the rows that the encoder computes for an image, without the extra ones."""
        rows, columns = self.grid(width_px, height_px)
        return rows * columns

    def tokens(self, width_px: int, height_px: int) -> int:
        """Return the LLM tokens of an image."""
        return self.patches(width_px, height_px) // (self.merge * self.merge)

    def size(self, area: Any) -> Any:
        """Return the patches."""
        return area

    def rows(self, column: str) -> Rows:
        """Return the rows of "patches", with the extra ones, or of "tokens", with newlines."""
        of_tokens = Rows(self.newlines, self.merge**2)
        return {"patches": Rows(self.extra_tokens, 1), "tokens": of_tokens}[column]

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Return channels (of two frames if videos are read), height and width."""
        return self.temporal * self.channels, grid[0] * self.patch_px, grid[1] * self.patch_px


class AudioInput(Head):
    """Preprocessing of an audio clip that the model reads (encoder).

    All clips are padded to one length.
    """

    kind: ClassVar[int] = 3
    what: ClassVar[str] = "audio clips"

    item: Literal["audio"] = "audio"
    mel_bins: int = Field(ge=1, description="Number of rows of the log-mel spectrogram.")
    frames: int = Field(
        ge=2, description="Number of columns of the log-mel spectrogram, each 10 ms of sound."
    )
    merge: int = Field(1, ge=1, description="Number of positions that form one LLM token.")

    @property
    def longest_ms(self) -> int:
        """Duration of the longest supported clip."""
        return self.frames * FRAME_MS

    @property
    def positions(self) -> int:
        """Rows that the encoder computes for a clip: its second convolution has stride 2."""
        return self.frames // 2

    @property
    def tokens(self) -> int:
        """LLM tokens of a clip."""
        return self.positions // self.merge

    def misfit(self, width: int, height: int) -> str | None:
        """Return why a clip is too long for the encoder; None if it is not."""
        if width <= self.longest_ms:
            return None
        return (
            f"a clip of {width / 1e3:.1f} s, longer than the model's limit of"
            f" {self.longest_ms / 1e3:g} s"
        )

    def size(self, area: Any) -> Any:
        """Return the positions."""
        return area * self.positions

    def rows(self, column: str) -> Rows:
        """Return the rows of "positions" or "tokens"."""
        return {"positions": Rows(0, 1), "tokens": Rows(0, self.merge)}[column]

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Return mel bins and frames."""
        return self.mel_bins, self.frames


class TargetInput(Head):
    """Preprocessing of an image that the model learns to generate (generator)."""

    kind: ClassVar[int] = 2
    what: ClassVar[str] = "images to generate"

    item: Literal["target"] = "target"
    size_px: int = Field(ge=8, description="Side length of the square image.")
    channels: int = Field(
        3,
        description="Channels of the image, or of the mean and log-variance of its prepared"
        " latents.",
    )
    context_tokens: int = Field(
        ge=1, description="Number of LLM positions that condition one image."
    )
    latent_pixels: int = Field(ge=1, description="Height × width of the tensor that is denoised.")
    cached_latents: Literal[False, "fp32", "bf16"] = Field(
        False,
        description="Precision of prepared latents that replace the image's pixels; or false.",
    )
    buckets: Annotated[
        Buckets | None, WithJsonSchema({"anyOf": [Buckets.model_json_schema(), {"type": "null"}]})
    ] = Field(
        None,
        description="Sizes of the images if they are not all squares; grid is then in patches, and"
        " size_px is the size of sampled images.",
    )

    @property
    def alike(self) -> bool:
        return self.buckets is None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the data of one image; of the largest if they differ."""
        if self.buckets is not None:
            return self.shape_of(self.buckets.largest)
        side = math.isqrt(self.latent_pixels) if self.cached_latents else self.size_px
        return self.channels, side, side

    def image_px(self, grid: Grid) -> tuple[int, int]:
        """Return height and width of an image of this grid."""
        return (self.size_px,) * 2 if self.buckets is None else self.buckets.image_px(grid)

    def grids(self, sizes: Any) -> Any:
        return super().grids(sizes) if self.buckets is None else self.buckets.nearest(sizes)

    def grid_of(self, rows: int, columns: int) -> Grid:
        return (1, 1) if self.buckets is None else (rows, columns)

    @property
    def largest(self) -> Grid:
        return (1, 1) if self.buckets is None else self.buckets.largest

    @property
    def pixels(self) -> TargetInput:
        """The spec of the image itself, if its latents were cached."""
        return self.model_copy(update={"channels": 3, "cached_latents": False})

    @property
    def affine(self) -> Affine | None:
        """Conversion of bytes to the generator's range -1..1; None for latents."""
        return None if self.cached_latents else ((1 / 127.5, 1.0),) * self.channels

    def shape_of(self, grid: Grid) -> tuple[int, int, int]:
        """Return channels, height and width of the data for this grid."""
        if self.buckets is None:
            return self.shape
        bucket = self.buckets
        sides = bucket.denoised(grid) if self.cached_latents else bucket.image_px(grid)
        return self.channels, *sides

    def size(self, area: Any) -> Any:
        """Return the latent pixels; patches if sizes differ."""
        return area * self.latent_pixels if self.buckets is None else area

    def rows(self, column: str) -> Rows:
        """Return the rows of "tokens", which condition it, "one", or "patches" if sizes differ."""
        known = {"tokens": Rows(self.context_tokens), "one": Rows(1), "patches": Rows(0, 1)}
        return known[column]
