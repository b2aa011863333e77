"""When a device has settled under load, and what its profile records of that load."""

from collections.abc import Callable

import pytest

from disttrain_cli.profiling import sustained
from disttrain_cli.profiling.sustained import load_of, passes_for, settle
from disttrain_cli.runtime.watching.sensors import Reading


def settled_s(mhz: Callable[[float], float], seen: bool = True, run_s: float = 0.1) -> float:
    """Seconds that a device is kept busy whose clock follows `mhz(seconds)`."""
    clock, readings = [0.0], list[Reading]()

    def run() -> None:
        clock[0] += run_s
        if seen:
            readings.append(Reading(round(mhz(clock[0])), 650, 0x4))

    settle(run, readings, lambda: clock[0])
    return clock[0]


@pytest.mark.parametrize(
    ("mhz", "run_s", "at_least", "at_most"),
    [
        (lambda s: 1700.0, 0.1, 2.0, 2.5),
        (lambda s: 1980.0 - min(s, 4.0) * 100.0, 0.1, 4.0, 6.5),  # falls for four seconds
        (lambda s: 1700.0 + 15 * (int(10 * s) % 2), 0.1, 2.0, 2.5),  # changes from look to look
        (lambda s: 1980.0 - 100.0 * s, 0.1, 10.0, 10.2),  # never settles
        (lambda s: 1700.0, 1.7, 5.0, 12.0),  # passes longer than a window
    ],
)
def test_a_device_is_kept_busy_until_its_clock_stays(
    mhz: Callable[[float], float], run_s: float, at_least: float, at_most: float
) -> None:
    assert at_least <= settled_s(mhz, run_s=run_s) <= at_most


def test_a_device_without_a_sensor_is_kept_busy_for_a_fixed_time() -> None:
    assert settled_s(lambda _: 0.0, seen=False) == pytest.approx(sustained.UNSEEN_S, abs=0.11)


@pytest.mark.parametrize(
    ("pass_s", "passes"), [(0.01, 20), (0.15, 2), (3.0, 1), (1e-6, sustained.MOST_PASSES)]
)
def test_passes_fill_their_time(pass_s: float, passes: int) -> None:
    assert passes_for(0.2, pass_s) == passes


def test_a_profile_records_the_load_and_what_held_the_clock_down_most_of_the_time() -> None:
    readings = [Reading(1980, 400, 0x0), Reading(1700, 690, 0x4), Reading(1650, 700, 0x4 | 0x20)]
    assert load_of(readings) == {"sm_mhz": 1700.0, "power_w": 690.0, "throttle": ["power cap"]}
    assert load_of([]) == {}
