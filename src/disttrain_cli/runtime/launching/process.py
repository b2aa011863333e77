"""Joining the job: devices, process groups and DeepSpeed's start-up, for one rank."""

from __future__ import annotations

import errno
import importlib
import math
import os
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.launching.devices import Backend
from disttrain_cli.runtime.launching.ending import within
from disttrain_cli.runtime.launching.launch import LISTENER

ABORT_S = 5.0
LATE_S = 5.0  # beyond a limit, for what knows the limit itself and fails with a better reason
#: What helps where ranks have met and cannot connect.
REMEDIES = {
    "nccl": (
        "Name the network interface in cluster.interface; look for firewalls between the hosts;"
        " NCCL_DEBUG=INFO says in the logs what it tries."
    ),
    "gloo": (
        "Name the network interface in cluster.interface; look for firewalls between the hosts."
    ),
}


def set_timeout(timeout: timedelta) -> None:
    """Set the timeout of all groups made from now on, those of libraries too: torch gives groups
    its own default, not the world's."""
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout


#: For several communicators on one device (NCCL's documentation, "Using multiple NCCL communicators
#: concurrently"): kernels start in the order of the host's calls, which is the same on all ranks
#: (`runtime.messages`), each communicator with a hardware queue of its own (CUDA's default is 8).
CUDA_ENVIRONMENT = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def set_cuda_environment() -> str:
    """Set what of `CUDA_ENVIRONMENT` is not set, before this process uses CUDA; returns all of
    it as one line."""
    for name, value in CUDA_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return " ".join(f"{name}={os.environ[name]}" for name in CUDA_ENVIRONMENT)


@contextmanager
def joined(
    device: torch.device | str,
    timeout_s: float,
    *,
    store: dist.Store | None = None,
    backend: Backend = "gloo",
) -> Iterator[torch.device]:
    """Join the process group that the environment describes; leave it at the end, after a failure
    by `abort_groups`.

    `store`: where the ranks have met already, which they must have before NCCL: making its
    communicator knows no time limit. That of the world is made here. No device is bound to the
    group, or torch would split every later one from the world's communicator: one after the other,
    and each by all ranks (docs/deepspeed.md). On a CPU nothing is compiled: DeepSpeed's
    shared-memory operation is declared incompatible first.

    Raises:
        DisttrainError: the rendezvous fails.
    """
    import deepspeed
    import deepspeed.ops

    import_muon()
    device = torch.device(device)
    if device.type == "cpu":
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if backend == "nccl":
        # Its groups of gloo, which checkpoints use, connect only ranks that talk (`descriptors`).
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        # Its monitor kills a process silently; that is for the hang watch to do, with a reason.
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(math.ceil(timeout_s)))
    timeout = timedelta(seconds=timeout_s)
    set_timeout(timeout)
    store = store or rendezvous(timeout)
    with within(timeout_s + LATE_S, lambda: _not_connected(backend, timeout_s)):
        dist.init_process_group(
            backend,
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=timeout,
        )
        if backend == "nccl":
            # as meant
            warnings.filterwarnings("ignore", "barrier.*: using the device under current context")
            dist.barrier(device_ids=[device.index])
    try:
        deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
        yield device
    except BaseException:
        abort_groups()
        raise
    dist.destroy_process_group()


def _not_connected(backend: str, limit_s: float) -> DisttrainError:
    return DisttrainError(
        f"{backend} did not connect all {os.environ['WORLD_SIZE']} ranks within {limit_s:g} s",
        f"all of them have met; host {socket.gethostname()}",
        REMEDIES[backend],
    )


#: Groups that were aborted. They stay: to delete one waits for what it has under way.
_aborted: list[Any] = []


def abort_groups() -> None:
    """Leave all process groups without waiting for their other ranks, which may wait for this
    one."""
    _aborted.extend(distributed_c10d._world.pg_map)
    thread = threading.Thread(
        target=distributed_c10d._abort_process_group, name="abort", daemon=True
    )
    thread.start()
    thread.join(ABORT_S)


def import_muon() -> None:
    """Import DeepSpeed's Muon optimizer, which it asks every other one about, without compiling it.

    Its functions are decorated to be compiled, and to decorate them takes torch's compiler: seconds
    of a core, on every rank, for an optimizer that is not used here.
    """
    from deepspeed.runtime import compiler

    def plainly(*options: Any, **more: Any) -> Callable[[Any], Any]:
        return lambda function: function

    real, compiler.compile = compiler.compile, plainly
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = real


def rendezvous(timeout: timedelta) -> dist.Store:
    """The store through which the ranks find each other.

    Of our own starter's ranks, rank 0 serves it on the socket that `launch` opened; torchrun's
    agent serves its own; of srun's ranks, rank 0 serves it at MASTER_ADDR alone.

    Raises:
        DisttrainError: the port is in use, or nobody answers there.
    """
    rank, where = (
        int(os.environ["RANK"]),
        (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])),
    )
    listener: int | None = None
    if LISTENER in os.environ:
        listener = int(os.environ[LISTENER])
        if rank:
            os.close(listener)
    elif _agent_serves():
        store = _store(where, timeout, None)
        return dist.PrefixStore(
            f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store
        )
    elif rank == 0:
        listener = _listen(*where)
    return _store(where, timeout, None if rank else listener)


def serves_rendezvous() -> bool:
    """Whether this process is the one that serves it."""
    return os.environ["RANK"] == "0" and not _agent_serves()


def _agent_serves() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store(where: tuple[str, int], timeout: timedelta, listener: int | None) -> dist.TCPStore:
    try:
        return dist.TCPStore(
            *where,
            int(os.environ["WORLD_SIZE"]),
            is_master=listener is not None,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except dist.DistError as error:
        raise DisttrainError(
            f"No rank 0 answers at {where[0]}:{where[1]}",
            str(error).splitlines()[0],
            f"Start its host too, and check that {socket.gethostname()} reaches this address and"
            " port; cluster.port names another one.",
        ) from None


def _listen(host: str, port: int) -> int:
    """A socket that listens there and nowhere else."""
    try:
        return socket.create_server(
            (host, port), family=socket.getaddrinfo(host, port)[0][0]
        ).detach()
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise DisttrainError(
            (
                f"Port {port} of {host} is in use"
                if in_use
                else f"Rank 0 cannot listen on {host}:{port}"
            ),
            str(error),
            (
                "Set another cluster.port in the run file, or end what uses it."
                if in_use
                else "MASTER_ADDR must be an address of the first host."
            ),
        ) from None
