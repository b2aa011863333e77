"""Cached latents: outputs of a VAE's encoder for every image to generate.

They are in `runs/NAME/latents/MODULE/`. `latents.json` (`Latents`) records their origin and names a
flat file for each shard of the index. That holds, for the shard's images in the order of the index,
the mean and the log-variance of their latents as the encoder returns them: [images, 2 · channels,
height, width], little-endian float32, or bfloat16 for a run in that precision; images in buckets
are padded with zeros if they are smaller than the largest. An image that cannot be decoded is all
ones, bit by bit (`MARK`). A file's name depends on everything that determines its bytes.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from disttrain_cli.spec.buckets import Buckets
from disttrain_cli.spec.files import Strict

DESCRIPTION = "latents.json"
#: Every byte of the row of an image that cannot be decoded; no encoder output begins with `MARKED`
#: of them.
MARK, MARKED = 0xFF, 4


class Origin(Strict):
    """Dependencies of latents, apart from the images."""

    configuration: str = Field(description="Fingerprint of the VAE's configuration.")
    weights: str = Field(
        description="Fingerprint of its weights, or the seed from which they are drawn."
    )
    image_size: int = Field(description="Side length of an image in pixels.")
    shape: tuple[int, int, int] = Field(
        description="Shape of the latents of an image: 2 · channels, height, width."
    )
    precision: Literal["fp32", "bf16"]
    buckets: Buckets | None = Field(
        None, description="Sizes of the images, if they differ; shape is then that of the largest."
    )

    @property
    def image_bytes(self) -> int:
        """Bytes of one image."""
        return math.prod(self.shape) * (2 if self.precision == "bf16" else 4)


class LatentFile(Strict):
    """Images of one shard."""

    name: str
    images: int = Field(ge=0, description="Size of the file; 0 = there is no file.")


class Latents(Strict):
    """Contents of a generator's files."""

    version: Literal[1] = 1
    data: str = Field(description="Fingerprint of the index.")
    origin: Origin
    files: list[LatentFile] = Field(description="Entry for each shard, in the order of the index.")
