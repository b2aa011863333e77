"""GPUs with lowered clocks: recorded clocks against other devices, earlier steps, the profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.record import SlowClock
from disttrain_cli.spec.trace import THROTTLES, throttle_reasons

#: A clock is low below this share of what it is compared with; under a power limit, equal devices
#: differ by a few percent.
LOW = 0.95
#: Least share of the steps in which it must be, and of those in which a reason must be recorded.
LEAST_SHARE, OFTEN = 0.1, 0.5
#: Percentile of a device's own clocks that counts as its usual one.
OWN = 90

Clocks = NDArray[np.float64]


def slow_clocks(database: Database) -> dict[int, SlowClock]:
    """Return, by rank, the devices that ran below their usual clock, with the recorded reasons.

    A device is compared with the others of its unit's stage, with its own fastest steps, and with
    the profile, in this order. One whose driver gives no reason is not among them.
    """
    rows = database.sql(
        "SELECT rank, any_value((unit, stage)::VARCHAR) AS alike, list(sm_mhz ORDER BY step) AS"
        " mhz, list(power_w ORDER BY step) AS power_w, list(throttle ORDER BY step) AS throttle"
        " FROM operations WHERE operation = 'step' AND measured AND sm_mhz > 0 GROUP BY rank"
    )
    medians = {row["rank"]: float(np.median(row["mhz"])) for row in rows}
    job = database.job
    of_profile = None if job is None else job.profile.device.sm_mhz
    slow: dict[int, SlowClock] = {}
    for row in rows:
        others = [
            medians[one["rank"]]
            for one in rows
            if one["alike"] == row["alike"] and one["rank"] != row["rank"]
        ]
        for usual_mhz, where in _usual(row["mhz"], others, of_profile):
            if (found := _slow(row, usual_mhz, where)) is not None:
                slow[row["rank"]] = found
                break
    return slow


def _usual(
    own: list[int], others: list[float], of_profile: float | None
) -> Iterator[tuple[float, str]]:
    if others:
        yield float(np.median(others)), "on the other devices of its stage"
    yield float(np.percentile(own, OWN)), "in its own fastest steps"
    if of_profile is not None:
        yield of_profile, "when it was profiled"


def _slow(row: dict[str, Any], usual_mhz: float, where: str) -> SlowClock | None:
    mhz, bits = np.array(row["mhz"]), np.array(row["throttle"])
    low = mhz < LOW * usual_mhz
    if low.mean() < LEAST_SHARE:
        return None
    often = sum(bit for bit in THROTTLES if (bits[low] & bit > 0).mean() >= OFTEN)
    if not often:
        return None
    return SlowClock(
        float(np.median(mhz[low])),
        usual_mhz,
        where,
        float(np.median(np.array(row["power_w"])[low])),
        tuple(throttle_reasons(often)),
    )
