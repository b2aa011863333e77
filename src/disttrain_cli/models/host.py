"""What the host knows, on the device, without making the host wait: a copy from pageable memory
stops it.

Numbers of a batch are copied from page-locked memory (`to_device`); what never changes is copied
once (`constant`). What the host has to know of a device makes it wait: `read`, once in a step.
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
    """Numbers of the host on a device; what is on the way stays in memory until it is there."""
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
    """What a function makes of these arguments on the host, kept on a device."""
    with torch.device("cpu"):
        return to_device(make(*arguments).to(dtype), device)


def read(numbers: Tensor) -> list[float]:
    """Numbers of a device on the host, which waits for all that the device was asked for before."""
    with waiting(numbers.device):
        return numbers.cpu().tolist()


@contextmanager
def waiting(device: torch.device) -> Iterator[None]:
    """Where the host may wait for a device even if it is told of every wait
    (`torch.cuda.set_sync_debug_mode`)."""
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
    """Make a CUDA device this process's own, and fp32 there exact.

    cuDNN's convolutions would round fp32 to TF32's 10 bits (relative errors of 1e-3). These two
    settings serve in all versions of torch; the newer ones (`fp32_precision`), mixed with them,
    make reading these fail.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    return device
