"""Symmetric memory of processes on a CPU: PyTorch's own code of its fused operators, over files
that all ranks map and barriers of gloo."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _symmetric_memory, distributed_c10d

from disttrain_cli.models import symmetric


class _Stream:
    """One of those that a CPU runs one after the other."""

    def wait_stream(self, _: Any) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class SharedMemory:
    """What a group's workspace is asked for."""

    def __init__(self, folder: Path, group: dist.ProcessGroup, size: int) -> None:
        self.rank, self.world_size, self._group = group.rank(), group.size(), group
        paths = [folder / f"{group.group_name}-{rank}-{size}" for rank in range(self.world_size)]
        self._parts = [
            torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8) for path in paths
        ]
        self.size = size

    def barrier(self, channel: int = 0) -> None:
        dist.barrier(self._group)

    def get_buffer(
        self, rank: int, shape: Any, dtype: torch.dtype, storage_offset: int = 0
    ) -> Tensor:
        count = torch.Size(shape).numel()
        numbers = self._parts[rank].view(dtype)[storage_offset : storage_offset + count]
        assert len(numbers) == count, "more than the workspace has"
        return numbers.view(shape)


@contextmanager
def shared_in(folder: Path) -> Iterator[None]:
    """Have CPU tensors go the way of CUDA's, through files in a folder."""
    known: dict[str, SharedMemory] = {}

    def workspace(name: str, min_size: int) -> SharedMemory:
        if name not in known or known[name].size < min_size:
            group = distributed_c10d._resolve_process_group(name)
            known[name] = SharedMemory(folder, group, -(-min_size // 64) * 64)
        return known[name]

    kernels = torch.library.Library("symm_mem", "IMPL", "CPU")
    kernels.impl("fused_all_gather_matmul", _symmetric_memory._fused_all_gather_matmul)
    kernels.impl("fused_matmul_reduce_scatter", _symmetric_memory._fused_matmul_reduce_scatter)
    symmetric._implement("CPU", symmetric._gather, symmetric._scatter)
    with (
        patch.object(_symmetric_memory, "get_symm_mem_workspace", workspace),
        patch.object(_symmetric_memory, "_get_backend_stream", _Stream),
        patch.object(torch.cuda, "current_stream", _Stream),
        patch.object(torch.cuda, "_sleep", lambda _: None),
    ):
        yield
    del kernels
