"""Small Kineto traces of known content: a compute kernel and a collective per step, at stated
times."""

import json
from pathlib import Path

from disttrain_cli.analysis.analyze import ask

BASE_US = 1_700_000_000_000_000
STEP_US = 1000
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
GEMM = "ampere_sgemm_128x64_tn"


def span(name, start, duration, cat="cpu_op", pid=100, tid=100, **more):
    """A complete event."""
    event = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
    return event | {"ts": start, "dur": duration, **more}


def kernel(name, start, duration, correlation, stream=7, cat="kernel", **args):
    """A kernel and the call that launched it 5 µs earlier."""
    return [
        span(
            "cudaLaunchKernel", start - 5, 3, cat="cuda_runtime", args={"correlation": correlation}
        ),
        span(
            name,
            start,
            duration,
            cat=cat,
            pid=0,
            tid=stream,
            args={"device": 0, "stream": stream, "correlation": correlation, **args},
        ),
    ]


def events(arrivals, compute=300, moves=20, base=BASE_US, last=None, marked=True):
    """Steps of one rank: a GEMM that starts with the step, an all-reduce that starts at
    `arrivals[step]`.

    `last[step]` is when the last rank arrives; the collective ends `moves` later everywhere.
    """
    found = []
    for step, arrival in enumerate(arrivals):
        at = base + step * STEP_US
        end = at + (arrival if last is None else last[step]) + moves
        if marked:
            found.append(span(f"ProfilerStep#{step}", at, STEP_US, cat="user_annotation"))
        found.append(span("aten::mm", at + 1, 10))
        found += kernel(GEMM, at + 10, compute, 1000 + 2 * step)
        found += kernel(ALL_REDUCE, at + arrival, end - at - arrival, 1001 + 2 * step, stream=20)
    return found


def document(found, rank=0, world_size=1, **more):
    about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world_size}}
    return {"schemaVersion": 1, **about, "traceEvents": found, "traceName": "made", **more}


def write(path: Path, content) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content, indent=1))
    return path


def job(folder: Path, arrivals, compute=None, world_size=None, ahead=None, **more) -> list[Path]:
    """One file per rank; `arrivals[rank][step]`; `ahead[rank]` is by how much its clock is."""
    ranks = len(arrivals)
    last = [max(own[step] for own in arrivals) for step in range(len(arrivals[0]))]
    return [
        write(
            folder / f"rank{rank}.json",
            document(
                events(
                    own,
                    last=last,
                    base=BASE_US + (ahead or [0] * ranks)[rank],
                    compute=(compute or [300] * ranks)[rank],
                    **more,
                ),
                rank,
                world_size or ranks,
            ),
        )
        for rank, own in enumerate(arrivals)
    ]


def mean_step_s(paths) -> float:
    """Seconds of a measured step, mean over the ranks."""
    return ask(paths, "SELECT avg(step_ns) / 1e9 FROM step_times").rows[0][0]
