"""FlashAttention 4 on Hopper and Blackwell GPUs, where the package flash-attn-4 is installed.

It computes and saves what torch's flash attention (version 2) does, with kernels for these GPUs
(`attention.kernel_for` decides for both; Shah et al. 2024, arXiv 2407.08608, for Hopper). Its
kernels are compiled when they are first needed, for each head width and kind of mask.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

PACKAGE = "flash_attn.cute"
#: Compute capabilities with kernels of both directions for segments.
CAPABILITIES = (9, 10)
WIDEST_HEAD = 128


@cache
def is_used(device: torch.device) -> bool:
    """Return True if attention by segments on a device, of heads up to 128 wide, is version 4."""
    return (
        device.type == "cuda"
        and torch.cuda.get_device_capability(device)[0] in CAPABILITIES
        and find_spec(PACKAGE.partition(".")[0]) is not None
        and find_spec(PACKAGE) is not None
    )


def computes(query_RHD: Tensor) -> bool:
    """Return True if version 4 computes attention of these rows; tensors without values never."""
    plain = isinstance(query_RHD, torch.nn.Parameter) or type(query_RHD) is Tensor
    return plain and query_RHD.shape[-1] <= WIDEST_HEAD and is_used(query_RHD.device)


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
