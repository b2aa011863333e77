"""Time budget of `disttrain profile`: CPU time of all its processes on a CPU, wall time on GPUs.

Reading the data is not part of it: the index is built once and serves every later command.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

CPU_S = 30.0
#: On a CPU, largest share of the planned training's CPU time that a profile takes, where that is
#: above `LEAST_S`.
TRAINING_SHARE = 0.1
LEAST_S = 5.0
CUDA_S = 180.0


class Meter:
    """Time that a profile has spent since this object was created, by kind of device.

    On a CPU: CPU time of this process and of its children that have ended; on GPUs: wall time.
    """

    def __init__(self) -> None:
        self._began_s = self._now()

    def read_s(self, kind: str) -> float:
        """Return the seconds so far, for "cpu" or "cuda"."""
        return self._now()[kind] - self._began_s[kind]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Exclude the time spent inside the context."""
        begin_s = self._now()
        try:
            yield
        finally:
            self._began_s = {
                kind: self._began_s[kind] + now_s - begin_s[kind]
                for kind, now_s in self._now().items()
            }

    @staticmethod
    def _now() -> dict[str, float]:
        return {"cpu": sum(os.times()[:4]), "cuda": time.monotonic()}


def cpu_budget_s(training_s: float) -> float:
    """Return the budget of a profile for a training that takes this much CPU time."""
    return min(CPU_S, max(LEAST_S, TRAINING_SHARE * training_s))


@dataclass
class Budget:
    """The budget as seen by one of the measuring processes, which all spend at the same rate."""

    limit_s: float  # of all processes together
    before_s: float  # spent when this process's clock shows 0
    processes: int  # whose clocks add up
    clock: Callable[[], float]

    @classmethod
    def of(cls, payload: Mapping[str, Any], processes: int) -> Budget:
        """Create the budget from a worker's payload (`worker.main`)."""
        limit_s, before_s = float(payload["budget_s"]), float(payload["before_s"])
        if payload["device"] == "cpu":
            return cls(limit_s, before_s, processes, time.process_time)
        return cls(limit_s, before_s - float(payload["started_s"]), 1, time.monotonic)

    @property
    def spent_s(self) -> float:
        """Seconds that all processes have spent, assuming that each spent as much as this one."""
        return self.before_s + self.processes * self.clock()

    @property
    def left_s(self) -> float:
        """Seconds of this process's own clock until the budget is spent; below 0 after that."""
        return (self.limit_s - self.spent_s) / self.processes


@dataclass
class Rate:
    """Time of measurements by their FLOPs, extrapolated from the largest so far.

    Smaller measurements have more overhead per FLOP, so a measurement larger than all before is
    expected to take too long rather than too short.
    """

    flops: float = 0.0
    took_s: float = 0.0

    def see(self, flops: float, took_s: float) -> None:
        """Record a measurement."""
        if flops >= self.flops:
            self.flops, self.took_s = flops, took_s

    def expected_s(self, flops: float) -> float:
        """Return the expected time, or 0 where nothing was measured yet."""
        return self.took_s * flops / self.flops if self.flops else 0.0
