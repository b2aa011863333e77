"""Differences between the supported versions of torch, and an error for all others.

All other code is written for the newest of them; `models/__init__.py` imports this before any of
it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_cli.errors import DisttrainError

#: First supported and first unsupported version, as in pyproject.toml.
OLDEST, BEYOND = (2, 11), (2, 14)


def check(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version of torch.

    Raises:
        DisttrainError: the version is not supported.
    """
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not OLDEST <= numbers < BEYOND:
        wanted = ",".join(
            f"{sign}{number[0]}.{number[1]}" for sign, number in ((">=", OLDEST), ("<", BEYOND))
        )
        raise DisttrainError(
            f"torch {version} cannot be used",
            f"disttrain runs with torch {wanted}",
            f"Install one of them: python -m pip install 'torch{wanted}'",
        )
    return numbers


VERSION = check(torch.__version__)

from torch.nn.attention import varlen  # noqa: E402  # absent from versions that are too old
from torch.utils import flop_counter  # noqa: E402


def varlen_attn(*tensors_and_longest: Any, enable_gqa: bool = False, **more: Any) -> Tensor:
    """Call the `varlen_attn` of torch 2.12; in 2.11 its kernel supports GQA without the flag."""
    options = {} if VERSION < (2, 12) else {"enable_gqa": enable_gqa}
    return varlen.varlen_attn(*tensors_and_longest, **options, **more)


def all_gather(whole: Tensor, local: Tensor, group: Any, begin: bool = False) -> Any:
    """Fill `whole` with the concatenation of every rank's `local`; with `begin` return the work."""
    return (dist.all_gather_into_tensor if VERSION < (2, 13) else dist.all_gather_single)(
        whole, local, group=group, async_op=begin
    )


def reduce_scatter(local: Tensor, partial: Tensor, group: Any, begin: bool = False) -> Any:
    """Fill `local` with this rank's part of the sum of `partial`; with `begin` return the work."""
    return (dist.reduce_scatter_tensor if VERSION < (2, 13) else dist.reduce_scatter_single)(
        local, partial, group=group, async_op=begin
    )


def _varlen_flops(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, *_: Any, **__: Any
) -> int:
    return sum(
        flop_counter.sdpa_flop_count(*shapes) for shapes in _segments(starts, query, key, value)
    )


def _varlen_backward_flops(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    made: Tensor,
    sums: Tensor,
    starts: Tensor,
    *_: Any,
    **__: Any,
) -> int:
    return sum(
        flop_counter.sdpa_backward_flop_count(*shapes)
        for shapes in _segments(starts, gradient, query, key, value)
    )


def _segments(starts: Tensor, *rows: Tensor) -> list[list[tuple[int, int, int, int]]]:
    """Return the shapes [1, heads, rows, width] of every segment, all with the queries' heads."""
    heads = rows[0].shape[1]
    return [
        [(1, heads, length, tensor.shape[2]) for tensor in rows]
        for length in starts.diff().tolist()
    ]


if VERSION < (2, 12):  # later versions count the FLOPs of `varlen_attn` themselves
    for _operator, _count in (
        (torch.ops.torch_attn._varlen_attn, _varlen_flops),
        (torch.ops.torch_attn._varlen_attn_backward, _varlen_backward_flops),
    ):
        _count._get_raw = True  # type: ignore[union-attr]  # tensors, not their shapes
        flop_counter.flop_registry[_operator] = _count


def _convolution_backward_flops(
    gradient: Tensor, given: Tensor, weight: Tensor, *rest: Any, **_: Any
) -> int:
    transposed, mask = rest[4], rest[7]
    shapes = given.shape, weight.shape, gradient.shape
    return sum(mask[:2]) * flop_counter.conv_flop_count(*shapes, transposed=transposed)


# torch counts a grouped convolution's gradient of its weight as if it had one group
_convolution_backward_flops._get_raw = True  # type: ignore[attr-defined]  # tensors, not shapes
flop_counter.flop_registry[torch.ops.aten.convolution_backward] = _convolution_backward_flops
