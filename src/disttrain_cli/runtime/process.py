"""Joining the job: devices, process groups and DeepSpeed's start-up, for one rank."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.runtime.launch import LISTENER


@contextmanager
def joined(device_kind: str, timeout_s: float) -> Iterator[torch.device]:
    """Join the process group that the environment describes; leave it at the end, failure or not.

    On a CPU nothing is compiled: DeepSpeed's shared-memory operation is declared incompatible first.
    """
    import deepspeed
    import deepspeed.ops

    _import_muon()
    if device_kind == "cpu":
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        device = torch.device("cpu")
    else:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend, timeout = "gloo" if device_kind == "cpu" else "nccl", timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=rendezvous(timeout), rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _import_muon() -> None:
    """Import DeepSpeed's Muon optimizer, which it asks every other one about, without compiling it.

    Its functions are decorated to be compiled, and to decorate them takes torch's compiler: seconds of a core, on
    every rank, for an optimizer that is not used here.
    """
    from deepspeed.runtime import compiler

    def plainly(*options: Any, **more: Any) -> Callable[[Any], Any]:
        return lambda function: function

    real, compiler.compile = compiler.compile, plainly
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = real


def rendezvous(timeout: timedelta) -> dist.TCPStore:
    """The store through which the ranks find each other; rank 0 serves it on the socket that `launch` opened."""
    rank, listener = int(os.environ["RANK"]), int(os.environ[LISTENER])
    if rank:
        os.close(listener)
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]),
                         is_master=rank == 0, timeout=timeout, master_listen_fd=None if rank else listener)
