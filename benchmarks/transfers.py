"""Exposed transfer time: what a stage waits for the rows of the stage before it, as a share of the
step.

Two units with TP 2 on four processes of this machine, over gloo. Devices are emulated by waits, so
that two cores serve; the rows are real. Each rank of a TP group moves its own part of the rows, or
all of them as a stage that knows nothing of TP would; receives are posted while the slot before is
computed, or only when the rows are needed. All four ways take turns in one run, and each is set
against the step without any waiting.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import Tables, main

TP, WIDTH, LENGTH = 2, 1024, 1024
COMPUTE_S = 0.025  # of a slot, forward, on either stage
WAYS = {
    "whole, when needed": (False, False),
    "whole, posted ahead": (False, True),
    "split, when needed": (True, False),
    "split, posted ahead": (True, True),
}


def ranks(payload: dict[str, Any]) -> None:
    """Run every way in turns; the second unit's first rank writes the seconds of each (steps,
    waits)."""
    import torch.distributed as dist

    from disttrain_cli.runtime.launching.process import joined

    with joined("cpu", 120.0):
        rank = int(os.environ["RANK"])
        groups = [dist.new_group(list(range(first, first + TP))) for first in (0, TP)]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
        for counted in [False] + [True] * payload["rounds"]:
            for name, (split, ahead) in WAYS.items():
                times = _step(
                    rank, groups[rank // TP], payload["slots"], payload["sequences"], split, ahead
                )
                if counted:
                    found[name].append(times)
        if rank == TP:
            Path(payload["out"]).write_text(json.dumps(found))


def _step(
    rank: int, ranks_of_group: Any, slots: int, sequences: int, split: bool, ahead: bool
) -> tuple[float, float]:
    """One step of a rank: (its seconds, those that it waited for rows)."""
    import torch
    import torch.distributed as dist

    from disttrain_cli.models.layer import TensorSpec
    from disttrain_cli.models.parallel import Group
    from disttrain_cli.runtime.units.broker import Broker
    from disttrain_cli.spec.plan import Layout, UnitPlan
    from disttrain_cli.spec.stage_graph import RankCoords, stage_graph

    tp = TP if split else 1
    units = [
        UnitPlan(name=name, modules=[name], tp=tp, gpus=tp, layers_per_stage=[1])
        for name in ("before", "after")
    ]
    layout = Layout(
        global_batch_size=1, microbatch_size=1, microbatches=1, gpus_used=2 * tp, units=units
    )
    stages = stage_graph(layout, "after").stages
    if not split:
        stages = tuple(replace(stage, ranks=(stage.number * TP + rank % TP,)) for stage in stages)
    side, tp_rank = rank // TP, rank % TP if split else 0
    spec = TensorSpec("hidden", "sequence", "tokens", (WIDTH,), split=True)
    broker = Broker(
        RankCoords(rank, stages[side], 0, tp_rank),
        stages[1 - side],
        [spec] if side == 0 else [],
        [spec] if side == 1 else [],
        torch.float32,
        torch.device("cpu"),
        Group(ranks_of_group, TP, rank % TP) if split else None,
    )
    order = [_slot(sequences) for _ in range(slots)]
    rows = torch.zeros(sequences * LENGTH // tp, WIDTH)
    dist.barrier()
    begun, waited = time.perf_counter(), 0.0
    if ahead:
        broker.expect(order)
    for slot in order:
        if side == 1:
            start = time.perf_counter()
            broker.receive(slot)
            waited += time.perf_counter() - start
        time.sleep(COMPUTE_S)
        if side == 0:
            broker.send(slot, {"hidden": rows})
    seconds = time.perf_counter() - begun
    broker.drain()
    return seconds, waited


def _slot(sequences: int) -> Any:
    import numpy as np

    from disttrain_cli.data.slots import Slot, replica_items, slot_items
    from disttrain_cli.spec.index import KINDS
    from disttrain_cli.spec.inputs import ModelInputs

    all_of_them = np.arange(sequences)
    inputs = ModelInputs(llm="after", vocabulary=8, sequence_length=LENGTH)
    items = [replica_items(sequence=all_of_them)]
    return Slot(
        inputs=inputs,
        sequences=all_of_them,
        sequence_tokens=all_of_them,
        sequence_length_sq=all_of_them,
        items={item: slot_items() for item in KINDS},
        replicas={"before": items, "after": items},
    )


def measure(small: bool) -> Tables:
    """Steps and waits of the second unit, for microbatches of different sizes."""
    from disttrain_cli.runtime.launching.launch import launch

    rows = []
    for sequences in [1] if small else [1, 2, 4]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "times.json")
            launch(
                2 * TP,
                "benchmarks.transfers:ranks",
                {
                    "rounds": 1 if small else 9,
                    "slots": 4 if small else 16,
                    "sequences": sequences,
                    "out": str(out),
                },
                Path(folder, "logs"),
                timeout_s=600,
            )
            found = json.loads(out.read_text())
        slots = 4 if small else 16
        for name, times in found.items():
            first = COMPUTE_S  # the first slot of the stage before, which nothing can hide
            exposed = [(waited - first) / seconds for seconds, waited in times]
            rows.append(
                {
                    "MiB of a slot": sequences * LENGTH * WIDTH * 4 / 2**20,
                    "rows": name.split(",")[0],
                    "received": name.split(", ")[1],
                    "step ms": 1e3 * median(s for s, _ in times),
                    "without waits ms": 1e3 * COMPUTE_S * (slots + 1),
                    "exposed % of step": 100 * median(exposed),
                }
            )
    return {"Waiting for the rows of the stage before, TP 2 to TP 2": rows}


if __name__ == "__main__":
    main(__doc__, measure)
