"""Figures of a job's steps from which its verdict is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disttrain_cli.analysis.confidence import known
from disttrain_cli.analysis.losses import Losses
from disttrain_cli.analysis.result.rows import Comparison, OperationRow
from disttrain_cli.analysis.result.verdicts import Place, Remedy

#: Largest error of a replay, as a share of the step.
MOST_UNEXPLAINED = 0.2


class SlowClock(NamedTuple):
    """GPU that ran below its usual SM clock, and what its driver says held it down."""

    mhz: float
    usual_mhz: float
    where: str  # the clock is usual there
    power_w: float
    reasons: tuple[str, ...]

    @property
    def clause(self) -> str:
        """Clause for a sentence on its rank."""
        return (
            f"its GPU runs at {self.mhz:,.0f} MHz, {self.usual_mhz:,.0f} {self.where}"
            f" ({', '.join(self.reasons)})"
        )

    @property
    def advice(self) -> str:
        """Advice for its reasons."""
        fixes = [_COOLING] if {"thermal limit", "hardware slowdown"} & set(self.reasons) else []
        fixes += [_POWER] if {"power cap", "power brake"} & set(self.reasons) else []
        return "; ".join(fixes) or "reset its clocks (nvidia-smi -rac, -rgc)"


_COOLING = "check its cooling (nvidia-smi -q -d TEMPERATURE)"
_POWER = "check its power limit and supply against other devices' (nvidia-smi -q -d POWER)"


@dataclass(frozen=True)
class Record:
    """Figures of the steps that verdicts need in addition to the causes."""

    losses: Losses
    where: Mapping[int, Place]  # by rank
    comparisons: list[Comparison]  # predictions and measurements
    gpus: int
    kind: str  # format of the traces, for the confidence
    shares: dict[str, float]  # fractions of the ranks' time by activity
    present: float = 1.0  # share of the job's ranks with traces
    # the ranks run on one CPU, so a rank that is ready may wait for a core
    shared_cores: bool = False
    core_wait_s: float | None = None  # seconds per step that a runnable rank waited for a core
    remedies: Sequence[Remedy] = ()
    operations: Sequence[OperationRow] = ()
    # by rank, the share of its passes that the others of its TP, CP or EP group wait for
    waited_for: Mapping[int, float] = field(default_factory=dict)
    # by rank, the rows of its experts over the mean of its EP group
    expert_loads: Mapping[int, float] = field(default_factory=dict)
    clocks_s: float = 0.0  # remaining error of the hosts' corrected clocks
    steps_measured: int = 0  # at most 32 of them are replayed
    slow_clocks: Mapping[int, SlowClock] = field(default_factory=dict)  # by rank

    @property
    def measured_s(self) -> float:
        return float(self.losses.measured.mean())

    @property
    def sampled(self) -> str:
        """Note on which steps the seconds are of, if not all measured steps are replayed."""
        replayed = len(self.losses.measured)
        if replayed >= self.steps_measured:
            return ""
        return f"; mean of the {replayed} replayed of {self.steps_measured} measured steps"

    @property
    def pipelined(self) -> bool:
        """True if the ranks are of several stages, of one unit or of several."""
        return len({(place.unit, place.stage) for place in self.where.values()}) > 1

    @property
    def known(self) -> float:
        """Factor from 0 to 1 for how complete the evidence is."""
        return known(self.unexplained, len(self.losses.measured), self.present)

    @property
    def unexplained(self) -> float:
        """Share of the steps that no recorded operation or message explains.

        It is negative if the replay takes longer than the steps.
        """
        return float(self.losses.lost["unexplained"].mean()) / self.measured_s

    @property
    def contradicts(self) -> bool:
        """True if the replay differs so much from the traces that no cause can be named."""
        return abs(self.unexplained) > MOST_UNEXPLAINED
