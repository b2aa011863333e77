"""Operators of one kernel: the formulas that they stand for; on a GPU the kernels themselves."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from disttrain_cli.models import kernels
from disttrain_cli.models.cross_entropy import cross_entropy
from disttrain_cli.models.fused import gated, rotated


def library() -> Any:
    """transformers' own, also where a decoder has put ours in its place."""
    found: Any = modeling_llama.apply_rotary_pos_emb
    return found.args[0] if isinstance(found, partial) else found


def drawn(
    device: str, dtype: torch.dtype, heads: int = 6, groups: int = 2, width: int = 16
) -> list[Tensor]:
    """Query [N, H, L, D] and key as projections leave them, cosines and sines [N, L, D]."""
    torch.manual_seed(0)
    query, key = (
        torch.randn(2, 5, count, width, device=device, dtype=dtype).transpose(1, 2)
        for count in (heads, groups)
    )
    angles = torch.randn(2, 5, width // 2, device=device).repeat(1, 1, 2)
    return [
        tensor.to(dtype).requires_grad_() for tensor in (query, key, angles.cos(), angles.sin())
    ]


def test_turned_rows_are_transformers_and_go_back_by_the_transpose() -> None:
    query, _, cos, sin = drawn("cpu", torch.float64)
    rows, cos_RD, sin_RD = (
        tensor.flatten(0, 1).float() for tensor in (query.transpose(1, 2), cos, sin)
    )
    want, _ = library()(query, query, cos, sin)
    made = kernels.turned_plainly(rows, cos_RD, sin_RD, False)
    torch.testing.assert_close(made, want.transpose(1, 2).flatten(0, 1).float())
    torch.testing.assert_close(kernels.turned_plainly(made, cos_RD, sin_RD, True), rows)


def test_one_operator_each_on_a_gpu_and_the_librarys_on_a_cpu() -> None:
    given = drawn("cpu", torch.float32)
    for made, want in zip(rotated(library(), *given), library()(*given), strict=True):
        assert torch.equal(made, want)
    query, key, cos, sin = (tensor.detach().to("meta").requires_grad_() for tensor in given)
    for made, like in zip(rotated(library(), query, key, cos, sin), (query, key), strict=True):
        assert made.shape == like.shape
        assert made.transpose(1, 2).is_contiguous()  # as attention wants its rows
    made = gated(cos, sin, nn.SiLU())
    assert made.grad_fn is not None and made.grad_fn.name() == "_GatedBySiluBackward"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "heads", "groups", "width"),
    [
        (torch.float32, 6, 2, 16),
        (torch.bfloat16, 32, 8, 128),
        (torch.bfloat16, 12, 12, 80),
        (torch.bfloat16, 7, 1, 64),
    ],
)
def test_kernels_on_a_gpu(dtype: torch.dtype, heads: int, groups: int, width: int) -> None:
    """Forward and backward as in fp64, rounded once."""
    given = drawn("cuda", dtype, heads, groups, width)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    bound = 1e-5 if dtype == torch.float32 else 8e-3
    ours = (*rotated(library(), *given), gated(given[2], given[3], nn.SiLU()))
    theirs = (*library()(*exact), nn.functional.silu(exact[2]) * exact[3])
    for made, want, leaves in zip(ours, theirs, ((0,), (1,), (2, 3)), strict=True):
        torch.testing.assert_close(made.double(), want, rtol=bound, atol=bound)
        seed = torch.randn_like(made)
        of_ours = torch.autograd.grad(made, [given[leaf] for leaf in leaves], seed)
        of_theirs = torch.autograd.grad(want, [exact[leaf] for leaf in leaves], seed.double())
        for one, other in zip(of_ours, of_theirs, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)


def test_the_gradient_of_a_loss_is_written_over_its_logits() -> None:
    logits, labels, scale = torch.randn(5, 7), torch.tensor([0, 6, -1, 3, 2]), torch.rand(5)
    leaf = logits.clone().requires_grad_()
    of_label = leaf.gather(1, labels.clamp(min=0)[:, None])[:, 0] * (labels >= 0)
    (want,) = torch.autograd.grad((scale * (leaf.logsumexp(1) - of_label)).sum(), leaf)
    made = kernels.loss_gradient_plainly(logits, logits.logsumexp(1), labels, scale)
    assert made is logits
    torch.testing.assert_close(made, want)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("dtype", "rows", "width"),
    [(torch.float32, 9, 11), (torch.bfloat16, 64, 4096), (torch.bfloat16, 33, 151_937)],
)
def test_the_loss_on_a_gpu(dtype: torch.dtype, rows: int, width: int) -> None:
    """Loss and gradient as in fp64, rounded once; large logits and rows without labels too."""
    torch.manual_seed(0)
    logits = (10.0 * torch.randn(rows, width, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(width, (rows,), device="cuda")
    labels[::4] = -100
    exact = logits.detach().double().requires_grad_()
    want = nn.functional.cross_entropy(exact, labels, ignore_index=-100, reduction="sum")
    made = cross_entropy(logits, labels, 0, None)
    torch.testing.assert_close(made.double(), want, rtol=1e-5, atol=1e-5)
    (of_ours,), (of_theirs,) = (
        torch.autograd.grad(0.5 * loss, leaf, retain_graph=True)
        for loss, leaf in ((made, logits), (want, exact))
    )
    bound = 1e-6 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(of_ours.double(), of_theirs, rtol=bound, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        made.backward()
