"""Exponential moving averages (EMA) of weights, which give steadier images than the last weights.

    average ← decay · average + (1 - decay) · weight,  after every step that updated

Stored in fp32, by each rank for its part of the optimizer's state (`checkpoints.owning`), so that
nothing is sent and the values do not depend on the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from disttrain_cli.runtime.checkpoints.owning import Part, parts_of, weights
from disttrain_cli.runtime.hooks import Hook, Step

if TYPE_CHECKING:
    from disttrain_cli.runtime.engine.engine import UnitEngine
    from disttrain_cli.spec.runfile.train import EmaSpec


class Average(Hook):
    """This rank's part of the averages of some modules' weights; starts at the current weights."""

    def __init__(self, engine: UnitEngine, spec: EmaSpec) -> None:
        self._decay = spec.decay
        self._parts = [part for part in parts_of(engine) if part.module in spec.modules]
        self._values = [weights(part).float().clone() for part in self._parts]

    def start(self) -> None:
        """Set the averages to the weights."""
        for part, average in self.values():
            average.copy_(weights(part))

    def stepped(self, step: Step) -> None:
        """Move the averages towards the weights, unless the step was skipped."""
        if step.updated:
            self.update()

    def update(self) -> None:
        """Move the averages towards the weights."""
        if self._values:
            torch._foreach_lerp_(
                self._values, [weights(part).float() for part in self._parts], 1.0 - self._decay
            )

    def values(self) -> list[tuple[Part, Tensor]]:
        """Parts with their averages [elements]."""
        return list(zip(self._parts, self._values, strict=True))
