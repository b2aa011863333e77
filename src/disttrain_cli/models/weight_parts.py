"""Split backward: input gradients (B) at once, weight gradients (W) later.

As in zero-bubble pipelines (Qi et al. 2024, arXiv 2401.10241): only the first part delays the
previous stage. Linear and convolution layers that are `split` record the operands of their weight
gradients while `deferred` is active; everything else in a layer (norms, biases, embeddings, the
loss) has its full backward at once. `add_weight_gradients` goes through autograd like a usual
backward, so hooks on weights run as always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_cli.models.division import WithoutBias
from disttrain_cli.models.layer import is_adapter

#: A weight, and the function that computes its gradient.
WeightPart = tuple[Tensor, Callable[[], Tensor]]

# Per process: autograd may run a backward on another thread.
_aside: list[WeightPart] | None = None


@contextmanager
def deferred(parts: list[WeightPart]) -> Iterator[None]:
    """Make backwards of split layers append their weight gradients to `parts` uncomputed."""
    global _aside
    assert _aside is None
    _aside = parts
    try:
        yield
    finally:
        _aside = None


def add_weight_gradients(parts: list[WeightPart]) -> None:
    """Compute deferred weight gradients in order, and release their operands."""
    parts.reverse()
    while parts:
        weight, gradient = parts.pop()
        with torch.no_grad():
            made = gradient()
        del gradient
        torch.autograd.backward([weight], [made])


def split(layer: nn.Module) -> None:
    """Give a layer's trained linears and convolutions a split backward.

    Adapters are excluded: their gradients take next to no time, and deferring them would hold as
    much memory as for full weights.
    """
    for path, part in layer.named_modules():
        if is_adapter(path):
            continue
        if isinstance(part, Splittable):
            part.is_split = part.weight.requires_grad
        kind = _SPLIT.get(type(part))
        if kind is not None and part.weight.requires_grad and not _pads_oddly(part):
            part.__class__ = kind


def _pads_oddly(part: nn.Module) -> bool:
    """Return True if a convolution pads with other values than zeros, or by a named mode."""
    return getattr(part, "padding_mode", "zeros") != "zeros" or isinstance(
        getattr(part, "padding", None), str
    )


def hand_over(weight: Tensor, gradient: Callable[[], Tensor]) -> None:
    """Defer the gradient of a weight, or add it at once if `deferred` is not active."""
    if _aside is None:
        add_weight_gradients([(weight, gradient)])
    else:
        _aside.append((weight, gradient))


def anchor(part: nn.Module) -> Tensor:
    """Return a stand-in for a weight in autograd's graph, so that there is a backward.

    The weight itself must not be in it: its hooks would run without a gradient.
    """
    return part.weight.new_empty(0, requires_grad=True)


class Splittable(nn.Linear):
    """Linear with its own autograd function, which defers the weight's gradient if it is split."""

    is_split = False

    @property
    def in_graph(self) -> Tensor:
        """Autograd's input for the weight: the weight itself, or its stand-in if it is split."""
        return anchor(self) if self.is_split else self.weight


class _Linear(torch.autograd.Function):
    """`functional.linear` with the same kernels; deferred operands hold no other layer's graph."""

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, bias: Tensor | None, anchor: Tensor, part: nn.Linear
    ) -> Tensor:
        ctx.weight = part.weight
        ctx.save_for_backward(given)
        return functional.linear(given, part.weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        given, wanted = ctx.saved_tensors[0].detach(), ctx.needs_input_grad
        rows = gradient.flatten(0, -2)
        of_given = gradient @ ctx.weight if wanted[0] else None
        of_bias = rows.sum(0) if wanted[1] else None
        hand_over(ctx.weight, lambda: rows.t() @ given.flatten(0, -2))
        return of_given, of_bias, None, None


class _Convolution(torch.autograd.Function):
    """Convolution of one or two dimensions with zero padding."""

    @staticmethod
    def forward(
        ctx: Any,
        given: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        part: nn.Conv1d | nn.Conv2d,
    ) -> Tensor:
        ctx.weight = part.weight
        ctx.how = (
            part.stride,
            part.padding,
            part.dilation,
            False,
            [0] * len(part.stride),
            part.groups,
        )
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.save_for_backward(given)
        return torch.ops.aten.convolution(given, part.weight, bias, *ctx.how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        given, wanted = ctx.saved_tensors[0].detach(), ctx.needs_input_grad
        weight, how, sizes = ctx.weight, ctx.how, ctx.bias_sizes

        def gradients(*of: bool) -> Any:
            return torch.ops.aten.convolution_backward(gradient, given, weight, sizes, *how, of)

        of_given, _, of_bias = gradients(wanted[0], False, wanted[1])
        hand_over(weight, lambda: gradients(False, True, False)[1])
        return of_given, of_bias, None, None


class _SplitLinear(nn.Linear):
    def forward(self, given: Tensor) -> Tensor:
        return _Linear.apply(given, self.bias, anchor(self), self)


class _SplitWithoutBias(WithoutBias):
    def forward(self, given: Tensor) -> Tensor:
        return _Linear.apply(given, None, anchor(self), self)


class _SplitConv1d(nn.Conv1d):
    def forward(self, given: Tensor) -> Tensor:
        return _Convolution.apply(given, self.bias, anchor(self), self)


class _SplitConv2d(nn.Conv2d):
    def forward(self, given: Tensor) -> Tensor:
        return _Convolution.apply(given, self.bias, anchor(self), self)


_SPLIT: dict[type, type] = {
    nn.Linear: _SplitLinear,
    WithoutBias: _SplitWithoutBias,
    nn.Conv1d: _SplitConv1d,
    nn.Conv2d: _SplitConv2d,
}
