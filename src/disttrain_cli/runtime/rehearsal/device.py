"""Clock of an emulated device: an operation starts once the device is free and its inputs arrived.

As with a GPU, the host starts an operation when the device can begin it, and then does its own work
(Python, messages, traces) while the device computes: it delays nothing unless it takes longer than
the operation. A message carries the time at which the device will have finished; the receiver waits
until then, or until the message has really arrived. The host's delay is recorded, and the part of
it that delays the device. Traces show the device's time, as those of a GPU do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Device:
    """Devices of one process, in lockstep. Times are seconds of the host's monotonic clock."""

    time_scale: float  # seconds of this host per second of the cluster
    began_s: float = 0.0  # start of the step
    free_s: float = 0.0  # end of the last operation
    ready_s: float = 0.0  # arrival of the next operation's inputs
    due_s: float = 0.0  # their arrival without host delays
    stepping: bool = False
    # start delay of each operation by the host
    late_s: list[float] = field(default_factory=list)

    def begin(self, at_s: float) -> None:
        """Start a step with a device that is idle until `at_s`."""
        self.began_s = self.free_s = at_s
        self.ready_s, self.due_s, self.stepping = 0.0, 0.0, True

    def end(self) -> None:
        """End the step when the device has finished; until the next one only host time counts."""
        sleep_until(self.free_s)
        self.stepping = False

    @property
    def next_s(self) -> float:
        """Earliest start of the next operation, by the inputs known so far."""
        return max(self.free_s, self.ready_s)

    @property
    def now_s(self) -> float:
        """Time of the device in a step; the host's time between steps."""
        return self.next_s if self.stepping else time.monotonic()

    @property
    def delayed_s(self) -> float:
        """Delay of the next operation by late hosts, in seconds of the cluster."""
        return (self.next_s - max(self.free_s, self.due_s)) / self.time_scale

    def arrive(self, at_s: float, late_s: float = 0.0) -> None:
        """Register the arrival of an input of the next operation.

        Args:
            at_s: arrival without host delay.
            late_s: delay of the arrival by a late host.
        """
        self.ready_s = max(self.ready_s, at_s + late_s)
        self.due_s = max(self.due_s, at_s)

    def run(self, seconds: float) -> None:
        """Execute an operation of some seconds of the cluster; block until it starts."""
        begin_s = self.next_s
        sleep_until(begin_s)
        self.late_s.append(time.monotonic() - begin_s)
        self.enqueue(seconds)

    def enqueue(self, seconds: float) -> None:
        """Queue an operation that the host issues ahead of time, as at the end of a step.

        Unlike `run`, return at once.
        """
        self.free_s = self.next_s + seconds * self.time_scale
        self.ready_s = self.due_s = 0.0


def sleep_until(at_s: float) -> None:
    """Sleep until the monotonic clock shows a time."""
    while (left_s := at_s - time.monotonic()) > 0:
        time.sleep(left_s)
