"""Annotations of a rank's operations in torch's profile."""

from __future__ import annotations

import torch
from torch.profiler import record_function

from disttrain_cli.spec.trace import mark


class Marks:
    """Current operation as an annotation of the profile; a new one ends the previous one."""

    def __init__(self, step: int, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._step = record_function(f"ProfilerStep#{step}")
        self._open: record_function | None = None
        self._number = step
        self._step.__enter__()

    def begin(self, operation: str, slot: int, module: str) -> None:
        self.end()
        self._wait()
        self._open = record_function(mark(operation, self._number, slot, module))
        self._open.__enter__()

    def end(self) -> None:
        """End the current operation, if there is one."""
        if self._open is not None:
            self._wait()
            self._open.__exit__(None, None, None)
            self._open = None

    def close(self) -> None:
        """End the step."""
        self.end()
        self._step.__exit__(None, None, None)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()
