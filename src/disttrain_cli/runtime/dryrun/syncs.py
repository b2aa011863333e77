"""Detection of host waits on the device, from the operators that a step runs on a fake one."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_cli.runtime.dryrun.storages import device_of, on_cuda, tensors_in

_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_unsafe_index"}
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from"}
_OWN, _TORCH = Path(__file__).parent, Path(torch.__file__).parent


def pin_memory(tensor: Tensor, *_: Any) -> Tensor:
    """Replace `Tensor.pin_memory`: return a copy that is marked as page-locked."""
    return _pinned(tensor.clone())


def synchronize(what: str) -> None:
    """Replace waiting for the device, a stream or an event: count the wait."""
    if Waits.active is not None:
        Waits.active.counts[what, _where(sys._getframe(1))] += 1


class Waits(TorchDispatchMode):
    """Counter of waits for a device, by cause and source location, innermost function first.

    Causes: `synchronize` of any object, reading a value from the device, operators whose result's
    shape depends on values, selecting by a mask, copies between host and device that are not
    asynchronous or whose host memory is not page-locked, and barriers among NCCL's operations.
    NCCL's operations require device tensors: others are refused, as NCCL does. Values that the host
    reads are invented (1, or True), so that a step continues and all its waits are found.
    """

    active: ClassVar[Waits | None] = None  # in all threads: autograd's too

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> Waits:
        Waits.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        Waits.active = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return device_of(args[0])  # without the other modes, which need not see it
        kwargs = kwargs or {}
        tensors = list(tensors_in(args, kwargs))
        if what := _waits(func, args, kwargs, tensors):
            self.counts[what, _where(sys._getframe(1))] += 1
        if torch.Tag.data_dependent_output in func.tags:
            return {torch.bool: True}.get(
                tensors[0].dtype, 1.0 if tensors[0].is_floating_point() else 1
            )
        made = func(*args, **kwargs)
        return _pinned(made) if kwargs.get("pin_memory") else made


def _waits(func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> str:
    """Return what makes the host wait in an operator; "" if nothing does."""
    name = func._schema.name
    if func.namespace == "c10d":
        if name == "c10d::barrier":
            return name
        if any(not on_cuda(tensor) for tensor in tensors):
            raise RuntimeError(f"No backend type associated with device type cpu ({name})")
        return ""
    if name in _COPIES:
        return _copy(args, kwargs)
    if not any(on_cuda(tensor) for tensor in tensors):
        return ""
    if name in _INDEXED:
        masks = [
            index
            for index in args[1]
            if index is not None and index.dtype in (torch.bool, torch.uint8)
        ]
        # a fill with a host scalar does not wait, as in `masked_fill`
        alone = len(args) > 2 and args[2].numel() == 1 and not on_cuda(args[2])
        return name if masks and not alone else ""
    depends = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
    return name if depends and kwargs.get("output_size") is None else ""


def _copy(args: Any, kwargs: Any) -> str:
    source = args[1] if len(args) > 1 and isinstance(args[1], Tensor) else args[0]
    target, from_device = kwargs.get("device") or device_of(args[0]), on_cuda(source)
    asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if from_device == (target.type == "cuda"):
        return ""
    host = args[0] if from_device and source is not args[0] else source
    if asynchronous and (on_cuda(host) or _is_pinned(host)):
        return ""
    return f"copy {device_of(source).type} to {target.type}" + " from pageable memory" * (
        not from_device
    )


def _pinned(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().pinned = True
    return tensor


def _is_pinned(tensor: Tensor) -> bool:
    return getattr(tensor.untyped_storage(), "pinned", False)


def _where(frame: FrameType | None) -> str:
    """Return the innermost function outside torch and this folder.

    If that is not the package's, the package's innermost function follows.
    """
    shown: list[str] = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        ours = "disttrain_cli" in file.parts
        if _OWN not in file.parents and _TORCH not in file.parents and (ours or not shown):
            shown.append(f"{'/'.join(file.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}")
            if ours:
                break
        frame = frame.f_back
    return " < ".join(shown) or "backward"
