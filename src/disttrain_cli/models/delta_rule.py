"""The chunked gated delta rule as operators that have shapes, FLOPs and memory, but no kernels.

On "meta" and fake devices they stand for the kernels of `flash-linear-attention` (Yang et al. 2024,
arXiv 2412.06464; Kimi's per-channel decay: 2510.26692), which run on a GPU; transformers' function
in PyTorch, which they replace there, copies every tensor of a sequence once per chunk in its
backward. Counted from the sources of `fla.ops.gated_delta_rule`; no time has been measured.

Saved for the backward are queries and keys (normalised), values, summed decays, betas and the
inverse of every chunk; states of all chunks live inside a pass only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

FORWARD, BACKWARD = "disttrain::delta_rule", "disttrain::delta_rule_backward"
#: Functions of transformers' files that they replace.
REPLACED = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
#: Rows of a chunk.
CHUNK = 64

_LIBRARY = torch.library.Library("disttrain", "FRAGMENT")
_LIBRARY.define(
    "delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "delta_rule_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor decay,"
    " Tensor beta, Tensor inverse) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


@contextmanager
def counted(names: dict[str, Any]) -> Iterator[None]:
    """Replace the delta rule among the global names of one of transformers' files."""
    before = {name: names[name] for name in REPLACED if name in names}
    names.update(dict.fromkeys(before, _rule))
    try:
        yield
    finally:
        names.update(before)


def transient_bytes(value_BTHV: Tensor, key_BTGK: Tensor) -> int:
    """Return what a pass holds inside: the chunks' states, their new values, and both factors."""
    rows, width = value_BTHV[..., 0].numel(), key_BTGK.shape[-1]
    states = -(-rows // CHUNK) * value_BTHV.shape[-1] * width
    factors = rows * (2 * value_BTHV.shape[-1] + width)
    return (states + factors) * value_BTHV.element_size()


def _rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, None]:
    return _Rule.apply(query, key, value, g, beta), None


class _Rule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        made, query, key, decay, inverse = torch.ops.disttrain.delta_rule(*given)
        ctx.save_for_backward(query, key, given[2], decay, given[4], inverse)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return torch.ops.disttrain.delta_rule_backward(gradient, *ctx.saved_tensors)


def _forward(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Any:
    inverse = value.new_empty(*value.shape[:3], CHUNK)
    summed = decay.new_empty(decay.shape, dtype=torch.float32)
    return *(one.new_empty(one.shape) for one in (value, query, key)), summed, inverse


def _backward(gradient: Tensor, *saved: Tensor) -> Any:
    return tuple(one.new_empty(one.shape) for one in saved[:5])


_LIBRARY.impl("delta_rule", _forward, "Meta")
_LIBRARY.impl("delta_rule_backward", _backward, "Meta")


@register_flop_formula(torch.ops.disttrain.delta_rule)
def _flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Count the products of chunks: K and V wide states, C rows of a chunk."""
    batch, rows, heads, v = value
    k = key[-1]
    return batch * rows * heads * (6 * k * v + 6 * CHUNK * k + 4 * CHUNK * v + CHUNK**2)


@register_flop_formula(torch.ops.disttrain.delta_rule_backward)
def _backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _flops(query, key, value)
