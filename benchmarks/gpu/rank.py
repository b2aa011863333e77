"""A training rank that counts where the host waits for the device: torch's warnings, by line of
ours or DeepSpeed's."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from disttrain_cli.runtime import worker
from disttrain_cli.spec.whole import write_whole

before_fork = worker.before_fork
SAID = "called a synchronizing"


def main(payload: dict[str, Any]) -> None:
    """Train as `runtime.worker` does, and leave `synchronisations-RANK.json` beside the run
    file."""
    counted: Counter[str] = Counter()
    show = warnings.showwarning

    def heard(message: Warning | str, *more: Any, **others: Any) -> None:
        if SAID in str(message):
            counted[_where()] += 1
        else:
            show(message, *more, **others)

    warnings.showwarning = heard
    warnings.filterwarnings("always", message=f".*{SAID}.*")
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("warn")
    try:
        worker.main(payload)
    finally:
        path = Path(payload["run"]).parent / f"synchronisations-{os.environ['RANK']}.json"
        write_whole(path, json.dumps(counted))


def _where() -> str:
    """The innermost line of disttrain or DeepSpeed that led here."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        for package in ("disttrain_cli", "deepspeed"):
            if f"/{package}/" in frame.filename:
                return (
                    f"{package}/{frame.filename.split(f'/{package}/')[-1]}:{frame.lineno}"
                    f" {frame.line or ''}".strip()
                )
    return "elsewhere"
