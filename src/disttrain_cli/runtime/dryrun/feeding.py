"""Placeholder loader output for a slot: zero arrays of the right shapes, without reading data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from disttrain_cli.data.modalities.registry import MODALITIES
from disttrain_cli.data.positions import sample_positions
from disttrain_cli.data.sequences import PADDING_DOCUMENT
from disttrain_cli.data.slots import Ints, ItemArrays, Slot, SlotBatch
from disttrain_cli.spec.heads import Head, Item, number_of
from disttrain_cli.spec.library_images import LibraryItems


def empty_inputs(slot: Slot, lengths: Sequence[int], unit: str, fields: set[str]) -> SlotBatch:
    """Return the inputs of a unit's first replica, all zeros.

    Args:
        lengths: tokens of the samples in each of its sequences.
        fields: of `models.layer.PipelineLayer.needs`.
    """
    replica_items = slot.replicas[unit][0]
    tokens = len(replica_items["sequence"]) * slot.inputs.sequence_length
    items = {
        item: _items(slot, item, numbers, fields, tokens)
        for item, numbers in replica_items.items()
        if item != "sequence"
    }
    some = fields & {"tokens", "layout", "labels"}
    return SlotBatch(items, **(_sequences(slot, unit, lengths, fields) if some else {}))


def _items(slot: Slot, item: Item, numbers: Ints, fields: set[str], tokens: int) -> ItemArrays:
    grids, count = slot.items[item].grid[numbers], len(numbers)
    asked = {number_of(name) for name in fields if name.partition(".")[0] == item}
    named = {"context"} if item == "target" else {"tokens", "rows"}
    in_llm = fields & named and slot.inputs.of(item)
    rows = int(slot.rows(item, "tokens")[numbers].sum()) if in_llm else 0
    weighed = item == "target" and bool(asked or "weights" in fields)
    return ItemArrays(
        grids=grids,
        tables={
            number: [head.example(rows * columns).table[None] for rows, columns in grids.tolist()]
            for number, head in enumerate(slot.inputs.of(item))
            if number in asked and isinstance(head, LibraryItems)
        },
        values={number: _values(grids, slot.inputs.of(item)[number]) for number in sorted(asked)},
        # spread evenly over all tokens, of which each rank of a CP group takes its part
        rows=np.arange(rows, dtype=np.int64) * tokens // max(1, rows) if in_llm else None,
        seeds=np.zeros(count, np.int64) if "dropout" in fields else None,
        weights=np.ones(count, np.float32) if weighed else None,
        noise_seeds=np.zeros(count, np.int64) if weighed else None,
    )


def _sequences(slot: Slot, unit: str, lengths: Sequence[int], fields: set[str]) -> dict[str, Ints]:
    items, inputs = slot.replicas[unit][0], slot.inputs
    shape, used = (len(items["sequence"]), inputs.sequence_length), sum(lengths)
    arrays: dict[str, Ints] = {}
    if "layout" in fields:
        documents = np.full(shape, PADDING_DOCUMENT, np.int64)
        documents[:, :used] = np.repeat(np.arange(len(lengths)), lengths)
        of_samples = [sample_positions(inputs.positions, length) for length in lengths]
        one = np.concatenate(of_samples, axis=-1)[..., None, :]
        positions = np.zeros((*one.shape[:-2], *shape), np.int64)
        positions[..., :used] = one
        arrays |= {"documents": documents, "positions": positions}
        if "dropout" in fields:
            arrays["sample_seeds"] = np.zeros(
                shape[0] * (len(lengths) + (used < shape[1])), np.int64
            )
    if "tokens" in fields:
        arrays["token_ids"] = np.zeros(shape, np.int64)
    if "labels" in fields:
        arrays["labels"] = np.zeros(shape, np.int64)
    return arrays


def _values(grids: Ints, head: Head) -> list[Any]:
    """Return, for each run of equal grids, the input arrays of one encoder or generator."""
    if isinstance(head, LibraryItems):
        return [head.example(rows * columns).values[None] for rows, columns in grids.tolist()]
    return [
        np.repeat(
            MODALITIES[head.item].blank(head, (rows, columns))[None], sum(1 for _ in run), axis=0
        )
        for (rows, columns), run in groupby(map(tuple, grids.tolist()))
    ]
