"""The device of this machine: kind, count, memory and peak rate.

The peak of a GPU is its vendor's dense bf16 figure (the hardware catalogue) or the run file's
value; it is never guessed. The peak of a CPU is the best matrix-product rate of the whole machine,
measured here, and counted once however many processes share it.
"""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from disttrain_cli.calls import call
from disttrain_cli.costs.hardware import Precision, catalogue, lookup
from disttrain_cli.errors import DisttrainError
from disttrain_cli.models import flash4
from disttrain_cli.runtime.watching.host_memory import container_limits, text_of
from disttrain_cli.spec.profile import DeviceProfile
from disttrain_cli.spec.runfile.cluster import ClusterSpec

GIB = float(1 << 30)
GEMM_SIDES = (128, 1024)  # smallest and largest
GEMM_SECONDS = 0.5


def choose_kind(wanted: str) -> str:
    """Return "cpu" or "cuda" for "auto", "cpu" or "cuda".

    Raises:
        DisttrainError: CUDA was asked for and torch sees no CUDA device.
    """
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        build = (
            f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a build without CUDA"
        )
        raise DisttrainError(
            "No CUDA device was found",
            f"torch {torch.__version__} ({build}) sees 0 devices",
            f"Measure on the CPU with: {call('profile', device='cpu')}",
        )
    return wanted


def local_processes(cluster: ClusterSpec, kind: str) -> int:
    """Return the number of processes that a run starts on this machine, one per device.

    This is `cluster.gpus_per_node`; on CUDA at most `cluster.ranks_per_gpu` for each GPU present.
    """
    if kind == "cpu":
        return cluster.gpus_per_node
    return min(cluster.gpus_per_node, torch.cuda.device_count() * cluster.ranks_per_gpu)


def describe_device(cluster: ClusterSpec, kind: str, precision: Precision) -> DeviceProfile:
    """Return name, count, memory and peak of the device; on a CPU this measures the peak.

    The measurement takes a few seconds.

    Raises:
        SpecError: the peak of this GPU is not known and the run file does not state it; or
            FlashAttention 4 is asked for and not available.
    """
    processes = local_processes(cluster, kind)
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(0)
        return DeviceProfile(
            name=properties.name,
            kind="cuda",
            count=cluster.nodes * processes,
            memory_gib=cluster.memory_gib or properties.total_memory / GIB / cluster.ranks_per_gpu,
            peak_tflops=cluster.peak_tflops or lookup(properties.name).peak_of(precision),
            shared_by=1,
            cores=machine_cores(),
            flash_attention=flash4.version(cluster.flash_attention, torch.device("cuda", 0)),
            **catalogue().memory.reserves,
        )
    return DeviceProfile(
        name=cpu_name(),
        kind="cpu",
        count=cluster.gpus,
        memory_gib=cluster.memory_gib or machine_memory_gib() / processes,
        peak_tflops=cluster.peak_tflops or gemm_peak_tflops(precision),
        shared_by=processes,
        cores=machine_cores(),
        flash_attention=flash4.version(cluster.flash_attention, torch.device("cpu")),
    )


def gemm_peak_tflops(
    precision: str, cores: int | None = None, seconds: float = GEMM_SECONDS
) -> float:
    """Measure the best GEMM rate with every core busy, in TFLOP/s; takes about `seconds`.

    One thread per core, each timed by its own CPU time, so that other programs on the machine do
    not lower the result; their best rates are summed. Every operand layout is tried, because a CPU
    without bf16 units runs some of them many times slower; with bf16 the fp32 rate counts too: the
    peak is the best that such a CPU could reach.
    """
    dtypes = [torch.float32, torch.bfloat16] if precision == "bf16" else [torch.float32]
    count = cores or machine_cores()
    with ThreadPoolExecutor(count, "gemm") as pool:
        rates = list(pool.map(lambda _: _core_rate(dtypes, seconds), range(count)))
    return sum(rates) / 1e12


def _core_rate(dtypes: list[torch.dtype], seconds: float) -> float:
    """Return the best FLOP/s of the calling thread over data types, operand layouts and sides."""
    torch.set_num_threads(1)  # of this thread
    best = 0.0
    tries = [(dtype, layout) for dtype in dtypes for layout in ("nn", "nt", "tn")]
    for dtype, layout in tries:
        deadline, side, taken_s = time.perf_counter() + seconds / len(tries), GEMM_SIDES[0], 0.0
        while time.perf_counter() < deadline:
            left, right = torch.randn(side, side).to(dtype), torch.randn(side, side).to(dtype)
            left, right = (
                (left.t() if layout == "tn" else left),
                (right.t() if layout == "nt" else right),
            )
            begin_ns = time.thread_time_ns()
            left @ right
            taken_s = (time.thread_time_ns() - begin_ns) * 1e-9
            best = max(best, 2.0 * side**3 / taken_s)
            if taken_s < seconds / 200 and side < GEMM_SIDES[1]:
                side *= 2
    return best


def machine_cores() -> int:
    """Return the cores this process may use: its affinity, capped by the container's CPU quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = text_of("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def machine_memory_gib() -> float:
    """Return the memory of the machine, or the container's limit where it is lower."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in container_limits())]) / GIB


def cpu_name() -> str:
    """Return the model name of the processor, as the system reports it."""
    lines = text_of("/proc/cpuinfo").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
