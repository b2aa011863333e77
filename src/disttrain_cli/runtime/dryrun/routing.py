"""Numbers of rows that an EP group exchanges on fake devices, whose counts have no values.

The observed rank is the fullest of its group, as memory is priced for it (`costs.experts`); its
peers have equally many of the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from disttrain_cli.costs.routing import reached
from disttrain_cli.models import experts
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.spec.layer_costs import Experts


@contextmanager
def routed(layers: Sequence[PipelineLayer], loads: Sequence[float]) -> Iterator[None]:
    """Let experts of this rank get the load of their layer: rows over those of equal numbers."""
    stock, running = experts.counts, [1.0]  # load of the layer that runs

    def enter(load: float, *_: Any) -> None:
        running[0] = load

    for layer, load in zip(layers, loads, strict=True):
        for _, part in experts.mixtures(layer):
            part.register_forward_pre_hook(partial(enter, load))

    def drawn(parts_RK: Sequence[Tensor], count: int, group: Group) -> list[experts.Counts]:
        stock(parts_RK, count, group)  # its messages, and the host's wait
        ranks, chosen = group.size, parts_RK[0].shape[1]
        mixture, mine = Experts(ranks * count, chosen, 0, 0, 0), running[0] / ranks
        share_R = np.full(ranks, (1.0 - mine) / (ranks - 1))
        share_R[group.rank] = mine
        numbers = [
            share_R * chosen,
            *(
                [reached(mixture, share) for share in shares]
                for shares in (share_R, share_R.reshape(group.nodes, -1).sum(axis=1))
            ),
        ]
        return [
            experts.Counts(
                *(
                    np.ceil(len(part) * np.tile(each, (ranks, 1))).astype(np.int64)
                    for each in numbers
                )
            )
            for part in parts_RK
        ]

    with patch.object(experts, "counts", drawn):
        yield
