"""Storages followed on a fake CUDA device, against sums by hand."""

import pytest

from tests.runtime.dryrun.on_fake_cuda import on_fake_cuda


def block() -> list[float]:
    import torch

    from disttrain_cli.runtime.dryrun.storages import Storages

    with Storages() as storages:
        layer = torch.nn.Linear(1024, 1024, bias=False, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(4096, 1024, device="cuda", dtype=torch.bfloat16)
        before = storages.alive_bytes
        made = torch.nn.functional.gelu(layer(rows))
        kept = storages.alive_bytes - before
        made.sum().backward()
        del made, rows
        return [
            amount / 2**20 for amount in (before, kept, storages.alive_bytes, storages.peak_bytes)
        ]


@pytest.mark.slow
def test_alive_and_peak_bytes_are_those_of_a_small_block() -> None:
    before, kept, after, peak = on_fake_cuda(block)
    assert before == 2 + 8  # the weight and the input
    assert kept == 8 + 8  # the product's result, kept for gelu, and the result
    assert after == 2 + 2  # the weight and its gradient
    # in gelu's backward its own gradient joins them
    assert 2 + 3 * 8 + 8 <= peak < 2 + 3 * 8 + 8 + 0.1


def fused() -> list[float]:
    import torch

    from disttrain_cli.models import symmetric  # noqa: F401  # the operators
    from disttrain_cli.runtime.dryrun.observing import Observer

    with Observer() as seen:
        own = torch.empty(4096, 128, device="cuda", dtype=torch.bfloat16)
        factor = torch.empty(128, 128, device="cuda", dtype=torch.bfloat16)
        before = seen.alive_bytes
        for _ in range(2):
            made = torch.ops.disttrain.all_gather_matmul(own, [factor], "group", 4, False)
            peak, alive = seen.peak_bytes, seen.alive_bytes
            del made
        counts = [seen.counts[name] for name in ("kernels", "collectives", "collectives_bytes")]
        sizes = (alive - before, peak - before, seen.alive_bytes - before, counts.pop())
        return [*(size / 2**20 for size in sizes), *counts]


@pytest.mark.slow
def test_symmetric_memory_stays() -> None:
    """A chunk of 1 MiB of it, beside the products of all rows and, while these are made, the
    rows."""
    assert on_fake_cuda(fused) == [1 + 4, 1 + 4 + 4, 1, 2 * 4, 2, 2]


def asked() -> int:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from disttrain_cli.runtime.dryrun.observing import Observer
    from disttrain_cli.runtime.dryrun.syncs import Waits

    class Asked(TorchDispatchMode):
        times = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.times += func.namespace == "prim"
            return func(*args, **(kwargs or {}))

    with Asked() as below, Observer(), Waits():
        rows = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
        assert rows.is_cuda
        (rows @ rows).to("cpu")
    return below.times


@pytest.mark.slow
def test_no_operator_asks_torch_for_a_device() -> None:
    """Such a question runs through all modes and takes as long as an operator."""
    assert on_fake_cuda(asked) == 0
