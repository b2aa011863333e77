"""FlashAttention 4 on Hopper and Blackwell GPUs, where the package flash-attn-4 is installed.

A process uses the version that the profile was made with, so that what is priced is what runs. It
computes and saves what torch's flash attention (version 2) does, with kernels for these GPUs (Shah
et al. 2024, arXiv 2407.08608); `attention.kernel_for` decides for both. They are compiled when they
are first needed, for each head width and kind of mask.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.extras import EXTRAS, install_command

#: Compute capabilities with kernels of both directions for segments.
CAPABILITIES = (9, 10)
WIDEST_HEAD = 128


@cache
def available(device: torch.device) -> bool:
    """Return True if version 4 is installed and has kernels for a device."""
    return (
        device.type == "cuda"
        and EXTRAS["flash"].installed
        and torch.cuda.get_device_capability(device)[0] in CAPABILITIES
    )


def version(wanted: Literal["auto", 2, 4], device: torch.device) -> Literal[2, 4]:
    """Return the version of flash attention of a device; "auto" is 4 where it is available.

    Raises:
        SpecError: version 4 was asked for and is not available.
    """
    if wanted == 2 or (wanted == "auto" and not available(device)):
        return 2
    if not available(device):
        raise SpecError(
            f"FlashAttention 4 is not available on {device}",
            "cluster.flash_attention: 4; it needs a Hopper or Blackwell GPU and the package"
            " flash-attn-4",
            f"Install it: {install_command('flash')}; or set cluster.flash_attention: 2",
        )
    return 4


_version: Literal[2, 4] = 2


def use(chosen: Literal[2, 4]) -> None:
    """Make attention by segments use this version in this process from now on."""
    global _version
    _version = chosen


def used() -> Literal[2, 4]:
    """Return the version of this process."""
    return _version


def computes(query_RHD: Tensor) -> bool:
    """Return True if version 4 computes attention of these rows; tensors without values never."""
    real = query_RHD.is_cuda and type(query_RHD) is Tensor
    return _version == 4 and real and query_RHD.shape[-1] <= WIDEST_HEAD


def attended(
    query_RHD: Tensor,
    key_SGD: Tensor,
    value_SGD: Tensor,
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float | None,
    window: tuple[int, int],
) -> Tensor:
    """Return attention within segments [R, H, D], as torch's `varlen_attn` defines it.

    Args:
        starts: first row of every segment of queries and of keys, and the end of the last.
        longest: of both.
        window: rows before and after that a row sees; -1: all. (-1, 0) is causal.
    """
    from flash_attn.cute import flash_attn_varlen_func

    before, after = (None if rows < 0 else rows for rows in window)
    made = flash_attn_varlen_func(
        query_RHD,
        key_SGD,
        value_SGD,
        cu_seqlens_q=starts[0],
        cu_seqlens_k=starts[1],
        max_seqlen_q=longest[0],
        max_seqlen_k=longest[1],
        softmax_scale=scale,
        causal=window == (-1, 0),
        window_size=(None, None) if window == (-1, 0) else (before, after),
    )
    return made[0] if isinstance(made, tuple) else made
