"""What a step does on its device, operator by operator: kernels, messages, waits, storages, and numbers in their place."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import disttrain_cli
from disttrain_cli.runtime.dryrun.storages import Storages

#: Operators that start no kernel, besides those that only view.
IDLE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "set_", "resize_",
        "detach", "lift_fresh", "_local_scalar_dense", "record_stream"}
_PACKAGE, _TORCH = (str(Path(module.__file__ or "").parent) for module in (disttrain_cli, torch))
_SELF = str(Path(__file__).parent)


class Observer(Storages):
    """Counts what passes while it is active.

    A number that the host reads of the device is a wait and has no value: 1 stands for it.
    """

    def __init__(self) -> None:
        super().__init__()
        #: Of all so far: kernels, host operators; sends, receives, collectives and the bytes of each.
        self.counts: Counter[str] = Counter()
        self.instruction = ""  # that is under way
        self.waits: Counter[tuple[str, str]] = Counter()  # by instruction and source line

    def waited(self) -> None:
        """Note that the host waits for the device."""
        self.waits[self.instruction, source_line(sys._getframe(1))] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].device.type == self._device:
                self.waited()
            return 1.0 if args[0].is_floating_point() else 1
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace == "c10d":
            self._count_message(func._schema.name.removeprefix("c10d::"), args)
        elif not func.is_view and func._opname not in IDLE:
            made = next((value for value in tree_leaves(result) if isinstance(value, Tensor)), None)
            if made is not None:
                self.counts["kernels" if made.device.type == self._device else "host_operators"] += 1
                if made.device.type == "cpu" and any(isinstance(value, Tensor) and value.device.type == self._device
                                                     for value in tree_leaves((args, kwargs))):
                    self._copied_back(args, kwargs)
        return result

    def _copied_back(self, args: Any, kwargs: Any) -> None:
        if not (kwargs or {}).get("non_blocking", args[2] if len(args) > 2 and args[2] is True else False):
            self.waited()

    def _count_message(self, name: str, args: Any) -> None:
        kind = {"send": "sends", "recv_": "receives"}.get(name, "collectives")
        if name == "barrier":
            self.waited()
        first = args[0] if kind != "collectives" else args[:2]
        sizes = [value.numel() * value.element_size() for value in tree_leaves(first) if isinstance(value, Tensor)]
        self.counts[kind] += 1
        self.counts[f"{kind}_bytes"] += max(sizes, default=0) if kind == "collectives" else sum(sizes)


def source_line(frame: FrameType | None) -> str:
    """FILE:LINE of the innermost frame that is neither torch's nor the dry run's own."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, _SELF, "<")):
            return f"{short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


def short(file: str) -> str:
    """A source file by its path in the package, or in the library that it belongs to."""
    return file.removeprefix(_PACKAGE + "/") if file.startswith(_PACKAGE) else file.rpartition("site-packages/")[2]
