"""NCCL between all devices of a node: bandwidth of collectives and messages, and memory after each.

On one device two ranks share it (`cluster.ranks_per_gpu`), which shows memory and no speed. Bus
bandwidths are NCCL's (nccl-tests): comparable between numbers of ranks.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.setting import Figures, Setting
from disttrain_cli.runtime.launching.devices import rank_device
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.launching.process import joined, rendezvous, set_cuda_environment

LIMIT_S = 60.0
REPEATS = 5
SIZES_MIB = (1, 32, 256)


def collectives(setting: Setting) -> None:
    """Measure with a rank per device, or with two on the one device."""
    devices = torch.cuda.device_count() if setting.kind == "cuda" else 0
    sizes = SIZES_MIB if devices > 1 else SIZES_MIB[:1]
    payload = {"device": setting.kind, "ranks_per_gpu": 2 if devices == 1 else 1, "sizes": sizes}
    out = setting.folder / "collectives.json"
    launch(
        max(devices, 2),
        f"{__name__}:rank",
        payload | {"out": str(out)},
        setting.folder / "logs",
        timeout_s=LIMIT_S,
    )
    for name, found in json.loads(out.read_text()).items():
        setting.tell(name, found)


def rank(payload: dict[str, Any]) -> None:
    """Run every operation on every size; rank 0 writes what it took and the memory after it."""
    if payload["device"] == "cuda":
        print(set_cuda_environment(payload["ranks_per_gpu"]), flush=True)
    device = rank_device(payload["device"])
    figures: dict[str, Figures] = {"joined": {}}
    with joined(device, LIMIT_S, store=rendezvous(timedelta(seconds=LIMIT_S))) as device:
        figures["joined"] = {"ranks": dist.get_world_size(), **_outside(device)}
        for mib in payload["sizes"]:
            buffer = torch.zeros(mib << 18, device=device)
            for name, (call, share) in _operations(buffer).items():
                took_s = median(_took_s(call, device) for _ in range(REPEATS + 1))
                figures[f"{name}, {mib} MiB"] = {
                    "ms": 1e3 * took_s,
                    "bus_gbytes_s": 1e-9 * share * buffer.nbytes / took_s,
                    **_outside(device),
                }
    if os.environ["RANK"] == "0":
        Path(payload["out"]).write_text(json.dumps(figures))


def _operations(buffer: torch.Tensor) -> dict[str, tuple[Callable[[], Any], float]]:
    """Return the operations by name, with the bytes on the busiest link over the buffer's."""
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = buffer[: len(buffer) // size * size]
    own, taken = parts.chunk(size)[rank].clone(), torch.empty_like(buffer)
    ring = (size - 1) / size

    def pass_on() -> None:
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, buffer, (rank + 1) % size),
                dist.P2POp(dist.irecv, taken, (rank - 1) % size),
            ]
        ):
            work.wait()

    return {
        "all_reduce": (lambda: dist.all_reduce(buffer), 2.0 * ring),
        "all_gather": (lambda: dist.all_gather_into_tensor(parts, own), ring),
        "reduce_scatter": (lambda: dist.reduce_scatter_tensor(own, parts), ring),
        "ring of messages": (pass_on, 1.0),
        "all_to_all": (lambda: dist.all_to_all_single(taken[: len(parts)], parts), ring),
    }


def _took_s(call: Callable[[], Any], device: torch.device) -> float:
    _settle(device)
    dist.barrier(device_ids=[device.index]) if device.type == "cuda" else dist.barrier()
    started = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - started


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _outside(device: torch.device) -> Figures:
    """Return the memory in use on the device outside this rank's allocator."""
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"outside_allocator_mib": (total - free - torch.cuda.memory_reserved(device)) / 2**20}
