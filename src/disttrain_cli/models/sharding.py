"""Tensor parallelism of a run's modules: which TP sizes fit, one rank's part of a layer, and what a group reduces."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from disttrain_cli.models.division import parts, pieces, shard
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.spec.inputs import Item, ModelInputs
from disttrain_cli.spec.profile import Polynomial
from disttrain_cli.spec.runfile import Run

__all__ = ["all_reduce_values", "shard", "tp_degrees"]


def tp_degrees(run: Run, module: str, most: int) -> list[int]:
    """TP sizes that fit a module, ascending: divisors of `most` that divide heads, KV heads, FFN widths, vocabulary.

    A layer that no rule divides (convolutions, a ViT's embedding) is whole on every rank at any TP size.

    Raises:
        SpecError: the model's configuration is wrong.
    """
    counts = {count for layer in _one_of_each_kind(run, module).values() for count in pieces(layer)}
    return [tp for tp in range(1, most + 1) if most % tp == 0 and not any(count % tp for count in counts)]


def all_reduce_values(run: Run, module: str) -> dict[str, Polynomial]:
    """Numbers that a TP group reduces in one forward, by kind of layer, as polynomials in the module's work.

    Counted where the rules say that partial sums arise: outputs of row-parallel linears and of an embedding divided
    by ids, inputs of a head divided by ids (its gradient). The backward of a layer reduces as many. An LLM reduces
    its padding too.

    Raises:
        SpecError: the model's configuration is wrong.
    """
    table, inputs = layer_table(run), describe(run)
    sizes = _sizes(inputs, inputs.item(module))
    works = np.array([probe_work(inputs, module, **size) for size in sizes], dtype=float)[:, : len(sizes)]
    found = {}
    for index, layer in _one_of_each_kind(run, module).items():
        counts = []
        for size in sizes:
            batch = probe_batch(inputs, device="meta", **size)
            counts.append(_count(layer, state_at(table, index, inputs, batch, "meta"), batch))
        terms = [float(round(term)) for term in np.linalg.solve(works, counts)] + [0.0]
        found[layer.kind] = Polynomial(per_item=terms[0], per_token=terms[1])
    return found


def _one_of_each_kind(run: Run, module: str) -> dict[int, PipelineLayer]:
    """The first layer of every kind of a module on the meta device, by its place in the model."""
    first: dict[str, int] = {}
    for index, info in enumerate(layer_table(run)):
        if info.module == module:
            first.setdefault(info.kind, index)
    return {index: build_layers(run, index, index + 1, device="meta")[0] for index in first.values()}


def _sizes(inputs: ModelInputs, item: Item) -> list[dict[str, Any]]:
    """As many probe sizes as there are amounts that rows depend on: images and patches; else the number of items."""
    if item == "image":
        assert inputs.image is not None
        m = inputs.image.merge
        return [{"grids": [(m, m)]}, {"grids": [(m, 3 * m), (m, 3 * m)]}]
    sizes: dict[Item, dict[str, Any]] = {
        "audio": {"clips": 1}, "sequence": {"documents": [[1]]}, "target": {"targets": 1}}
    return [sizes[item]]


def _count(layer: PipelineLayer, state: dict[str, Tensor], batch: Any) -> int:
    counted = [0]

    def add(which: str, part: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> None:
        counted[0] += given[0].numel() if which == "input" else made.numel()

    division = layer.division
    for _, part in parts(layer, (*division.row, *division.vocabulary)):
        head = isinstance(part, nn.Linear) and any(part is other for _, other in parts(layer, division.vocabulary))
        part.register_forward_hook(partial(add, "input" if head else "output"))
    with torch.no_grad():
        layer(state, batch)
    return counted[0]
