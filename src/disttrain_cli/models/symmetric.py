"""Symmetric-memory all-gather and reduce-scatter of a TP group's rows, fused with GEMMs.

Replaces the ring (`ring`) by PyTorch's fused operators over symmetric memory: devices of one node
copy each other's chunks themselves, by copy engines, between the products of the chunks that have
arrived (`torch.distributed._symmetric_memory`, the same in torch 2.11 to 2.13). They are
independent of the dtype. Each operator is one blocking collective of the group. They need local
rows of equal length, and memory that all ranks of the group can map: this is agreed on once, at
start-up.

`torch.ops.symm_mem` decomposes into NCCL's collectives on devices without its kernels; here each is
one operator with a meta kernel that needs no group.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric_memory

from disttrain_cli.models.group import Group

#: Names of the operators; the third argument names the group.
GATHER, SCATTER = "disttrain::all_gather_matmul", "disttrain::matmul_reduce_scatter"
#: Alignment of rows, for the widest loads and stores of a device.
ALIGNED_BYTES = 16
#: Initial size of the group's memory; it grows with the rows.
_FIRST_BYTES = 1 << 21

_LIBRARY = torch.library.Library("disttrain", "FRAGMENT")
_LIBRARY.define(
    "all_gather_matmul(Tensor own, Tensor[] factors, str group, int size, bool keep) "
    "-> (Tensor?, Tensor[])"
)
_LIBRARY.define(
    "matmul_reduce_scatter(Tensor[] given, Tensor[] factors, str group, int size) -> Tensor"
)


def fits(rows: int, width: int, dtype: torch.dtype, group: Group) -> bool:
    """Return True if messages of `rows` rows over the group, each `width` wide, can use it."""
    return group.symmetric and not rows % group.size and not width * dtype.itemsize % ALIGNED_BYTES


def gathered(
    own_RD: Tensor,
    rows: int,
    group: Group,
    factors: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    keep: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Return `ring.gathered`'s result; `keep` must be the same on all ranks."""
    whole, made = torch.ops.disttrain.all_gather_matmul(
        own_RD.contiguous(), list(factors), _name(group), group.size, keep
    )
    for product, bias in zip(made, biases, strict=True):
        if bias is not None:
            product.add_(bias)
    return whole, made


def scattered(
    given: Sequence[Tensor],
    rows: int,
    group: Group,
    factors: Sequence[Tensor],
    bias: Tensor | None = None,
) -> Tensor:
    """Return `ring.scattered`'s result; each rank adds the bias to its local rows."""
    made: Tensor = torch.ops.disttrain.matmul_reduce_scatter(
        list(given), list(factors), _name(group), group.size
    )
    return made if bias is None else made.add_(bias)


def whole_bytes(func: Any, args: Any, result: Any) -> int:
    """Return the bytes of the rows that an operator gathers or sums over all ranks, else 0."""
    name = func._schema.name
    if name not in (GATHER, SCATTER):
        return 0
    return int(args[3] * (args[0] if name == GATHER else result).nbytes)


def agreed(group: Group | None, device: torch.device) -> Group | None:
    """Return the group, using symmetric memory if it overlaps and all its ranks support it.

    Otherwise it is unchanged, and its first rank prints the reason. A collective of the group if it
    overlaps over NCCL. A rank that fails alone while memory is exchanged blocks the others until
    the store's timeout.
    """
    if group is None or not group.overlap or device.type != "cuda":
        return group
    match dist.get_backend(group.ranks):
        case "fake":  # a dry run: TP groups are within a node
            return replace(group, symmetric=True)
        case "nccl":
            why = refusal(group, device)
        case other:
            why = f"messages go over {other}"
    if why and group.rank == 0:
        print(f"TP messages overlapped with GEMMs use a ring: {why}", flush=True)
    return replace(group, symmetric=not why)


def refusal(group: Group, device: torch.device) -> str:
    """Return why the group cannot use symmetric memory; empty if it can; equal on all ranks."""
    if len(hosts := set(_gathered(group, socket.gethostname()))) > 1:
        return f"the group is on the hosts {', '.join(sorted(hosts))}"
    for step in (_exchange, _try_out):
        if said := [one for one in _gathered(group, _attempt(step, group, device)) if one]:
            return said[0]
    return ""


def _gathered(group: Group, word: str) -> list[str]:
    """Gather each rank's `word` over the group."""
    words = [""] * group.size
    dist.all_gather_object(words, word, group=group.ranks)
    return words


def _attempt(
    step: Callable[[Group, torch.device], None], group: Group, device: torch.device
) -> str:
    try:
        step(group, device)
    except Exception as error:  # any failure selects the ring
        first, *_ = str(error).strip().splitlines() or [""]
        return f"symmetric memory: {first or type(error).__name__}"
    return ""


def _exchange(group: Group, device: torch.device) -> None:
    """Allocate the group's memory and map that of its other ranks."""
    memory = symmetric_memory.get_symm_mem_workspace(_name(group), _FIRST_BYTES)
    assert (memory.rank, memory.world_size) == (group.rank, group.size)


def _try_out(group: Group, device: torch.device) -> None:
    """Gather and sum a few rows and compare with the expected results."""
    columns, size = torch.eye(8, device=device), group.size
    own = torch.full((2, 8), float(group.rank), device=device)
    whole, _ = gathered(own, 2 * size, group, [columns], [None], True)
    _, (made,) = gathered(own, 2 * size, group, [columns], [None], False)
    total = scattered([made, made], 2 * size, group, [columns, columns])
    assert whole is not None
    expected = [float(rank) for rank in range(size) for _ in range(2)]
    found = whole[:, 0].tolist(), made[:, -1].tolist(), total.flatten().tolist()
    if found != (expected, expected, [2.0 * size * group.rank] * 16):
        raise RuntimeError("a GEMM gave a wrong result")


def _name(group: Group) -> str:
    return "" if group.ranks is None else str(group.ranks.group_name)


def _gather(
    own: Tensor, factors: list[Tensor], group: str, size: int, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    whole, made = torch.ops.symm_mem.fused_all_gather_matmul(own, factors, 0, group, return_A=keep)
    return whole if keep else None, made


def _scatter(given: list[Tensor], factors: list[Tensor], group: str, size: int) -> Tensor:
    if len(given) == 1:
        made: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(
            given[0], factors[0], "sum", 0, group
        )
        return made
    # sum of several products, for which torch has no fused operator
    chunks = [rows.chunk(size) for rows in given]

    def produce(rank: int, into: Tensor) -> None:
        torch.mm(chunks[0][rank], factors[0], out=into)
        for rows, factor in zip(chunks[1:], factors[1:], strict=True):
            torch.addmm(into, rows[rank], factor, out=into)

    partial = given[0].new_empty(len(given[0]), factors[0].shape[1])
    symmetric_memory._pipelined_produce_and_all2all(produce, partial, group)
    return partial.view(size, -1, partial.shape[1]).sum(0)


def _gather_shapes(
    own: Tensor, factors: list[Tensor], group: str, size: int, keep: bool
) -> tuple[Tensor | None, list[Tensor]]:
    rows = size * len(own)
    whole = own.new_empty(rows, own.shape[1]) if keep else None
    return whole, [own.new_empty(rows, factor.shape[1]) for factor in factors]


def _scatter_shapes(given: list[Tensor], factors: list[Tensor], group: str, size: int) -> Tensor:
    return given[0].new_empty(len(given[0]) // size, factors[0].shape[1])


def _implement(device: str, gather: Callable[..., Any], scatter: Callable[..., Any]) -> None:
    _LIBRARY.impl("all_gather_matmul", gather, device)
    _LIBRARY.impl("matmul_reduce_scatter", scatter, device)


_implement("CUDA", _gather, _scatter)
_implement("Meta", _gather_shapes, _scatter_shapes)
