"""FLOPs and bytes of operators, from the shapes that `record_shapes=True` leaves in a trace.

Only operators that do not contain one another are counted, so that their sums count nothing twice:
products, convolutions and fused attention, as executed: twice the multiplications; attention in
full, its causal half not discounted, and five products in its backward, which recomputes the
scores. Bytes are those of inputs and outputs, each once: the least that must move. What a trace
lacks (strides of a convolution before PyTorch 2.1) is not guessed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

Dims = list[Any]  # by argument: [] for anything but a tensor
Count = tuple[float, float]  # FLOPs, elements of inputs and outputs

#: Bytes of an element by the profilers' names of types.
ITEM_BYTES = {
    "double": 8,
    "long": 8,
    "long int": 8,
    "int64": 8,
    "float64": 8,
    "float": 4,
    "int": 4,
    "int32": 4,
    "float32": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "short": 2,
    "int16": 2,
    "bool": 1,
    "byte": 1,
    "char": 1,
    "int8": 1,
    "uint8": 1,
    "signed char": 1,
    "unsigned char": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


_MOST = 1e24  # most FLOPs and elements of a valid call


class Shape(NamedTuple):
    """Shapes, type, FLOPs and bytes of an operator's call; null if its arguments lack them."""

    dims: str
    dtype: str | None
    flops: float | None
    bytes: float | None


def is_counted(name: str) -> bool:
    """Return True if shapes of events of this name are used.

    They are those of counted operators and of annotated collectives.
    """
    return name in _COUNTERS or name.startswith("nccl:")


def shape_of(name: str, dims: bytes, types: bytes, concrete: bytes) -> Shape:
    """Return FLOPs and bytes of a call, from its arguments as JSON."""
    of, kinds, values = _list(dims), _list(types), _list(concrete)
    tensors = [index for index, dim in enumerate(of) if dim]
    try:
        if name not in _COUNTERS:
            dtype = _plain(kinds[tensors[0]])
            return Shape(
                _said(of, tensors),
                dtype,
                None,
                float(sum(prod(of[index]) for index in tensors) * ITEM_BYTES[dtype]),
            )
        first, count = _COUNTERS[name]
        dtype = _plain(kinds[first])
        flops, elements = (float(number) for number in count(of, values))
        if not (0 <= flops < _MOST and 0 <= elements < _MOST):
            raise ValueError("no shape has so many")
        size = ITEM_BYTES.get(dtype)
        return Shape(_said(of, tensors), dtype, flops, None if size is None else elements * size)
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError):
        return Shape(_said(of, tensors), None, None, None)


def item_bytes(dtype: str) -> int | None:
    """Return the bytes of an element, or None for an unknown type."""
    return ITEM_BYTES.get(_plain(dtype))


def _list(text: bytes) -> list[Any]:
    try:
        values = json.loads(text) if text else []
    except ValueError:
        return []
    return values if isinstance(values, list) else []


def _plain(dtype: Any) -> str:
    return str(dtype).removeprefix("c10::").removeprefix("torch.").lower()


def _said(dims: Dims, tensors: list[int]) -> str:
    return " ".join("×".join(map(str, dims[index])) for index in tensors)[:200]


def _product(at: int) -> Callable[[Dims, Dims], Count]:
    """Return a counter for matrices, or batches of them, in the arguments `at` and `at + 1`."""

    def count(dims: Dims, values: Dims) -> Count:
        one, other = dims[at], dims[at + 1]
        *batch, rows, inner = one
        if other[-2] != inner or other[:-2] != batch or len(one) < 2:
            raise ValueError("these do not multiply")
        columns = other[-1]
        return (
            2 * prod(batch) * rows * inner * columns,
            prod(batch) * (rows * inner + inner * columns + rows * columns),
        )

    return count


def _convolution(dims: Dims, values: Dims) -> Count:
    image, weight = dims[0], dims[1]
    if _flag(values[6]):  # transposed: every input pixel is multiplied with the whole kernel
        stride, padding, dilation, more = (
            _numbers(values[index], len(image) - 2) for index in (3, 4, 5, 7)
        )
        out = [
            (size - 1) * s - 2 * p + d * (k - 1) + m + 1
            for size, s, p, d, k, m in zip(
                image[2:], stride, padding, dilation, weight[2:], more, strict=True
            )
        ]
        outputs = image[0] * weight[1] * int(values[8]) * prod(out)
        return 2 * prod(image) * prod(weight[1:]), prod(image) + prod(weight) + outputs
    stride, padding, dilation = (_numbers(values[index], len(image) - 2) for index in (3, 4, 5))
    out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, s, p, d, k in zip(image[2:], stride, padding, dilation, weight[2:], strict=True)
    ]
    outputs = image[0] * weight[0] * prod(out)
    return 2 * outputs * prod(weight[1:]), prod(image) + prod(weight) + outputs


def _convolution_backward(dims: Dims, values: Dims) -> Count:
    gradient, image, weight = dims[0], dims[1], dims[2]
    mask = [_flag(word) for word in str(values[10]).strip("[]").split(",")]
    each = 2 * (prod(image) if _flag(values[7]) else prod(gradient)) * prod(weight[1:])
    outputs = mask[0] * prod(image) + mask[1] * prod(weight)
    return each * (mask[0] + mask[1]), prod(gradient) + prod(image) + prod(weight) + outputs


def _attention(
    first: int, heads_first: bool, products: int, tensors: int
) -> Callable[[Dims, Dims], Count]:
    """Return a counter for query, key and value from argument `first` on.

    Args:
        first: index of the query.
        heads_first: [batch, heads, length, size] instead of [batch, length, heads, size].
        products: number of matrix products of the scores' size.
        tensors: number of reads and writes of tensors of the query's size and of the keys', each.
    """

    def count(dims: Dims, values: Dims) -> Count:
        query, key = dims[first], dims[first + 1]
        if len(query) != 4 or len(key) != 4:
            raise ValueError("packed sequences: their lengths are not recorded")
        of = (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)
        batch, heads, length, size = (query[index] for index in of)
        read = key[of[2]]
        return products * 2 * batch * heads * length * read * size, tensors * (
            prod(query) + prod(key)
        )

    return count


def _flag(value: Any) -> bool:
    return str(value).strip() == "True"


def _numbers(value: Any, count: int) -> list[int]:
    numbers = [int(word) for word in str(value).strip("[]").split(",") if word.strip()]
    return numbers * count if len(numbers) == 1 else numbers


#: Operator → the argument whose type it computes in, and its counter.
_COUNTERS: dict[str, tuple[int, Callable[[Dims, Dims], Count]]] = (
    {
        "aten::mm": (0, _product(0)),
        "aten::bmm": (0, _product(0)),
        "aten::addmm": (1, _product(1)),
        "aten::baddbmm": (1, _product(1)),
        "aten::_addmm_activation": (1, _product(1)),
        "aten::_scaled_mm": (0, _product(0)),
        "aten::_int_mm": (0, _product(0)),
        "aten::convolution": (0, _convolution),
        "aten::convolution_backward": (0, _convolution_backward),
    }
    | {
        f"aten::_scaled_dot_product_{kind}_attention{suffix}": (0, _attention(0, True, 2, 2))
        for kind, suffix in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
    }
    | {
        f"aten::_scaled_dot_product_{kind}_attention{suffix}_backward": (
            1,
            _attention(1, True, 5, 4),
        )
        for kind, suffix in (("flash", ""), ("efficient", ""), ("cudnn", ""), ("flash", "_for_cpu"))
    }
    | {
        "flash_attn::_flash_attn_forward": (0, _attention(0, False, 2, 2)),
        "flash_attn::_flash_attn_backward": (1, _attention(1, False, 5, 4)),
    }
)
