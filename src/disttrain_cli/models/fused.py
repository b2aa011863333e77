"""Parts of published layers as autograd functions that control what is saved for the backward.

Left to autograd, transformers' RMSNorm saves two fp32 copies of its input, and a gated feed-forward
its activation: 40 % more than a block of Llama 7B needs. What is not saved is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.kernels import gated_by_silu, turned


def on_gpu(tensor: Tensor) -> bool:
    """Return True if a tensor is on a GPU, for which "meta" stands."""
    return tensor.is_cuda or tensor.is_meta


class RmsNorm(nn.Module):
    """x / √(mean(x²) + eps) · weight, in fp32 inside (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        one_kernel = on_gpu(x) and x.dtype == self.weight.dtype
        return (_KernelRmsNorm if one_kernel else _RmsNorm).apply(x, self.weight, self.eps)


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves x and one scale per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = _exact(x)
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (exact * scale * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        normed, gradient_f32 = _exact(x) * scale, _exact(gradient)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            scaled = gradient_f32 * weight
            of_x = ((scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * scale).to(
                x.dtype
            )
        if ctx.needs_input_grad[1]:
            of_weight = (gradient_f32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return of_x, of_weight, None


_LIBRARY = torch.library.Library("disttrain", "DEF")
_LIBRARY.define("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)")
_LIBRARY.define(
    "rms_norm_backward(Tensor gradient, Tensor x, Tensor scale, Tensor weight, bool[2] wanted) "
    "-> (Tensor, Tensor)"
)


def _on_cuda(x: Tensor, weight: Tensor, eps: float) -> Any:
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)


def _backward_on_cuda(
    gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor, wanted: list[bool]
) -> Any:
    made = torch.ops.aten._fused_rms_norm_backward(gradient, x, weight.shape, scale, weight, wanted)
    return tuple(x.new_empty(0) if tensor is None else tensor for tensor in made)


def _shapes(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _backward_shapes(
    gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor, wanted: list[bool]
) -> Any:
    return tuple(
        torch.empty_like(tensor) if want else x.new_empty(0)
        for tensor, want in zip((x, weight), wanted, strict=True)
    )


# torch's own operators decompose on devices without a fused kernel: on "meta" and in builds for
# CPUs.
for _name, _kernel, _shape in (
    ("rms_norm", _on_cuda, _shapes),
    ("rms_norm_backward", _backward_on_cuda, _backward_shapes),
):
    _LIBRARY.impl(_name, _kernel, "CUDA")
    _LIBRARY.impl(_name, _shape, "Meta")


class _KernelRmsNorm(torch.autograd.Function):
    """RMSNorm in torch's own fused kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        made, scale = torch.ops.disttrain.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, scale = ctx.saved_tensors
        wanted = list(ctx.needs_input_grad[:2])
        made = torch.ops.disttrain.rms_norm_backward(
            gradient.contiguous(), x, scale, weight, wanted
        )
        return *(tensor if want else None for tensor, want in zip(made, wanted, strict=True)), None


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_own_norms(layer: nn.Module) -> nn.Module:
    """Replace a library layer's RMSNorm modules by ours, under the same names; return the layer."""
    for path, part in list(layer.named_modules()):
        if type(part).__name__.endswith("RMSNorm"):
            norm: Any = part
            eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
            layer.set_submodule(path, RmsNorm(len(norm.weight), eps))
    return layer


def rotated(
    library: Callable[..., Any],
    query_NHLD: Tensor,
    key_NGLD: Tensor,
    cos_NLD: Tensor,
    sin_NLD: Tensor,
) -> tuple[Tensor, Tensor]:
    """Replace transformers' `apply_rotary_pos_emb`: on a GPU one kernel per tensor."""
    whole = cos_NLD.shape == (len(query_NHLD), *query_NHLD.shape[2:])
    if not (whole and on_gpu(query_NHLD)):
        made: tuple[Tensor, Tensor] = library(query_NHLD, key_NGLD, cos_NLD, sin_NLD)
        return made
    cos_RD, sin_RD = cos_NLD.flatten(0, 1), sin_NLD.flatten(0, 1)

    def one(x_NHLD: Tensor) -> Tensor:
        rows_RHD = x_NHLD.transpose(1, 2).flatten(0, 1)
        return turned(rows_RHD, cos_RD, sin_RD).unflatten(0, cos_NLD.shape[:2]).transpose(1, 2)

    return one(query_NHLD), one(key_NGLD)


def with_rows_added(whole_RD: Tensor, rows: Tensor, more: Tensor) -> Tensor:
    """Return the tensor with `more` added to its rows `rows`, which are distinct."""
    return _RowsAdded.apply(whole_RD, rows, more)


class _RowsAdded(torch.autograd.Function):
    """Row-wise addition that saves only the row indices, where autograd also saves the addend."""

    @staticmethod
    def forward(ctx: Any, whole_RD: Tensor, rows: Tensor, more: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return whole_RD.index_add(0, rows, more.to(whole_RD.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        more = gradient.index_select(0, ctx.saved_tensors[0]) if ctx.needs_input_grad[2] else None
        return gradient, None, more


def gated_mlp(mlp: Any, rows_RD: Tensor) -> Tensor:
    """Return down(act(gate(x)) · up(x)), transformers' gated feed-forward.

    See Shazeer 2020, arXiv 2002.05202.
    """
    return mlp.down_proj(gated(mlp.gate_proj(rows_RD), mlp.up_proj(rows_RD), mlp.act_fn))


def gated(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
    """Return act(gate) · up; only gate and up are saved."""
    if type(act).__name__ in _SILU and on_gpu(gate):
        return gated_by_silu(gate, up)
    return _Gated.apply(gate, up, act)


#: Names of the same activation in torch, transformers and diffusers.
_SILU = ("SiLU", "SiLUActivation", "FP32SiLU")


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            gate = gate.detach().requires_grad_()
            open_ = ctx.act(gate)
        open_.backward(gradient * up)
        return gate.grad, gradient * open_.detach(), None
