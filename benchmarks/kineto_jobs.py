"""Synthetic Kineto jobs of which is known what slows them: simulated hosts, devices, collectives.

In every step a rank's host loads data, launches a kernel per layer and a collective after every
other layer, copies, and synchronizes or runs ahead. Truths are what the same job gains without a
fault, by simulation; causes that cost less than a verdict asks for (`LEAST_SHARE`) count as none.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.known import Row, Truth
from disttrain_cli.analysis.kineto.verdict import LEAST_SHARE

#: Kinds that confidence is fitted on, and those that it is scored on only.
DEVELOPED = (
    "none",
    "data",
    "host",
    "communication",
    "straggler",
    "copies",
    "few steps",
    "missing",
    "noise",
    "event",
    "unclassified",
    "small",
    "clocks",
    "impossible",
    "merged",
)
HELD_OUT = ("runs ahead", "host gap", "late host", "two stragglers", "silent loader")
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
LAYERS, LAUNCH_US, BASE_US = 8, 6.0, 1_700_000_000_000_000
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


@dataclass(frozen=True)
class Job:
    """Times in µs."""

    seed: int
    ranks: int = 4
    steps: int = 6  # recorded, the first of several is warm-up
    layer_us: float = 3000.0
    data_us: float = 0.0
    loads_silently: bool = False
    call_us: float = 20.0  # host time of a launch
    gap_us: float = 0.0  # of the host, once a step, in an operator
    move_us: float = 100.0
    copy_us: float = 0.0
    noise: float = 0.005
    slow: dict[int, float] = field(default_factory=dict)  # rank: factor of its layers
    late_us: dict[int, float] = field(default_factory=dict)  # rank: its host is late, once a step
    start_us: float = 0.0  # of the profiler, in the first recorded step
    event_us: float = 0.0  # pause of a single step
    event_step: int = 2
    sync: bool = True
    talks: bool = True  # collectives are there
    lost_ranks: tuple[int, ...] = ()
    names: tuple[str, ...] = ()  # of the layers, GEMM where there are none
    reduce: str = REDUCE
    ahead_us: tuple[float, ...] = ()  # clocks of the ranks
    impossible: float = 0.0  # share of kernels whose times are
    merged: bool = False  # all ranks in one file, which names none


class Ran(list[tuple[str, str, float, float, int]]):
    """Events of a rank: category, name, start, end, correlation."""


def play(job: Job) -> tuple[list[Ran], np.ndarray[Any, Any]]:
    """Events of every rank, and seconds of the usual steps [ranks]."""
    draw = np.random.default_rng(job.seed)
    noise = 1 + job.noise * np.abs(draw.standard_normal((job.steps, LAYERS, job.ranks)))
    ran = [Ran() for _ in range(job.ranks)]
    host, device, number = np.zeros(job.ranks), np.zeros(job.ranks), 0
    marks = np.zeros((job.steps + 1, job.ranks))
    ends = np.zeros((job.steps + 1, job.ranks))
    for step in range(job.steps):
        marks[step] = host
        for rank in range(job.ranks):
            begin = host[rank]
            if step == 0 and job.start_us:
                host[rank] += job.start_us
            if job.data_us:
                host[rank] += job.data_us
                if not job.loads_silently:
                    ran[rank].append(("user_annotation", LOADER, begin, host[rank], -1))
            if job.late_us.get(rank):
                host[rank] += job.late_us[rank]
        for layer in range(LAYERS):
            number += 2
            for rank in range(job.ranks):
                before = host[rank]
                if layer == LAYERS // 2 and job.gap_us:
                    host[rank] += job.gap_us
                host[rank] += job.call_us
                ran[rank].append(("cpu_op", "aten::mm", before, host[rank], -1))
                start = max(host[rank], device[rank] + 1)
                takes = job.layer_us * noise[step, layer, rank] * job.slow.get(rank, 1.0)
                name = job.names[layer] if job.names else GEMM
                ran[rank].append(
                    (
                        "cuda_runtime",
                        "cudaLaunchKernel",
                        host[rank] - LAUNCH_US,
                        host[rank] - 1,
                        number,
                    )
                )
                ran[rank].append(("kernel", name, start, start + takes, number))
                device[rank] = start + takes
            if job.talks and layer % 2 and job.ranks > 1:
                last = device.max() + 1 + job.move_us
                for rank in range(job.ranks):
                    ran[rank].append(
                        (
                            "cuda_runtime",
                            "cudaLaunchKernelExC",
                            host[rank] + 1,
                            host[rank] + 5,
                            number + 1,
                        )
                    )
                    host[rank] += 6
                    ran[rank].append(("kernel", job.reduce, device[rank] + 1, last, number + 1))
                device[:] = last
        number += 2
        for rank in range(job.ranks):
            if job.copy_us:
                ran[rank].append(
                    ("cuda_runtime", "cudaMemcpyAsync", host[rank], host[rank] + 4, number)
                )
                ran[rank].append(
                    (
                        "gpu_memcpy",
                        "Memcpy DtoH (Device -> Pageable)",
                        device[rank] + 1,
                        device[rank] + job.copy_us,
                        number,
                    )
                )
                device[rank] += job.copy_us
            if job.sync:
                ran[rank].append(
                    ("cuda_runtime", "cudaDeviceSynchronize", host[rank] + 5, device[rank] + 5, -1)
                )
                host[rank] = device[rank] + 8
            elif step:  # one step ahead at most
                host[rank] = max(host[rank], ends[step][rank])
            if job.event_us and step == job.event_step:
                ran[rank].append(("cpu_op", "save", host[rank] + 10, host[rank] + job.event_us, -1))
                host[rank] += job.event_us
            ends[step + 1][rank] = device[rank]
    marks[-1] = host
    for rank, own in enumerate(ran):
        for step in range(job.steps):
            own.append(
                (
                    "user_annotation",
                    f"ProfilerStep#{step}",
                    marks[step][rank],
                    marks[step + 1][rank] - 2,
                    -1,
                )
            )
    bounds = marks if job.sync else ends
    lengths = np.diff(bounds, axis=0)
    usual = [
        step
        for step in range(job.steps)
        if (step or job.steps == 1) and (not job.event_us or step != job.event_step)
    ]
    return ran, lengths[usual].mean(axis=0)


def draw(kind: str, seed: int) -> Job:
    """A job of a kind; sizes of faults are drawn, from nothing to large ones."""
    random_ = random.Random(f"kineto job {kind} {seed}")
    layer_us = random_.choice((300.0, 1000.0, 3000.0, 6000.0))
    whole_us = LAYERS * layer_us
    ranks = random_.choice((1, 2, 4, 8))
    job = Job(
        seed=seed,
        ranks=ranks,
        steps=random_.choice((2, 3, 4, 6, 9)),
        layer_us=layer_us,
        move_us=random_.uniform(0.0, 0.08) * whole_us / 4,
        noise=random_.choice((0.002, 0.01, 0.03)),
        start_us=random_.choice((0.0, random_.uniform(0.0, 0.8) * whole_us)),
        sync=random_.random() < 0.7,
    )
    change = faults_of(job, random_)
    plain = ("none", "data", "host", "communication", "straggler", "copies")
    if kind in plain:
        return change(kind)
    if kind == "few steps":
        return dataclasses.replace(change(random_.choice(plain)), steps=random_.choice((1, 1, 2)))
    if kind == "missing":
        many = change(random_.choice(("none", "communication", "straggler", "data")), ranks=8)
        lost = tuple(random_.sample(range(8), random_.choice((1, 4, 7))))
        return dataclasses.replace(many, lost_ranks=lost)
    if kind == "noise":
        return dataclasses.replace(change(random_.choice(plain)), noise=random_.uniform(0.05, 0.3))
    if kind == "event":
        steps = random_.choice((3, 4, 6, 9))
        return dataclasses.replace(
            change(random_.choice(plain)),
            steps=steps,
            event_us=random_.uniform(0.1, 12.0) * whole_us,
            event_step=random_.randrange(1, steps),
        )
    if kind == "unclassified":
        job = change(random_.choice(plain))
        if random_.random() < 0.5:
            return dataclasses.replace(job, reduce=_strange(random_))
        share = random_.random()
        names = tuple(
            _strange(random_) if random_.random() < share else GEMM for _ in range(LAYERS)
        )
        return dataclasses.replace(job, names=names)
    if kind == "small":
        return change(random_.choice(plain), most=0.2)
    if kind == "clocks":
        job = change(random_.choice(plain), ranks=random_.choice((2, 4, 8)))
        most = random_.choice((0.1, 1.0, 10.0)) * layer_us
        ahead_us = tuple(random_.uniform(-most, most) for _ in range(job.ranks))
        return dataclasses.replace(job, ahead_us=ahead_us)
    if kind == "impossible":
        return dataclasses.replace(
            change(random_.choice(plain)), impossible=random_.choice((0.01, 0.05, 0.2))
        )
    if kind == "merged":
        return dataclasses.replace(change(random_.choice(plain), ranks=4), merged=True)
    if kind == "runs ahead":
        return dataclasses.replace(change(random_.choice(plain)), sync=False)
    if kind == "host gap":
        return dataclasses.replace(job, gap_us=random_.uniform(0.02, 1.0) * whole_us)
    if kind == "silent loader":
        return dataclasses.replace(change("data"), loads_silently=True)
    if kind == "late host":
        job = dataclasses.replace(job, ranks=4)
        return dataclasses.replace(
            job, late_us={random_.randrange(4): random_.uniform(0.01, 0.8) * whole_us}
        )
    slow = dict.fromkeys(random_.sample(range(8), 2), 1 + random_.uniform(0.02, 0.6))
    return dataclasses.replace(job, ranks=8, slow=slow)


def faults_of(job: Job, random_: random.Random) -> Callable[..., Job]:
    """A function that puts a fault of a plain kind into a job."""

    def change(kind: str, ranks: int | None = None, most: float = 0.9) -> Job:
        whole_us, share = LAYERS * job.layer_us, random_.uniform(0.01, most)
        many = ranks or (
            random_.choice((2, 4, 8)) if kind in ("straggler", "communication") else job.ranks
        )
        changed = dataclasses.replace(job, ranks=many)
        if kind == "data":
            return dataclasses.replace(changed, data_us=share * whole_us)
        if kind == "host":
            return dataclasses.replace(changed, call_us=(0.5 + 2 * share) * job.layer_us)
        if kind == "communication":
            return dataclasses.replace(changed, move_us=share * whole_us / 4)
        if kind == "copies":
            return dataclasses.replace(changed, copy_us=share * whole_us)
        if kind == "straggler":
            return dataclasses.replace(changed, slow={random_.randrange(many): 1 + share})
        return changed

    return change


def _strange(random_: random.Random) -> str:
    return "".join(random_.choice("bcdghjkqwxyz") for _ in range(12)) + f"_{random_.randrange(100)}"


def kineto_job(kind: str, seed: int, path: Path) -> list[Truth]:
    """Write the traces of a job, and what it gains without each cause."""
    job = draw(kind, seed)
    ran, lengths = play(job)
    written = {
        rank: _events(own, rank, job) for rank, own in enumerate(ran) if rank not in job.lost_ranks
    }
    path.mkdir(parents=True, exist_ok=True)
    if job.merged:
        events = [event for own in written.values() for event in own]
        (path / "merged.json").write_text(json.dumps({"traceEvents": events}))
    for rank, own in {} if job.merged else written.items():
        about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": job.ranks}}
        text = json.dumps({"schemaVersion": 1, **about, "traceEvents": own})
        (path / f"rank{rank}.json").write_text(text)
    step = float(lengths.mean())

    def without(**changes: Any) -> float:
        return float(play(dataclasses.replace(job, **changes))[1].mean())

    even = without(slow={}, late_us={})
    gains: list[tuple[str, Row, float, float]] = [
        ("data", {}, step - without(data_us=0.0), 0.0),
        ("host", {}, step - without(call_us=1.0, gap_us=0.0), 0.0),
        ("communication", {}, even - without(slow={}, late_us={}, talks=False, copy_us=0.0), 0.0),
    ]
    for rank in dict.fromkeys([*job.slow, *job.late_us]):
        slow = {one: factor for one, factor in job.slow.items() if one != rank}
        late = {one: us for one, us in job.late_us.items() if one != rank}
        gains.append(
            ("worker", {"rank": rank}, step - without(slow=slow, late_us=late), step - even)
        )
    return [
        Truth(cause, place, share if share >= LEAST_SHARE[cause] else 0.0, together / step)
        for cause, place, gain, together in gains
        for share in [gain / step]
    ]


def _events(ran: Ran, rank: int, job: Job) -> list[dict[str, Any]]:
    """Trace events of a rank; impossible kernels last too long, or have no time at all."""
    events, draw = [], np.random.default_rng([job.seed, rank])
    ahead_us = job.ahead_us[rank] if job.ahead_us else 0.0
    for category, name, start, end, number in ran:
        device = category in ("kernel", "gpu_memcpy")
        stream = 20 if name.startswith("nccl") else 7
        args = {"stream": stream, "device": 0 if job.merged else rank} if device else {}
        if number >= 0:
            args |= {"correlation": number + (job.merged and rank * 1_000_000)}
        at, lasts = BASE_US + float(start) + ahead_us, float(end - start)
        if device and draw.random() < job.impossible:
            at, lasts = (0.0, 0.0) if draw.random() < 0.3 else (at, lasts + 2**32 / 1000)
        events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": rank if device else 1000 + rank,
                "tid": stream if device else 1000 + rank,
                "ts": at,
                "dur": lasts,
                "args": args,
            }
        )
    return events
