"""Memory that kernels take for themselves while they run, by operator: no operator shows it.

Stated, not measured: by reading the sources where there are any, and guessed for cuDNN, which has
none. What cuBLAS takes does not depend on shapes: it is in `templates/hardware.yaml`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from disttrain_cli.models import symmetric

#: Rows that flash attention leaves free behind each segment of its sums, and in steps of which it
#: rounds heads up.
SEGMENT_ROWS, HEAD_STEP = 128, 32
#: As few rows, if they are not kept, are gathered into symmetric memory as a whole
#: (`_should_use_multimem_all_gather_matmul`).
FEW_ROWS = 2048


def workspace_bytes(func: Any, args: Any, result: Any) -> int:
    """What the kernels of an operator hold beside its arguments and results."""
    match func._schema.name:
        case "torch_attn::_varlen_attn_backward":
            _, query, key, *_ = args
            return _attention_backward(query, key, segments=len(args[6]) - 1)
        case "aten::convolution" | "aten::convolution_backward":
            return _convolution(
                [args[0], args[1], result if isinstance(result, Tensor) else args[2]]
            )
        case symmetric.GATHER if args[4]:
            return 0
        case symmetric.GATHER | symmetric.SCATTER:  # rows that nobody keeps, or parts of sums
            return symmetric.whole_bytes(func, args, result)
    return 0


def symmetric_bytes(func: Any, args: Any, result: Any) -> int:
    """Symmetric memory of its group that an operator needs; what the largest needed stays."""
    match func._schema.name:
        case symmetric.GATHER:  # from where the others copy
            own, _, _, size, keep = args
            few = not keep and size * len(own) <= FEW_ROWS
            return (size if few else 1) * int(own.nbytes)
        case symmetric.SCATTER:  # one chunk is copied while the next is made
            return 2 * int(result.nbytes)
    return 0


def _attention_backward(query_RHD: Tensor, key_RGD: Tensor, segments: int) -> int:
    """Flash attention 2 (`mha_varlen_bwd` in flash_api.cpp).

    The query's gradient is summed in fp32 beside a number per row and head, and where several heads
    share a key, each makes gradients of it and of its value.
    """
    rows, heads, width = query_RHD.shape
    sums = 4 * (rows + SEGMENT_ROWS * segments) * heads * (-(-width // HEAD_STEP) * HEAD_STEP + 1)
    shared = heads != key_RGD.shape[1]
    return sums + 2 * shared * len(key_RGD) * heads * width * key_RGD.element_size()


def _convolution(tensors: list[Tensor]) -> int:
    """cuDNN's kernels of half precision want channels last: a copy of all that they read and
    write."""
    return sum(tensor.nbytes for tensor in tensors) if tensors[0].element_size() == 2 else 0
