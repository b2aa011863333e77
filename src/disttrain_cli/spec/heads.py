"""What encoders and generators ask of their items, in numbers; a class per modality.

Other packages add theirs (`spec.plugins`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

FRAME_MS = 10  # of sound in a column of a spectrogram

#: What a module works on: packed sequences, or the items of a modality ("image": images read,
#: "audio": clips, "target": images to generate).
Item = str

#: Pixels of an image at which memory is recorded, at most.
LARGE_IMAGE_PX = 1 << 18

#: Rows and columns.
Grid = tuple[int, int]

#: What a file's header says: width and height in pixels, or duration in ms and samples per second;
#: of a video four (`spec.video_processor.Film`). Of an image whose record has a pixel budget minus
#: the width and height that it is resized to (`Head.budgeted`).
Numbers = tuple[int, ...]

#: Of each channel, the scale and shift of a byte x: x · scale - shift.
Affine = tuple[tuple[float, float], ...]


def number_of(name: str) -> int:
    """Number of the encoder or generator among those of its kind that a name speaks of: 0 of
    "NAME", N of "NAME.N"."""
    return int(name.partition(".")[2] or 0)


class Rows(NamedTuple):
    """Rows that an item has in a state tensor: `per_item`, and one for each `every` of its size."""

    per_item: int
    every: int = 0  # 0 = none

    def of(self, size: Any) -> Any:
        """The rows of items of these sizes (int64 array, or a number)."""
        return self.per_item + (size // self.every if self.every else 0 * size)


class Head(Strict):
    """What an encoder or generator asks of the items that it works on; a class per modality.

    An item has a grid (rows, columns), known from its file's header, and an area, their product.
    Where all items of a module are alike, their grid is (1, 1). A module's work grows with the
    *size* of an item: what it computes of it, as patches, positions, latent pixels.
    """

    #: Of the items in the index's column `kinds`; a number that no other modality has.
    kind: ClassVar[int]
    #: As users are told of several items.
    what: ClassVar[str]
    item: str
    module: str

    @property
    def alike(self) -> bool:
        """Whether all items of the module have one size."""
        return True

    @property
    def affine(self) -> Affine | None:
        """By which bytes become what the module reads; None where the data bring numbers."""
        return None

    @property
    def cuts(self) -> bool:
        """Whether a file may become several parts, each an item, or has texts around it."""
        return False

    def written(self, files: Sequence[Numbers]) -> list[Written]:
        """Of each of a sample's files, the texts before, between and behind its parts (one more
        than parts); ValueError with the reason where the sample cannot be read."""
        return [ALONE] * len(files)

    def grids(self, sizes: Any) -> Any:
        """Grids [N, 2] of items whose files' headers say these two numbers each [N, 2]: widths and
        heights in pixels, or durations in ms and samples per second."""
        import numpy as np

        return np.ones_like(sizes)

    def misfit(self, width: int, height: int) -> str | None:
        """Why an item with these numbers in its header is not read, if it is not."""
        return None

    def budgeted(self, numbers: Numbers, budget: PixelBudget) -> Numbers:
        """Return the numbers of a file whose record has a pixel budget; ValueError with the reason
        where items have none, or not this one."""
        raise ValueError(f"{budget.stated}: {self.what} have no pixel budget of their own")

    def tokens_of(self, sizes: Any, part: Any, parts: Any) -> Any:
        """Tokens [N] in the LLM of items that are part number `part` [N] of the `parts` [N] of a
        file with these numbers [N, 2]."""
        return self.rows("tokens").of(self.size(self.grids(sizes).prod(axis=1)))

    def places(self, numbers: Numbers, parts: int) -> list[Places] | None:
        """Of each of the `parts` of a file where its "tokens" rows are among all tokens of the
        file; None where they follow each other."""
        return None

    def size(self, area: Any) -> Any:
        """Sizes of items of these areas: int64 array, or a number."""
        raise NotImplementedError

    def rows(self, column: str) -> Rows:
        """Rows of an item in a state tensor (`models.layer.TensorSpec.rows`); "tokens" are those
        in the LLM."""
        raise NotImplementedError

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Shape of what the data bring for an item of this grid."""
        raise NotImplementedError

    def grid_of(self, rows: int, columns: int) -> Grid:
        """The grid of an item of rows × columns blocks, the smallest that grids grow by; for
        measuring. Where items have one column only, of rows · columns blocks."""
        return 1, 1

    @property
    def period(self) -> int:
        """Blocks per side after which a block costs the same again."""
        return 1

    @property
    def largest(self) -> Grid:
        """Rows and columns, in blocks, of an item that memory is recorded at; whole periods."""
        return 1, 1

    def work(self, count: float) -> Work:
        """Work that so many items bring; where all are alike."""
        size = self.size(1)
        return Work(count, count * size, count * float(size) ** 2)


class ImageInput(Head):
    """How an image that the model reads is prepared (encoder)."""

    kind: ClassVar[int] = 1
    what: ClassVar[str] = "images to read"

    item: Literal["image"] = "image"
    patch_px: int = Field(ge=1, description="Side of a patch in pixels.")
    merge: int = Field(1, ge=1, description="Patches per side that one LLM token stands for.")
    channels: int = 3
    mean: tuple[float, ...] = Field(
        (0.5, 0.5, 0.5), description="Of each channel: subtracted from pixel values scaled to 0..1."
    )
    std: tuple[float, ...] = Field(
        (0.5, 0.5, 0.5), description="Of each channel: what the rest is divided by."
    )
    max_pixels: int = Field(description="Pixel budget of one image.")
    extra_tokens: int = Field(
        1, ge=0, description="Rows the encoder adds to every image (a class token)."
    )
    window: int = Field(
        1,
        ge=1,
        description=(
            "Patches per side of the squares that most blocks' attention stays inside, whole merge "
            "blocks; 1 = none: all attend the whole image."
        ),
    )
    processor: Annotated[
        ImageProcessor | None,
        WithJsonSchema({"anyOf": [ImageProcessor.model_json_schema(), {"type": "null"}]}),
    ] = Field(
        None,
        description="The published model's own rule of resizing, where it has one.",
    )
    video: Annotated[
        VideoProcessor | None,
        WithJsonSchema({"anyOf": [VideoProcessor.model_json_schema(), {"type": "null"}]}),
    ] = Field(
        None,
        description=(
            "How videos are prepared, where they are read: an item is then two frames of a video,"
            " or an image twice."
        ),
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
        """By which bytes become what the encoder reads: (x / 255 - mean) / std."""
        return self.temporal * tuple(
            (1 / (255 * std), mean / std) for mean, std in zip(self.mean, self.std, strict=True)
        )

    @property
    def temporal(self) -> int:
        """Frames of an item, one after the other in its channels."""
        return 1 if self.video is None else TEMPORAL

    def grid_of(self, rows: int, columns: int) -> Grid:
        return rows * self.merge, columns * self.merge

    @property
    def period(self) -> int:
        """Whole windows."""
        return math.lcm(self.merge, self.window) // self.merge

    @property
    def largest(self) -> Grid:
        side_px, period_px = (
            math.isqrt(min(self.max_pixels, LARGE_IMAGE_PX)),
            self.period * self.merge * self.patch_px,
        )
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
        """How an image of this width and height becomes tiles; `alone`: its sample has no
        other."""
        assert self.processor is not None and self.processor.tiling is not None
        return self.processor.tiling.cut(size, self.processor.tile, alone)

    @property
    def joined(self) -> bool:
        """Whether rows of tiles are those of a joined picture, with `image_newline` at their ends
        (`spec.joined_tiles`)."""
        return self.processor is not None and isinstance(self.processor.tiling, JoinedTiles)

    @property
    def tile_side(self) -> int:
        """Tokens per side of a tile."""
        assert self.processor is not None
        return self.processor.tile[0] // self.patch_px // self.merge

    @property
    def newlines(self) -> int:
        """Rows of `image_newline` behind each image's own rows in "tokens"."""
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
        """What says where the rows of an image in so many parts are."""
        assert self.processor is not None and isinstance(self.processor.tiling, JoinedTiles)
        cut = self.cut(size, alone=parts > 1)
        return size, cut, self.tile_side, self.processor.tiling

    def misfit(self, width: int, height: int, *film: int) -> str | None:
        """Sides too unlike for the processor; a video of too few frames."""
        if film and self.video is not None:
            return self.video.misfit(Film(width, height, *film), self.patch_px * self.merge)
        if width < 0:  # of a budget
            return None
        return None if self.processor is None else self.processor.misfit(width, height)

    def budgeted(self, numbers: Numbers, budget: PixelBudget) -> Numbers:
        try:
            if len(numbers) > 2:
                raise ValueError("a video has no pixel budget of its own")
            rule = self.processor or ImageProcessor(resize="budget", max_pixels=self.max_pixels)
            width, height = rule.budgeted(
                (numbers[0], numbers[1]), budget, self.patch_px * self.merge, self.max_pixels
            )
        except ValueError as error:
            raise ValueError(f"an image with {budget.stated}: {error}") from None
        return -width, -height

    def grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """Patches (rows, columns) of an image after resizing: whole merge blocks, within the pixel
        budget.

        The aspect ratio is kept as far as whole blocks allow; never less than one block per side.
        A published processor's rule goes before this one.
        """
        rows, columns = self.grids([[width_px, height_px]])[0].tolist()
        return rows, columns

    def grids(self, sizes_px: Any) -> Any:
        """`grid` of many images at once: [N, 2] patches (rows, columns) of [N, 2] widths and
        heights, int64 arrays; or of [N, 4], of which some are of videos, those of their frames."""
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
        """Of images (whose last two numbers are 0) and videos."""
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
        """Frames, rows and columns of an image's tokens in the LLM, of its grid of patches."""
        rows, columns = grid
        return 1, int(rows) // self.merge, int(columns) // self.merge

    def patches(self, width_px: int, height_px: int) -> int:
        """Rows the encoder computes for an image, without the extra ones."""
        rows, columns = self.grid(width_px, height_px)
        return rows * columns

    def tokens(self, width_px: int, height_px: int) -> int:
        """LLM tokens of an image."""
        return self.patches(width_px, height_px) // (self.merge * self.merge)

    def size(self, area: Any) -> Any:
        """Patches."""
        return area

    def rows(self, column: str) -> Rows:
        """ "patches", with the extra ones; "tokens", with the newlines behind."""
        of_tokens = Rows(self.newlines, self.merge**2)
        return {"patches": Rows(self.extra_tokens, 1), "tokens": of_tokens}[column]

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Channels (of two frames where videos are read), height and width."""
        return self.temporal * self.channels, grid[0] * self.patch_px, grid[1] * self.patch_px


class AudioInput(Head):
    """How an audio clip that the model hears is prepared (encoder); all clips are padded to one
    length."""

    kind: ClassVar[int] = 3
    what: ClassVar[str] = "audio clips"

    item: Literal["audio"] = "audio"
    mel_bins: int = Field(ge=1, description="Rows of the log-mel spectrogram.")
    frames: int = Field(ge=2, description="Its columns: 10 ms of sound each.")
    merge: int = Field(1, ge=1, description="Positions that one LLM token stands for.")

    @property
    def longest_ms(self) -> int:
        """Duration of the longest clip that the model hears."""
        return self.frames * FRAME_MS

    @property
    def positions(self) -> int:
        """Rows the encoder computes for a clip: its second convolution takes every other frame."""
        return self.frames // 2

    @property
    def tokens(self) -> int:
        """LLM tokens of a clip."""
        return self.positions // self.merge

    def misfit(self, width: int, height: int) -> str | None:
        """Longer than the encoder hears."""
        if width <= self.longest_ms:
            return None
        return (
            f"a clip of {width / 1e3:.1f} s, longer than the {self.longest_ms / 1e3:g} s that the"
            " model hears"
        )

    def size(self, area: Any) -> Any:
        """Positions."""
        return area * self.positions

    def rows(self, column: str) -> Rows:
        """ "positions"; "tokens"."""
        return {"positions": Rows(0, 1), "tokens": Rows(0, self.merge)}[column]

    def shape_of(self, grid: Grid) -> tuple[int, ...]:
        """Mel bins and frames."""
        return self.mel_bins, self.frames


class TargetInput(Head):
    """How an image that the model learns to generate is prepared (generator)."""

    kind: ClassVar[int] = 2
    what: ClassVar[str] = "images to generate"

    item: Literal["target"] = "target"
    size_px: int = Field(ge=8, description="Side of the square image.")
    channels: int = Field(
        3,
        description=(
            "Of the image, or of its latents' mean and log-variance where they were prepared"
            " beforehand."
        ),
    )
    context_tokens: int = Field(ge=1, description="LLM positions that condition one image.")
    latent_pixels: int = Field(ge=1, description="Height × width of the tensor that is denoised.")
    cached_latents: Literal[False, "fp32", "bf16"] = Field(
        False,
        description="In which precision latents come in the place of the image's pixels; or false.",
    )
    buckets: Annotated[
        Buckets | None,
        WithJsonSchema({"anyOf": [Buckets.model_json_schema(), {"type": "null"}]}),
    ] = Field(
        None,
        description=(
            "Sizes of the images, where they are not all squares; a grid is then patches, and"
            " size_px that of the images which are drawn."
        ),
    )

    @property
    def alike(self) -> bool:
        return self.buckets is None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the data brings for one image; for the largest where
        they differ."""
        if self.buckets is not None:
            return self.shape_of(self.buckets.largest)
        side = math.isqrt(self.latent_pixels) if self.cached_latents else self.size_px
        return self.channels, side, side

    def image_px(self, grid: Grid) -> tuple[int, int]:
        """Height and width of an image of this grid."""
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
        """Of the image itself, where its latents were prepared beforehand."""
        return self.model_copy(update={"channels": 3, "cached_latents": False})

    @property
    def affine(self) -> Affine | None:
        """By which bytes become what the generator draws: -1..1; None of latents."""
        return None if self.cached_latents else ((1 / 127.5, 1.0),) * self.channels

    def shape_of(self, grid: Grid) -> tuple[int, int, int]:
        """Channels, height and width of what the data brings."""
        if self.buckets is None:
            return self.shape
        bucket = self.buckets
        sides = bucket.denoised(grid) if self.cached_latents else bucket.image_px(grid)
        return self.channels, *sides

    def size(self, area: Any) -> Any:
        """Latent pixels; patches where sizes differ."""
        return area * self.latent_pixels if self.buckets is None else area

    def rows(self, column: str) -> Rows:
        """ "tokens", which condition it; "one"; "patches", where sizes differ."""
        known = {"tokens": Rows(self.context_tokens), "one": Rows(1), "patches": Rows(0, 1)}
        return known[column]
