"""Packed sequences as columns: all the data that an ordering needs.

A column has one value or row for each sequence, each of its samples, or each of its items,
concatenated over all sequences.

| column | of | content |
|---|---|---|
| sample_start | [Q + 1] | offset of the samples of each sequence |
| samples | [samples] | rows of the index |
| tokens, label_tokens | [Q] | without padding |
| length_sq | [Q] | Σ length² over the samples inside |
| ITEM.start | [Q + 1] | offset of the items of each sequence, of every modality |
| ITEM.segment | [items] | segments of the index, in the order of the sequences |
| ITEM.grid | [items, 2] | rows, columns |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import ranges, starts_of
from disttrain_cli.data.columns import Columns
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.index import KINDS

if TYPE_CHECKING:
    from disttrain_cli.data.index.sample_index import Index

START = "start"  # suffix of the names of columns of offsets


def columns_of(index: Index, sample_start: Ints, samples: Ints) -> dict[str, NDArray[Any]]:
    """Return the columns of sequences [Q] of these samples, each as narrow as the index allows."""
    sequences = len(sample_start) - 1
    lengths = index.lengths[samples].astype(np.int64)

    def per_sequence(values: Ints) -> Ints:
        total = starts_of(values)
        return total[sample_start[1:]] - total[sample_start[:-1]]

    columns: dict[str, NDArray[Any]] = {
        "sample_start": sample_start,
        "samples": samples.astype(_narrow(len(index))),
        "tokens": per_sequence(lengths).astype(np.int32),
        "length_sq": per_sequence(index.inputs.length_sq(lengths)),
        "label_tokens": per_sequence(index.label_tokens[samples]).astype(np.int32),
    }
    first = index.segment_start[samples]
    counts = index.segment_start[samples + 1] - first
    segments = ranges(first, counts)
    kinds = index.kinds[segments]
    sequence = np.repeat(
        np.repeat(np.arange(sequences, dtype=np.int32), np.diff(sample_start)), counts
    )
    for item, kind in KINDS.items():
        at = np.flatnonzero(kinds == kind)
        own = segments[at]
        columns |= {
            f"{item}.start": starts_of(np.bincount(sequence[at], minlength=sequences)),
            f"{item}.segment": own.astype(_narrow(len(index.kinds))),
            f"{item}.grid": index.grids[own].astype(np.int32),
        }
    return columns


def part_of(columns: Columns, low: int, high: int) -> dict[str, NDArray[Any]]:
    """Return the columns of sequences `low` to before `high`."""
    part: dict[str, NDArray[Any]] = {
        name: columns[name][low:high] for name in ("tokens", "length_sq", "label_tokens")
    }
    for start, members in [("sample_start", ["samples"])] + [
        (f"{item}.start", [f"{item}.segment", f"{item}.grid"]) for item in KINDS
    ]:
        begin, end = columns[start][low], columns[start][high]
        part[start] = columns[start][low : high + 1] - begin
        part |= {name: columns[name][begin:end] for name in members}
    return part


def joined(parts: list[dict[str, NDArray[Any]]]) -> dict[str, Ints]:
    """Return the columns of all these sequences, concatenated, in 64 bits."""
    whole = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        if name.endswith(START):
            pieces = [starts_of(np.concatenate([np.diff(piece) for piece in pieces]))]
        whole[name] = np.concatenate(pieces).astype(np.int64)
    return whole


def _narrow(values: int) -> type[np.signedinteger[Any]]:
    return np.int32 if values < 1 << 31 else np.int64
