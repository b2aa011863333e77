# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Elementwise parts of decoder layers, and the loss, as single Triton kernels for GPUs.

torch's CUDA builds include Triton. Each kernel reads its inputs once and writes its results once,
in fp32 inside. `kernels` wraps them as operators; nothing else imports this module, which needs
Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

#: Elements per program.
BLOCK = 1024
#: Logits of a row that a program holds at a time.
LOGITS = 4096


@triton.jit
def turned_kernel(
    x,
    cos,
    sin,
    made,
    x_row,
    x_head,
    heads,
    half,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Compute all heads of a row: x · cos + (−x₂, x₁) · sin; with BACK that matrix's transpose."""
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, HALF)[None, :]
    mask, inside = (head < heads) & (column < half), column < half
    factors = row * 2 * half + column
    cos_1 = tl.load(cos + factors, mask=inside).to(tl.float32)
    cos_2 = tl.load(cos + factors + half, mask=inside).to(tl.float32)
    sin_1 = tl.load(sin + factors, mask=inside).to(tl.float32)
    sin_2 = tl.load(sin + factors + half, mask=inside).to(tl.float32)
    given = x + row * x_row + head * x_head + column
    x_1 = tl.load(given, mask=mask).to(tl.float32)
    x_2 = tl.load(given + half, mask=mask).to(tl.float32)
    if BACK:
        made_1, made_2 = x_1 * cos_1 + x_2 * sin_2, x_2 * cos_2 - x_1 * sin_1
    else:
        made_1, made_2 = x_1 * cos_1 - x_2 * sin_1, x_2 * cos_2 + x_1 * sin_2
    into = made + (row * heads + head) * 2 * half + column
    tl.store(into, made_1, mask=mask)
    tl.store(into + half, made_2, mask=mask)


@triton.jit
def gated_kernel(gate, up, made, count, BLOCK: tl.constexpr):
    """Compute silu(gate) · up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    x = tl.load(gate + place, mask=mask).to(tl.float32)
    y = tl.load(up + place, mask=mask).to(tl.float32)
    tl.store(made + place, x * tl.sigmoid(x) * y, mask=mask)


@triton.jit
def gated_backward_kernel(gradient, gate, up, of_gate, of_up, count, BLOCK: tl.constexpr):
    """Compute the gradients of gate and up."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    g = tl.load(gradient + place, mask=mask).to(tl.float32)
    x = tl.load(gate + place, mask=mask).to(tl.float32)
    y = tl.load(up + place, mask=mask).to(tl.float32)
    open_ = tl.sigmoid(x)
    tl.store(of_up + place, g * x * open_, mask=mask)
    tl.store(of_gate + place, g * y * open_ * (1.0 + x * (1.0 - open_)), mask=mask)


@triton.jit
def log_sum_exp_kernel(logits, made, width, BLOCK: tl.constexpr):
    """Compute log Σ exp of a row in one pass; sums so far are rescaled to the largest so far."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    largest, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        place = start + column
        x = tl.load(logits + row * width + place, mask=place < width, other=float("-inf"))
        x = x.to(tl.float32)
        new = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new))
        largest = new
    tl.store(made + row, largest + tl.log(total))


@triton.jit
def loss_gradient_kernel(logits, log_sum, label, scale, width, BLOCK: tl.constexpr):
    """Write scale · (softmax − one-hot of the label) over a row of logits; label −1: no one-hot."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, where = place < width, logits + row * width + place
    x = tl.load(where, mask=mask).to(tl.float32)
    share = tl.exp(x - tl.load(log_sum + row)) - (place == tl.load(label + row)).to(tl.float32)
    tl.store(where, share * tl.load(scale + row), mask=mask)


def log_sum_exp(logits_RV: Any, made_R: Any) -> None:
    """Launch `log_sum_exp_kernel`; the logits must be contiguous."""
    rows, width = logits_RV.shape
    log_sum_exp_kernel[(rows,)](logits_RV, made_R, width, BLOCK=LOGITS, num_warps=8)


def loss_gradient(logits_RV: Any, log_sum_R: Any, label_R: Any, scale_R: Any) -> None:
    """Launch `loss_gradient_kernel`; all tensors must be contiguous."""
    rows, width = logits_RV.shape
    loss_gradient_kernel[(rows, triton.cdiv(width, LOGITS))](
        logits_RV, log_sum_R, label_R, scale_R, width, BLOCK=LOGITS, num_warps=8
    )


def turn(x_RHD: Any, cos_RD: Any, sin_RD: Any, back: bool, made_RHD: Any) -> None:
    """Launch `turned_kernel`; the columns of `x` must be contiguous, all other tensors dense."""
    rows, heads, width = x_RHD.shape
    turned_kernel[(rows,)](
        x_RHD,
        cos_RD,
        sin_RD,
        made_RHD,
        x_RHD.stride(0),
        x_RHD.stride(1),
        heads,
        width // 2,
        BACK=back,
        HEADS=triton.next_power_of_2(heads),
        HALF=triton.next_power_of_2(width // 2),
    )


def gate(gate_: Any, up: Any, made: Any) -> None:
    """Launch `gated_kernel`; all tensors must be contiguous."""
    count = gate_.numel()
    gated_kernel[(triton.cdiv(count, BLOCK),)](gate_, up, made, count, BLOCK=BLOCK)


def gate_back(gradient: Any, gate_: Any, up: Any, of_gate: Any, of_up: Any) -> None:
    """Launch `gated_backward_kernel`; all tensors must be contiguous."""
    count = gate_.numel()
    gated_backward_kernel[(triton.cdiv(count, BLOCK),)](
        gradient, gate_, up, of_gate, of_up, count, BLOCK=BLOCK
    )
