"""What a rank's loader would bring for a slot: arrays of the right shapes, all zeros, for which no
data is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from disttrain_cli.data.sequences import PADDING_DOCUMENT
from disttrain_cli.data.slots import Ints, Slot, SlotBatch
from disttrain_cli.spec.inputs import ImageInput, number_of


def empty_inputs(slot: Slot, lengths: Sequence[int], unit: str, fields: set[str]) -> SlotBatch:
    """Inputs of a unit's first replica; of each of its sequences the samples have these lengths.

    Args:
        fields: keys of `models.layer.FIELDS`.
    """
    own, inputs = slot.replicas[unit][0], slot.inputs
    arrays: dict[str, Any] = {"image_grids": slot.image_grid[own.images]}
    if inputs.audio is not None:
        arrays["clips"] = np.array(len(own.clips), np.int64)
        if "audio" in fields:
            arrays["audio_features"] = np.zeros(
                (len(own.clips), inputs.audio.mel_bins, inputs.audio.frames), np.float32
            )
    if asked := _asked(fields, "pixels"):
        blocks = [_pixels(arrays["image_grids"], head) for head in inputs.images]
        nothing = [np.zeros((0, 1, 1, 1), np.uint8)] * len(blocks[0])
        arrays["pixels"] = blocks[0] if 0 in asked else None
        if asked - {0}:
            arrays["other_pixels"] = [
                array
                for number, block in enumerate(blocks)
                if number
                for array in (block if number in asked else nothing)
            ]
    drawn = _asked(fields, "targets")
    if drawn or "weights" in fields:
        count = len(own.targets)
        targets = [
            np.zeros((count if number in drawn else 0, *head.shape), np.uint8)
            for number, head in enumerate(inputs.targets)
        ]
        arrays |= {
            "target_weights": np.ones(count, np.float32),
            "noise_seeds": np.zeros(count, np.int64),
            "target_pixels": targets[0] if 0 in drawn else None,
            "other_targets": targets[1:] if drawn - {0} else None,
        }
    if "dropout" in fields:
        arrays |= {
            f"{name}_seeds": np.zeros(len(items), np.int64)
            for name, items in (("image", own.images), ("clip", own.clips), ("target", own.targets))
        }
    if fields & {"tokens", "layout", "context", "labels"}:
        arrays |= _sequences(slot, unit, lengths, fields)
    return SlotBatch(**arrays)


def _sequences(slot: Slot, unit: str, lengths: Sequence[int], fields: set[str]) -> dict[str, Ints]:
    own, inputs = slot.replicas[unit][0], slot.inputs
    shape, used = (len(own.sequences), inputs.sequence_length), sum(lengths)
    arrays: dict[str, Ints] = {}
    if "layout" in fields:
        documents, positions = np.full(shape, PADDING_DOCUMENT, np.int64), np.zeros(shape, np.int64)
        documents[:, :used] = np.repeat(np.arange(len(lengths)), lengths)
        positions[:, :used] = np.concatenate([np.arange(length) for length in lengths])
        arrays |= {"documents": documents, "positions": positions}
    if "tokens" in fields:
        arrays |= {
            "token_ids": np.zeros(shape, np.int64),
            "image_rows": _rows(slot, own.images, "image", "tokens"),
        }
        if inputs.audio is not None:
            arrays["audio_rows"] = _rows(slot, own.clips, "audio", "tokens")
    if "context" in fields:
        arrays["context_rows"] = _rows(slot, own.targets, "target", "context")
    if "labels" in fields:
        arrays["labels"] = np.zeros(shape, np.int64)
    return arrays


def _rows(slot: Slot, items: Ints, item: str, column: str) -> Ints:
    """Places for the rows of some items; any will do."""
    return np.zeros(int(slot.rows(item, column)[items].sum()) if len(items) else 0, np.int64)


def _pixels(grids: Ints, head: ImageInput) -> list[Any]:
    """By run of equal grids, the pixels for one encoder."""
    return [
        np.zeros(
            (sum(1 for _ in run), head.channels, rows * head.patch_px, columns * head.patch_px),
            np.uint8,
        )
        for (rows, columns), run in groupby(map(tuple, grids.tolist()))
    ]


def _asked(fields: set[str], name: str) -> set[int]:
    """Numbers of the encoders ("pixels") or generators ("targets") whose pixels are asked for."""
    return {number_of(field) for field in fields if field.partition(".")[0] == name}
