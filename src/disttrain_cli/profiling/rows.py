"""Bytes of the tensors between layers, from their specifications alone.

Inputs of layers and of slots, and the tensors that cross cuts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from disttrain_cli.models.graph import LayerInfo, live_tensors, parallel_layers
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.spec.heads import number_of
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.layer_costs import Polynomial, combine
from disttrain_cli.spec.work import Work


def rows(spec: TensorSpec, inputs: ModelInputs) -> Polynomial:
    """Return the rows of a state tensor as a polynomial in the work of its items' owner.

    See `models.layer.TensorSpec`.
    """
    each = inputs.rows(spec.item, spec.rows)
    if spec.item == "sequence":
        return Polynomial(per_item=float(each.per_item))
    head = inputs.of(spec.item)[0]
    if head.alike:
        return Polynomial(per_item=float(each.of(head.size(1))))
    return Polynomial(
        per_item=float(each.per_item), per_token=1.0 / each.every if each.every else 0.0
    )


def input_bytes(
    layer: LayerInfo,
    table: list[LayerInfo],
    inputs: ModelInputs,
    mean: Mapping[str, Work],
    value_bytes: int,
    *,
    tp: int = 1,
) -> Polynomial:
    """Return the bytes of a layer's input on one rank of a TP group, in the work of its module.

    Rows that another module owns (images and clips in the LLM's embedding) are counted by the
    data's mean share of tokens.

    Args:
        mean: by module name, its mean work per packed sequence.
    """
    return combine(
        *(
            (
                math.prod(spec.shape) * value_bytes / (tp if spec.split else 1),
                rows(spec, inputs)
                if (owner := _owner(spec, inputs, layer.module)) == layer.module
                else _of_others(spec, inputs, mean[owner], mean[layer.module]),
            )
            for spec in _read(layer, table)
        )
    )


def gathered_bytes(
    layer: LayerInfo,
    table: list[LayerInfo],
    inputs: ModelInputs,
    mean: Mapping[str, Work],
    value_bytes: int,
) -> Polynomial:
    """Return the bytes of encoder outputs that a CP group gathers for a layer of the LLM.

    They are in the work of the LLM; each modality counts once, where the sum of several tensors is
    read.
    """
    owners = {
        spec.item: (owner, spec)
        for spec in _read(layer, table)
        if (owner := _owner(spec, inputs, layer.module)) != layer.module
    }
    return combine(
        *(
            (
                float(math.prod(spec.shape) * value_bytes),
                _of_others(spec, inputs, mean[owner], mean[layer.module]),
            )
            for owner, spec in owners.values()
        )
    )


def batch_bytes(
    layer: LayerInfo, table: list[LayerInfo], inputs: ModelInputs, value_bytes: int
) -> Polynomial:
    """Return the bytes of a slot's inputs that a layer reads as the first of its module.

    Positions and seeds are not counted: they are few.
    """
    before = table[
        next(
            index for index, other in enumerate(table) if other.module == layer.module
        ) : table.index(layer)
    ]
    known = {name for other in before for name in other.needs}
    return combine(
        *(
            (1.0, _field_bytes(name, inputs, value_bytes))
            for name in layer.needs
            if name not in known
        )
    )


def _field_bytes(field: str, inputs: ModelInputs, value_bytes: int) -> Polynomial:
    """Return the bytes of a group of batch fields (`models.layer.PipelineLayer.needs`).

    Every rank of a TP group has all of them.
    """
    if heads := inputs.of(field.partition(".")[0]):
        head = heads[number_of(field)]
        whole = float(math.prod(head.shape_of((1, 1))) * value_bytes)
        return Polynomial(per_item=whole) if head.alike else Polynomial(per_token=whole)
    return (
        Polynomial(per_item=8.0 * inputs.sequence_length)
        if field in ("tokens", "labels")
        else Polynomial()
    )


def cut_bytes(
    module: str,
    table: list[LayerInfo],
    inputs: ModelInputs,
    mean: Mapping[str, Work],
    value_bytes: int,
) -> list[float]:
    """Return the bytes per packed sequence that cross the cut after each layer of a module."""
    parallel = parallel_layers(table, inputs.llm, module)
    return [
        sum(
            rows(spec, inputs)(mean[_owner(spec, inputs, module)])
            * math.prod(spec.shape)
            * value_bytes
            for spec in live_tensors(table, number + 1, parallel)
        )
        for number, layer in enumerate(table)
        if layer.module == module
    ]


def _read(layer: LayerInfo, table: list[LayerInfo]) -> list[TensorSpec]:
    """Return the tensors that a layer reads."""
    return [spec for spec in live_tensors(table, table.index(layer)) if spec.name in layer.reads]


def _of_others(spec: TensorSpec, inputs: ModelInputs, owner: Work, own: Work) -> Polynomial:
    """Return rows that another module owns in this module's work, by the mean share of tokens."""
    return Polynomial(per_token=rows(spec, inputs)(owner) / own.tokens if own.tokens else 0.0)


def _owner(spec: TensorSpec, inputs: ModelInputs, module: str) -> str:
    """Return the name of the module whose work counts the items of a tensor.

    This is `module`, where it works on such items too.
    """
    if inputs.item(module) == spec.item:
        return module
    if spec.item == "sequence":
        return inputs.llm
    return inputs.of(spec.item)[0].module
