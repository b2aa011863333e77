"""A GPU under sustained load: passes are repeated until its clock has settled, then measured.

Under load a GPU lowers its clock until it keeps its power limit, within milliseconds, and further
as it warms up. Passes that were timed in bursts between pauses ran at clocks that no training
keeps: an H100's steps took 5 to 13 % longer (benchmarks/README.md).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import mean, median
from typing import Any

from disttrain_cli.runtime.watching.sensors import Reading
from disttrain_cli.spec.trace import throttle_reasons

#: Seconds for which passes of one size are measured without a wait of the host.
MEASURED_S = 0.2
#: Seconds of load between two looks at clock and power.
LOOK_S = 0.1
#: A device has settled if the means of its last two windows of `WINDOW_S` differ by no more.
WINDOW_S = 1.0
LARGEST_CHANGE = 0.01
#: Longest time for that; and the time that is taken where clocks cannot be read.
SETTLING_S, UNSEEN_S = 10.0, 3.0
#: Most passes that are queued at once.
MOST_PASSES = 500


def passes_for(seconds: float, pass_s: float) -> int:
    """Return the number of passes that keep a device busy for some time."""
    return min(MOST_PASSES, max(1, math.ceil(seconds / pass_s)))


def settle(
    run: Callable[[], object],
    readings: Sequence[Reading],
    now: Callable[[], float] = time.monotonic,
) -> None:
    """Keep a device busy until its clock and power stay as they are.

    Args:
        run: keeps it busy for about `LOOK_S`.
        readings: the sensor's, to which each run adds one; it stays empty without a sensor.
    """
    begin_s = at_s = now()
    looks: list[tuple[float, Reading]] = []
    while at_s - begin_s < SETTLING_S and not _steady(looks, at_s):
        run()
        at_s = now()
        if readings:
            looks.append((at_s, readings[-1]))
        elif at_s - begin_s >= UNSEEN_S:
            return


def _steady(looks: Sequence[tuple[float, Reading]], at_s: float) -> bool:
    """Return True if the means of the last two windows hardly differ."""
    if not looks or at_s - looks[0][0] < 2 * WINDOW_S:
        return False
    last, before = (
        [one for look_s, one in looks if age <= (at_s - look_s) / WINDOW_S < age + 1]
        for age in (0, 1)
    )
    return bool(before) and all(
        abs(mean(now) / mean(then) - 1) <= LARGEST_CHANGE
        for now, then in zip(
            zip(*((one.sm_mhz, one.power_w) for one in last), strict=True),
            zip(*((one.sm_mhz, one.power_w) for one in before), strict=True),
            strict=True,
        )
    )


def load_of(readings: Sequence[Reading]) -> dict[str, Any]:
    """Return the fields of a `DeviceProfile` for its state under load; none without readings.

    Throttle reasons are those of more than half of the readings.
    """
    if not readings:
        return {}
    reasons = list(chain.from_iterable(throttle_reasons(one.throttle) for one in readings))
    return {
        "sm_mhz": float(median(one.sm_mhz for one in readings)),
        "power_w": float(median(one.power_w for one in readings)),
        "throttle": [
            reason for reason in dict.fromkeys(reasons) if reasons.count(reason) > len(readings) / 2
        ],
    }
