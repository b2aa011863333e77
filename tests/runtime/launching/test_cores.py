"""A rank is bound to its GPU's socket, unless it is bound already."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from disttrain_cli.runtime.launching import cores

GPU = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("allowed", "listed", "bound", "line"),
    [
        (range(8), "0-1,4-5", {0, 1, 4, 5}, "cores: the 4 of 8 on its GPU's socket"),
        (range(4), "0-1,4-5", None, "cores: the 4 of 8 to which it was bound before"),
        (range(8), "0-7", None, "cores: all 8, none of which is known to be nearer to its GPU"),
        (range(8), "", None, "cores: all 8, none of which is known to be nearer to its GPU"),
        (range(8), None, None, "cores: all 8, none of which is known to be nearer to its GPU"),
    ],
)
def test_cores_of_the_socket(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: range,
    listed: str | None,
    bound: set[int] | None,
    line: str,
) -> None:
    done: list[set[int]] = []
    known = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(allowed))
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, those: done.append(those))
    monkeypatch.setattr(cores, "DEVICES", tmp_path)
    if listed is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(f"{listed}\n")
    assert cores.bind_cores(GPU) == line
    assert done == ([] if bound is None else [bound])
