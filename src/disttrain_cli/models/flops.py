"""FLOPs of every layer, counted from the operators on the meta device, as polynomials in `spec.work`.

Model FLOPs, as in MFU: a sequence counts as its samples, unpadded, each attending itself alone; attention
within a sample is not discounted for causality. So the LLM is counted on one sample per sequence, L = its
tokens; the padding and the masked attention between samples that a device really computes are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch, PipelineLayer
from disttrain_cli.models.probe import probe_batch, probe_work, state_at
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import Polynomial
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.work import Work


@dataclass(frozen=True)
class LayerFlops:
    """FLOPs of one kind of layer; a multiply-add counts as two."""

    parameters: int
    forward: Polynomial
    backward: Polynomial


def layer_flops(layer: PipelineLayer, state: Mapping[str, Tensor], batch: Batch) -> tuple[int, int]:
    """FLOPs of one forward and one backward of a layer on these inputs, on any device, best meta.

    The backward includes the gradients of all inputs in `state` that ask for one.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as forward:
        results = [tensor for tensor in layer(dict(state), batch).values() if tensor.requires_grad]
    with FlopCounterMode(display=False) as backward:
        torch.autograd.backward(results, [torch.ones_like(tensor) for tensor in results])
    return forward.get_total_flops(), backward.get_total_flops()


def count_flops(run: Run) -> dict[str, dict[str, LayerFlops]]:
    """FLOPs of all layers of a run's model, by module and kind of layer.

    Raises:
        SpecError: the model's configuration is wrong.
    """
    table, inputs = layer_table(run), describe(run)
    layers = build_layers(run, 0, len(table), device="meta")
    counted: dict[str, dict[str, LayerFlops]] = {}
    for index, info in enumerate(table):
        kinds = counted.setdefault(info.module, {})
        if info.kind in kinds:
            continue
        kind = run.file.model.modules[info.module].kind
        works, counts = [], []
        for sizes in _sizes(inputs, kind):
            batch = probe_batch(inputs, device="meta", **sizes)
            counts.append(layer_flops(layers[index], state_at(table, index, inputs, batch, "meta"), batch))
            sizes.pop("length", None)
            works.append(probe_work(inputs, kind, **sizes))
        forward, backward = zip(*counts, strict=True)
        kinds[info.kind] = LayerFlops(info.parameters, _exact(works, forward, kind), _exact(works, backward, kind))
    return counted


def _sizes(inputs: ModelInputs, kind: str) -> list[dict[str, Any]]:
    """Probe sizes that tell the features of `Work` apart."""
    if kind == "encoder":
        assert inputs.image is not None
        m = inputs.image.merge
        return [
            {"grids": [(rows * m, columns * m)] * images}
            for images, rows, columns in ((1, 4, 4), (1, 8, 6), (2, 4, 4), (3, 8, 8))
        ]
    if kind == "llm":
        return [
            {"documents": [[length]] * sequences, "length": length}
            for sequences, length in ((1, 64), (1, 192), (2, 64), (3, 256))
        ]
    return [{"targets": 1}, {"targets": 3}]


def _exact(works: Sequence[Work], counts: Sequence[int], kind: str) -> Polynomial:
    """The polynomial through all counts; the generator's images all have one size, so its FLOPs are per item."""
    features = np.array(works, dtype=float)[:, : 1 if kind == "generator" else 3]
    scale = features.max(axis=0)
    solution = np.linalg.lstsq(features / scale, np.array(counts, dtype=float), rcond=None)[0] / scale
    terms = [float(round(value)) for value in solution] + [0.0, 0.0]
    polynomial = Polynomial(per_item=terms[0], per_token=terms[1], per_length_sq=terms[2])
    assert all(polynomial(work) == count for work, count in zip(works, counts, strict=True)), (
        works,
        counts,
        polynomial,
    )
    return polynomial
