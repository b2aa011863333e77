"""Transfers between host and device that do not block the host.

A copy from pageable memory blocks it. Numbers of a batch are copied from page-locked memory
(`to_device`); constants are copied once (`constant`). Reading a device's values on the host blocks:
`read`, once per step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[float] | Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copy numbers from the host to a device; the source stays allocated until the copy ends."""
    tensor = (
        values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype, device="cpu")
    )
    return (
        tensor.pin_memory().to(device, non_blocking=True)
        if device.type == "cuda"
        else tensor.to(device)
    )


@lru_cache(maxsize=4096)
def constant(
    make: Callable[..., Tensor],
    *arguments: Any,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a function's result for these arguments, cached on a device.

    It is computed on the host.
    """
    with torch.device("cpu"):
        return to_device(make(*arguments).to(dtype), device)


def read(numbers: Tensor) -> list[float]:
    """Return a device's numbers on the host, which waits for all previously queued work."""
    with waiting(numbers.device):
        return numbers.cpu().tolist()


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """Let the host wait for a device inside, despite `torch.cuda.set_sync_debug_mode`."""
    if device.type != "cuda":
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(0)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def use_cuda(number: int) -> torch.device:
    """Select this process's CUDA device, with exact fp32.

    cuDNN's convolutions would round fp32 to TF32's 10 bits (relative errors of 1e-3). These two
    settings work in all versions of torch; the newer ones (`fp32_precision`), mixed with them, make
    reading these fail.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
