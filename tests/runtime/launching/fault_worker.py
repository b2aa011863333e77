"""A training rank that goes wrong at a place that the file `fault.json`, beside the logs, names."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from disttrain_cli.runtime import worker
from disttrain_cli.runtime.checkpoints.checkpoint import Saver
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.partitions import Gathering
from disttrain_cli.runtime.engine.reduction import Reduction
from disttrain_cli.runtime.launching import join

#: Text of the error: of several lines, as those of compilers and drivers are.
TEXT = 'the kernel refused\n  File "kernel.cu", line 3\n\nwith an empty line and ünïcode'
#: Where it happens: what is replaced, and in which of its calls.
PLACES: dict[str, tuple[Any, str, int]] = {
    "joining": (join, "rendezvous", 1),
    "met": (join, "joined", 1),
    "building": (worker, "build_engine", 1),
    "preflight": (worker, "check_groups", 1),
    "step": (UnitEngine, "_forward", 3),
    "reducing": (Reduction, "_begin_next", 2),
    "gathering": (Gathering, "begin", 2),
    "checkpoint": (Saver, "_copy", 1),
}


def before_fork(payload: dict[str, Any]) -> None:
    worker.before_fork(payload)


def main(payload: dict[str, Any]) -> None:
    """Train, and on one rank go wrong."""
    fault = json.loads((Path(payload["logs"]).parent / "fault.json").read_text())
    if int(os.environ["RANK"]) == fault["rank"]:
        owner, name, call = PLACES[fault["where"]]
        setattr(owner, name, going_wrong(getattr(owner, name), call, fault["how"]))
    worker.main(payload)


def going_wrong(real: Callable[..., Any], call: int, how: str) -> Callable[..., Any]:
    """The function, which fails in its n-th call."""
    calls = 0

    def function(*given: Any, **more: Any) -> Any:
        nonlocal calls
        calls += 1
        return fail(how) if calls == call else real(*given, **more)

    return function


def fail(how: str) -> NoReturn:
    if how == "raise":
        raise RuntimeError(TEXT)
    os.kill(os.getpid(), getattr(signal, how))
    raise AssertionError("still here")
