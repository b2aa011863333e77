"""Binding of a rank to the cores of its GPU's socket."""

from __future__ import annotations

import os
from pathlib import Path

import torch

#: Folder of the kernel's PCI devices.
DEVICES = Path("/sys/bus/pci/devices")


def bind_cores(device: torch.device) -> str:
    """Bind this process to the cores next to its GPU, unless it is bound; return a line about it.

    A process that may not use all cores of its host is bound already, by Slurm, a container or the
    user. Threads and processes that it starts from now on inherit its cores.
    """
    allowed = os.sched_getaffinity(0)
    if len(allowed) < (os.cpu_count() or 1):
        return f"cores: the {len(allowed)} of {os.cpu_count()} to which it was bound before"
    near = near_cores(device) & allowed
    if not near or near == allowed:
        return f"cores: all {len(allowed)}, none of which is known to be nearer to its GPU"
    os.sched_setaffinity(0, near)
    return f"cores: the {len(near)} of {len(allowed)} on its GPU's socket"


def near_cores(device: torch.device) -> set[int]:
    """Return the cores of a GPU's socket; empty if the kernel does not tell."""
    known = torch.cuda.get_device_properties(device)
    if not hasattr(known, "pci_domain_id"):
        return set()
    name = f"{known.pci_domain_id:04x}:{known.pci_bus_id:02x}:{known.pci_device_id:02x}.0"
    try:
        text = (DEVICES / name / "local_cpulist").read_text().strip()
    except OSError:
        return set()
    spans = [span.split("-") for span in text.split(",") if span]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}
