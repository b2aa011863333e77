"""Tracker of tensor storages on a device: bytes alive, and their peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_cli.models.workspaces import symmetric_bytes, workspace_bytes

#: CUDA's caching allocator hands out multiples of this many bytes
#: (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
BLOCK_BYTES = 512


class Storages(TorchDispatchMode):
    """Bytes alive on a kind of device, of all tensors created or used while the mode is active.

    It is independent of layers and autograd: a storage counts from the operator that created it
    until it is freed. Workspaces inside kernels count for the peak while they run, by their formula
    (`workspace_bytes`), and symmetric memory from its first use on; a rank has one TP group.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.alive: dict[int, int] = {}  # bytes by storage
        self.alive_bytes = self.peak_bytes = self._symmetric_bytes = 0
        self._device = device

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's storage on the device from now on, unless it is counted already."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.alive:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.alive[address] = size
        self.alive_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
        weakref.finalize(storage, self._freed, address)

    def _freed(self, address: int) -> None:
        self.alive_bytes -= self.alive.pop(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, here = func(*args, **(kwargs or {})), False
        for tensor in tensors_in(args, kwargs, result):
            if device_of(tensor).type == self._device:
                self.follow(tensor)
                here = True
        if here:
            more = max(0, symmetric_bytes(func, args, result) - self._symmetric_bytes)
            self._symmetric_bytes += more
            self.alive_bytes += more
            self.peak_bytes = max(
                self.peak_bytes, self.alive_bytes + workspace_bytes(func, args, result)
            )
        return result


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments or results: nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor.

    For a fake tensor it is read without asking torch, which would dispatch the query through all
    modes like an operator.
    """
    device: torch.device = getattr(tensor, "fake_device", None) or tensor.device
    return device


def on_cuda(tensor: Tensor) -> bool:
    """True if a tensor lies on a CUDA device."""
    return device_of(tensor).type == "cuda"


def bytes_of(tensors: list[Tensor]) -> int:
    """Return the bytes of all storages of some tensors, counting each storage once."""
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes.values())
