"""Ranks that behave badly, for the launcher's tests."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from disttrain_cli.errors import DisttrainError, SpecError
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.spec.whole import write_whole


class UnfitError(SpecError):
    """An error of a class that the launcher does not import."""


def before_fork(payload: dict[str, Any]) -> list[str]:
    if "stop_by" in payload:
        os.kill(os.getppid(), payload["stop_by"])
        time.sleep(600)
    if "killed" in payload:
        os.kill(os.getpid(), signal.SIGKILL)
    if "unfit" in payload:
        raise UnfitError("The weights do not fit", payload["unfit"], "Take others.")
    return payload.get("notes", [])


def write_rank(payload: dict[str, Any]) -> None:
    Path(payload["folder"], os.environ["RANK"]).write_text(os.environ["WORLD_SIZE"])


def fail(payload: dict[str, Any]) -> None:
    if os.environ["RANK"] == payload["rank"]:
        raise ValueError("this rank is broken")
    time.sleep(600)


def refuse(payload: dict[str, Any]) -> None:
    """Fail with more to say than a pipe takes at once."""
    if os.environ["RANK"] == payload["rank"]:
        raise DisttrainError(
            "The checkpoint could not be written", "rank 0: No space left\n" * 1000, "Free some."
        )
    time.sleep(600)


def killed(payload: dict[str, Any]) -> None:
    if os.environ["RANK"] == payload["rank"]:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def launcher(payload: dict[str, Any]) -> None:
    """A launcher of its own, to be killed."""
    launch(
        1,
        "tests.runtime.launching.launch_worker:report_and_wait",
        payload,
        Path(payload["folder"], "inner"),
    )


def report_and_wait(payload: dict[str, Any]) -> None:
    Path(payload["folder"], "pid").write_text(str(os.getpid()))
    if payload["stopped"]:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)


def listening(payload: dict[str, Any]) -> None:
    """Join a process group and write the addresses on which this rank listens."""
    from disttrain_cli.runtime.launching.process import joined

    with joined("cpu", 60.0):
        import torch

        torch.distributed.all_reduce(torch.ones(1))
        found = [
            c.laddr.ip
            for c in psutil.Process().net_connections("inet")
            if c.status == psutil.CONN_LISTEN
        ]
        Path(payload["folder"], os.environ["RANK"]).write_text(" ".join(found))
        torch.distributed.barrier()


def hanging(payload: dict[str, Any]) -> None:
    """Three stages of one rank: the last waits for the middle one, which stops, waits for the last,
    or computes."""
    from disttrain_cli.runtime.launching.process import joined
    from disttrain_cli.runtime.watching.pulse import Pulse, read_state

    rank, how = int(os.environ["RANK"]), payload["how"]
    with (
        Pulse(Path(payload["pulses"]), rank, payload["hang_s"]).beating() as pulse,
        joined("cpu", 60.0),
    ):
        import torch

        torch.distributed.barrier()
        if rank == 0:
            pulse.begin("receive_gradient", 5, 2)
            torch.distributed.recv(torch.ones(1), 1)
        elif rank == 2:
            pulse.begin("receive_activation", 5, 3)
            torch.distributed.recv(torch.ones(1), 1)
        elif how == "circle":
            pulse.begin("receive_gradient", 5, 2)
            torch.distributed.recv(torch.ones(1), 2)
        else:
            pulse.begin("forward", 5, 3, "llm")
            while (
                told := read_state(Path(payload["pulses"]), rank)
            ) is None or told.operation != "forward":
                time.sleep(0.01)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Lock().acquire() and threading.Event().wait()


def emitted(payload: dict[str, Any]) -> None:
    """A rank that others start: write what it was told, and stop, fail or end as the payload's file
    says."""
    rank, folder = os.environ["RANK"], Path(payload["logs"])
    names = (
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "DISTTRAIN_HOSTS",
        "DISTTRAIN_WORKERS",
        "GLOO_SOCKET_IFNAME",
    )
    told = {name: os.environ.get(name) for name in names}
    told["start"] = json.loads(Path(payload["start_file"]).read_text())
    write_whole(folder / f"told-{rank}.json", json.dumps(told))
    how = (folder.parent / "how").read_text()
    if how == "fail":  # as all do when one of a training's ranks does
        raise ValueError("this rank is broken")
    while how == "wait" and folder.exists() and not (folder / "stop").exists():
        time.sleep(0.02)
    if how == "wait" and folder.exists():
        write_whole(folder / "stopped", (folder / "stop").read_text().strip() or "stop file")
