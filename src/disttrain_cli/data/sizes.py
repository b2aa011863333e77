"""Sizes of packed sequences as flat arrays: all that an ordering, and a simulation of one, needs of
the data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import mix, ranges, starts_of
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import SizeSample

SAMPLED_BATCH = 4  # purpose of `mix`, beside those of packing


@dataclass(frozen=True)
class Sizes:
    """Sizes of Q packed sequences; images of all of them lie one after the other."""

    tokens: Ints  # [Q] without padding
    length_sq: Ints  # [Q] Σ length² over the samples inside
    image_start: Ints  # [Q + 1]
    patches: Ints  # [images]
    targets: Ints  # [Q] images to generate
    clips: Ints  # [Q] audio clips

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, chosen: Ints) -> Sizes:
        """The chosen sequences, in that order; one may be chosen several times."""
        counts = np.diff(self.image_start)[chosen]
        return Sizes(
            tokens=self.tokens[chosen],
            length_sq=self.length_sq[chosen],
            image_start=starts_of(counts),
            patches=self.patches[ranges(self.image_start[chosen], counts)],
            targets=self.targets[chosen],
            clips=self.clips[chosen],
        )

    def per_sequence(self, per_image: Ints) -> Ints:
        """[Q] sums of a value per image."""
        total = starts_of(per_image)
        return total[self.image_start[1:]] - total[self.image_start[:-1]]

    def work(self, inputs: ModelInputs) -> dict[str, NDArray[np.float64]]:
        """By module name, [Q, 3]: the columns of `Work` that each sequence brings to the module."""
        work = {inputs.llm: np.stack([np.ones(len(self)), self.tokens, self.length_sq], axis=1)}
        if inputs.images:
            columns = (
                np.diff(self.image_start),
                self.per_sequence(self.patches),
                self.per_sequence(self.patches**2),
            )
            work |= dict.fromkeys(
                [head.module for head in inputs.images], np.stack(columns, axis=1).astype(float)
            )
        if inputs.audio is not None:
            work[inputs.audio.module] = self.clips[:, None] * np.array(inputs.audio.work(1))
        for head in inputs.targets:
            work[head.module] = self.targets[:, None] * np.array(head.work(1))
        return work


def sizes_of(packing: Packing) -> Sizes:
    """The sizes of a packing's sequences."""
    return Sizes(
        tokens=packing.tokens,
        length_sq=packing.length_sq,
        image_start=packing.image_start,
        patches=packing.image_grid.prod(axis=1),
        targets=np.diff(packing.target_start),
        clips=packing.clips,
    )


def sizes_of_sample(sample: SizeSample) -> Sizes:
    """The sizes that a profile keeps."""
    return Sizes(
        tokens=np.array(sample.tokens, dtype=np.int64),
        length_sq=np.array(sample.length_sq, dtype=np.int64),
        image_start=starts_of(np.array([len(images) for images in sample.images], dtype=np.int64)),
        patches=np.array(
            [patches for images in sample.images for patches in images], dtype=np.int64
        ),
        targets=np.array(sample.targets, dtype=np.int64),
        clips=np.array(sample.clips or [0] * len(sample.tokens), dtype=np.int64),
    )


def sampled_batch(sizes: Sizes, count: int, step: int) -> Sizes:
    """A global batch drawn from `sizes`: shuffled, each sequence equally often, other ones with
    every step."""
    turns = -(-count // len(sizes))
    drawn = [
        np.argsort(mix(SAMPLED_BATCH, step, turn, np.arange(len(sizes))), kind="stable")
        for turn in range(turns)
    ]
    return sizes.take(np.concatenate(drawn)[:count])
