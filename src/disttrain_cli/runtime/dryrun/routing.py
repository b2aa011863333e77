"""Numbers of rows that an EP group exchanges on fake devices, whose counts have no values.

The observed rank is the fullest of its group, as memory is priced for it (`costs.experts`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
from torch import Tensor

from disttrain_cli.models import experts
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import PipelineLayer


@contextmanager
def routed(layers: Sequence[PipelineLayer], loads: Sequence[float]) -> Iterator[None]:
    """Let as many rows arrive in each exchange as a rank sends, times the load of the layer."""
    stock, running = experts.counts, [1.0]  # load of the layer that runs

    def enter(load: float, *_: Any) -> None:
        running[0] = load

    for layer, load in zip(layers, loads, strict=True):
        for _, part in experts.mixtures(layer):
            part.register_forward_pre_hook(partial(enter, load))

    def drawn(expert_S: Tensor, count: int, group: Group) -> tuple[Tensor, list[int], list[int]]:
        taken_E, _, _ = stock(expert_S, count, group)  # its messages, and the host's wait
        sent, arrived = (
            np.diff(np.arange(group.size + 1) * rows // group.size).tolist()
            for rows in (len(expert_S), math.ceil(len(expert_S) * running[0]))
        )
        return taken_E, sent, arrived

    with patch.object(experts, "counts", drawn):
        yield
