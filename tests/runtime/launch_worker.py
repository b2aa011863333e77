"""Ranks that behave badly, for the launcher's tests."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from disttrain_cli.runtime.launch import launch


def write_rank(payload: dict[str, Any]) -> None:
    Path(payload["folder"], os.environ["RANK"]).write_text(os.environ["WORLD_SIZE"])


def fail(payload: dict[str, Any]) -> None:
    if os.environ["RANK"] == payload["rank"]:
        raise ValueError("this rank is broken")
    time.sleep(600)


def killed(payload: dict[str, Any]) -> None:
    if os.environ["RANK"] == payload["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def launcher(payload: dict[str, Any]) -> None:
    """A launcher of its own, to be killed."""
    launch(1, "tests.runtime.launch_worker:report_and_wait", payload, Path(payload["folder"], "inner"))


def report_and_wait(payload: dict[str, Any]) -> None:
    Path(payload["folder"], "pid").write_text(str(os.getpid()))
    time.sleep(600)


def listening(payload: dict[str, Any]) -> None:
    """Join a process group and write the addresses on which this rank listens."""
    from disttrain_cli.runtime.process import joined

    with joined("cpu", 60.0):
        import torch

        torch.distributed.all_reduce(torch.ones(1))
        found = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
        Path(payload["folder"], os.environ["RANK"]).write_text(" ".join(found))
        torch.distributed.barrier()
