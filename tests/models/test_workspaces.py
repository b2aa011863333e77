"""What kernels hold of their own, as it is stated, where a layer's footprint and a device's peak
contain it."""

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_cli.models.attention import Segments, attend
from disttrain_cli.models.workspaces import symmetric_bytes, workspace_bytes


class Asked(TorchDispatchMode):
    """The workspaces of all operators that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if size := workspace_bytes(func, args, result):
            self.bytes.append(size)
        return result


def rows(heads: int, width: int) -> Tensor:
    return torch.empty(300, heads, width, device="meta", dtype=torch.bfloat16, requires_grad=True)


def attention(query_heads: int, key_heads: int, width: int) -> list[int]:
    with Asked() as asked:
        attend(
            rows(query_heads, width),
            rows(key_heads, width),
            rows(key_heads, width),
            Segments([100, 200], torch.device("meta")),
            causal=True,
        ).sum().backward()
    return asked.bytes


def test_the_backward_of_attention_sums_in_fp32() -> None:
    sums = 4 * (300 + 2 * 128) * 8
    assert attention(8, 8, 64) == [sums * (64 + 1)]
    assert attention(8, 8, 72) == [sums * (96 + 1)]
    # keys and values of every query's head
    assert attention(8, 2, 64) == [sums * (64 + 1) + 2 * 300 * 8 * 64 * 2]


def test_what_fused_operators_of_a_tp_group_hold() -> None:
    """By PyTorch's sources: all rows, or parts of the sums of all ranks, while they run, and the
    chunks that others copy in memory that stays."""
    chunk = 1024 * 64 * 2
    own, factor = (
        torch.empty(rows, 64, device="meta", dtype=torch.bfloat16) for rows in (1024, 96)
    )
    gather, scatter = (
        getattr(torch.ops.disttrain, name).default
        for name in ("all_gather_matmul", "matmul_reduce_scatter")
    )

    def held(func, *args):  # type: ignore[no-untyped-def]
        result = func(*args)
        return workspace_bytes(func, args, result), symmetric_bytes(func, args, result)

    assert held(gather, own, [factor.t()], "", 4, False) == (4 * chunk, chunk)
    assert held(gather, own, [factor.t()], "", 4, True) == (0, chunk)
    # so few that every device writes to all at once
    assert held(gather, own, [factor.t()], "", 2, False) == (2 * chunk, 2 * chunk)
    given = torch.empty(4096, 96, device="meta", dtype=torch.bfloat16)
    assert held(scatter, [given], [factor], "", 4) == (4 * chunk, 2 * chunk)


def test_convolutions_of_half_precision_copy_what_they_read_and_write() -> None:
    def convolve(dtype: torch.dtype) -> list[int]:
        image = torch.empty(2, 3, 32, 32, device="meta", dtype=dtype, requires_grad=True)
        weight = torch.empty(16, 3, 3, 3, device="meta", dtype=dtype, requires_grad=True)
        with Asked() as asked:
            torch.nn.functional.conv2d(image, weight, padding=1).sum().backward()
        return asked.bytes

    assert (
        convolve(torch.bfloat16) == [2 * (2 * 3 * 32 * 32 + 16 * 3 * 3 * 3 + 2 * 16 * 32 * 32)] * 2
    )
    assert convolve(torch.float32) == []
