"""Generators over images of several sizes: each layer runs once per image size.

Items of one grid are contiguous, so that their rows of a state tensor are a slice. State tensors
with one row per patch are reshaped to [images, patches, …], as diffusers' classes expect; no image
is padded, and attention stays within each image.
"""

from __future__ import annotations

from itertools import groupby

import torch
from torch import Tensor

from disttrain_cli.models.dropout import begin
from disttrain_cli.models.layer import LOSS_PREFIX, Batch, Items, PipelineLayer

#: State tensors with a row for each patch; all others have equally many rows for every image.
OF_PATCHES = ("patches", "latents")


def by_size(layer: PipelineLayer, state: dict[str, Tensor], batch: Batch) -> dict[str, Tensor]:
    """Return a layer's outputs for all images of a batch: `compute` per image size, joined."""
    batches = sized(batch)
    parts: list[dict[str, Tensor]] = [{} for _ in batches]
    for name in layer.reads:
        for part, rows in zip(parts, _split(name, state[name], batches), strict=True):
            part[name] = rows
    made = []
    for part, of_size in zip(parts, batches, strict=True):
        if layer.dropouts:
            begin(layer, (part, of_size))
        made.append(layer.compute(part, of_size))
    return {name: _joined(name, [one[name] for one in made]) for name in made[0]}


def sized(batch: Batch) -> list[Batch]:
    """Return the batch's images by size, as batches with caches of their own; created once."""
    of_sizes: list[Batch] = []
    first, items = 0, batch.of("target")
    for number, (_, run) in enumerate(groupby(items.grids)):
        count, name = len(list(run)), f"size/{number}"
        if name not in batch.cache:
            batch.cache[name] = _part(batch, items, number, slice(first, first + count))
        of_sizes.append(batch.cache[name])
        first += count
    return of_sizes


def _part(batch: Batch, items: Items, number: int, which: slice) -> Batch:
    def of_size(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[which]

    part = Items(
        items.grids[which],
        {module: [runs[number]] for module, runs in items.values.items()},
        seeds=of_size(items.seeds),
        weights=of_size(items.weights),
        noise_seeds=of_size(items.noise_seeds),
    )
    return Batch({"target": part}, targets=batch.targets)


def _split(name: str, rows: Tensor, batches: list[Batch]) -> list[Tensor]:
    grids = [batch.of("target").grids for batch in batches]
    counts = [len(of_size) for of_size in grids]
    if name in OF_PATCHES:
        sizes = [count * one[0][0] * one[0][1] for count, one in zip(counts, grids, strict=True)]
        parts = rows.split(sizes)
        return [part.unflatten(0, (count, -1)) for part, count in zip(parts, counts, strict=True)]
    each = len(rows) // sum(counts)
    return list(rows.split([count * each for count in counts]))


def _joined(name: str, parts: list[Tensor]) -> Tensor:
    if name.startswith(LOSS_PREFIX):
        return torch.stack(parts).sum()
    if name in OF_PATCHES:
        parts = [part.flatten(0, 1) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
