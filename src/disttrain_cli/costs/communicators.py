"""How many communicators a rank is a member of: each takes memory on its device and time at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from disttrain_cli.spec.plan import UnitPlan


class Placed(Protocol):
    """A stage, of costs or of a topology."""

    @property
    def unit(self) -> UnitPlan: ...
    @property
    def before(self) -> Sequence[int]: ...
    @property
    def after(self) -> Sequence[int]: ...


def communicators_per_rank(stage: Placed) -> int:
    """Communicators of more than one rank that each rank of a stage is in, over NCCL.

    The world's, that of its replicas, of its TP group, and of every neighbouring stage one in each direction
    (`runtime.units.communicators` lists their ranks).
    """
    unit = stage.unit
    return 1 + (unit.dp > 1) + (unit.tp > 1) + 2 * (len(stage.before) + len(stage.after))
