"""What an ordering decides: for every slot of a step, which replica of which unit works on which
items.

Items of a slot are numbered in canonical order: sequences as the ordering lists them, images, clips
and targets by (sequence, place in the sequence). Replicas refer to them by these numbers, so routes
between units can be derived on every rank without a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.spec.inputs import ModelInputs, number_of
from disttrain_cli.spec.work import Work

Ints = NDArray[np.int64]


def no_items() -> Ints:
    """The numbers of no item."""
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Assignment:
    """What a policy decides: places of the sequences, and how units without the LLM share a slot's
    items."""

    places: Ints  # [n slots, LLM replicas, M] places in the batch; every sequence has one
    carry: bool = False  # replicas are level over the slots of the step too, not only in each one


@dataclass(frozen=True)
class ReplicaItems:
    """The items of one replica of one unit in one slot, as canonical numbers in the replica's own
    order."""

    sequences: Ints  # empty for units without the LLM
    images: Ints  # images of equal grid adjacent: sorted by (grid rows, grid columns, number)
    targets: Ints
    clips: Ints = field(default_factory=no_items)


@dataclass(frozen=True)
class Slot:
    """The k-th microbatch of all LLM replicas together: S = DP_lm · M sequences."""

    inputs: ModelInputs
    sequences: Ints  # [S] packed-sequence ids
    sequence_tokens: Ints  # [S] unpadded tokens
    sequence_length_sq: Ints  # [S] Σ length² over the samples inside
    image_sequence: Ints  # [N images] position in `sequences`
    image_grid: Ints  # [N images, 2] patches (rows, columns)
    target_sequence: Ints  # [N targets] position in `sequences`
    replicas: dict[str, list[ReplicaItems]]  # unit name → its replicas
    clip_sequence: Ints = field(default_factory=no_items)  # [N clips] position in `sequences`

    def rows(self, item: str, column: str) -> Ints:
        """Rows that each item contributes to a state tensor (`models.layer.TensorSpec.rows`)."""
        patches = self.image_grid[:, 0] * self.image_grid[:, 1]
        image, audio, target = self.inputs.image, self.inputs.audio, self.inputs.target
        if item == "image" and column.startswith("patches"):
            return patches + self.inputs.images[number_of(column)].extra_tokens
        if (item, column) == ("image", "tokens"):
            assert image is not None
            return patches // (image.merge * image.merge)
        if item == "audio":
            assert audio is not None
            of_clip = {"positions": audio.positions, "tokens": audio.tokens}[column]
            return np.full(len(self.clip_sequence), of_clip, dtype=np.int64)
        if (item, column) == ("sequence", "tokens"):
            return np.full(len(self.sequences), self.inputs.sequence_length, dtype=np.int64)
        if (item, column) == ("target", "one"):
            return np.ones(len(self.target_sequence), dtype=np.int64)
        if (item, column) == ("target", "context"):
            assert target is not None
            return np.full(len(self.target_sequence), target.context_tokens, dtype=np.int64)
        raise AssertionError(f"no rows for {item}/{column}")

    def items(self, unit: str, replica: int, item: str) -> Ints:
        """Canonical numbers of one replica's items, in its own order."""
        own = self.replicas[unit][replica]
        return {
            "image": own.images,
            "audio": own.clips,
            "sequence": own.sequences,
            "target": own.targets,
        }[item]

    def work(self, module: str, items: ReplicaItems) -> Work:
        """Work that these items bring to a module."""
        item = self.inputs.item(module)
        if item == "image":
            patches = (self.image_grid[items.images, 0] * self.image_grid[items.images, 1]).astype(
                float
            )
            return Work(len(items.images), float(patches.sum()), float((patches**2).sum()))
        if item == "audio":
            assert self.inputs.audio is not None
            return self.inputs.audio.work(float(len(items.clips)))
        if item == "sequence":
            return Work(
                len(items.sequences),
                float(self.sequence_tokens[items.sequences].sum()),
                float(self.sequence_length_sq[items.sequences].sum()),
            )
        return self.inputs.target_of(module).work(float(len(items.targets)))


@dataclass(frozen=True)
class StepOrder:
    """The whole global batch of one step."""

    step: int
    slots: list[Slot]
    label_tokens: int  # over the global batch: the text loss is divided by it
    targets: int  # over the global batch: the image loss is divided by it


@dataclass(frozen=True)
class SlotBatch:
    """Prepared inputs of one replica for one slot, as NumPy arrays; the fields of
    `models.layer.Batch`.

    Pixels are bytes, which the rank normalises (`ImageInput.affine`): a quarter of the memory and
    of the way there. Fields that were not asked for are None.
    """

    image_grids: Ints
    clips: Ints | None = None  # [] how many; of models that hear, always
    pixels: list[NDArray[np.uint8]] | None = None
    other_pixels: list[NDArray[np.uint8]] | None = None
    audio_features: NDArray[np.float32] | None = None
    token_ids: Ints | None = None
    positions: Ints | None = None
    documents: Ints | None = None
    image_rows: Ints | None = None
    audio_rows: Ints | None = None
    context_rows: Ints | None = None
    labels: Ints | None = None
    target_pixels: NDArray[np.uint8] | None = None
    other_targets: list[NDArray[np.uint8]] | None = None
    target_weights: NDArray[np.float32] | None = None
    noise_seeds: Ints | None = None
    image_seeds: Ints | None = None
    clip_seeds: Ints | None = None
    target_seeds: Ints | None = None
