"""Joining the job: devices, process groups and DeepSpeed's start-up, for one rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch


@contextmanager
def joined(device_kind: str, timeout_s: float) -> Iterator[torch.device]:
    """Join the process group that the environment describes; leave it at the end, failure or not.

    On a CPU nothing is compiled: DeepSpeed's shared-memory operation is declared incompatible first.
    """
    import deepspeed
    import deepspeed.ops

    if device_kind == "cpu":
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "gloo" if device_kind == "cpu" else "nccl"
    deepspeed.init_distributed(dist_backend=backend, timeout=timedelta(seconds=timeout_s), verbose=False)
    try:
        yield device
    finally:
        torch.distributed.destroy_process_group()
