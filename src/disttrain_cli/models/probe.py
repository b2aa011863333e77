"""Synthetic inputs of given sizes: batches and state tensors with random values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from disttrain_cli.models.division import own_rows
from disttrain_cli.models.graph import LayerInfo, live_tensors
from disttrain_cli.models.layer import Batch, Items, TensorSpec
from disttrain_cli.spec.heads import Grid, Item
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.library_images import LibraryItems
from disttrain_cli.spec.work import Work

Given = int | Sequence[Grid]


def probe_work(
    inputs: ModelInputs,
    module: str,
    *,
    windows: bool = True,
    documents: Sequence[Sequence[int]] = (),
    **items: Given,
) -> Work:
    """Return a module's work in a probe batch of these sizes (see `probe_batch`).

    Args:
        windows: count as a step's work; else as operators on the meta device, which ignore windows.
    """
    head = inputs.head(module)
    if head is not None:
        sizes = [head.size(rows * columns) for rows, columns in grids_of(items.get(head.item, 0))]
        return Work(len(sizes), sum(sizes), sum(size * size for size in sizes))
    lengths = [length for sequence in documents for length in sequence]
    return Work(
        len(documents),
        sum(lengths),
        int(inputs.length_sq(lengths).sum()) if windows else sum(n * n for n in lengths),
    )


def grids_of(given: Given) -> list[Grid]:
    """Return the grids of items, equal ones adjacent; a mere count if all items are alike.

    Lists from JSON become tuples.
    """
    if isinstance(given, int):
        return [(1, 1)] * given
    return sorted((rows, columns) for rows, columns in given)


def probe_batch(
    inputs: ModelInputs,
    *,
    documents: Sequence[Sequence[int]] = (),
    device: torch.device | str = "cpu",
    seed: int = 0,
    length: int | None = None,
    **items: Given,
) -> Batch:
    """Return a batch with sequences of samples of these lengths, and items of each modality.

    Items are given as `image=[(4, 6), (4, 6)]`, `audio=2`, `target=1`. Tokens of encoders' items
    take the first positions of the sequences and those of targets the last. If the sequences have
    no room for them (or there are none), the batch has no positions for them and serves the other
    modules only.

    Args:
        documents: for each sequence the tokens of its samples; the rest of the sequence is padding.
        length: tokens of a sequence, padding included; the model's own if None.
        items: by modality, patches (rows, columns) of each item, or their count if all are alike.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.device("cpu"):
        made = {
            item: _items(inputs, item, grids_of(items.get(item, 0)), generator, device)
            for item in dict.fromkeys(head.item for head in inputs.heads)
        }
        batch = Batch(made, targets=float(max(1, len(made.get("target", ())))))
        if documents:
            size = length or inputs.sequence_length
            batch = _with_tokens(batch, inputs, documents, size, generator)
    return _moved(batch, torch.device(device))


def row_count(spec: TensorSpec, inputs: ModelInputs, batch: Batch) -> int:
    """Return the rows of a state tensor for an entire batch."""
    if spec.item == "sequence":
        assert batch.token_ids is not None
        return batch.token_ids.numel()
    return _rows(inputs, spec.item, spec.rows, batch.of(spec.item).grids)


def _rows(inputs: ModelInputs, item: Item, column: str, grids: Sequence[Grid]) -> int:
    rows, head = inputs.rows(item, column), inputs.of(item)[0]
    return sum(rows.of(head.size(height * width)) for height, width in grids)


def state_at(
    table: list[LayerInfo],
    cut: int,
    inputs: ModelInputs,
    batch: Batch,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    tp: int = 1,
) -> dict[str, Tensor]:
    """Return random state for the cut before layer `cut`: standard normal leaves that require grad.

    In a TP group the first rank's, which has the local rows of split tensors.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    state = {}
    for spec in live_tensors(table, cut):
        rows = row_count(spec, inputs, batch)
        shape = (own_rows(rows, tp, 0)[1] if spec.split else rows, *spec.shape)
        tensor = _normal(shape, generator, torch.device(device))
        state[spec.name] = tensor.to(device, dtype).requires_grad_()
    return state


def _normal(shape: Sequence[int], generator: torch.Generator, device: torch.device) -> Tensor:
    """Return standard normal numbers, drawn by a GPU itself: one thread of its host takes seconds.

    Those for a CPU follow from `generator`; the meta device has none.
    """
    if device.type == "cpu":
        return torch.randn(shape, generator=generator)
    make = torch.empty if device.type == "meta" else torch.randn
    return make(tuple(shape), device=device)


def entry_state(
    table: list[LayerInfo],
    module: str,
    inputs: ModelInputs,
    batch: Batch,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return random state at the entry of a module (see `state_at`)."""
    cut = next(i for i, layer in enumerate(table) if layer.module == module)
    return state_at(table, cut, inputs, batch, device, dtype, seed)


def _items(
    inputs: ModelInputs,
    item: Item,
    grids: list[Grid],
    generator: torch.Generator,
    device: torch.device | str,
) -> Items:
    values, tables = {}, {}
    for number, head in enumerate(inputs.of(item)):
        if isinstance(head, LibraryItems):
            packed = [head.example(rows * columns) for rows, columns in grids]
            values[number] = [torch.from_numpy(one.values)[None] for one in packed]
            tables[number] = [one.table[None] for one in packed]
            continue
        shapes = [(sum(1 for _ in run), *head.shape_of(grid)) for grid, run in groupby(grids)]
        blocks = [_normal(shape, generator, torch.device(device)) for shape in shapes]
        # without items still an empty tensor, whose shape layers read
        values[number] = blocks or [torch.zeros((0, *head.shape_of((1, 1))))][: int(head.alike)]
    if item != "target":
        return Items(grids, values, tables=tables, seeds=torch.arange(len(grids)))
    seeds = torch.randint(2**31, (len(grids),), generator=generator)
    return Items(grids, values, seeds=seeds, weights=torch.ones(len(grids)), noise_seeds=seeds)


def _with_tokens(
    batch: Batch,
    inputs: ModelInputs,
    documents: Sequence[Sequence[int]],
    length: int,
    generator: torch.Generator,
) -> Batch:
    shape = (len(documents), length)
    numbers, positions = torch.full(shape, -1), torch.zeros(shape, dtype=torch.int64)
    for row, lengths in enumerate(documents):
        assert sum(lengths) <= length, "samples longer than their sequence"
        start = 0
        for number, size in enumerate(lengths):
            numbers[row, start : start + size] = number
            positions[row, start : start + size] = torch.arange(size)
            start += size
    token_ids = torch.randint(inputs.vocabulary, shape, generator=generator)
    labels = torch.where(
        numbers >= 0, torch.randint(inputs.vocabulary, shape, generator=generator), -100
    )
    free = (numbers.flatten() >= 0).nonzero().flatten()
    counts = {
        item: _rows(inputs, item, "tokens", prepared.grids)
        for item, prepared in batch.items.items()
    }
    items, fits, first = {}, sum(counts.values()) <= len(free), 0
    for item, prepared in batch.items.items():
        # targets take the last positions
        start = len(free) - counts[item] if item == "target" else first
        first += 0 if item == "target" else counts[item]
        items[item] = replace(prepared, rows=free[start : start + counts[item]] if fits else None)
    lengths = [size for one in documents for size in (*one, length - sum(one)) if size]
    return replace(
        batch,
        items=items,
        token_ids=token_ids,
        positions=positions.expand(3, *shape) if inputs.positions == "mrope" else positions,
        sample_lengths=lengths,
        sample_seeds=torch.arange(len(lengths)),
        labels=labels,
        label_tokens=float(max(1, int((labels >= 0).sum()))),
    )


def _moved(batch: Batch, device: torch.device) -> Batch:
    host = {"noise_seeds"} if device.type != "meta" else set()  # read on the host (`noise`)

    def move(value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)

    items = {
        item: Items(
            **{
                name: value if name in host else move(value)
                for name, value in vars(prepared).items()
            }
        )
        for item, prepared in batch.items.items()
    }
    rest = {name: move(value) for name, value in vars(batch).items() if name != "items"}
    return Batch(items, **rest)
