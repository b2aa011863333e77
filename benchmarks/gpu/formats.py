"""Convolutions with their channels last, and a group norm that leaves them there: tried here before
anything trains so.

torch's group norm on CUDA makes its input and output channels-first whatever comes in (2.11 to
2.13), and keeps that copy; and the flat buffers of DeepSpeed's optimizers make weights
channels-first again. So a U-Net runs channels-last only with a norm of its own, which costs more
passes over memory without a compiler than torch's; whether the convolutions gain more than that, a
device must say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from disttrain_cli.models.layer import PipelineLayer


def channels_last(layers: Sequence[PipelineLayer], norms: bool) -> None:
    """Lay out weights of convolutions, and so their outputs, channels-last; with `norms` leave
    nothing else first."""
    for layer in layers:
        for path, part in list(layer.named_modules()):
            if norms and type(part) is nn.GroupNorm:
                layer.set_submodule(path, ChannelsLastNorm(part))
        for parameter in layer.parameters():
            if parameter.ndim == 4:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)


class ChannelsLastNorm(nn.Module):
    """A group norm (Wu & He 2018, arXiv 1803.08494) of inputs whose channels are last, with the
    weights of another."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.groups, self.eps = (
            norm.weight,
            norm.bias,
            norm.num_groups,
            norm.eps,
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4:  # the rows of a transformer's attention have no format
            return nn.functional.group_norm(x, self.groups, self.weight, self.bias, self.eps)
        return _GroupNorm.apply(
            x.contiguous(memory_format=torch.channels_last),
            self.weight,
            self.bias,
            self.groups,
            self.eps,
        )


class _GroupNorm(torch.autograd.Function):
    """y = a · x + b with a, b of every image and channel; keeps x and two numbers of every
    group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float
    ) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        # [N, G]
        variance, mean = torch.var_mean(_grouped(x, groups).to(exact), dim=(1, 3), correction=0)
        scale = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.groups = groups
        a = _spread(scale, x) * weight.to(exact)
        b = bias.to(exact) - _spread(mean, x) * a
        return _scaled(x, a, b)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        exact, size = scale.dtype, x[0].numel() // ctx.groups
        of_bias_NC = gradient.sum((2, 3), dtype=exact)
        of_x_NC = (gradient * x.to(exact)).sum((2, 3))
        # dx = a · gradient + c · x + d; c and d are equal in a group (ibid.; as torch's kernels
        # derive them)
        of_scale, of_mean = (
            (tensor * weight.to(exact)).unflatten(1, (ctx.groups, -1)).sum(2)
            for tensor in (of_x_NC, of_bias_NC)
        )
        c = (of_mean * mean - of_scale) * scale**3 / size
        d = -c * mean - of_mean * scale / size
        of_x = _scaled(
            gradient, _spread(scale, x) * weight.to(exact), _spread(d, x), x, _spread(c, x)
        )
        of_weight = ((of_x_NC - of_bias_NC * _spread(mean, x)) * _spread(scale, x)).sum(0)
        return of_x, of_weight.to(weight.dtype), of_bias_NC.sum(0).to(weight.dtype), None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[N, H·W, G, C / G], a view."""
    return x.permute(0, 2, 3, 1).flatten(1, 2).unflatten(2, (groups, -1))


def _spread(of_group_NG: Tensor, x: Tensor) -> Tensor:
    """[N, C]: every channel's group's."""
    return of_group_NG.repeat_interleave(x.shape[1] // of_group_NG.shape[1], dim=1)


def _scaled(
    x: Tensor, a_NC: Tensor, b_NC: Tensor, other: Tensor | None = None, c_NC: Tensor | None = None
) -> Tensor:
    """a · x + b, and c · other where it is given, in the numbers' precision, rounded once to
    x's."""
    made = torch.addcmul(b_NC[..., None, None], x, a_NC[..., None, None])
    if other is not None and c_NC is not None:
        made = torch.addcmul(made, other, c_NC[..., None, None])
    return made.to(x.dtype, memory_format=torch.channels_last)
