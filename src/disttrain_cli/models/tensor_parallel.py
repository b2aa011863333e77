"""Sharding of a layer over a tensor-parallel group, and its communication with the group.

See Megatron-LM, Shoeybi et al. 2019, section 3. The layer's `division` lists the sharded weights;
`models/parallel.py` has the messages between the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from disttrain_cli.models.division import Shard, Sharding, WithoutBias, piece, shard_of, sharding_of
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import ADAPTER, PipelineLayer
from disttrain_cli.models.overlapped import ColumnLinear, RowLinear
from disttrain_cli.models.parallel import copy, reduce

#: Attributes of linears, embeddings and convolutions that count outputs or inputs.
_SIZES = (
    ("out_features", "num_embeddings", "out_channels", "in_channels", "groups"),
    ("in_features",),
)
#: Attributes of attentions and recurrent mixers that count local heads or features.
COUNTS = (
    *("heads", "num_heads", "num_k_heads", "num_v_heads"),
    *("key_dim", "value_dim", "qkv_dim", "conv_dim"),
)


class Listed(NamedTuple):
    """Submodule or parameter in a layer's `division`."""

    owner: nn.Module  # its parent
    name: str
    part: Any  # a module or a parameter
    sharding: Sharding


def listed(layer: PipelineLayer) -> Iterator[Listed]:
    """Yield the submodules and parameters that a layer's `division` lists."""
    for path, part in (*layer.named_modules(), *layer.named_parameters()):
        sharding = sharding_of(layer.division, path)
        if sharding is not None:
            owner, _, name = path.rpartition(".")
            yield Listed(layer.get_submodule(owner), name, part, sharding)


def linears(layer: PipelineLayer, dim: int | None) -> list[Any]:
    """Return the modules that are sharded by outputs (0) or inputs (1), but not by ids."""
    return [
        one.part
        for one in listed(layer)
        if one.sharding.dim == dim and isinstance(one.part, nn.Module)
        if not one.sharding.vocabulary
    ]


def owners(layer: PipelineLayer) -> list[nn.Module]:
    """Return the modules whose children are sharded by outputs: attentions, mixers, FFNs."""
    return list(
        dict.fromkeys(
            one.owner
            for one in listed(layer)
            if one.sharding.dim == 0 and not one.sharding.vocabulary
        )
    )


def pieces(layer: PipelineLayer) -> set[int]:
    """Return the counts of heads, features and ids that a TP size must divide.

    Empty if the layer is replicated on every rank.
    """
    if layer.unsharded:
        return {1}
    sizes = {
        int(getattr(owner, count))
        for owner in owners(layer)
        for count in COUNTS
        if hasattr(owner, count)
    }
    for owner, _, part, sharding in listed(layer):
        if sharding.dim in (None, 1):
            continue
        size = (part if isinstance(part, nn.Parameter) else part.weight).shape[sharding.dim]
        width = 1 if sharding.vocabulary else int(getattr(owner, "head_dim", 1))
        for own in Shard(0, sharding.packed, 1, 0).widths(size):
            sizes.add(own if own % width else own // width)
    return sizes


def same_at_any_tp(layer: PipelineLayer) -> bool:
    """Return True if a rank runs the unsharded layer over all rows, whatever the TP size."""
    return not pieces(layer) and (layer.redundant or not layer.by_rows)


def shard(layer: PipelineLayer, *, tp: int, rank: int = 0) -> PipelineLayer:
    """Narrow a layer in place to one rank's shard, on any device (on meta only shapes change).

    `tp` must divide `pieces(layer)`; `shard_of` returns a parameter's shard. The layer sends no
    messages until it joins a group (`join`): its outputs are one rank's partial sums, and the
    head's loss is that of its own ids, with all other labels clipped to them.
    """
    if tp == 1:
        return layer
    assert not any(count % tp for count in pieces(layer)), (layer.name, tp)
    for owner in owners(layer):
        for count in COUNTS:
            if hasattr(owner, count):  # others infer their heads from their linears
                setattr(owner, count, getattr(owner, count) // tp)
    for owner, name, part, sharding in list(listed(layer)):
        if sharding.dim is None:
            continue
        to = Shard(sharding.dim, sharding.packed, tp, rank)
        if isinstance(part, nn.Parameter):
            narrow(owner, name, to)
            continue
        adapter = getattr(part, "lora_A" if to.dim else "lora_B", None)
        for one in (part, adapter) if adapter is not None else (part,):
            for own, _ in list(one.named_parameters(recurse=False)):
                narrow(one, own, to)
            for count in _SIZES[to.dim]:
                if hasattr(one, count):
                    setattr(one, count, getattr(one, count) // tp)
        if sharding.vocabulary:
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
    own = set[int]()  # replicated; gradients differ by rank
    for linear in linears(layer, 1):
        own.add(id(linear.bias))
        if group.rank:
            linear.__class__ = WithoutBias
    for part in linears(layer, None):
        own.update(map(id, part.parameters()))
    for linear in (*linears(layer, 0), *linears(layer, 1)):
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
    for owner in owners(layer):
        columns = [
            one.part for one in listed(layer) if one.owner is owner and one.sharding.dim == 0
        ]
        for linear in columns:
            linear.__class__ = ColumnLinear
            linear.together = tuple(columns)
    for linear in linears(layer, 1):
        linear.__class__ = RowLinear


def narrow(owner: nn.Module, name: str, shard: Shard) -> None:
    """Narrow a parameter to one rank's shard, if it has the dimension: a bias has no inputs."""
    parameter = owner.get_parameter(name)
    if shard.dim < parameter.ndim:
        local = piece(parameter.detach(), shard).clone(memory_format=torch.contiguous_format)
        made = nn.Parameter(local, parameter.requires_grad)
        made.__dict__["shard"] = shard
        setattr(owner, name, made)


def _join_whole(layer: PipelineLayer, group: Group) -> None:
    """Add hooks around the sharded linears of a library's layer: copy before, reduce after."""

    entered: dict[nn.Module, None] = {}

    def before(owner: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(copied, given)), {name: copied(value) for name, value in named.items()}

    def copied(value: Any) -> Any:
        return copy(value, group) if isinstance(value, Tensor) and value.requires_grad else value

    def after(linear: nn.Module, given: tuple[Tensor, ...], made: Tensor) -> Tensor:
        return reduce(made, group)

    for owner, _, part, sharding in list(listed(layer)):
        if sharding.dim == 1:
            part.register_forward_hook(after)
        elif sharding.dim == 0 and len(sharding.packed) > 1:  # its owner may do more than read
            part.register_forward_pre_hook(before, with_kwargs=True)
        elif sharding.dim == 0 and not sharding.vocabulary:
            entered.setdefault(owner)
    for owner in entered:
        owner.register_forward_pre_hook(before, with_kwargs=True)
