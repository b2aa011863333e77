"""An operation-level trace of a Megatron job, timed by the dependencies that the study describes.

Every duration is chosen here; the ends follow from a small event loop of its own, so that the reader's graph is checked
against something that is not it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FORWARD_S, BACKWARD_S, TRANSFER_S, UPDATE_S = 0.010, 0.020, 0.001, 0.005
CLOSING = ("layernorm-grads-all-reduce", "embedding-grads-all-reduce", "grads-reduce-scatter",
           "optimizer-clip-main-grad", "optimizer")
GROUPED = {"embedding-grads-all-reduce": "ends", "grads-reduce-scatter": "replicas", "optimizer-clip-main-grad": "all"}


@dataclass
class Job:
    """What to simulate; the faults are factors on passes, and seconds."""

    dp: int = 2
    pp: int = 3
    slots: int = 4
    steps: int = 6
    slow_stage: dict[int, float] = field(default_factory=dict)
    slow_rank: dict[int, float] = field(default_factory=dict)
    load: dict[tuple[int, int], float] = field(default_factory=dict)  # (step + replica) % 3, slot → times as much work
    launch_s: dict[int, float] = field(default_factory=dict)  # by rank, before its first forward of a step


def rows(job: Job) -> list[dict[str, Any]]:
    """All rows of the job."""
    return [row for step in range(job.steps) for row in _step(job, step)]


def write(path: Path, found: list[dict[str, Any]]) -> Path:
    """Write rows as Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(found), path)
    return path


def _step(job: Job, step: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    last_done: dict[tuple[int, int], float] = {}
    for replica in range(job.dp):
        done: dict[tuple[str, int, int], float] = {}
        free = {stage: job.launch_s.get(stage * job.dp + replica, 0.0) for stage in range(job.pp)}
        orders = {stage: _one_f_one_b(job.slots, job.pp - stage - 1) for stage in range(job.pp)}
        while any(orders.values()):
            for stage in range(job.pp):
                while orders[stage]:
                    kind, slot = orders[stage][0]
                    near = stage + (-1 if kind == "forward" else 1)
                    asked = free[stage]
                    if 0 <= near < job.pp:
                        if (kind, slot, near) not in done:
                            break
                        sent = done[kind, slot, near]
                        # the receiver may ask long before, and the sender waits for it: both end together
                        begun = max(asked, sent)
                        found.append(_row(job, replica, stage, step, f"{kind}-recv", slot, asked, begun + TRANSFER_S))
                        found.append(_row(job, replica, near, step, f"{kind}-send", slot, sent, begun + TRANSFER_S))
                        asked = begun + TRANSFER_S
                    rank = stage * job.dp + replica
                    took = (FORWARD_S if kind == "forward" else BACKWARD_S) * job.slow_stage.get(stage, 1.0)
                    took *= job.slow_rank.get(rank, 1.0) * job.load.get(((step + replica) % 3, slot), 1.0)
                    found.append(_row(job, replica, stage, step, f"{kind}-compute", slot, asked, asked + took))
                    free[stage] = done[kind, slot, stage] = asked + took
                    orders[stage].pop(0)
        last_done |= {(replica, stage): free[stage] for stage in range(job.pp)}
    for kind in CLOSING:
        begun = dict(last_done)
        for replica, stage in itertools.product(range(job.dp), range(job.pp)):
            if kind.startswith("embedding") and stage not in (0, job.pp - 1):
                continue
            over = GROUPED.get(kind)
            members = [at for (r, s), at in begun.items()
                       if (over == "all") or (over == "replicas" and s == stage)
                       or (over == "ends" and r == replica and s in (0, job.pp - 1)) or (r, s) == (replica, stage)]
            end = max(members) + UPDATE_S
            found.append(_row(job, replica, stage, step, kind, 0, begun[replica, stage], end))
            last_done[replica, stage] = end
    return found


def _one_f_one_b(slots: int, behind: int) -> list[tuple[str, int]]:
    ahead = min(slots, behind)
    order = [("forward", slot) for slot in range(ahead)]
    for slot in range(slots - ahead):
        order += [("forward", ahead + slot), ("backward", slot)]
    return order + [("backward", slot) for slot in range(slots - ahead, slots)]


def _row(job: Job, replica: int, stage: int, step: int, kind: str, seq: int, start: float,
         end: float) -> dict[str, Any]:
    computes = kind.endswith("compute")
    return {"dp_rank": replica, "stage": stage, "rank": stage * job.dp + replica, "step": step, "optype": kind,
            "start_ts": start, "duration": end - start, "seq_id": seq, "mc": 0 if computes else -1,
            "mb_id": seq if computes else -1, "gmc": stage if computes else -1}
