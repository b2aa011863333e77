"""Checks for arguments that CUDA kernels reject but fake tensors accept."""

from __future__ import annotations

from typing import Any

import torch

from disttrain_cli.runtime.dryrun.storages import on_cuda, tensors_in

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward"}
FLASH = {"_scaled_dot_product_flash_attention", "_flash_attention_forward", "_varlen_attn"}
FLASH_TYPES, FLASH_WIDTH = {torch.float16, torch.bfloat16}, 256


def refuse(func: Any, args: Any, kwargs: Any) -> None:
    """Raise RuntimeError, as the kernel would, on mixed-dtype GEMMs and unsupported attention.

    Attention is unsupported where the flash kernel does not take the dtype or head size.
    """
    name = func._opname
    if name not in PRODUCTS and name not in FLASH:
        return
    tensors = [one for one in tensors_in(args, kwargs) if on_cuda(one)]
    if (
        name in PRODUCTS
        and len(types := {str(one.dtype) for one in tensors if one.is_floating_point()}) > 1
    ):
        raise RuntimeError(f"{name} of different types: {', '.join(sorted(types))}")
    if name in FLASH and (
        tensors[0].dtype not in FLASH_TYPES or tensors[0].shape[-1] > FLASH_WIDTH
    ):
        raise RuntimeError(
            f"{name} takes float16 or bfloat16 and heads of at most {FLASH_WIDTH} numbers: given "
            f"{tensors[0].dtype}, {tensors[0].shape[-1]}"
        )
