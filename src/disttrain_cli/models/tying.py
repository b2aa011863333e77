"""Tied weights: an LLM's head that is its embedding (Press and Wolf 2017, arXiv 1608.05859).

If both layers are on one stage they share one parameter. Elsewhere each has a copy: the engine sums
the gradients of the two after they were reduced over the replicas, counts them once in the norm,
and both optimizers take the same step from the same state, so that the copies stay bitwise equal. A
TP group shards both alike, and each rank has its tied-embedding peer in the same replica and TP
rank. One tensor is stored and exported, under the name of the layer that owns it.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Literal

from torch import nn

from disttrain_cli.models.division import shard_of, whole_shape
from disttrain_cli.models.graph import LayerInfo
from disttrain_cli.models.layer import PipelineLayer

#: Of two copies on different stages: the one that counts and is stored, or the other.
Copy = Literal["first", "second"]


def tied_layers(table: Sequence[LayerInfo]) -> tuple[int, int] | None:
    """Return the index of the layer that owns a tied weight, and of its sharer, if any."""
    places = {info.name: index for index, info in enumerate(table)}
    pairs = {
        (places[owner], index)
        for index, info in enumerate(table)
        for owner, _ in info.tied.values()
    }
    assert len(pairs) <= 1, "one pair of layers at most shares weights"
    return next(iter(pairs), None)


def tie(layers: Iterable[PipelineLayer], table: Sequence[LayerInfo]) -> None:
    """Let layers of a stage share tied parameters, and mark those whose copy is on another stage.

    The mark is read by `copy_of`.

    Args:
        table: of the whole model.
    """
    here = {layer.name: layer for layer in layers}
    for layer in here.values():
        for path, (owner, of_owner) in layer.tied.items():
            if owner in here:
                _share(here[owner].get_parameter(of_owner), layer, path)
            else:
                layer.get_parameter(path).__dict__["tied_copy"] = "second"
    for info in table:
        for owner, of_owner in () if info.name in here else info.tied.values():
            if owner in here:
                here[owner].get_parameter(of_owner).__dict__["tied_copy"] = "first"


def untie(layers: Iterable[PipelineLayer], stored: Container[str]) -> None:
    """Untie weights that are stored separately (LAYER/PARAMETER) for each layer.

    Checkpoints from before `tie_word_embeddings` tied anything hold such weights.
    """
    for layer in layers:
        layer.tied = {
            path: of for path, of in layer.tied.items() if f"{layer.name}/{path}" not in stored
        }


def shared_names(table: Iterable[LayerInfo]) -> list[str]:
    """Return LAYER/PARAMETER of all parameters that another layer owns."""
    return [f"{info.name}/{path}" for info in table for path in info.tied]


def copy_of(parameter: nn.Parameter) -> Copy | None:
    """Return which copy of a tied weight a parameter is; None if this stage has the only one."""
    return getattr(parameter, "tied_copy", None)


def stored_name(layer: PipelineLayer, path: str) -> str:
    """Return the LAYER/PARAMETER under which a parameter is stored."""
    return "/".join(layer.tied.get(path, (layer.name, path)))


def _share(parameter: nn.Parameter, layer: PipelineLayer, path: str) -> None:
    own = layer.get_parameter(path)
    assert whole_shape(own) == whole_shape(parameter), (layer.name, path)
    assert shard_of(own) == shard_of(parameter), "a TP group divides tied weights alike"
    part, _, name = path.rpartition(".")
    setattr(layer.get_submodule(part), name, parameter)
