"""Boxes of a tensor: ZeRO's flat partitions and tensor-parallel shards in global coordinates.

ZeRO stores flat ranges of parameters. A range of a tensor in row-major order is at most
2 · dims - 1 boxes (a partial row, whole rows, a partial row, and so on inward), and boxes are what
torch.distributed.checkpoint moves between any two layouts. A tensor-parallel shard is a box of the
global tensor too, or one box for each half of a fused parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from disttrain_cli.models.division import Shard

Offsets = tuple[int, ...]  # offsets of a box in its tensor


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Offsets, Offsets]]:
    """Yield (offsets, sizes) of the boxes with elements start .. stop - 1, in row-major order."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        rest = tuple(shape[1:])
        yield (first, *(0 for _ in rest)), (last - first, *rest)
    yield from _in_row(shape, last, last * row, stop)


def _in_row(
    shape: Sequence[int], row: int, start: int, stop: int
) -> Iterator[tuple[Offsets, Offsets]]:
    size = math.prod(shape[1:])
    for offsets, sizes in boxes(shape[1:], start - row * size, stop - row * size):
        yield (row, *offsets), (1, *sizes)


def spread(
    offsets: Offsets, values: Tensor, shape: Sequence[int], shard: Shard | None
) -> Iterator[tuple[Offsets, Tensor]]:
    """Yield a box of this rank's shard as boxes of the global tensor, each with a view of `values`.

    Args:
        offsets: of the box in the shard.
        shape: of the shard.
        shard: its position in the global tensor; None = it is the global tensor.
    """
    if shard is None:
        yield offsets, values
        return
    low, high, first = offsets[shard.dim], offsets[shard.dim] + values.shape[shard.dim], 0
    for width in shard.widths(shape[shard.dim]):  # of each packed part, in the shard
        start, stop = max(low, first), min(high, first + width)
        at, first = start + first * (shard.tp - 1) + width * shard.rank, first + width
        if start < stop:
            view = values.narrow(shard.dim, start - low, stop - start)
            yield (*offsets[: shard.dim], at, *offsets[shard.dim + 1 :]), view


def flat_boxes(
    values: Tensor, start: int, shape: Sequence[int], shard: Shard | None
) -> list[tuple[Offsets, Tensor]]:
    """Return elements start, start + 1, … of this rank's shard as boxes of the global tensor.

    Args:
        values: the elements [count].
        start: index of the first of them in the flattened shard.
        shape: of the shard.
        shard: its position in the global tensor; None = it is the global tensor.
    """
    pieces: list[tuple[Offsets, Tensor]] = []
    at = 0
    for offsets, sizes in boxes(shape, start, start + len(values)):
        count = math.prod(sizes)
        pieces += spread(offsets, values[at : at + count].view(sizes), shape, shard)
        at += count
    return pieces


@dataclass
class Pieces:
    """Boxes of one tensor that this rank writes or reads ("checkpointable" in torch.distributed).

    Boxes that are read may overlap (a master weight's partition and the weight itself), also of
    different dtypes.
    """

    shape: torch.Size
    dtype: torch.dtype
    boxes: list[tuple[Offsets, Tensor]]

    def __create_write_items__(self, key: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(key, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(values.shape))
            for offsets, values in self.boxes
        ]

    def at(self, offsets: Sequence[int]) -> Tensor:
        """Return the values of the box with these offsets."""
        return next(values for box, values in self.boxes if box == tuple(offsets))
