"""Training ranks of these benchmarks: one counts where the host waits for the device (torch's
warnings, by line of ours or DeepSpeed's), one saves nothing."""

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
from disttrain_cli.runtime.checkpoints.checkpoint import Saver
from disttrain_cli.spec.whole import write_whole

before_fork = worker.before_fork
SAID = "called a synchronizing"


def main(payload: dict[str, Any]) -> None:
    """Train as `runtime.worker` does, and leave `synchronisations-RANK.json`, on CUDA also
    `allocator-RANK.json`, beside the run file."""
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
        folder, rank = Path(payload["run"][0]).parent, os.environ["RANK"]
        write_whole(folder / f"synchronisations-{rank}.json", json.dumps(counted))
        if torch.cuda.is_available():
            write_whole(folder / f"allocator-{rank}.json", json.dumps(_allocator()))


def unsaved(payload: dict[str, Any]) -> None:
    """Train as `runtime.worker` does without any checkpoint: a large one takes longer than the
    steps."""
    Saver.save = lambda *_: None  # type: ignore[method-assign]
    worker.main(payload)


def _allocator() -> dict[str, float]:
    """What tensors held at most, and what the allocator held of the device for them."""
    return {
        "allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
    }


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
