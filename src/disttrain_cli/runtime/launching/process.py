"""Joining the job: devices, process groups and DeepSpeed's start-up, for one rank."""

from __future__ import annotations

import errno
import importlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.errors import DisttrainError
from disttrain_cli.runtime.launching.launch import LISTENER


@contextmanager
def joined(device_kind: str, timeout_s: float, *, store: dist.Store | None = None,
           share: bool = False) -> Iterator[torch.device]:
    """Join the process group that the environment describes; leave it at the end, failure or not.

    `store`: where the ranks have met already. `share`: more ranks than CUDA devices on this host divide them, and talk
    over gloo. On a CPU nothing is compiled: DeepSpeed's shared-memory operation is declared incompatible first.

    Raises:
        DisttrainError: there are more ranks than devices, without `share`; or the rendezvous fails.
    """
    import deepspeed
    import deepspeed.ops

    import_muon()
    if device_kind == "cpu":
        deepspeed.ops.__dict__["__compatible_ops__"] = {}
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = _cuda(share)
    timeout = timedelta(seconds=timeout_s)
    dist.init_process_group(backend, store=store or rendezvous(timeout), rank=int(os.environ["RANK"]),
                            world_size=int(os.environ["WORLD_SIZE"]), timeout=timeout)
    deepspeed.init_distributed(dist_backend=backend, timeout=timeout, verbose=False)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _cuda(share: bool) -> tuple[torch.device, str]:
    """This rank's CUDA device, and the backend that its ranks can use: NCCL wants a device for each."""
    devices, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not devices:
        raise DisttrainError(f"There is no CUDA device on {socket.gethostname()}", "the profile was measured on one",
                             "Start the ranks where the devices are, or profile again: disttrain profile")
    if ranks > devices and not share:
        raise DisttrainError(f"{ranks} ranks on {socket.gethostname()}, which has {devices} CUDA device(s)", "",
                             "Set cluster.gpus_per_node and plan again; or set cluster.device: cuda, so that ranks "
                             "share devices (over gloo, slowly).")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % devices)
    torch.cuda.set_device(device)
    return device, "nccl" if ranks <= devices else "gloo"


def import_muon() -> None:
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


def rendezvous(timeout: timedelta) -> dist.Store:
    """The store through which the ranks find each other.

    Of our own starter's ranks, rank 0 serves it on the socket that `launch` opened; torchrun's agent serves its own;
    of srun's ranks, rank 0 serves it at MASTER_ADDR alone.

    Raises:
        DisttrainError: the port is in use, or nobody answers there.
    """
    rank, where = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    listener: int | None = None
    if LISTENER in os.environ:
        listener = int(os.environ[LISTENER])
        if rank:
            os.close(listener)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _store(where, timeout, None)
        return dist.PrefixStore(f"/worker/attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    elif rank == 0:
        listener = _listen(*where)
    return _store(where, timeout, None if rank else listener)


def _store(where: tuple[str, int], timeout: timedelta, listener: int | None) -> dist.TCPStore:
    try:
        return dist.TCPStore(*where, int(os.environ["WORLD_SIZE"]), is_master=listener is not None, timeout=timeout,
                             wait_for_workers=False, master_listen_fd=listener)
    except dist.DistError as error:
        raise DisttrainError(
            f"No rank 0 answers at {where[0]}:{where[1]}", str(error).splitlines()[0],
            f"Start its host too, and check that {socket.gethostname()} reaches this address and port; "
            "cluster.port names another one.") from None


def _listen(host: str, port: int) -> int:
    """A socket that listens there and nowhere else."""
    try:
        return socket.create_server((host, port), family=socket.getaddrinfo(host, port)[0][0]).detach()
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise DisttrainError(
            f"Port {port} of {host} is in use" if in_use else f"Rank 0 cannot listen on {host}:{port}", str(error),
            "Set another cluster.port in the run file, or end what uses it." if in_use else
            "MASTER_ADDR must be an address of the first host.") from None
