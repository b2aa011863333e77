"""Fake `torch.cuda` in a process with the shim loaded: GPUs of one kind, without run time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.dryrun.syncs import pin_memory, synchronize

_REAL_TENSOR = torch.tensor


class _Event:
    """Fake CUDA event, complete as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None:
        synchronize(f"{type(self).__name__.removeprefix('_')}.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 0.0


class _Stream(_Event):
    """Fake CUDA stream, on which nothing ever waits."""

    device = torch.device("cuda", 0)

    def wait_event(self, _: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


def _tensor(
    values: Any,
    *,
    dtype: torch.dtype | None = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Replace `torch.tensor`: copy host values to the fake device, without real memory."""
    made = _REAL_TENSOR(values, dtype=dtype, device="cpu")
    return (made if device is None else made.to(device)).requires_grad_(requires_grad)


def _apply(
    module: torch.nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True
) -> torch.nn.Module:
    """Replace `Module._apply` so that fake parameters keep their identity, as real ones do.

    For fake tensors, torch swaps the parameters, or fails.
    """
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        with torch.no_grad():
            made = function(parameter)
        if torch._has_compatible_shallow_copy_type(parameter, made):
            parameter.data = made
            if isinstance(made, FakeTensor):
                parameter.fake_device = made.fake_device
        else:  # from the meta device
            module._parameters[name] = torch.nn.Parameter(made, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else function(buffer)
    return module


@contextmanager
def pretend(
    name: str = "fake", memory_gib: float = 80.0, capability: tuple[int, int] = (9, 0)
) -> Iterator[FakeTensorMode]:
    """Make `torch.cuda` describe such a device, and every new tensor a fake one.

    A process that ran a backward should end by `os._exit`: at a normal exit, autograd's device
    threads may abort it.

    Raises:
        DisttrainError: the process was not started with `shim.environment`.
    """
    if "fake_cuda" not in os.environ.get("LD_PRELOAD", ""):
        raise DisttrainError(
            "This process has no fake CUDA devices", "the library is not preloaded", ""
        )
    total = round(memory_gib * 2**30)
    properties = SimpleNamespace(
        name=name,
        total_memory=total,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
        warp_size=32,
        gcnArchName="",
        uuid="fake",
    )
    stream, kernels = _Stream(), torch.library.Library("aten", "IMPL", "CUDA")
    # One kernel in CUDA's build; the CPU build decomposes it into operators whose intermediate
    # results would be counted as memory.
    kernels.impl("silu_backward", lambda gradient, x: torch.empty_like(x))
    given: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "synchronize": lambda *_: synchronize("torch.cuda.synchronize"),
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "get_device_properties": lambda *_: properties,
        "get_device_name": lambda *_: name,
        "get_device_capability": lambda *_: capability,
        "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda *_: (total, total),
        "memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "memory_cached": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "max_memory_cached": lambda *_: 0,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
        "reset_max_memory_allocated": lambda *_: None,
        "reset_max_memory_cached": lambda *_: None,
        "reset_max_memory_reserved": lambda *_: None,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "set_stream": lambda _: None,
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "is_current_stream_capturing": lambda: False,
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": lambda _: None,
    }
    with (
        patch.multiple(torch.cuda, create=True, **given),
        patch.multiple(torch.cuda.nvtx, range_push=lambda _: 0, range_pop=lambda: 0),
        patch.object(torch.Tensor, "pin_memory", pin_memory),
        patch.object(torch.Tensor, "record_stream", lambda *_: None),
        patch.object(torch.nn.Module, "_apply", _apply),
        patch.object(torch, "tensor", _tensor),
        # otherwise constants would be stored as real tensors
        patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", -1),
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
    ):
        yield mode
