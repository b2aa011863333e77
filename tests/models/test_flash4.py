"""FlashAttention 4 in the place of torch's flash attention: its arguments, and on a GPU itself."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from disttrain_cli.errors import SpecError
from disttrain_cli.models import attention, flash4
from disttrain_cli.models.attention import Segments, attend
from tests.models.test_attention import CPU, drawn, masked

MASKS = [(False, None), (True, None), (True, 3), (True, 1), (True, 50)]


def stand_in(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
) -> tuple[Tensor, None]:
    """What the package documents, for equal segments of queries and keys."""
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and cu_seqlens_q.dtype == torch.int32
    lengths = cu_seqlens_q.diff().tolist()
    assert max_seqlen_q == max_seqlen_k == max(lengths)
    before, after = window_size
    assert not causal or window_size == (None, None)
    assert after in (None, 0)
    window = None if before is None else before + 1
    return masked(query, key, value, lengths, causal or after == 0, window, softmax_scale), None


@pytest.mark.parametrize(("causal", "window"), MASKS)
def test_it_is_told_the_segments_and_the_window(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: int | None
) -> None:
    package: Any = ModuleType("flash_attn.cute")
    package.flash_attn_varlen_func = stand_in
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", package)
    monkeypatch.setattr(attention, "kernel_for", lambda *_: "varlen")
    monkeypatch.setattr(flash4, "computes", lambda rows: True)
    rows, lengths = drawn(12, 4, 2, 8), [5, 4, 3]
    made = attend(*rows, Segments(lengths, CPU), causal=causal, window=window, scale=0.3)
    torch.testing.assert_close(made, masked(*rows, lengths, causal, window, 0.3))


@pytest.mark.parametrize(
    ("capability", "installed", "found"),
    [((9, 0), True, True), ((8, 0), True, False), ((10, 0), False, False)],
)
def test_it_is_chosen_on_gpus_that_it_has_kernels_for_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], installed: bool, found: bool
) -> None:
    flash4.available.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    extra = SimpleNamespace(installed=installed)
    monkeypatch.setitem(flash4.EXTRAS, "flash", extra)
    device = torch.device("cuda", 0)
    assert flash4.version("auto", device) == (4 if found else 2) and flash4.version(2, device) == 2
    assert flash4.version("auto", CPU) == 2
    monkeypatch.undo()
    flash4.available.cache_clear()
    monkeypatch.setattr(flash4, "available", lambda device: found)
    if found:
        assert flash4.version(4, device) == 4
    else:
        with pytest.raises(SpecError, match="FlashAttention 4 is not available"):
            flash4.version(4, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("causal", "window"), MASKS)
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 2, 128), (4, 4, 64), (3, 3, 80)])
def test_it_is_the_masked_softmax_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    causal: bool,
    window: int | None,
    heads: int,
    groups: int,
    width: int,
) -> None:
    """As exact as torch's kernels are, forward and backward."""
    if not flash4.available(torch.device("cuda", 0)):
        pytest.skip("needs flash-attn-4 and a GPU that it has kernels for")
    monkeypatch.setattr(flash4, "_version", 4)
    lengths = [150, 1, 70, 300]
    exact = drawn(521, heads, groups, width)
    rows = [tensor.detach().cuda().bfloat16().requires_grad_() for tensor in exact]
    made = attend(*rows, Segments(lengths, rows[0].device), causal=causal, window=window)
    want = masked(*exact, lengths, causal, window, None)
    torch.testing.assert_close(made.double().cpu(), want, rtol=2e-2, atol=2e-2)
    seed = torch.randn_like(want)
    for own, other in zip(
        torch.autograd.grad(made, rows, seed.cuda().bfloat16()),
        torch.autograd.grad(want, exact, seed),
        strict=True,
    ):
        torch.testing.assert_close(own.double().cpu(), other, rtol=5e-2, atol=5e-2)
