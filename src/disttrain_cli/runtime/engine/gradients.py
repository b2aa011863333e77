"""Which layers train, which only pass gradients on, and which tensors carry gradients across a cut.

A layer's outputs carry gradients if some of its weights are trained or one of its inputs carries
one. A layer with neither is *still*: it has no backward and keeps nothing for one. `costs.freezing`
says the same of a profile's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disttrain_cli.models.graph import LayerInfo
from disttrain_cli.models.layer import PipelineLayer


@dataclass(frozen=True)
class GradientFlow:
    """What is trained of a whole model, and what follows from it."""

    # under which weights are trained (`PipelineLayer.owner_of`); None = all
    names: tuple[str, ...] | None
    trained: tuple[bool, ...]  # by layer, whether any of its weights are
    passes: tuple[bool, ...]  # by layer, whether its inputs carry gradients
    # by cut before a layer, and at the end: state tensors with gradients
    carrying: tuple[frozenset[str], ...]

    def mark(self, layers: Sequence[PipelineLayer], first: int) -> None:
        """Freeze the weights that are not trained, and tell layers `first`, first + 1, … what they
        do."""
        for index, layer in enumerate(layers, first):
            layer.trained, layer.passes = self.trained[index], self.passes[index]
            for path, parameter in layer.named_parameters():
                if not layer.trained or (
                    self.names is not None and layer.owner_of(path) not in self.names
                ):
                    parameter.requires_grad_(False)


def gradient_flow(table: Sequence[LayerInfo], trained: Sequence[str] | None) -> GradientFlow:
    """The flow of gradients through a model of which `trained` modules (and "projectors") are
    trained; None = all."""
    carrying: set[str] = set()
    trains, passes, cuts = [], [], []
    for layer in table:
        cuts.append(frozenset(carrying))
        trains.append(
            not layer.frozen and (trained is None or not layer.owners.isdisjoint(trained))
        )
        passes.append(not layer.frozen and not carrying.isdisjoint(layer.reads))
        written = {spec.name for spec in layer.writes}
        carrying = carrying | written if trains[-1] or passes[-1] else carrying - written
    names = None if trained is None else tuple(trained)
    return GradientFlow(names, tuple(trains), tuple(passes), (*cuts, frozenset(carrying)))
