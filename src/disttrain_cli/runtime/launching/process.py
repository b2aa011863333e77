"""Process start-up of one rank: devices, process groups and DeepSpeed's initialisation."""

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
from disttrain_cli.runtime.launching.ending import within
from disttrain_cli.runtime.launching.launch import LISTENER
from disttrain_cli.runtime.units.communicators import nccl_options

ABORT_S = 5.0
LATE_S = 5.0  # extra time for calls with the same limit, which fail with a better reason
#: Advice where ranks have met but cannot connect.
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
    """Set the timeout of all groups created from now on, in libraries too.

    torch gives groups its default, not the world's.
    """
    distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = timeout


#: For several communicators on one device (NCCL's documentation, "Using multiple NCCL communicators
#: concurrently"): kernels start in the order of the host's calls, which is the same on all ranks
#: (`runtime.messages`), each communicator with a separate hardware queue (CUDA's default is 8).
CUDA_ENVIRONMENT = {"NCCL_LAUNCH_ORDER_IMPLICIT": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


#: For ranks that share a device. NCCL refuses two ranks with equal host and bus id (NCCL 2.28,
#: src/init.cc, "Duplicate GPU detected"); NCCL_HOSTID replaces the host (src/misc/utils.cc). As if
#: of different hosts, they communicate through sockets on loopback: communicators, streams, order,
#: watchdog and abort are those of any NCCL job; NVLink and InfiniBand have no part in it. Few
#: blocks per kernel, as the kernels of all ranks wait for each other on one device.
SHARED_DEVICE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_CUMEM_HOST_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def set_cuda_environment(ranks_per_gpu: int = 1) -> str:
    """Set the unset variables of `CUDA_ENVIRONMENT`; return all of them as one line.

    With several ranks per GPU those of `SHARED_DEVICE` too, and a host of this rank's own for NCCL.
    Must be called before this process uses CUDA.
    """
    variables = dict(CUDA_ENVIRONMENT)
    if ranks_per_gpu > 1:
        host = f"{socket.gethostname()}-rank-{os.environ['RANK']}"
        variables |= SHARED_DEVICE | {"NCCL_HOSTID": host}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    return " ".join(f"{name}={os.environ[name]}" for name in variables)


@contextmanager
def joined(
    device: torch.device | str,
    timeout_s: float,
    *,
    store: dist.Store | None = None,
) -> Iterator[torch.device]:
    """Join the process group that the environment describes; leave it at the end.

    It uses NCCL for CUDA devices, gloo for CPUs.

    After a failure it is left by `abort_groups`. No device is bound to the group, or torch would
    split every later one from the world's communicator: one after the other, and each by all ranks
    (docs/deepspeed.md). On a CPU nothing is compiled: DeepSpeed's shared-memory operation is
    declared incompatible first.

    Args:
        store: of the rendezvous that the ranks have completed; None = do it here. NCCL requires it
            first: creating a communicator has no time limit. The world's is created here.

    Raises:
        DisttrainError: the rendezvous fails.
    """
    import deepspeed
    import deepspeed.ops

    import_muon()
    device = torch.device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cpu":
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if backend == "nccl":
        # Gloo groups, which checkpoints use, connect only ranks that communicate (`descriptors`).
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        # NCCL's monitor kills a process silently; the hang watch does so with a reason.
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
            pg_options=nccl_options("world", backend),
        )
        if backend == "nccl":
            # intended
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


#: Aborted groups, never deleted: deleting one waits for its operations in progress.
_aborted: list[Any] = []


def abort_groups() -> None:
    """Leave all process groups without waiting for other ranks, which may wait for this one."""
    _aborted.extend(distributed_c10d._world.pg_map)
    thread = threading.Thread(
        target=distributed_c10d._abort_process_group, name="abort", daemon=True
    )
    thread.start()
    thread.join(ABORT_S)


def import_muon() -> None:
    """Import DeepSpeed's Muon optimizer without compiling it.

    DeepSpeed checks every optimizer against its class. Its functions are decorated to be compiled,
    and decorating them imports torch's compiler: seconds of a core, on every rank, for an optimizer
    that is not used here.
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
    """Return the store of the ranks' rendezvous.

    With `launch`, rank 0 serves it on the socket that `launch` opened; torchrun's agent serves its
    own; with srun, rank 0 serves it at MASTER_ADDR only.

    Raises:
        DisttrainError: the port is in use, or nothing answers there.
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
    """Return True if this process serves the rendezvous."""
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
    """Return a socket that listens on this address only."""
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
