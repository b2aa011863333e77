"""Ranks whose clean-up never returns, for the tests of how ranks end."""

import ctypes
import os
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.launching import ending
from disttrain_cli.runtime.launching.ending import follow, reported_at_once
from disttrain_cli.runtime.watching.pulse import Pulse
from disttrain_cli.spec.rundir import pulses


def stuck(payload: dict[str, Any]) -> None:
    """Rank 0 fails, and what it leaves open never closes. Rank 1 hears of it by the verdict
    only."""
    ending.CLOSING_S, ending.STUCK_S = 0.5, 1
    rank = int(os.environ["RANK"])
    with ExitStack() as stack, reported_at_once():
        stack.enter_context(Pulse(pulses(Path(payload["logs"])), rank, 1.0, follow).beating())
        stack.callback(wait_for_ever, payload["lock"] == "held")
        if rank == 0:
            error = ValueError("mine\nand more of it")
            error.add_note("In the forward of slot 3: unit llm, stage 1, replica 0")
            raise error
        threading.Event().wait()


def late(payload: dict[str, Any]) -> None:
    """A wait that knows no limit, behind one that ended in time."""
    with ending.within(60.0, lambda: DisttrainError("not this one")):
        pass
    with ending.within(
        0.2, lambda: DisttrainError("nccl did not connect all 2 ranks", "a host", "Look there.")
    ):
        threading.Event().wait()


def wait_for_ever(holding_the_lock: bool) -> None:
    """As a call into a device does that waits for a kernel which never ends."""
    if holding_the_lock:
        ctypes.PyDLL(None).sleep(600)
    threading.Event().wait()
