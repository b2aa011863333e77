"""Exponential moving averages of weights: what a generator makes images with is steadier than its
last weights.

    average ← decay · average + (1 - decay) · weight,  after every step that updated

Kept in fp32, by each rank for what it keeps of the optimizer's state (`checkpoints.owning`), so
that nothing is sent and a layout changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from disttrain_cli.runtime.checkpoints.owning import Part, parts_of, weights

if TYPE_CHECKING:
    from disttrain_cli.runtime.engine.engine import UnitEngine
    from disttrain_cli.spec.runfile.train import EmaSpec


class Average:
    """This rank's part of the averages of some modules' weights; they begin as the weights are
    now."""

    def __init__(self, engine: UnitEngine, spec: EmaSpec) -> None:
        self._decay = spec.decay
        self._parts = [part for part in parts_of(engine) if part.module in spec.modules]
        self._values = [weights(part).float().clone() for part in self._parts]

    def start(self) -> None:
        """Set the averages to the weights."""
        for part, average in self.values():
            average.copy_(weights(part))

    def update(self) -> None:
        """Move the averages towards the weights after a step."""
        if self._values:
            torch._foreach_lerp_(
                self._values, [weights(part).float() for part in self._parts], 1.0 - self._decay
            )

    def values(self) -> list[tuple[Part, Tensor]]:
        """Parts with their averages [elements]."""
        return list(zip(self._parts, self._values, strict=True))
