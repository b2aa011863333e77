"""How the weights of a layer are divided over a tensor-parallel group (Megatron-LM, Shoeybi et al.
2019, section 3).

A column-parallel linear is divided by its outputs and the row-parallel linear after it by its
inputs: between the two every rank has its own heads or features and nothing is sent. What a
row-parallel linear gives is a partial sum over the group; its bias, which every rank has whole, is
added after the sum. The gradient of a column-parallel linear's input is a partial sum too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from disttrain_cli.models.layer import PipelineLayer


@dataclass(frozen=True)
class Division:
    """Which linears and embeddings of a layer are divided, by the end of their path; all else is
    whole on every rank.

    An embedding divided by ids gives partial sums (zero for ids of other ranks); a linear divided
    by ids gives the logits of its ids.
    """

    column: tuple[str, ...] = ()
    fused: tuple[
        str, ...
    ] = ()  # column-parallel, its outputs two halves (value and gate) that are divided alike
    thirds: tuple[str, ...] = ()  # the same of three: an attention's queries, keys and values
    row: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()  # divided by token ids


@dataclass(frozen=True)
class Shard:
    """Which part of a whole tensor one TP rank holds: a `tp`-th of a dimension, of each of its
    `halves` alike."""

    dim: int
    halves: int
    tp: int
    rank: int


def shard_of(parameter: nn.Parameter) -> Shard | None:
    """What part of the whole a parameter is; None where every TP rank has all of it."""
    return getattr(parameter, "shard", None)


def whole_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the tensor that a parameter is a part of."""
    shape, own = list(parameter.shape), shard_of(parameter)
    if own is not None:
        shape[own.dim] *= own.tp
    return tuple(shape)


def piece(whole: Tensor, shard: Shard | None) -> Tensor:
    """A rank's part of a whole tensor, as a view where that is possible."""
    if shard is None:
        return whole
    halves = whole.unflatten(shard.dim, (shard.halves, -1))
    return halves.chunk(shard.tp, shard.dim + 1)[shard.rank].flatten(shard.dim, shard.dim + 1)


def own_rows(rows: int, tp: int, rank: int) -> tuple[int, int]:
    """(start, stop) of the rows of a state tensor that a TP rank holds: ⌈rows / tp⌉, the last
    ranks' fewer or none."""
    most = -(-rows // tp)
    return min(rows, rank * most), min(rows, (rank + 1) * most)


def parts(layer: PipelineLayer, ends: tuple[str, ...]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """The parts of a layer whose path ends in one of `ends`, each with the module that owns it."""
    for path, part in layer.named_modules():
        if any(path == end or path.endswith(f".{end}") for end in ends):
            yield layer.get_submodule(path.rpartition(".")[0]), part


def pieces(layer: PipelineLayer) -> set[int]:
    """Numbers of heads, features and ids that a TP size must divide; none where the layer is whole
    on every rank."""
    division = layer.division
    found = {
        _heads(owner, linear) or linear.out_features
        for owner, linear in parts(layer, division.column)
    }
    found |= {linear.out_features // 2 for _, linear in parts(layer, division.fused)}
    found |= {_heads(owner, linear) // 3 for owner, linear in parts(layer, division.thirds)}
    return found | {len(part.weight) for _, part in parts(layer, division.vocabulary)}


def shard(layer: PipelineLayer, tp: int, rank: int = 0) -> PipelineLayer:
    """Narrow a layer in place to one rank's part, for any device (on the meta device only shapes
    change).

    `tp` must divide `pieces(layer)`; what a parameter is a part of is known by `shard_of`. The
    shard sends no messages until it joins a group (`parallel.join`): its outputs are one rank's
    partial sums, and the head's loss is that of its own ids, with all other labels clipped to them.
    """
    if tp == 1:
        return layer
    assert not any(count % tp for count in pieces(layer)), (layer.name, tp)
    division = layer.division
    owners = {owner for owner, _ in parts(layer, (*division.column, *division.thirds))}
    for ends, halves in ((division.column, 1), (division.fused, 2), (division.thirds, 3)):
        for _, linear in parts(layer, ends):
            _narrow(linear, Shard(0, halves, tp, rank))
            linear.out_features //= tp
    for _, linear in parts(layer, division.row):
        _narrow(linear, Shard(1, 1, tp, rank))
        linear.in_features //= tp
    for (
        attention
    ) in owners:  # diffusers' and Whisper's; the others follow the shapes of their linears
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


def _heads(owner: nn.Module, linear: nn.Module) -> int:
    """Heads that an attention's linear gives; 0 where the owner is no attention."""
    if hasattr(owner, "head_dim"):
        return int(linear.out_features) // int(owner.head_dim)
    return int(getattr(owner, "heads", 0))


def _narrow(part: nn.Module, shard: Shard) -> None:
    """Keep one rank's part of the weights along a dimension, and of the bias if outputs are
    divided."""
    for name, parameter in list(part.named_parameters(recurse=False)):
        if shard.dim < parameter.ndim:
            own = piece(parameter.detach(), shard).clone(memory_format=torch.contiguous_format)
            made = nn.Parameter(own, parameter.requires_grad)
            made.__dict__["shard"] = shard
            setattr(part, name, made)
