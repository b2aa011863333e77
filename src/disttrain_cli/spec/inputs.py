"""The input specification: what a model asks of its data, in numbers, so that CPU nodes need no
torch.

Written by `models.describe`, kept in the profile and beside the index; read by `data`.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, Literal

from pydantic import Field, model_validator

from disttrain_cli.spec.files import Strict, fingerprint
from disttrain_cli.spec.work import Work

#: What a module works on: images read, audio clips, packed sequences, images to generate.
Item = Literal["image", "audio", "sequence", "target"]

#: Of each channel, the scale and shift of a byte x: x · scale - shift.
Affine = tuple[tuple[float, float], ...]


def number_of(name: str) -> int:
    """Number of the encoder or generator among those of its kind that a name speaks of: 0 of
    "NAME", N of "NAME.N"."""
    return int(name.partition(".")[2] or 0)


class ImageInput(Strict):
    """How an image that the model reads is prepared (encoder)."""

    module: str
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

    @model_validator(mode="after")
    def _values_per_channel(self) -> ImageInput:
        if not len(self.mean) == len(self.std) == self.channels:
            raise ValueError(f"mean and std need a value for each of {self.channels} channels")
        if min(self.std) <= 0:
            raise ValueError("std must be positive")
        return self

    @property
    def affine(self) -> Affine:
        """By which bytes become what the encoder reads: (x / 255 - mean) / std."""
        return tuple(
            (1 / (255 * std), mean / std) for mean, std in zip(self.mean, self.std, strict=True)
        )

    @property
    def probe_step(self) -> int:
        """Patches per side in which probes of an image's costs grow: whole merge blocks and whole
        windows."""
        return math.lcm(self.merge, self.window)

    def grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """Patches (rows, columns) of an image after resizing: whole merge blocks, within the pixel
        budget.

        The aspect ratio is kept as far as whole blocks allow; never less than one block per side.
        """
        rows, columns = self.grids([[width_px, height_px]])[0].tolist()
        return rows, columns

    def grids(self, sizes_px: Any) -> Any:
        """`grid` of many images at once: [N, 2] patches (rows, columns) of [N, 2] widths and
        heights, int64 arrays."""
        import numpy as np

        width, height = np.asarray(sizes_px, dtype=np.int64).reshape(-1, 2).T
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

    def patches(self, width_px: int, height_px: int) -> int:
        """Rows the encoder computes for an image, without the extra ones."""
        rows, columns = self.grid(width_px, height_px)
        return rows * columns

    def tokens(self, width_px: int, height_px: int) -> int:
        """LLM tokens of an image."""
        return self.patches(width_px, height_px) // (self.merge * self.merge)


class AudioInput(Strict):
    """How an audio clip that the model hears is prepared (encoder); all clips are padded to one
    length."""

    module: str
    mel_bins: int = Field(ge=1, description="Rows of the log-mel spectrogram.")
    frames: int = Field(ge=2, description="Its columns: 10 ms of sound each.")
    merge: int = Field(1, ge=1, description="Positions that one LLM token stands for.")

    @property
    def positions(self) -> int:
        """Rows the encoder computes for a clip: its second convolution takes every other frame."""
        return self.frames // 2

    @property
    def tokens(self) -> int:
        """LLM tokens of a clip."""
        return self.positions // self.merge

    def work(self, clips: float) -> Work:
        """Encoder work of that many clips."""
        return Work(clips, clips * self.positions, clips * float(self.positions) ** 2)


class TargetInput(Strict):
    """How an image that the model learns to generate is prepared (generator)."""

    module: str
    size_px: int = Field(ge=8, description="Side of the square image.")
    channels: int = Field(
        3, description="Of the image, or of its latents where they were prepared beforehand."
    )
    context_tokens: int = Field(ge=1, description="LLM positions that condition one image.")
    latent_pixels: int = Field(ge=1, description="Height × width of the tensor that is denoised.")
    cached_latents: bool = Field(
        False, description="Latents come in the place of the image's pixels."
    )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of what the data brings for one image."""
        side = math.isqrt(self.latent_pixels) if self.cached_latents else self.size_px
        return self.channels, side, side

    @property
    def affine(self) -> Affine:
        """By which bytes become what the generator draws: -1..1."""
        return ((1 / 127.5, 1.0),) * self.channels

    def work(self, images: float) -> Work:
        """Generator work of that many images."""
        return Work(images, images * self.latent_pixels, images * float(self.latent_pixels) ** 2)


class ModelInputs(Strict):
    """Everything the data room needs to know of a model."""

    llm: str = Field(description="Name of the LLM module.")
    vocabulary: int = Field(ge=1)
    sequence_length: int = Field(ge=16)
    windows: list[int] = Field(
        default_factory=list,
        description=(
            "Of each of the LLM's blocks, how many tokens of a sample one sees back, "
            "itself among them; empty where all blocks see all of them."
        ),
    )
    image: ImageInput | None = None
    other_images: list[ImageInput] = Field(
        default_factory=list,
        description="Of further image encoders: all see every image, cut into the same patches.",
    )
    audio: AudioInput | None = None
    target: TargetInput | None = None
    other_targets: list[TargetInput] = Field(
        default_factory=list,
        description="Of further generators: all learn to draw the same images, each at its size.",
    )

    @model_validator(mode="after")
    def _same_patches(self) -> ModelInputs:
        if (
            len(
                {
                    (head.patch_px, head.merge, head.channels, head.max_pixels)
                    for head in self.images
                }
            )
            > 1
        ):
            raise ValueError(
                "image encoders must have equal patch_px, merge, channels and max_pixels: their"
                " tokens are added one by one"
            )
        return self

    @property
    def images(self) -> list[ImageInput]:
        """Of every image encoder, in the model's order."""
        return [] if self.image is None else [self.image, *self.other_images]

    @property
    def probe_step(self) -> int:
        """`ImageInput.probe_step` that suits every image encoder."""
        return math.lcm(*(head.probe_step for head in self.images))

    @property
    def targets(self) -> list[TargetInput]:
        """Of every generator, in the model's order."""
        return [] if self.target is None else [self.target, *self.other_targets]

    @property
    def encoders(self) -> list[str]:
        """Names of the encoders: they stand side by side, each sends to the LLM what it made."""
        return [head.module for head in (*self.images, self.audio) if head is not None]

    @property
    def generators(self) -> list[str]:
        """Names of the generators: they stand side by side, to each goes what the LLM made."""
        return [head.module for head in self.targets]

    def item(self, module: str) -> Item:
        """What a module works on."""
        heads: list[tuple[Item, ImageInput | AudioInput | TargetInput | None]] = [
            *(("image", head) for head in self.images),
            ("audio", self.audio),
            *(("target", head) for head in self.targets),
        ]
        return next(
            (item for item, head in heads if head is not None and head.module == module), "sequence"
        )

    def length_sq(self, lengths: Any) -> Any:
        """Pairs of tokens no farther apart than a block of the LLM sees, in samples of these
        lengths: an int64 array.

        length² where none has a window; of blocks with different windows the mean. Causal attention
        computes half.
        """
        import numpy as np

        lengths, windows = np.asarray(lengths, dtype=np.int64), Counter(self.windows)
        hidden = np.zeros_like(lengths)
        for window, blocks in windows.items():
            beyond = np.maximum(0, lengths - window)
            hidden += blocks * beyond * (beyond + 1)
        return lengths**2 - hidden // max(1, windows.total())

    def target_of(self, generator: str) -> TargetInput:
        """What a generator asks of its images."""
        return next(head for head in self.targets if head.module == generator)

    def plain(self) -> dict[str, Any]:
        """As JSON holds it; further encoders and generators only where there are any: what was made
        before fits."""
        return {name: value for name, value in self.model_dump(mode="json").items() if value != []}

    def fingerprint(self) -> str:
        return fingerprint(self.plain())
