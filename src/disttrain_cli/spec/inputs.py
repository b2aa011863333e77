"""The input specification: what a model asks of its data, in numbers, so that CPU nodes need no torch.

Written by `models.describe`, kept in the profile and beside the index; read by `data`.
"""

from __future__ import annotations

import math

from pydantic import Field

from disttrain_cli.spec.files import Strict, fingerprint
from disttrain_cli.spec.work import Work


class ImageInput(Strict):
    """How an image that the model reads is prepared (encoder)."""

    module: str
    patch_px: int = Field(ge=1, description="Side of a patch in pixels.")
    merge: int = Field(1, ge=1, description="Patches per side that one LLM token stands for.")
    channels: int = 3
    mean: float = Field(0.5, description="Subtracted from pixel values scaled to 0..1.")
    std: float = Field(0.5, gt=0)
    max_pixels: int = Field(description="Pixel budget of one image.")
    extra_tokens: int = Field(1, ge=0, description="Rows the encoder adds to every image (a class token).")

    def grid(self, width_px: int, height_px: int) -> tuple[int, int]:
        """Patches (rows, columns) of an image after resizing: whole merge blocks, within the pixel budget.

        The aspect ratio is kept as far as whole blocks allow; never less than one block per side.
        """
        block_px = self.patch_px * self.merge
        scale = min(1.0, math.sqrt(self.max_pixels / (width_px * height_px)))
        rows = max(1, round(height_px * scale / block_px))
        columns = max(1, round(width_px * scale / block_px))
        limit = max(1, self.max_pixels // (block_px * block_px))
        while rows * columns > limit:
            if rows >= columns:
                rows -= 1
            else:
                columns -= 1
        return rows * self.merge, columns * self.merge

    def patches(self, width_px: int, height_px: int) -> int:
        """Rows the encoder computes for an image, without the extra ones."""
        rows, columns = self.grid(width_px, height_px)
        return rows * columns

    def tokens(self, width_px: int, height_px: int) -> int:
        """LLM tokens of an image."""
        return self.patches(width_px, height_px) // (self.merge * self.merge)


class TargetInput(Strict):
    """How an image that the model learns to generate is prepared (generator)."""

    module: str
    size_px: int = Field(ge=8, description="Side of the square image.")
    channels: int = 3
    context_tokens: int = Field(ge=1, description="LLM positions that condition one image.")
    latent_pixels: int = Field(ge=1, description="Height × width of the tensor that is denoised.")

    def work(self, images: float) -> Work:
        """Generator work of that many images."""
        return Work(images, images * self.latent_pixels, images * float(self.latent_pixels) ** 2)


class ModelInputs(Strict):
    """Everything the data room needs to know of a model."""

    llm: str = Field(description="Name of the LLM module.")
    vocabulary: int = Field(ge=1)
    sequence_length: int = Field(ge=16)
    image: ImageInput | None = None
    target: TargetInput | None = None

    def fingerprint(self) -> str:
        return fingerprint(self)
