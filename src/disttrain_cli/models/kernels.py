"""Rotary embeddings, SiLU gates and the cross-entropy as operators, each a single GPU kernel.

As PyTorch's operators, rotary embeddings and gates need a dozen passes over memory, 18 % of a step
of a model of a billion weights on an H100; the loss takes five times as long as its two kernels
(docs/decisions/14-gpu-kernels.md). On "meta" and fake devices the operators represent those that
run; a CUDA build of torch without Triton computes the same in several kernels, more slowly.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_LIBRARY = torch.library.Library("disttrain", "FRAGMENT")
_LIBRARY.define("turn(Tensor x, Tensor cos, Tensor sin, bool back) -> Tensor")
_LIBRARY.define("gate(Tensor gate, Tensor up) -> Tensor")
_LIBRARY.define("gate_backward(Tensor gradient, Tensor gate, Tensor up) -> (Tensor, Tensor)")
_LIBRARY.define("log_sum_exp(Tensor logits) -> Tensor")
_LIBRARY.define(
    "loss_gradient_(Tensor(a!) logits, Tensor log_sum, Tensor label, Tensor scale) -> Tensor(a!)"
)


def turned(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Return x · cos + (−x₂, x₁) · sin of every head's halves x₁, x₂, contiguous [R, H, D].

    Rotary embedding of Su et al. 2021, arXiv 2104.09864.
    """
    made: Tensor = _Turned.apply(x_RHD, cos_RD, sin_RD)
    return made


def gated_by_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) · up; only gate and up are saved."""
    made: Tensor = _GatedBySilu.apply(gate, up)
    return made


def log_sum_exp(logits_RV: Tensor) -> Tensor:
    """Return log Σ exp of each row [R] in fp32; no gradient."""
    made: Tensor = torch.ops.disttrain.log_sum_exp(logits_RV)
    return made


def into_loss_gradient(
    logits_RV: Tensor, log_sum_R: Tensor, label_R: Tensor, scale_R: Tensor
) -> Tensor:
    """Overwrite logits by scale · (softmax − one-hot of the label), and return them.

    Args:
        label_R: columns; −1 = in none of these columns.
    """
    made: Tensor = torch.ops.disttrain.loss_gradient_(logits_RV, log_sum_R, label_R, scale_R)
    if logits_RV.is_cuda:  # a second backward is refused; counting on "meta" takes two
        torch.autograd.graph.increment_version(logits_RV)
    return made


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_RD, sin_RD)
        return torch.ops.disttrain.turn(_by_columns(x_RHD), cos_RD, sin_RD, False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        made = torch.ops.disttrain.turn(_by_columns(gradient), *ctx.saved_tensors, True)
        return made, None, None


class _GatedBySilu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return torch.ops.disttrain.gate(gate, up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return torch.ops.disttrain.gate_backward(gradient.contiguous(), *ctx.saved_tensors)


def _by_columns(x: Tensor) -> Tensor:
    """Return the tensor with its last dimension contiguous in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _triton() -> Any:
    """Return the Triton kernels, or None if Triton is not installed."""
    if not find_spec("triton"):
        return None
    from disttrain_cli.models import triton_kernels

    return triton_kernels


def turned_plainly(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    """Return `turn`'s result, in fp32 and by PyTorch's operators."""
    (x_1, x_2), (cos_1, cos_2), (sin_1, sin_2) = (
        tensor.float().chunk(2, -1) for tensor in (x, cos[:, None], sin[:, None])
    )
    halves = (
        (x_1 * cos_1 + x_2 * sin_2, x_2 * cos_2 - x_1 * sin_1)
        if back
        else (x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2)
    )
    return torch.cat(halves, -1).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    if (kernels := _triton()) is None:
        return turned_plainly(x, cos, sin, back)
    made = x.new_empty(x.shape)
    kernels.turn(x, cos.contiguous(), sin.contiguous(), back, made)
    return made


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    if (kernels := _triton()) is None:
        return functional.silu(gate) * up
    made = torch.empty_like(gate)
    kernels.gate(gate, up, made)
    return made


def _gate_backward(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if (kernels := _triton()) is None:
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return of_gate, gradient * functional.silu(gate)
    of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
    kernels.gate_back(gradient, gate, up, of_gate, of_up)
    return of_gate, of_up


def _log_sum_exp(logits: Tensor) -> Tensor:
    if (kernels := _triton()) is None:
        return torch.logsumexp(logits.float(), 1)
    made = logits.new_empty(len(logits), dtype=torch.float32)
    if len(logits):
        kernels.log_sum_exp(logits.contiguous(), made)
    return made


def loss_gradient_plainly(logits: Tensor, log_sum: Tensor, label: Tensor, scale: Tensor) -> Tensor:
    """Return `loss_gradient_`'s result, by PyTorch's operators."""
    one_hot = torch.arange(logits.shape[1], device=logits.device) == label[:, None]
    return logits.copy_(((logits - log_sum[:, None]).exp_() - one_hot.float()) * scale[:, None])


def _loss_gradient(logits: Tensor, log_sum: Tensor, label: Tensor, scale: Tensor) -> Tensor:
    if (kernels := _triton()) is None:
        return loss_gradient_plainly(logits, log_sum, label, scale)
    assert logits.is_contiguous()
    if len(logits):
        kernels.loss_gradient(logits, log_sum, label.contiguous(), scale.contiguous())
    return logits


for _name, _kernel, _shape in (
    ("turn", _turn, lambda x, cos, sin, back: x.new_empty(x.shape)),
    ("gate", _gate, lambda gate, up: torch.empty_like(gate)),
    (
        "gate_backward",
        _gate_backward,
        lambda gradient, gate, up: (torch.empty_like(gate), torch.empty_like(up)),
    ),
    (
        "log_sum_exp",
        _log_sum_exp,
        lambda logits: logits.new_empty(len(logits), dtype=torch.float32),
    ),
    ("loss_gradient_", _loss_gradient, lambda logits, log_sum, label, scale: logits),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _shape, "Meta")
