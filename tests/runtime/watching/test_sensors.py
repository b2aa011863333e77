"""Readings of a GPU's driver, whose library is a stand-in here."""

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_cli.runtime.watching import sensors
from disttrain_cli.runtime.watching.sensors import Reading, sensor_of


def library(asked: list[Any], **failing: int) -> SimpleNamespace:
    """NVML with one device, H100-like; `failing` functions return an error."""

    def function(name: str, value: int | None = None) -> Any:
        def called(*arguments: Any) -> int:
            asked.append((name, arguments[0] if arguments else None))
            if value is not None and name not in failing:
                arguments[-1]._obj.value = value
            return failing.get(name, 0)

        return called

    values = {
        "nvmlInit_v2": None,
        "nvmlDeviceGetHandleByUUID": 7,
        "nvmlDeviceGetClockInfo": 1695,
        "nvmlDeviceGetPowerUsage": 698_412,
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x24,
    }
    return SimpleNamespace(**{name: function(name, value) for name, value in values.items()})


@pytest.mark.parametrize("uuid", ["11-22", "GPU-11-22"])
def test_a_device_is_found_by_its_uuid_and_read(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library(asked))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=uuid))
    sensor = sensor_of(torch.device("cuda", 0))
    assert sensor is not None and ("nvmlDeviceGetHandleByUUID", b"GPU-11-22") in asked
    assert sensor.read() == Reading(sm_mhz=1695, power_w=698, throttle=0x24)


@pytest.mark.parametrize(
    "failing",
    ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetPowerUsage", "no library", "cpu"],
)
def test_there_is_no_reading_where_the_driver_has_none(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def loaded(name: str) -> Any:
        if failing == "no library":
            raise OSError(name)
        return library([], **{failing: 3})

    monkeypatch.setattr(sensors.ctypes, "CDLL", loaded)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="11-22")
    )
    sensor = sensor_of(torch.device("cpu" if failing == "cpu" else "cuda"))
    assert sensor is None or sensor.read() is None
