"""Gradient flow: layers that train, layers that only pass gradients, and gradients across cuts.

A layer's outputs carry gradients if some of its weights are trained or one of its inputs carries
one. A layer with neither is *forward-only*: it has no backward and saves nothing for one.
`costs.freezing` applies the same rule to a profile's layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from disttrain_cli.models.graph import LayerInfo
from disttrain_cli.models.layer import PipelineLayer


@dataclass(frozen=True)
class GradientFlow:
    """Trained layers of a whole model, and the layers and cuts that gradients pass."""

    # owners of the trained weights (`PipelineLayer.owner_of`); None = all
    names: tuple[str, ...] | None
    trained: tuple[bool, ...]  # by layer, True if any of its weights are
    passes: tuple[bool, ...]  # by layer, True if its inputs carry gradients
    # state tensors with gradients, by cut before each layer and at the end
    carrying: tuple[frozenset[str], ...]

    def mark(self, layers: Sequence[PipelineLayer], first: int) -> None:
        """Freeze the untrained weights, and set `trained` and `passes` of the layers.

        Args:
            first: index in the model of the first of `layers`.
        """
        for index, layer in enumerate(layers, first):
            layer.trained, layer.passes = self.trained[index], self.passes[index]
            for path, parameter in layer.named_parameters():
                if not layer.trained or (
                    self.names is not None and layer.owner_of(path) not in self.names
                ):
                    parameter.requires_grad_(False)


def gradient_flow(table: Sequence[LayerInfo], trained: Sequence[str] | None) -> GradientFlow:
    """Return the gradient flow of a model.

    Args:
        table: layers of the model.
        trained: modules (and "projectors") that are trained; None = all.
    """
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
