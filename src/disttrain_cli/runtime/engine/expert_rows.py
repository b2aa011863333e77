"""Rows that choose each expert of the model in a step, counted on all ranks.

The sum over all ranks travels with the losses, and the host reads it with the gradient norm, so it
costs no message and no wait of its own: 8 bytes per expert and layer more in one all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ExpertRows:
    """Counts of one rank, and of all ranks in the last step.

    Args:
        experts: number of experts, by index in the model of each layer with some.
        counters: of this rank's layers [E] (`models.experts.count_rows`).
    """

    experts: Mapping[int, int]
    counters: Mapping[int, Tensor]
    last: dict[int, list[int]] = field(default_factory=dict)  # by layer, of all ranks

    def take(self, device: torch.device) -> Tensor:
        """Return this rank's counts of all layers of the model, in order; start from zero."""
        parts = [
            self.counters[layer].double()
            if layer in self.counters
            else torch.zeros(count, dtype=torch.float64, device=device)
            for layer, count in self.experts.items()
        ]
        for counter in self.counters.values():
            counter.zero_()
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64, device=device)

    def keep(self, values: Sequence[float]) -> None:
        """Set `last` from the sum of all ranks' counts."""
        numbers = iter(values)
        self.last = {
            layer: [int(next(numbers)) for _ in range(count)]
            for layer, count in self.experts.items()
        }
