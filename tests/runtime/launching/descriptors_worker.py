"""A rank that counts its descriptors as it joins groups of gloo."""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from disttrain_cli.runtime.launching.process import rendezvous


def main(payload: dict[str, Any]) -> None:
    """Write how many descriptors were open before the rendezvous, after it, and with a whole and a
    lazy group."""
    rank, size, count = (
        int(os.environ["RANK"]),
        int(os.environ["WORLD_SIZE"]),
        psutil.Process().num_fds,
    )
    torch.set_num_threads(1)
    told = {"before": count() - (rank == 0)}  # the socket on which rank 0 will serve
    store = rendezvous(timedelta(seconds=120))
    store.set(str(rank), "")
    store.wait([str(other) for other in range(size)])
    told["connected"] = count() + (rank > 0)  # the same socket, which the others have closed
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    told["whole"] = count() + (rank > 0)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    group = dist.new_group(backend="gloo")
    dist.gather_object(rank, [None] * size if rank == 0 else None, group=group)  # as checkpoints do
    dist.barrier(group)
    told["lazy"] = count() + (rank > 0)
    Path(payload["folder"], f"{rank}.json").write_text(json.dumps(told))
    dist.barrier()
