"""The emulated device against a clock that the test moves."""

import pytest

from disttrain_cli.runtime.rehearsal import device as module
from disttrain_cli.runtime.rehearsal.device import Device


class Clock:
    """Time that passes by sleeping, or when the test says that the host works."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_the_hosts_own_work_runs_beside_the_device(clock: Clock) -> None:
    device = Device(time_scale=0.5)
    device.begin(clock.now_s)
    device.run(2.0)
    clock.now_s += 0.3  # python between two operations
    device.run(2.0)
    assert clock.now_s == pytest.approx(101.0) and device.now_s == pytest.approx(102.0)
    device.end()
    assert clock.now_s == pytest.approx(102.0)
    assert device.late_s == pytest.approx([0.0, 0.0])


def test_inputs_that_come_later_are_waited_for(clock: Clock) -> None:
    device = Device(time_scale=1.0)
    device.begin(clock.now_s)
    device.run(1.0)
    device.arrive(103.0)
    assert device.now_s == 103.0
    device.run(1.0)
    assert clock.now_s == pytest.approx(103.0) and device.free_s == pytest.approx(104.0)


def test_what_a_late_host_delays_is_told_from_what_it_does_not(clock: Clock) -> None:
    device = Device(time_scale=0.5)
    device.begin(clock.now_s)
    device.run(2.0)  # until 101
    device.arrive(100.5, late_s=0.3)
    assert device.delayed_s == 0.0
    device.arrive(102.0, late_s=1.0)
    device.arrive(102.5)
    assert (device.next_s, device.delayed_s) == (103.0, pytest.approx(1.0))
    device.run(2.0)
    assert (device.next_s, device.delayed_s) == (104.0, 0.0)


def test_a_host_that_is_behind_is_counted_and_does_not_delay_its_own_device(clock: Clock) -> None:
    device = Device(time_scale=1.0)
    device.begin(clock.now_s)
    device.run(1.0)
    clock.now_s += 5.0
    device.run(1.0)
    assert device.late_s[-1] == pytest.approx(4.0) and device.free_s == pytest.approx(102.0)
    device.end()
    assert clock.now_s == pytest.approx(105.0) and device.now_s == pytest.approx(105.0)


def test_between_steps_the_hosts_time_counts(clock: Clock) -> None:
    device = Device(time_scale=1.0)
    device.begin(clock.now_s)
    device.run(1.0)
    device.end()
    clock.now_s += 2.0
    assert device.now_s == pytest.approx(103.0)
    device.begin(clock.now_s)
    assert device.began_s == device.now_s == pytest.approx(103.0)
