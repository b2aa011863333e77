"""Sharding of a layer over a tensor-parallel group, and its communication with the group.

See Megatron-LM, Shoeybi et al. 2019, section 3. The layer's `division` lists the sharded weights;
`models/parallel.py` has the messages between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from disttrain_cli.models.division import Shard, WithoutBias, piece, shard_of
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import ADAPTER, PipelineLayer
from disttrain_cli.models.overlapped import ColumnLinear, RowLinear
from disttrain_cli.models.parallel import copy, reduce


def parts(layer: PipelineLayer, ends: tuple[str, ...]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield the submodules whose path ends in one of `ends`, each with its parent module."""
    for path, part in layer.named_modules():
        if any(path == end or path.endswith(f".{end}") for end in ends):
            yield layer.get_submodule(path.rpartition(".")[0]), part


def pieces(layer: PipelineLayer) -> set[int]:
    """Return the counts of heads, features and ids that a TP size must divide.

    Empty if the layer is replicated on every rank.
    """
    if layer.unsharded:
        return {1}
    division = layer.division
    sizes = {
        _heads(owner, linear) or linear.out_features
        for owner, linear in parts(layer, division.column)
    }
    sizes |= {linear.out_features // 2 for _, linear in parts(layer, division.fused)}
    sizes |= {linear.out_features // 4 for _, linear in parts(layer, division.quarters)}
    sizes |= {_heads(owner, linear) // 3 for owner, linear in parts(layer, division.thirds)}
    return sizes | {len(part.weight) for _, part in parts(layer, division.vocabulary)}


def shard(layer: PipelineLayer, *, tp: int, rank: int = 0) -> PipelineLayer:
    """Narrow a layer in place to one rank's shard, on any device (on meta only shapes change).

    `tp` must divide `pieces(layer)`; `shard_of` returns a parameter's shard. The layer sends no
    messages until it joins a group (`join`): its outputs are one rank's partial sums, and the
    head's loss is that of its own ids, with all other labels clipped to them.
    """
    if tp == 1:
        return layer
    assert not any(count % tp for count in pieces(layer)), (layer.name, tp)
    division = layer.division
    owners = {owner for owner, _ in parts(layer, (*division.column, *division.thirds))}
    for ends, halves in (
        (division.column, 1),
        (division.fused, 2),
        (division.thirds, 3),
        (division.quarters, 4),
    ):
        for linear in _with_adapter(layer, ends, "lora_B"):
            _narrow(linear, Shard(0, halves, tp, rank))
            linear.out_features //= tp
    for ends, halves in division.inputs:
        for linear in _with_adapter(layer, ends, "lora_A"):
            _narrow(linear, Shard(1, halves, tp, rank))
            linear.in_features //= tp
    # diffusers' and Whisper's attention; others infer the number of heads from their linears
    for attention in owners:
        for count in ("heads", "num_heads"):
            if hasattr(attention, count):
                setattr(attention, count, getattr(attention, count) // tp)
    for _, part in parts(layer, division.vocabulary):
        _narrow(part, Shard(0, 1, tp, rank))
        if isinstance(part, nn.Embedding):
            part.num_embeddings //= tp
        else:
            part.out_features //= tp
        layer.first_id = rank * len(part.weight)
    return layer


def join(layer: PipelineLayer, group: Group | None, cp: Group | None = None) -> None:
    """Connect a layer that was narrowed to this rank's shard (`shard`) to its TP and CP groups.

    The bias of a row-parallel linear is added by the first rank, once. Replicated weights get
    `partial_gradient`: the sum over the group is their gradient. If all ranks compute the same one,
    each contributes its part of the mean, so that the weights stay equal even if kernels are not
    deterministic.
    """
    layer.cp = cp
    if group is None:
        return
    layer.group = group = group if layer.row_by_row else replace(group, overlap=False)
    division, own = layer.division, set[int]()  # replicated; gradients differ by rank
    for _, linear in parts(layer, (*division.row, *division.fifths)):
        own.add(id(linear.bias))
        if group.rank:
            linear.__class__ = WithoutBias
    for _, norm in parts(layer, division.per_head):
        own.update(map(id, norm.parameters()))
    columns = (*division.column, *division.fused, *division.thirds, *division.quarters)
    for _, linear in parts(layer, (*columns, *division.row, *division.fifths)):
        own.update(id(getattr(linear, n).weight) for n in ADAPTER if hasattr(linear, n))
    for parameter in layer.parameters():
        partial = shard_of(parameter) is None
        parameter.__dict__["partial_gradient"] = partial
        alike = partial and not layer.by_rows and id(parameter) not in own
        if alike and parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient / group.size)
    if not layer.by_rows:
        _join_whole(layer, group)
    elif group.overlap:
        _overlap(layer)


def _overlap(layer: PipelineLayer) -> None:
    """Replace sharded linears by those that communicate themselves."""
    columns: dict[nn.Module, list[ColumnLinear]] = {}
    for owner, linear in parts(layer, (*layer.division.column, *layer.division.thirds)):
        linear.__class__ = ColumnLinear
        columns.setdefault(owner, []).append(cast(ColumnLinear, linear))
    for linears in columns.values():
        for one in linears:
            one.together = tuple(linears)
    for _, linear in parts(layer, layer.division.row):
        linear.__class__ = RowLinear


def _heads(owner: nn.Module, linear: nn.Module) -> int:
    """Return the heads that an attention's linear outputs; 0 if the owner is no attention."""
    if hasattr(owner, "head_dim"):
        return int(linear.out_features) // int(owner.head_dim)
    return int(getattr(owner, "heads", 0))


def _with_adapter(layer: PipelineLayer, ends: tuple[str, ...], matrix: str) -> Iterator[Any]:
    """Yield linears whose path ends in one of `ends`, and one matrix of their adapters (`lora`)."""
    for _, linear in parts(layer, ends):
        yield linear
        if hasattr(linear, matrix):
            yield getattr(linear, matrix)


def _narrow(part: nn.Module, shard: Shard) -> None:
    """Narrow weights to one rank's shard of a dimension, and the bias if outputs are sharded."""
    for name, parameter in list(part.named_parameters(recurse=False)):
        if shard.dim < parameter.ndim:
            local = piece(parameter.detach(), shard).clone(memory_format=torch.contiguous_format)
            made = nn.Parameter(local, parameter.requires_grad)
            made.__dict__["shard"] = shard
            setattr(part, name, made)


def _join_whole(layer: PipelineLayer, group: Group) -> None:
    """Add hooks around the sharded linears of a library's layer: copy before, reduce after."""

    def before(owner: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(copied, given)), {name: copied(value) for name, value in named.items()}

    def copied(value: Any) -> Any:
        return copy(value, group) if isinstance(value, Tensor) and value.requires_grad else value

    def after(linear: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        return reduce(made, group)

    division = layer.division
    owners = [owner for owner, _ in parts(layer, (*division.column, *division.fused))]
    owners += [linear for _, linear in parts(layer, division.quarters)]
    for owner in dict.fromkeys(owners):
        owner.register_forward_pre_hook(before, with_kwargs=True)
    for _, linear in parts(layer, (*division.row, *division.fifths)):
        linear.register_forward_hook(after)
