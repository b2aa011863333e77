"""Latency and bandwidth of messages between processes: one sender and one receiver, and an all-reduce of all.

A message of b bytes takes latency + b / bandwidth; both come from a fit over message sizes. Gloo between
processes, NCCL between GPUs. One process alone has no link; what stands in the profile then is a copy inside
its device's memory, which is what a "transfer" costs where sender and receiver are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from disttrain_cli.profiling.fitting import fit
from disttrain_cli.spec.profile import LinkProfile
from disttrain_cli.spec.work import Work

SIZES_BYTES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
REPEATS = 7
GIGABIT = 1e9


def fit_link(sizes_bytes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """(bandwidth in Gbit/s, latency in µs) of time = latency + bytes / bandwidth."""
    line = fit([Work(tokens=float(size)) for size in sizes_bytes], times_s)
    slowest = min(size / time_s for size, time_s in zip(sizes_bytes, times_s, strict=True))
    bytes_per_s = 1.0 / line.per_token if line.per_token > 0.0 else slowest
    return 8.0 * bytes_per_s / GIGABIT, line.base * 1e6


def measure_links(device: torch.device) -> LinkProfile:
    """Measure with all processes of the default group (every rank must call this; all get rank 0's result)."""
    rank, world = dist.get_rank(), dist.get_world_size()

    def exchange(buffer: torch.Tensor) -> None:
        """There and back between ranks 0 and 1: two messages."""
        if rank == 0:
            dist.send(buffer, 1)
            dist.recv(buffer, 1)
        elif rank == 1:
            dist.recv(buffer, 0)
            dist.send(buffer, 0)

    def copy(buffer: torch.Tensor) -> None:
        buffer.clone()

    if world == 1:
        p2p = reduce = _curve(device, copy)
    else:
        p2p = [time_s / 2.0 for time_s in _curve(device, exchange)]
        reduce = _curve(device, dist.all_reduce)
    p2p_gbps, p2p_us = fit_link(SIZES_BYTES, p2p)
    reduce_gbps, reduce_us = fit_link(SIZES_BYTES, reduce)
    found = [p2p_gbps, p2p_us, reduce_gbps, reduce_us]
    if world > 1:
        dist.broadcast_object_list(found, src=0, device=device)
    return LinkProfile(p2p_gbps=found[0], p2p_us=found[1], all_reduce_gbps=found[2], all_reduce_us=found[3])


def _curve(device: torch.device, operation: Callable[[torch.Tensor], object]) -> list[float]:
    """Median seconds of `operation` on a buffer of every size, after one warm-up each."""
    medians = []
    for size in SIZES_BYTES:
        buffer = torch.zeros(size // 4, dtype=torch.float32, device=device)
        times = []
        for _ in range(REPEATS + 1):
            _settle(device)
            begin = time.perf_counter_ns()
            operation(buffer)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append((time.perf_counter_ns() - begin) * 1e-9)
        medians.append(float(np.median(times[1:])))
    return medians


def _settle(device: torch.device) -> None:
    """Let all ranks begin together, with nothing queued on the device."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
