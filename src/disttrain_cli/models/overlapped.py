"""Sharded linears that communicate while they multiply, chunk by chunk, forward and backward.

They are all-gather → GEMM and GEMM → reduce-scatter of a TP group. Between `parallel.across` and
its function the rows of the group never exist as a whole. The column-parallel linears that read the
same rows multiply every rank's rows as these arrive; the row-parallel linear after them sends each
rank's partial sum while it computes the next. Chunks travel through symmetric memory of the group's
devices if possible (`symmetric`), else round a ring of messages (`ring`). In the backward the two
change roles:

    row-parallel      the gradient's rows arrive overlapped with the GEMMs of the input's gradient;
                      they are kept for the weight's
    column-parallel   partial gradients of local rows are summed overlapped with their GEMMs

and the local rows, which are all that a column-parallel linear saves, are gathered again from the
row-parallel linear's backward on: overlapped with its weight's gradient and everything between the
two (attention).

A library's module calls its linears as usual, with a placeholder instead of all rows: its first
column-parallel linear multiplies for all that belong `together`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from disttrain_cli.models import ring, symmetric
from disttrain_cli.models.group import Group, begin_all_gathered
from disttrain_cli.models.weight_parts import Splittable, hand_over


class Way(Protocol):
    """Transport of rows overlapped with GEMMs: `ring`, `symmetric`."""

    def gathered(
        self,
        own_RD: Tensor,
        rows: int,
        group: Group,
        factors: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        keep: bool,
    ) -> tuple[Tensor | None, list[Tensor]]: ...

    def scattered(
        self,
        given: Sequence[Tensor],
        rows: int,
        group: Group,
        factors: Sequence[Tensor],
        bias: Tensor | None = None,
    ) -> Tensor: ...


class _Crossing:
    """State shared by the linears between local rows and local rows."""

    def __init__(self, own_RD: Tensor, rows: int, group: Group) -> None:
        self.rows, self.group = rows, group
        # of the forward
        self.own_RD: Tensor | None = own_RD
        self.made: dict[ColumnLinear, Tensor] = {}
        # of the backward
        self.gathers_again = False
        self.of_given: Tensor | None = None  # gradient of the row-parallel linear's input
        self._coming: Callable[[], Tensor] | None = None

    def way(self, like: Tensor, width: int) -> Way:
        """Return the transport for rows of this width, the same on all ranks."""
        return symmetric if symmetric.fits(self.rows, width, like.dtype, self.group) else ring

    def end(self) -> None:
        """Release the tensors that only the forward needs."""
        self.own_RD = None
        self.made.clear()

    def gather_again(self, own_RD: Tensor) -> None:
        """Begin to gather all rows, once."""
        if self._coming is None:
            self._coming = begin_all_gathered(own_RD.detach(), self.rows, self.group)

    def gathered(self) -> Tensor:
        """Wait for all rows and return them."""
        assert self._coming is not None
        coming, self._coming = self._coming, None
        return coming()


# Per process: autograd may run a second forward on another thread.
_crossing: _Crossing | None = None


@contextmanager
def crossing(own_RD: Tensor, rows: int, group: Group) -> Iterator[Tensor]:
    """Yield a placeholder [rows, D] of all rows; sharded linears inside read only its shape."""
    global _crossing
    before, now = _crossing, _Crossing(own_RD, rows, group)
    _crossing = now
    try:
        yield own_RD.new_empty(()).expand(rows, *own_RD.shape[1:])
    finally:
        _crossing = before
        now.end()


class ColumnLinear(Splittable):
    """all-gather → GEMM, of all linears that read the same rows at once."""

    together: tuple[ColumnLinear, ...]

    def forward(self, given: Tensor) -> Tensor:
        assert _crossing is not None
        if self not in _crossing.made:
            linears = self.together
            made = _Columns.apply(
                _crossing.own_RD,
                _crossing,
                linears,
                *(linear.in_graph for linear in linears),
                *(linear.bias for linear in linears),
            )
            _crossing.made.update(zip(linears, made, strict=True))
        return _crossing.made.pop(self).view(*given.shape[:-1], -1)


class RowLinear(Splittable):
    """GEMM → reduce-scatter: local rows [1, …, local rows, D]; the first rank adds the bias."""

    def forward(self, given: Tensor) -> Tensor:
        assert _crossing is not None and _crossing.own_RD is not None
        rows_RF = given.flatten(0, -2)
        bias = None if _crossing.group.rank else self.bias
        # saved tensors are known before the GEMMs, so that a recomputed forward stops before them
        promised = _Kept.apply(
            rows_RF, _crossing.own_RD.detach(), _crossing, self, self.in_graph, bias
        )
        made: Tensor = _Row.apply(promised, rows_RF.detach(), _crossing, self)
        return made.view(*(1,) * (given.ndim - 2), *made.shape)


class _Columns(torch.autograd.Function):
    """Local rows [·, D] → [rows, F] of each linear. Weights and biases come after the linears."""

    @staticmethod
    def forward(
        ctx: Any,
        own_RD: Tensor,
        crossing: _Crossing,
        linears: Sequence[ColumnLinear],
        *parameters: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.crossing, ctx.linears = crossing, linears
        _, made = crossing.way(own_RD, own_RD.shape[1]).gathered(
            own_RD,
            crossing.rows,
            crossing.group,
            [linear.weight.t() for linear in linears],
            [linear.bias for linear in linears],
            False,
        )
        if any(ctx.needs_input_grad[3 : 3 + len(linears)]):
            ctx.save_for_backward(own_RD)
            crossing.gathers_again = True
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        crossing, linears = ctx.crossing, ctx.linears
        gradients = tuple(gradient.contiguous() for gradient in gradients)
        wanted, count = ctx.needs_input_grad[3:], len(linears)
        if crossing.gathers_again:
            crossing.gather_again(*ctx.saved_tensors)

        of_own = None
        if ctx.needs_input_grad[0]:
            weights = [linear.weight for linear in linears]
            way = crossing.way(gradients[0], weights[0].shape[1])
            of_own = way.scattered(gradients, crossing.rows, crossing.group, weights)
        of_biases = [
            gradient.sum(0) if want else None
            for gradient, want in zip(gradients, wanted[count:], strict=True)
        ]
        if not crossing.gathers_again:
            return of_own, None, None, *[None] * count, *of_biases
        whole_RD = crossing.gathered()
        of_weights = [
            _weight_gradient(linear, gradient, whole_RD) if want else None
            for linear, gradient, want in zip(linears, gradients, wanted, strict=False)
        ]
        return of_own, None, None, *of_weights, *of_biases


class _Kept(torch.autograd.Function):
    """Saves tensors for a row-parallel linear's backward; its output stands for the product.

    The product has shape [rows, D'].
    """

    @staticmethod
    def forward(
        ctx: Any,
        given_RF: Tensor,
        own_RD: Tensor,
        crossing: _Crossing,
        linear: RowLinear,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.crossing, ctx.linear = crossing, linear
        ctx.save_for_backward(
            given_RF if ctx.needs_input_grad[4] else None,
            own_RD if crossing.gathers_again else None,
        )
        return given_RF.new_empty(()).expand(crossing.rows, len(linear.weight))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        given_RF, own_RD = ctx.saved_tensors
        of_given, ctx.crossing.of_given = ctx.crossing.of_given, None
        if own_RD is not None:
            ctx.crossing.gather_again(own_RD)
        of_weight = None if given_RF is None else _weight_gradient(ctx.linear, gradient, given_RF)
        of_bias = gradient.sum(0) if ctx.needs_input_grad[5] else None
        return of_given, None, None, None, of_weight, of_bias


class _Row(torch.autograd.Function):
    """Placeholder from `_Kept` → local rows of the sum over the group."""

    @staticmethod
    def forward(
        ctx: Any,
        promised: Tensor,
        given_RF: Tensor,
        crossing: _Crossing,
        linear: RowLinear,
    ) -> Tensor:
        ctx.crossing, ctx.linear = crossing, linear
        ctx.keeps = any(parameter.requires_grad for parameter in linear.parameters())
        return crossing.way(given_RF, len(linear.weight)).scattered(
            [given_RF], crossing.rows, crossing.group, [linear.weight.t()], linear.bias
        )

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        crossing, weight = ctx.crossing, ctx.linear.weight
        whole, (crossing.of_given,) = crossing.way(gradient, gradient.shape[1]).gathered(
            gradient, crossing.rows, crossing.group, [weight], [None], ctx.keeps
        )
        if whole is None:  # only the function that produced the input waits for this
            whole = gradient.new_empty(()).expand(crossing.rows, gradient.shape[1])
        return whole, None, None, None


def _weight_gradient(linear: Splittable, gradient_RF: Tensor, given_RD: Tensor) -> Tensor | None:
    """Return the gradient of a linear's weight, or None if it is deferred."""

    def made() -> Tensor:
        return gradient_RF.t() @ given_RD

    if not linear.is_split:
        return made()
    hand_over(linear.weight, made)
    return None
