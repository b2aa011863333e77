"""Workspaces that kernels allocate while they run, by operator: no operator reports them.

Derived from the sources where available, and guessed for cuDNN, which has none; not measured.
cuBLAS' workspace does not depend on shapes: it is in `templates/hardware.yaml`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from disttrain_cli.models import delta_rule, symmetric

#: Flash attention's padding rows after each segment of its sums, and the multiple to which it
#: rounds head widths.
SEGMENT_ROWS, HEAD_STEP = 128, 32
#: Up to this many rows, if they are not kept, are gathered into symmetric memory in full
#: (`_should_use_multimem_all_gather_matmul`).
FEW_ROWS = 2048


def workspace_bytes(func: Any, args: Any, result: Any) -> int:
    """Return the bytes that an operator's kernels hold in addition to its arguments and results."""
    match func._schema.name:
        case "torch_attn::_varlen_attn_backward":
            _, query, key, *_ = args
            return _attention_backward(query, key, segments=len(args[6]) - 1)
        case "aten::convolution" | "aten::convolution_backward":
            return _convolution(
                [args[0], args[1], result if isinstance(result, Tensor) else args[2]]
            )
        case delta_rule.FORWARD:
            return delta_rule.transient_bytes(args[2], args[1])
        case delta_rule.BACKWARD:  # and the gradients of states and factors
            return 2 * delta_rule.transient_bytes(args[3], args[2])
        case symmetric.GATHER if args[4]:
            return 0
        case symmetric.GATHER | symmetric.SCATTER:  # rows that are not kept, or partial sums
            return symmetric.whole_bytes(func, args, result)
    return 0


def symmetric_bytes(func: Any, args: Any, result: Any) -> int:
    """Return an operator's symmetric memory; a group keeps the largest requirement."""
    match func._schema.name:
        case symmetric.GATHER:  # the other ranks copy from it
            own, _, _, size, keep = args
            few = not keep and size * len(own) <= FEW_ROWS
            return (size if few else 1) * int(own.nbytes)
        case symmetric.SCATTER:  # double buffer: one chunk is copied while the next is computed
            return 2 * int(result.nbytes)
    return 0


def _attention_backward(query_RHD: Tensor, key_RGD: Tensor, segments: int) -> int:
    """Return the workspace of flash attention 2 (`mha_varlen_bwd` in flash_api.cpp).

    The query's gradient is summed in fp32 next to one value per row and head, and if several heads
    share a key, each computes gradients of it and of its value.
    """
    rows, heads, width = query_RHD.shape
    sums = 4 * (rows + SEGMENT_ROWS * segments) * heads * (-(-width // HEAD_STEP) * HEAD_STEP + 1)
    shared = heads != key_RGD.shape[1]
    return sums + 2 * shared * len(key_RGD) * heads * width * key_RGD.element_size()


def _convolution(tensors: list[Tensor]) -> int:
    """Return cuDNN's half-precision channels-last copies of everything it reads and writes."""
    return sum(tensor.nbytes for tensor in tensors) if tensors[0].element_size() == 2 else 0
