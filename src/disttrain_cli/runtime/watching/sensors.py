"""SM clock, power and throttle reasons of a CUDA device, read from its driver (NVML).

The driver's library is called directly: `torch.cuda.clock_rate` and `power_draw` need the package
pynvml. A reading takes the host well below a millisecond and the device nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch

SM_CLOCK = 1  # NVML_CLOCK_SM


class Reading(NamedTuple):
    """State of a device at one instant; the fields are columns of a trace."""

    sm_mhz: int
    power_w: int
    throttle: int  # bits of `spec.trace.THROTTLES`


class Sensor:
    """Sensor of one device.

    Args:
        library: NVML, initialised.
        handle: the device's.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle

    def read(self) -> Reading | None:
        """Return the device's present state; None where the driver does not report all of it."""
        clock, power, reasons = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_ulonglong()
        failed = (
            self._library.nvmlDeviceGetClockInfo(self._handle, SM_CLOCK, ctypes.byref(clock))
            or self._library.nvmlDeviceGetPowerUsage(self._handle, ctypes.byref(power))
            or self._library.nvmlDeviceGetCurrentClocksThrottleReasons(
                self._handle, ctypes.byref(reasons)
            )
        )
        return None if failed else Reading(clock.value, power.value // 1000, reasons.value)


def sensor_of(device: torch.device) -> Sensor | None:
    """Return the sensor of a CUDA device; None for a CPU, and if the driver reports too little."""
    if device.type != "cuda":
        return None
    name = f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"
    handle = ctypes.c_void_p()
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(
            name.encode(), ctypes.byref(handle)
        ):
            return None
        sensor = Sensor(library, handle)
        return None if sensor.read() is None else sensor
    except (OSError, AttributeError):  # no library, or one without these functions
        return None
