"""The loss of a head against torch's; over a TP group see `parallel_worker`."""

import pytest
import torch

from disttrain_cli.models import cross_entropy as module
from disttrain_cli.models.cross_entropy import cross_entropy


@pytest.mark.parametrize("chunk", [1, 50, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_change_nothing(monkeypatch, chunk, dtype):
    monkeypatch.setattr(module, "CHUNK", chunk)
    draws = torch.Generator().manual_seed(0)
    logits = (torch.randn(17, 11, generator=draws) * 30).to(dtype).requires_grad_()
    labels = torch.where(torch.arange(17) % 4 == 2, -100, torch.arange(17) % 11)
    made = cross_entropy(logits, labels, 0, None)
    expected = torch.nn.functional.cross_entropy(
        logits.float(), labels, ignore_index=-100, reduction="sum"
    )
    assert made.dtype == torch.float32 and torch.allclose(made, expected, rtol=1e-6)
    own, other = (
        torch.autograd.grad(3 * loss, logits, retain_graph=True)[0] for loss in (made, expected)
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert own.dtype == dtype and torch.allclose(own.float(), other.float(), atol=tolerance)
    assert torch.equal(own, torch.autograd.grad(3 * made, logits)[0])  # a graph may be walked twice


def test_no_trained_row_and_no_row():
    logits = torch.randn(4, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((4,), -100), 0, None)
    loss.backward()
    assert float(loss.detach()) == 0 and not logits.grad.any()
    none = torch.randn(0, 5, requires_grad=True)
    cross_entropy(none, torch.zeros(0, dtype=torch.int64), 0, None).backward()
    assert none.grad.shape == (0, 5)


def test_only_a_chunk_is_in_fp32(monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 1 << 12)
    logits = torch.randn(512, 64).bfloat16().requires_grad_()
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **kwargs or {})
            for made in torch.utils._pytree.tree_leaves(result):
                if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
                    largest = max(largest, made.numel())
            return result

    with Largest():
        cross_entropy(logits, torch.zeros(512, dtype=torch.int64), 0, None).backward()
    assert largest <= 1 << 12
