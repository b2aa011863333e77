"""An operation-level trace of a Megatron job, timed by the dependencies that the study describes.

Every duration is chosen here; the ends follow from a small event loop of its own, so that the
reader's graph is checked against something that is not it. With `chunks` the stages are
interleaved: receives are posted ahead, recorders write transfers that move nothing at the ends of
the model and lack the very first receive, parameters are gathered by part.
"""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

FORWARD_S, BACKWARD_S, TRANSFER_S, UPDATE_S = 0.010, 0.020, 0.001, 0.005
CLOSING = (
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer-clip-main-grad",
    "optimizer",
)
GROUPED = {
    "embedding-grads-all-reduce": "ends",
    "grads-reduce-scatter": "replicas",
    "separate-grads-all-reduce": "replicas",
    "optimizer-clip-main-grad": "all",
}


@dataclass
class Job:
    """What to simulate; the faults are factors on passes, and seconds."""

    dp: int = 2
    pp: int = 3
    slots: int = 4
    steps: int = 6
    chunks: int = 1  # parts of a stage
    overlapped: bool = False  # gradients are reduced by part, beside the backward passes
    slow_part: dict[int, float] = field(default_factory=dict)  # part of the model
    slow_stage: dict[int, float] = field(default_factory=dict)
    slow_rank: dict[int, float] = field(default_factory=dict)
    # (step + replica) % 3, slot → times as much work
    load: dict[tuple[int, int], float] = field(default_factory=dict)
    # by rank, before its first forward of a step
    launch_s: dict[int, float] = field(default_factory=dict)
    # by rank, what its clock shows more than the others'
    ahead_s: dict[int, float] = field(default_factory=dict)

    def pass_s(
        self, kind: str, stage: int, chunk: int, replica: int, step: int, slot: int
    ) -> float:
        """Seconds of a pass."""
        took = (
            (FORWARD_S if kind == "forward" else BACKWARD_S)
            / self.chunks
            * self.slow_stage.get(stage, 1.0)
        )
        took *= self.slow_part.get(chunk * self.pp + stage, 1.0) * self.slow_rank.get(
            stage * self.dp + replica, 1.0
        )
        return took * self.load.get(((step + replica) % 3, slot), 1.0)


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
        if job.chunks > 1:
            ends, passes = _interleaved(job, replica, step)
            found += passes
            last_done |= {(replica, stage): end for stage, end in ends.items()}
            continue
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
                        # the receiver may ask long before, and the sender waits for it: both end
                        # together
                        begun = max(asked, sent)
                        found.append(
                            _row(
                                job,
                                replica,
                                stage,
                                step,
                                f"{kind}-recv",
                                slot,
                                asked,
                                begun + TRANSFER_S,
                            )
                        )
                        found.append(
                            _row(
                                job,
                                replica,
                                near,
                                step,
                                f"{kind}-send",
                                slot,
                                sent,
                                begun + TRANSFER_S,
                            )
                        )
                        asked = begun + TRANSFER_S
                    took = job.pass_s(kind, stage, 0, replica, step, slot)
                    found.append(
                        _row(
                            job, replica, stage, step, f"{kind}-compute", slot, asked, asked + took
                        )
                    )
                    free[stage] = done[kind, slot, stage] = asked + took
                    orders[stage].pop(0)
        last_done |= {(replica, stage): free[stage] for stage in range(job.pp)}
    if job.overlapped:
        found += _reduced(
            job, step, [row for row in found if row["optype"] == "backward-compute"], last_done
        )
    for kind in CLOSING:
        if job.overlapped:
            kind = kind.replace("grads-reduce-scatter", "separate-grads-all-reduce")
        begun = dict(last_done)
        for replica, stage in itertools.product(range(job.dp), range(job.pp)):
            if kind.startswith("embedding") and stage not in (0, job.pp - 1):
                continue
            over = GROUPED.get(kind)
            members = [
                at
                for (r, s), at in begun.items()
                if (over == "all")
                or (over == "replicas" and s == stage)
                or (over == "ends" and r == replica and s in (0, job.pp - 1))
                or (r, s) == (replica, stage)
            ]
            end = max(members) + UPDATE_S
            found.append(_row(job, replica, stage, step, kind, 0, begun[replica, stage], end))
            last_done[replica, stage] = end
    for row in found:
        row["start_ts"] += job.ahead_s.get(row["rank"], 0.0)
    return found


def _interleaved(
    job: Job, replica: int, step: int
) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """When each stage is done, and the rows of a replica's passes and transfers."""
    found, parts = list[dict[str, Any]](), job.pp * job.chunks
    # when, and its ordinal of its kind and stage
    done: dict[tuple[str, int, int], tuple[float, int]] = {}
    queue: dict[tuple[str, int], float] = {}  # until when transfers of a kind and stage go
    launch = {stage: job.launch_s.get(stage * job.dp + replica, 0.0) for stage in range(job.pp)}
    gathered = {chunk: (chunk + 1) * TRANSFER_S for chunk in range(job.chunks)}
    for stage, chunk in itertools.product(range(job.pp), range(job.chunks)):
        found.append(
            _row(
                job,
                replica,
                stage,
                step,
                "params-all-gather",
                chunk,
                gathered[chunk] - TRANSFER_S,
                gathered[chunk],
                chunk,
            )
        )
    ends: dict[int, list[tuple[str, float]]] = {stage: [] for stage in range(job.pp)}
    orders = {stage: _interleaved_order(job, stage) for stage in range(job.pp)}
    while any(orders.values()):
        for stage in range(job.pp):
            while orders[stage]:
                kind, slot, chunk = orders[stage][0]
                depth, ahead = chunk * job.pp + stage, 1 if kind == "forward" else -1
                # it receives when the one before is done
                own = [end for other, end in ends[stage] if other == kind]
                asked = (
                    own[-1] if own else launch[stage] if kind == "forward" else ends[stage][-2][1]
                )
                asked = max(asked, queue.get((f"{kind}-recv", stage), 0.0))
                number, end = len(own), asked
                if 0 <= depth - ahead < parts:
                    if (kind, slot, depth - ahead) not in done:
                        break
                    near = (depth - ahead) % job.pp
                    sent, fed = done[kind, slot, depth - ahead]
                    sent = max(sent, queue.get((f"{kind}-send", near), 0.0))
                    end = max(asked, sent) + TRANSFER_S
                    found.append(_row(job, replica, near, step, f"{kind}-send", fed, sent, end))
                    queue[f"{kind}-send", near] = queue[f"{kind}-recv", stage] = end
                missing = kind == "forward" and stage == 0
                if not (missing and number == 0):
                    found.append(
                        _row(
                            job, replica, stage, step, f"{kind}-recv", number - missing, asked, end
                        )
                    )
                start = max(
                    [
                        end,
                        gathered[chunk] if kind == "forward" else 0.0,
                        *(end for _, end in ends[stage][-1:]),
                    ]
                )
                end = start + job.pass_s(kind, stage, chunk, replica, step, slot)
                found.append(
                    _row(
                        job,
                        replica,
                        stage,
                        step,
                        f"{kind}-compute",
                        number,
                        start,
                        end,
                        chunk,
                        slot,
                    )
                )
                ends[stage].append((kind, end))
                done[kind, slot, depth] = end, number
                if not 0 <= depth + ahead < parts:
                    found.append(_row(job, replica, stage, step, f"{kind}-send", number, end, end))
                orders[stage].pop(0)
    return {stage: passes[-1][1] for stage, passes in ends.items()}, found


def _interleaved_order(job: Job, stage: int) -> list[tuple[str, int, int]]:
    """Megatron's: microbatches in groups of as many as stages, each group through all parts; then
    one of each."""
    turns = [
        (group * job.pp + member, chunk)
        for group in range(job.slots // job.pp)
        for chunk in range(job.chunks)
        for member in range(job.pp)
    ]
    forward = [("forward", slot, chunk) for slot, chunk in turns]
    backward = [("backward", slot, job.chunks - 1 - chunk) for slot, chunk in turns]
    ahead = min(len(turns), 2 * (job.pp - stage - 1) + (job.chunks - 1) * job.pp)
    pairs = [one for both in zip(forward[ahead:], backward, strict=False) for one in both]
    return forward[:ahead] + pairs + backward[len(turns) - ahead :]


def _reduced(
    job: Job, step: int, backward: list[dict[str, Any]], last_done: dict[tuple[int, int], float]
) -> list[dict[str, Any]]:
    """Reductions of each part's gradients after its last backward; `last_done` is moved to the last
    one's end."""
    found = []
    for stage in range(job.pp):
        until = dict.fromkeys(range(job.dp), 0.0)
        for number, chunk in enumerate(reversed(range(job.chunks))):
            for replica in until:
                until[replica] = max(
                    [
                        until[replica],
                        *(
                            row["start_ts"] + row["duration"]
                            for row in backward
                            if (row["dp_rank"], row["stage"], row["mc"]) == (replica, stage, chunk)
                        ),
                    ]
                )
            end = max(until.values()) + UPDATE_S
            for replica in until:
                begun, until[replica] = until[replica], end
                found.append(
                    _row(
                        job, replica, stage, step, "grads-reduce-scatter", number, begun, end, chunk
                    )
                )
        for replica, end in until.items():
            last_done[replica, stage] = max(last_done[replica, stage], end)
    return found


def _one_f_one_b(slots: int, behind: int) -> list[tuple[str, int]]:
    ahead = min(slots, behind)
    order = [("forward", slot) for slot in range(ahead)]
    for slot in range(slots - ahead):
        order += [("forward", ahead + slot), ("backward", slot)]
    return order + [("backward", slot) for slot in range(slots - ahead, slots)]


def _row(
    job: Job,
    replica: int,
    stage: int,
    step: int,
    kind: str,
    seq: int,
    start: float,
    end: float,
    chunk: int | None = None,
    slot: int | None = None,
) -> dict[str, Any]:
    computes = kind.endswith("compute")
    chunk, slot = (
        0 if chunk is None and computes else -1 if chunk is None else chunk,
        seq if slot is None else slot,
    )
    return {
        "dp_rank": replica,
        "stage": stage,
        "rank": stage * job.dp + replica,
        "step": step,
        "optype": kind,
        "start_ts": start,
        "duration": end - start,
        "seq_id": seq,
        "mc": chunk,
        "mb_id": slot if computes else -1,
        "gmc": chunk * job.pp + stage if computes else -1,
    }
