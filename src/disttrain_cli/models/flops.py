"""FLOPs of every layer, counted on the meta device, as polynomials in `spec.work`.

Model FLOPs, as in MFU: a sequence counts as its samples, unpadded, each attending to itself alone;
attention within a sample is not discounted for causality. So the LLM is counted on one sample per
sequence, L = its tokens; padding does not count. Sliding windows do: a sample counts the pairs of
tokens that they leave (`ModelInputs.length_sq`), so the count here, without windows, is the cost
per pair.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.models.attention import unpadded
from disttrain_cli.models.graph import build_layers, describe, layer_table, of_model
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.models.signatures import SignatureMode
from disttrain_cli.models.weight_parts import WeightPart, add_weight_gradients, deferred, split
from disttrain_cli.spec.heads import Head
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.library_images import LibraryItems
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of one kind of layer; a multiply-add counts as two."""

    parameters: int
    forward: Polynomial
    backward: Polynomial
    backward_input: Polynomial
    weights: Polynomial  # weight-gradient part (W) of a split backward


class Counts(NamedTuple):
    """FLOPs of one pass of a layer: forward, full backward, gradients of inputs alone."""

    forward: int
    backward: int
    backward_input: int


def layer_flops(layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch) -> Counts:
    """Return the FLOPs of a layer for these inputs, on any device, preferably meta.

    Both backwards include the gradients of all inputs in `state` that require one.
    """
    from torch.utils.flop_counter import FlopCounterMode

    model: dict[Any, Callable[..., int]] = {
        operator: _without_scores(operator)
        for operator in (
            torch.ops.torch_attn._varlen_attn_backward,
            torch.ops.aten._scaled_dot_product_efficient_attention_backward,
        )
    }
    model[torch.ops.disttrain.scores] = lambda *_, **__: 0  # computed again
    with unpadded(), SignatureMode(), FlopCounterMode(display=False) as forward:
        results = [tensor for tensor in layer(dict(state), batch).values() if tensor.requires_grad]
    seeds = [torch.ones_like(tensor) for tensor in results]
    inputs = [tensor for tensor in state.values() if tensor.requires_grad]
    with (
        SignatureMode(),
        FlopCounterMode(display=False, custom_mapping=model) as backward_input,
    ):
        if results and inputs:
            torch.autograd.grad(results, inputs, seeds, retain_graph=True, allow_unused=True)
    with SignatureMode(), FlopCounterMode(display=False, custom_mapping=model) as backward:
        torch.autograd.backward(results, seeds)
    return Counts(*(counter.get_total_flops() for counter in (forward, backward, backward_input)))


def weight_flops(layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch) -> int:
    """Return the FLOPs of the weight gradients (W) in a layer's split backward (`weight_parts`).

    The layer itself stays converted to the split backward.
    """
    from torch.utils.flop_counter import FlopCounterMode

    split(layer)
    parts: list[WeightPart] = []
    with SignatureMode():
        roots = [tensor for tensor in layer(dict(state), batch).values() if tensor.requires_grad]
        if roots:
            with deferred(parts):
                torch.autograd.backward(roots, [torch.ones_like(tensor) for tensor in roots])
    with SignatureMode(), FlopCounterMode(display=False) as counter:
        add_weight_gradients(parts)
    return int(counter.get_total_flops())


def _without_scores(operator: Any) -> Callable[..., int]:
    """Return a counter of attention's backward without recomputed scores: 4 of its 5 products."""
    from torch.utils.flop_counter import flop_registry

    def counted(*args: Any, **kwargs: Any) -> int:
        flops = flop_registry[operator](*args, **kwargs)
        keys, values = (args[number].shape[-1] for number in (1, 3))
        return flops * (2 * keys + 2 * values) // (3 * keys + 2 * values)

    counted._get_raw = True  # type: ignore[attr-defined]  # tensors, not their shapes
    return counted


@of_model
def count_flops(run: Run) -> dict[str, dict[str, LayerFlops]]:
    """Return the FLOPs of all layers of a run's model, by module and kind of layer.

    Raises:
        SpecError: the model's configuration is wrong.
    """
    table, inputs = layer_table(run), describe(run)
    counted: dict[str, dict[str, LayerFlops]] = {}
    for index, info in enumerate(table):
        kinds = counted.setdefault(info.module, {})
        if info.kind in kinds:
            continue
        head = inputs.head(info.module)
        layer = build_layers(run, index, index + 1, device="meta")[0]
        works, given = [], []
        for sizes in _sizes(head):
            batch = probe_batch(inputs, device="meta", **sizes)
            given.append((state_at(table, index, inputs, batch, "meta"), batch))
            sizes.pop("length", None)
            works.append(probe_work(inputs, info.module, windows=False, **sizes))
        counts = [layer_flops(layer, *one) for one in given]
        later = [weight_flops(layer, *one) for one in given]
        polynomials = [
            _exact(works, column, head) for column in (*zip(*counts, strict=True), later)
        ]
        kinds[info.kind] = LayerFlops(info.parameters, *polynomials)
    return counted


def _sizes(head: Head | None) -> list[dict[str, Any]]:
    """Return probe sizes for which the features of `Work` are linearly independent."""
    if head is None:  # whole chunks of recurrent mixers, of 64 to 256 rows
        return [
            {"documents": [[length]] * sequences, "length": length}
            for sequences, length in ((1, 256), (1, 768), (2, 256), (3, 1024))
        ]
    if head.alike:
        return [{head.item: 1}]
    if isinstance(head, LibraryItems):
        small, medium, large = head.spread
        return [{head.item: grids} for grids in ([small], [medium], [small, small], [large])]
    p = head.period
    return [
        {head.item: [head.grid_of(rows * p, columns * p)] * count}
        for count, rows, columns in ((1, 4, 4), (1, 8, 6), (2, 4, 4), (3, 8, 8))
    ]


def _exact(works: Sequence[Work], counts: Sequence[int], head: Head | None) -> Polynomial:
    """Return the polynomial through all counts; a constant per item if all items have one size.

    A projector works once per block of merge² patches, so that FLOPs of a patch need not be
    integers, while those of the smallest item are.
    """
    smallest = 1 if head is None else math.prod(head.grid_of(head.period, head.period))
    alike = head is not None and head.alike
    features = np.array(works, dtype=float)[:, : 1 if alike else 3]
    terms = [*_solved(features, counts, smallest), 0.0, 0.0]
    polynomial = Polynomial(per_item=terms[0], per_token=terms[1], per_length_sq=terms[2])
    if head is not None and head.packed:  # an image's work is not exactly that of its rows
        return polynomial
    if head is None and not _fits(polynomial, works, counts):
        # a convolution over packed rows computes a few that are dropped
        base, *terms = _solved(np.insert(features, 0, 1.0, axis=1), counts, smallest)
        polynomial = Polynomial(
            base=base, per_item=terms[0], per_token=terms[1], per_length_sq=terms[2]
        )
        # chunks of recurrent mixers that have no kernels here
        assert _fits(polynomial, works, counts, 1e-2), (works, counts, polynomial)
        return polynomial
    assert _fits(polynomial, works, counts), (works, counts, polynomial)
    return polynomial


def _solved(features: Any, counts: Sequence[int], smallest: int) -> list[float]:
    scale = features.max(axis=0)
    solution = (
        np.linalg.lstsq(features / scale, np.array(counts, dtype=float), rcond=None)[0] / scale
    )
    return [round(value * smallest) / smallest for value in solution]


def _fits(
    polynomial: Polynomial, works: Sequence[Work], counts: Sequence[int], rel_tol: float = 1e-12
) -> bool:
    return all(
        math.isclose(polynomial(work), count, rel_tol=rel_tol)
        for work, count in zip(works, counts, strict=True)
    )
