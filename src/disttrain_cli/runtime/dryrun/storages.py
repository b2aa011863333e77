"""Following the storages of tensors on a device: what is alive, and the most that ever was."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttrain_cli.models.workspaces import symmetric_bytes, workspace_bytes

#: CUDA's caching allocator hands out multiples of this many bytes
#: (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
BLOCK_BYTES = 512


class Storages(TorchDispatchMode):
    """Bytes alive on a kind of device, of all tensors made or touched while the mode is active.

    It knows nothing of layers or autograd: a storage counts from the operator that made it until it
    is freed. What kernels hold of their own counts for the peak while they run, as it is stated,
    and symmetric memory from its first use on; a rank has one TP group.
    """

    def __init__(self, device: str = "cuda") -> None:
        super().__init__()
        self.alive: dict[int, int] = {}  # bytes by storage
        self.alive_bytes = self.peak_bytes = self._symmetric_bytes = 0
        self._device = device

    def follow(self, tensor: Tensor) -> None:
        """Count a tensor's storage from now on, if it is not yet."""
        if tensor.device.type != self._device:
            return
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
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, Tensor):
                self.follow(value)
                here = here or value.device.type == self._device
        if here:
            more = max(0, symmetric_bytes(func, args, result) - self._symmetric_bytes)
            self._symmetric_bytes += more
            self.alive_bytes += more
            self.peak_bytes = max(
                self.peak_bytes, self.alive_bytes + workspace_bytes(func, args, result)
            )
        return result


def bytes_of(tensors: list[Tensor]) -> int:
    """Bytes of all storages of some tensors, each once."""
    sizes = {
        tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(-(-size // BLOCK_BYTES) * BLOCK_BYTES for size in sizes.values())
