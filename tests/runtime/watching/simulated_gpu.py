"""A GPU that is simulated: it runs behind its host, by a clock of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.runtime.watching.device_clock import DeviceClock
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.spec.stage_graph import RankCoords
from tests.runtime.watching.test_hang import graph_of

LAUNCH_NS = 4_000  # from a call on the host until an idle device does what it asks for


class Gpu:
    """One stream. `work` and events queue up; the device's clock is fast by some parts per
    million."""

    def __init__(self, ppm: float = 0.0) -> None:
        self.host_ns, self.free_ns, self.rate = 1_700_000_000 * 10**9, 0, 1 + ppm * 1e-6
        self.waits, self.made, self.failed = 0, 0, False

    def now(self) -> int:
        self.host_ns += 100
        return self.host_ns

    def work(self, ns: int) -> None:
        self.host_ns += 1_000
        self.free_ns = max(self.free_ns, self.host_ns + LAUNCH_NS) + ns

    def synchronize(self) -> None:
        self.waits += 1
        self.host_ns = max(self.host_ns, self.free_ns)


class Event:
    """As torch's: times in single-precision milliseconds of the device's clock."""

    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu.made += 1

    def record(self) -> None:
        self.gpu.host_ns += 1_000
        self.at_ns = self.gpu.free_ns = max(self.gpu.free_ns, self.gpu.host_ns + LAUNCH_NS)

    def query(self) -> bool:
        if self.gpu.failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return self.at_ns <= self.gpu.host_ns

    def elapsed_time(self, later: Event) -> float:
        assert self.query() and later.query(), "torch raises where an event has not happened"
        return float(np.float32((later.at_ns - self.at_ns) * self.gpu.rate / 1e6))


def traced(gpu: Gpu, folder: Path, device: bool = True) -> Tracer:
    """A rank's tracer, in the time of its device or of its host."""
    return Tracer(
        folder,
        "start-000",
        RankCoords(0, graph_of().stages[0], 0),
        gpu.now,
        pytest.fail,
        DeviceClock(gpu.now) if device else None,
    )
