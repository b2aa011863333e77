"""Latency and bandwidth of messages: point to point and collectives, within and between nodes.

A message that puts b bytes on a link takes latency + b / bandwidth; both come from a fit over
message sizes. In a ring of N ranks an all-reduce puts 2·b·(N-1)/N bytes on every link, an
all-gather and a reduce-scatter b·(N-1)/N (`spec.profile.LinkTimes`), so the bandwidths hold for
other N. Gloo between processes, NCCL between GPUs. A single rank has no link; the profile then
holds a copy inside its device's memory, which is the cost of a "transfer" where sender and receiver
are the same.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from disttrain_cli.profiling.fitting import fit
from disttrain_cli.runtime.units.communicators import nccl_options
from disttrain_cli.spec.profile import LinkProfile, LinkTimes
from disttrain_cli.spec.work import Work

SIZES_BYTES = (4 << 10, 32 << 10, 256 << 10, 1 << 20, 4 << 20)
CUDA_SIZES_BYTES = (*SIZES_BYTES, 16 << 20, 64 << 20)
REPEATS = 7
GIGABIT = 1e9

#: An operation on a buffer and one rank's shard of it.
Operation = Callable[[torch.Tensor, torch.Tensor], object]


def fit_link(sizes_bytes: Sequence[float], times_s: Sequence[float]) -> tuple[float, float]:
    """Return (bandwidth in Gbit/s, latency in µs) of time = latency + bytes / bandwidth."""
    line = fit([Work(tokens=float(size)) for size in sizes_bytes], times_s)
    slowest = min(size / time_s for size, time_s in zip(sizes_bytes, times_s, strict=True))
    bytes_per_s = 1.0 / line.per_token if line.per_token > 0.0 else slowest
    return 8.0 * bytes_per_s / GIGABIT, line.base * 1e6


def measure_links(device: torch.device) -> LinkProfile:
    """Measure with all processes of the default group and return the same result on all.

    Every rank must call this. Inside a node, the ranks of rank 0's host are measured. Between
    nodes, where there are several, as many concurrent rings as every host has ranks, each through
    one rank of each host: a rank's share of a network that its neighbours use too
    (`costs.links.ring_link`).
    """
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    rings = [list(ring) for ring in zip(*by_host.values(), strict=False)]
    links = [
        _measure([by_host[hosts[0]]], device),
        _measure(rings, device) if len(by_host) > 1 else None,
    ]
    dist.broadcast_object_list(links, src=0, device=device)
    assert links[0] is not None
    if links[1] is None:
        return LinkProfile(**links[0])
    per_node = len(by_host[hosts[0]])
    return LinkProfile(**links[0], inter_node=LinkTimes(**links[1]), gpus_per_node=per_node)


def _measure(groups: list[list[int]], device: torch.device) -> dict[str, float]:
    """Return fields of `LinkTimes` for equally large groups, all at once.

    Ranks outside all groups wait, and return no fields.
    """
    options = nccl_options("messages", dist.get_backend())  # as between stages
    made = [
        (ranks, dist.new_group(ranks), dist.new_group(ranks[:2], pg_options=options))
        for ranks in groups
    ]
    mine = next((one for one in made if dist.get_rank() in one[0]), None)
    operations = _operations(*(mine or made[0]))
    count, sizes = len(groups[0]), CUDA_SIZES_BYTES if device.type == "cuda" else SIZES_BYTES
    measured: dict[str, float] = {}
    for name, (operation, share, messages) in operations.items():
        times_s = _medians_s(operation if mine else None, sizes, count, device)
        if mine is not None:
            measured[f"{name}_gbps"], measured[f"{name}_us"] = fit_link(
                [share * size for size in sizes], [time_s / messages for time_s in times_s]
            )
    return measured


def _operations(
    ranks: list[int], group: dist.ProcessGroup, pair: dist.ProcessGroup
) -> dict[str, tuple[Operation, float, int]]:
    """Return operations by name in `LinkTimes`: function, share of the buffer on a link, messages.

    Messages is the number of messages that the function sends one after the other.
    """
    if len(ranks) == 1:
        copy: tuple[Operation, float, int] = (lambda buffer, part: buffer.clone(), 1.0, 1)
        return dict.fromkeys(("p2p", "all_reduce", "all_gather", "reduce_scatter"), copy)
    rank, ring = dist.get_rank(), (len(ranks) - 1) / len(ranks)

    def exchange(buffer: torch.Tensor, part: torch.Tensor) -> None:
        """Send a buffer back and forth between the first two ranks."""
        if rank not in ranks[:2]:
            return
        first = rank == ranks[0]
        for begin in (dist.isend, dist.irecv) if first else (dist.irecv, dist.isend):
            message = dist.P2POp(begin, buffer, ranks[first], pair)
            for work in dist.batch_isend_irecv([message]):
                work.wait()

    return {
        "p2p": (exchange, 1.0, 2),
        "all_reduce": (lambda buffer, part: dist.all_reduce(buffer, group=group), 2.0 * ring, 1),
        "all_gather": (
            lambda buffer, part: dist.all_gather_into_tensor(buffer, part, group=group),
            ring,
            1,
        ),
        "reduce_scatter": (
            lambda buffer, part: dist.reduce_scatter_tensor(part, buffer, group=group),
            ring,
            1,
        ),
    }


def _medians_s(
    operation: Operation | None, sizes_bytes: Sequence[int], ranks: int, device: torch.device
) -> list[float]:
    """Return the median time of an operation on buffers of about these sizes, divisible by `ranks`.

    One warm-up round over the sizes comes first; all sizes are timed in rounds, so that a moment
    when the machine is slow slows all sizes.
    """
    parts = [
        torch.zeros(max(1, size // 4 // ranks), dtype=torch.float32, device=device)
        for size in sizes_bytes
    ]
    buffers = [part.repeat(ranks) for part in parts]
    rounds_s: list[list[float]] = []
    for _ in range(REPEATS + 1):
        rounds_s.append([])
        for buffer, part in zip(buffers, parts, strict=True):
            _settle(device)
            begin = time.perf_counter_ns()
            if operation is not None:
                operation(buffer, part)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            rounds_s[-1].append((time.perf_counter_ns() - begin) * 1e-9)
    return np.median(rounds_s[1:], axis=0).tolist()


def _settle(device: torch.device) -> None:
    """Wait until all ranks can start together, with nothing queued on the device."""
    dist.barrier()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
