"""Flat ranges and tensor-parallel parts as boxes of whole tensors."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.models.division import Shard, piece
from disttrain_cli.runtime.checkpoints.boxes import boxes, flat_boxes, spread

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@given(shape=SHAPES, data=st.data())
def test_a_range_is_boxes_in_its_own_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    whole = torch.arange(count).view(shape)
    found = [
        whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))].reshape(
            -1
        )
        for offsets, sizes in boxes(shape, start, stop)
    ]
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert torch.equal(
        torch.cat([torch.zeros(0, dtype=torch.int64), *found]), torch.arange(start, stop)
    )


@given(
    rest=SHAPES,
    dim=st.integers(0, 4),
    own=st.integers(1, 3),
    packed=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    tp=st.integers(1, 3),
    data=st.data(),
)
def test_a_range_of_a_part_lies_in_the_whole_where_the_part_was_cut(
    rest: tuple[int, ...],
    dim: int,
    own: int,
    packed: tuple[int, ...],
    tp: int,
    data: st.DataObject,
) -> None:
    dim = min(dim, len(rest))
    shape = (*rest[:dim], sum(packed) * tp * own, *rest[dim:])
    whole = torch.arange(math.prod(shape)).view(shape)
    shard = Shard(dim, packed, tp, data.draw(st.integers(0, tp - 1)))
    part = piece(whole, shard).contiguous()
    start = data.draw(st.integers(0, part.numel()))
    values = part.view(-1)[start : data.draw(st.integers(start, part.numel()))]
    found = 0
    for offsets, box in flat_boxes(values, start, part.shape, shard):
        place = tuple(slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True))
        assert torch.equal(whole[place], box)
        found += box.numel()
    assert found == len(values)
    assert (
        sum(box.numel() for _, box in spread((0,) * part.ndim, part, part.shape, shard))
        == part.numel()
    )
