"""The clock of an emulated device: an operation takes its time from when the device is free and its
inputs are there.

As with a GPU, the host starts an operation when the device can begin it, and then does its own work
(Python, messages, traces) while the device computes: it delays nothing unless it takes longer than
the operation. What the host sends carries the time at which the device will have finished; whoever
receives it waits until then, or until it has really come. By how much the host is behind is
counted, and what of it delays the device. Traces show the device's time, as those of a GPU do.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Device:
    """One process's devices, in lockstep. Times are seconds of the host's monotonic clock."""

    time_scale: float  # seconds here per second of the cluster
    began_s: float = 0.0  # when the step began
    free_s: float = 0.0  # when the last operation ends
    ready_s: float = 0.0  # when the inputs of the next one are there
    due_s: float = 0.0  # when they would be, were no host late
    stepping: bool = False
    # by how much the host missed the start of each operation
    late_s: list[float] = field(default_factory=list)

    def begin(self, at_s: float) -> None:
        """Start a step with a device that is idle until then."""
        self.began_s = self.free_s = at_s
        self.ready_s, self.due_s, self.stepping = 0.0, 0.0, True

    def end(self) -> None:
        """End the step when the device has; until the next one only the host's time counts."""
        sleep_until(self.free_s)
        self.stepping = False

    @property
    def next_s(self) -> float:
        """When the next operation can begin, for all that is known so far."""
        return max(self.free_s, self.ready_s)

    @property
    def now_s(self) -> float:
        """Where the device stands in a step; the host's time between steps."""
        return self.next_s if self.stepping else time.monotonic()

    @property
    def delayed_s(self) -> float:
        """By how much late hosts put off the next operation, in seconds of the cluster."""
        return (self.next_s - max(self.free_s, self.due_s)) / self.time_scale

    def arrive(self, at_s: float, late_s: float = 0.0) -> None:
        """An input of the next operation is there at a time, or so much later because its host is
        late."""
        self.ready_s = max(self.ready_s, at_s + late_s)
        self.due_s = max(self.due_s, at_s)

    def run(self, seconds: float) -> None:
        """One operation of so many of the cluster's seconds; returns when it begins."""
        begin_s = self.next_s
        sleep_until(begin_s)
        self.late_s.append(time.monotonic() - begin_s)
        self.enqueue(seconds)

    def enqueue(self, seconds: float) -> None:
        """The same for what the host gives the device ahead of time, as at the end of a step;
        returns at once."""
        self.free_s = self.next_s + seconds * self.time_scale
        self.ready_s = self.due_s = 0.0


def sleep_until(at_s: float) -> None:
    """Sleep until the monotonic clock shows a time."""
    while (left_s := at_s - time.monotonic()) > 0:
        time.sleep(left_s)
