"""Ranks that train as ever, but that the one on device 1 takes longer for every pass."""

import os
import time
from collections.abc import Callable
from typing import Any

from disttrain_cli.runtime import worker
from disttrain_cli.runtime.engine.stage import StageRunner
from disttrain_cli.spec.plan import Plan

DEVICE, SLOWER_S = 1, 0.05

before_fork = worker.before_fork


def main(payload: dict[str, Any]) -> None:
    """Train; the layers and backwards of the slow device take `SLOWER_S` more."""
    devices = Plan.model_validate(payload["plan"]).plan.devices
    if devices[int(os.environ["RANK"])] == DEVICE:
        for name in ("_compute", "_backward"):
            setattr(StageRunner, name, _late(getattr(StageRunner, name)))
    worker.main(payload)


def _late(run: Callable[..., Any]) -> Callable[..., Any]:
    def late(*given: Any) -> Any:
        time.sleep(SLOWER_S)
        return run(*given)

    return late
