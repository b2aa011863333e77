"""What each process of `disttrain profile` does: links and the optimizer, then its share of the
modules' layers.

There are as many processes as the run will have ranks on this machine, and all are busy until the
last one has its measurements, because on a CPU they share cores, caches and memory as the ranks
will. Modules go round the processes, so that different modules are measured beside each other,
again as in the run. A process has one module at one TP size in memory at a time.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.models.graph import layer_table
from disttrain_cli.profiling.compute import Slowdown
from disttrain_cli.profiling.kept import Record, Records, record_name
from disttrain_cli.profiling.links import measure_links
from disttrain_cli.profiling.optimizer import adamw_ns_per_parameter
from disttrain_cli.profiling.trial import Bench
from disttrain_cli.runtime.launching.devices import rank_device
from disttrain_cli.runtime.launching.process import rendezvous, set_cuda_environment, set_timeout
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
WARM_UP_DRAWS = 2
#: Draws that a process repeats while it waits for the others.
WAITING_DRAWS = 4
#: Seconds between two reports of what was measured.
REPORT_S = 1.0


@dataclass(frozen=True)
class Variant:
    """A module at one TP size, its weights trained or frozen, and which draws it is measured on."""

    module: str
    tp: int
    frozen: bool
    draws: list[int]
    memory_draws: list[int]  # those of which kept activations are counted, too

    def share(self, first: int, step: int) -> Variant:
        """Every `step`-th draw from `first` on."""
        share = self.draws[first::step]
        return Variant(
            self.module,
            self.tp,
            self.frozen,
            share,
            [draw for draw in self.memory_draws if draw in share],
        )


@dataclass(frozen=True)
class Share:
    """What one process measures of one module: every `step`-th draw from `first` on."""

    module: str
    first: int
    step: int


def shares(modules: list[str], rank: int, processes: int) -> list[Share]:
    """The shares of a process; together the processes measure every draw of every module once."""
    turns = range(max(len(modules), processes))
    takers = Counter(turn % len(modules) for turn in turns)
    return [
        Share(modules[turn % len(modules)], turn // len(modules), takers[turn % len(modules)])
        for turn in turns
        if turn % processes == rank
    ]


def before_fork(payload: dict[str, Any]) -> None:
    """Import the model's classes once for all processes."""
    layer_table(read_run(*payload["run"]))


def main(payload: dict[str, Any]) -> None:
    """Measure and write `payload["folder"]/RANK.json`: links, optimizer and records, these every
    second.

    payload: run (path of the run file), device ("cpu" or "cuda"), parameters (of the whole model),
    draws (module → arguments of `probe_batch`), variants (fields of `Variant`), kept (names of
    records that an interrupted profile left), passes (over the draws, at most), budget_s (for the
    passes after the first), timeout_s (of the groups), folder.
    """
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if payload["device"] == "cuda":
        print(set_cuda_environment(), flush=True)
    device = rank_device(payload["device"])
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = rendezvous(RENDEZVOUS_TIMEOUT)
    set_timeout(timedelta(seconds=float(payload["timeout_s"])))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=processes
    )
    result: dict[str, Any] = {"links": measure_links(device).model_dump()}
    result["optimizer_ns"] = adamw_ns_per_parameter(int(payload["parameters"]) // processes, device)
    session = Session(payload, rank, result)
    drawn = shares(list(payload["draws"]), rank, processes)
    groups = [group for share in drawn for group in _groups(payload, share)]
    clock = Slowdown()
    for group in groups:
        session.measure(group, device, float(payload["budget_s"]) / len(groups))
    result["slowdown"] = clock.read()
    session.report(now=True)
    done = store.add("measured", 1)
    while done < processes:
        session.wait_busily()
        done = store.add("measured", 0)
    dist.barrier()
    dist.destroy_process_group()


def _groups(payload: dict[str, Any], share: Share) -> Iterator[list[Variant]]:
    """A process's part of a module's variants, those of one TP size together."""
    variants = [
        Variant(**fields) for fields in payload["variants"] if fields["module"] == share.module
    ]
    for _, group in groupby(variants, key=lambda variant: variant.tp):
        yield [variant.share(share.first, share.step) for variant in group]


class Session:
    """The measurements of one process, reported as they are made."""

    def __init__(self, payload: dict[str, Any], rank: int, result: dict[str, Any]) -> None:
        self._payload, self._result, self._file = (
            payload,
            result,
            Path(payload["folder"]) / f"{rank}.json",
        )
        self._run = read_run(*payload["run"])
        self._records: Records = {}
        self._reported_s = 0.0
        self._bench: Bench | None = None
        self._busy: list[tuple[dict[str, Any], bool]] = []

    def measure(self, variants: Sequence[Variant], device: torch.device, budget_s: float) -> None:
        """Measure all draws of a module at one TP size once, and again in passes while the time
        lasts.

        Draws that an interrupted profile has measured are not measured again.
        """
        module, kept = variants[0].module, set(self._payload["kept"])
        work = [
            (variant, draw)
            for variant in variants
            for draw in variant.draws
            if record_name(module, variant.tp, variant.frozen, draw) not in kept
        ]
        if not work and self._bench is not None:
            return
        self._bench = None  # gives its memory back before the next one takes some
        self._bench = Bench(self._run, module, variants[0].tp, device)
        draws = self._payload["draws"][module]
        largest = sorted({draw for _, draw in work}, key=lambda draw: _size(draws[draw]))[
            -WARM_UP_DRAWS:
        ]
        self._busy = [(draws[draw], False) for draw in largest or variants[0].draws[:WAITING_DRAWS]]
        self.wait_busily()
        deadline = time.monotonic() + budget_s
        for number in range(int(self._payload["passes"]) * len(work)):
            if number >= len(work) and time.monotonic() > deadline:
                break
            variant, draw = work[number % len(work)]
            self._measure(variant, draw, draws[draw])
        self._busy = [
            (draws[draw], variant.frozen) for variant, draw in work[:WAITING_DRAWS]
        ] or self._busy

    def _measure(self, variant: Variant, draw: int, sizes: dict[str, Any]) -> None:
        assert self._bench is not None
        name = record_name(variant.module, variant.tp, variant.frozen, draw)
        times = self._bench.times(sizes, variant.frozen)
        if times is None:
            return
        if name not in self._records:
            kept = (
                self._bench.kept_bytes(sizes, variant.frozen)
                if draw in variant.memory_draws
                else None
            )
            self._records[name] = Record(times={kind: [] for kind in times}, kept_bytes=kept or {})
        for kind, pair in times.items():
            self._records[name]["times"][kind].append(list(pair))
        self.report()

    def report(self, now: bool = False) -> None:
        """Write what was measured so far, about once a second."""
        if now or time.monotonic() - self._reported_s > REPORT_S:
            write_whole(self._file, json.dumps(self._result | {"records": self._records}))
            self._reported_s = time.monotonic()

    def wait_busily(self) -> None:
        """Keep this core as busy as before."""
        assert self._bench is not None
        for sizes, frozen in self._busy:
            self._bench.times(sizes, frozen)


def _size(sizes: dict[str, Any]) -> int:
    """Something that grows with the work of a draw."""
    if "documents" in sizes:
        return sum(map(sum, sizes["documents"]))
    return sum(rows * columns for grids in sizes.values() for rows, columns in grids)
