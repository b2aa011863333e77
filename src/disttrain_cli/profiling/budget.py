"""How long `disttrain profile` measures: CPU time of all its processes together on a CPU, wall time
on GPUs.

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
#: On a CPU a profile takes no more than this share of the training that it is for, where that is
#: above `LEAST_S`.
TRAINING_SHARE = 0.1
LEAST_S = 5.0
CUDA_S = 180.0


class Meter:
    """What a profile has spent since this was made, on the clock of a kind of device: CPU time of
    this process and of its children that have ended, or wall time."""

    def __init__(self) -> None:
        self._began_s = self._now()

    def read_s(self, kind: str) -> float:
        """Seconds so far, for "cpu" or "cuda"."""
        return self._now()[kind] - self._began_s[kind]

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave out what is spent inside."""
        begin_s = self._now()
        yield
        self._began_s = {
            kind: self._began_s[kind] + now_s - begin_s[kind] for kind, now_s in self._now().items()
        }

    @staticmethod
    def _now() -> dict[str, float]:
        return {"cpu": sum(os.times()[:4]), "cuda": time.monotonic()}


def cpu_budget_s(training_s: float) -> float:
    """Budget of a profile for a training of so much CPU time."""
    return min(CPU_S, max(LEAST_S, TRAINING_SHARE * training_s))


@dataclass
class Budget:
    """The budget as one of the measuring processes sees it, all of which spend alike."""

    limit_s: float  # of all processes together
    before_s: float  # spent when this process's clock shows 0
    processes: int  # whose clocks add up
    clock: Callable[[], float]

    @classmethod
    def of(cls, payload: Mapping[str, Any], processes: int) -> Budget:
        """Of a worker's payload (`worker.main`)."""
        limit_s, before_s = float(payload["budget_s"]), float(payload["before_s"])
        if payload["device"] == "cpu":
            return cls(limit_s, before_s, processes, time.process_time)
        return cls(limit_s, before_s - float(payload["started_s"]), 1, time.monotonic)

    @property
    def spent_s(self) -> float:
        """Seconds that all processes have spent, taking it that the others did as this one."""
        return self.before_s + self.processes * self.clock()

    @property
    def left_s(self) -> float:
        """Seconds of this process's own clock until the budget is spent; below 0 after that."""
        return (self.limit_s - self.spent_s) / self.processes


@dataclass
class Rate:
    """How long measurements take by their FLOPs, from the largest so far: smaller ones have more
    overhead per FLOP, so that one larger than all is expected to take too long rather than too
    short."""

    flops: float = 0.0
    took_s: float = 0.0

    def see(self, flops: float, took_s: float) -> None:
        """Take in a measurement."""
        if flops >= self.flops:
            self.flops, self.took_s = flops, took_s

    def expected_s(self, flops: float) -> float:
        """0 where nothing was measured yet."""
        return self.took_s * flops / self.flops if self.flops else 0.0
