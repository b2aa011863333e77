"""Catalogue of devices as data: dense bf16 peak, memory and bandwidths, each with its source.

A device that is not listed is an error that asks for its figures: a wrong peak makes every MFU a lie.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from disttrain_cli.errors import SpecError


@dataclass(frozen=True)
class Device:
    """Published figures of one device."""

    name: str
    pattern: str  # of the name that torch.cuda.get_device_name reports
    peak_tflops: float  # dense bf16, without sparsity
    memory_gib: float  # nominal
    memory_gbytes_s: float
    nvlink_gbytes_s: float  # both directions together
    source: str


DEVICES = (
    Device("A100", r"\bA100\b.*80GB", 312.0, 80.0, 2039.0, 600.0, "NVIDIA A100 80GB (SXM) datasheet"),
    Device("A100-40GB", r"\bA100\b.*40GB", 312.0, 40.0, 1555.0, 600.0, "NVIDIA A100 40GB datasheet"),
    Device("A800", r"\bA800\b.*80GB", 312.0, 80.0, 2039.0, 400.0, "NVIDIA A800 80GB datasheet"),
    Device("H100", r"\bH100\b", 989.4, 80.0, 3350.0, 900.0, "NVIDIA H100 (SXM) datasheet"),
    Device("H800", r"\bH800\b", 989.4, 80.0, 3350.0, 400.0, "NVIDIA H800 (SXM) datasheet"),
    Device("H200", r"\bH200\b", 989.4, 140.0, 4800.0, 900.0, "NVIDIA H200 (SXM) datasheet"),
    Device("B200", r"\bB200\b", 2250.0, 180.0, 8000.0, 1800.0, "NVIDIA DGX B200 datasheet, per GPU"),
)

# Forms with the same name and other peaks: refused rather than guessed.
OTHER_FORMS = re.compile(r"\bMIG\b|(?:H100|H800|H200).*(?:PCIe|NVL)", re.IGNORECASE)


def lookup(device_name: str) -> Device:
    """The catalogue's entry for the name that torch reports.

    Raises:
        SpecError: the device is not in the catalogue; asks for `cluster.peak_tflops`.
    """
    if not OTHER_FORMS.search(device_name):
        for device in DEVICES:
            if device_name == device.name or re.search(device.pattern, device_name, re.IGNORECASE):
                return device
    raise SpecError(f"The peak of the device {device_name!r} is not known",
                    f"the catalogue has {', '.join(device.name for device in DEVICES)}",
                    "Give its dense peak for your precision in the run file: cluster.peak_tflops")
