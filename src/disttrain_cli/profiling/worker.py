"""Program of each process of `disttrain profile`: links, optimizer, then its share of the layers.

There are as many processes as the run will have ranks on this machine, and all are busy until the
last one has its measurements, because on a CPU they share cores, caches and memory as the ranks
will. Modules are dealt to the processes in turn, so that different modules are measured
concurrently, again as in the run. A process has one module at one TP size in memory at a time.

It measures in two rounds: first a few sizes that span the data's for each of its groups, then,
while the budget lasts (`budget.py`), more sizes of everything, and at last, on a CPU, repeats of
measured sizes, those whose times differ most first.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from disttrain_cli.models import flash4
from disttrain_cli.models.graph import layer_table
from disttrain_cli.profiling.budget import Budget, Rate, cpu_budget_s
from disttrain_cli.profiling.compute import Slowdown, Stopwatch
from disttrain_cli.profiling.links import measure_links
from disttrain_cli.profiling.optimizer import step_ns_per_parameter
from disttrain_cli.profiling.records import Record, Records, record_name
from disttrain_cli.profiling.sustained import load_of
from disttrain_cli.profiling.trial import Bench
from disttrain_cli.runtime.launching.devices import rank_device
from disttrain_cli.runtime.launching.process import rendezvous, set_cuda_environment, set_timeout
from disttrain_cli.runtime.watching.sensors import sensor_of
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole

RENDEZVOUS_TIMEOUT = timedelta(minutes=5)
#: Draws of a variant in the first round: fits of 8 that span the sizes were as good on the other
#: draws as fits of 18 at random (tiny preset; docs/decisions/10-profiling.md).
FIRST = 8
#: Most measurements of one draw on a CPU; on a GPU each is a median of many passes.
TIMES = 3
#: A draw of more than this many times the FLOPs of the largest before it is run once untimed, so
#: that memory is allocated and kernels are chosen.
GROWTH = 2.5
#: Seconds between two reports of the measurements.
REPORT_S = 1.0


@dataclass(frozen=True)
class Variant:
    """A module at one TP size, trained or frozen, with the draws to measure it on."""

    module: str
    tp: int
    frozen: bool
    draws: list[int]  # in the order of measuring
    needed: list[int]  # draws that are measured regardless of the budget
    memory_draws: list[int]  # draws whose saved activations are counted, too


class Measurement(NamedTuple):
    """One draw of a variant."""

    variant: Variant
    draw: int

    @property
    def name(self) -> str:
        """Name of its record."""
        return record_name(self.variant.module, self.variant.frozen, self.draw, tp=self.variant.tp)


@dataclass(frozen=True)
class Share:
    """Share of one module that a process measures: every `step`-th draw from `first` on."""

    module: str
    first: int
    step: int


def shares(modules: list[str], rank: int, processes: int) -> list[Share]:
    """Return the shares of a process.

    Together the processes measure every draw of every module once.
    """
    turns = range(max(len(modules), processes))
    takers = Counter(turn % len(modules) for turn in turns)
    return [
        Share(modules[turn % len(modules)], turn // len(modules), takers[turn % len(modules)])
        for turn in turns
        if turn % processes == rank
    ]


@dataclass(frozen=True)
class Group:
    """Measurements by one process of a module at one TP size, in order."""

    module: str
    tp: int
    first: list[Measurement]  # the first round
    rest: list[Measurement]
    rate: Rate = field(default_factory=Rate)


def groups(variants: Iterable[Variant], drawn: Iterable[Share]) -> Iterator[Group]:
    """Yield the groups of a process's shares, TP 1 of all modules first.

    Within a group, the first draws of all variants come first, then their second draws, and so on.
    """
    of = {
        (tp, share): list(group)
        for share in drawn
        for tp, group in groupby(
            (variant for variant in variants if variant.module == share.module),
            key=lambda variant: variant.tp,
        )
    }
    for (tp, share), members in sorted(of.items(), key=lambda item: item[0][0]):
        rounds: tuple[list[Measurement], list[Measurement]] = [], []
        longest = max(len(variant.draws) for variant in members)
        for number in range(share.first, longest, share.step):
            rounds[number >= FIRST].extend(
                Measurement(variant, variant.draws[number])
                for variant in members
                if number < len(variant.draws)
            )
        yield Group(share.module, tp, *rounds)


class Rates:
    """Times and FLOPs of every module in the first round, shared between the processes.

    They are exchanged through the store of the processes' rendezvous.
    """

    def __init__(self, store: dist.Store, rank: int, processes: int) -> None:
        self._store, self._rank = store, rank
        self._keys = [f"rates/{number}" for number in range(processes)]

    def publish(self, sums: dict[str, tuple[float, float]]) -> None:
        """Publish this process's sums: by module, seconds and FLOPs."""
        self._store.set(self._keys[self._rank], json.dumps(sums))

    def training_s(self, flops: Mapping[str, float]) -> float | None:
        """Return the CPU time of a training of these FLOPs.

        None until all processes have published, and if no draw of a module was measured: a resumed
        profile may know all of the first round.
        """
        if not self._store.check(self._keys):
            return None
        published = [json.loads(self._store.get(key)) for key in self._keys]
        seconds = 0.0
        for module, count in flops.items():
            took_s, done = np.sum([one.get(module, (0.0, 0.0)) for one in published], axis=0)
            if count and not done:
                return None
            seconds += count * took_s / done if done else 0.0
        return seconds


def before_fork(payload: dict[str, Any]) -> None:
    """Import the model's classes once for all processes."""
    layer_table(read_run(*payload["run"]))
    if payload["device"] == "cpu":
        payload["before_s"] += time.process_time()


def main(payload: dict[str, Any]) -> None:
    """Measure and write `payload["folder"]/RANK.json`: links, optimizer and records.

    Records are rewritten every second.

    payload: run (path of the run file), device ("cpu" or "cuda"), parameters (of the whole model),
    draws (module → arguments of `probe_batch`), flops (module → FLOPs of each draw), training_flops
    (module → FLOPs of the whole training), variants (fields of `Variant`), kept (names of records
    of an interrupted profile), budget_s, before_s and started_s (`Budget.of`), timeout_s (of the
    groups), folder.
    """
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    run = read_run(*payload["run"])
    if payload["device"] == "cuda":
        print(set_cuda_environment(run.file.cluster.ranks_per_gpu), flush=True)
    device = rank_device(payload["device"])
    if device.type == "cuda":
        flash4.use(flash4.version(run.file.cluster.flash_attention, device))
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    store = rendezvous(RENDEZVOUS_TIMEOUT)
    set_timeout(timedelta(seconds=float(payload["timeout_s"])))
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=processes
    )
    result: dict[str, Any] = {"links": measure_links(device).model_dump()}
    result["optimizer_ns"] = step_ns_per_parameter(
        int(payload["parameters"]) // processes, run.file.train.precision, device
    )
    stopwatch = Stopwatch(device, sensor_of(device))
    budget = Budget.of(payload, processes)
    result["started_s"] = budget.spent_s
    session = Session(
        payload,
        Path(payload["folder"]) / f"{rank}.json",
        result,
        budget,
        lambda module, tp: Bench(run, module, device, stopwatch, tp=tp),
        Rates(store, rank, processes) if device.type == "cpu" else None,
        TIMES if device.type == "cpu" else 1,
    )
    variants = [Variant(**fields) for fields in payload["variants"]]
    mine = list(groups(variants, shares(list(payload["draws"]), rank, processes)))
    clock = Slowdown()
    session.measure(mine)
    result["slowdown"] = clock.read()
    result["load"] = load_of(stopwatch.readings)
    session.report(now=True)
    done = store.add("measured", 1)
    while done < processes:
        session.wait_busily(mine[0])
        done = store.add("measured", 0)
    dist.barrier()
    dist.destroy_process_group()


class Session:
    """Measurements of one process, reported while they are made."""

    def __init__(
        self,
        payload: Mapping[str, Any],
        file: Path,
        result: dict[str, Any],
        budget: Budget,
        bench: Callable[[str, int], Bench],
        rates: Rates | None = None,
        times: int = TIMES,
    ) -> None:
        self._payload, self._file, self._result = payload, file, result
        self._budget, self._make, self._rates, self._most = budget, bench, rates, times
        self.records: Records = {}
        self._reported_s = 0.0
        # records of an interrupted profile are not measured again
        self._times = Counter(dict.fromkeys(payload["kept"], times))
        self._trained: dict[str, tuple[float, float]] = {}
        self._bench: Bench | None = None
        self._bench_of: tuple[str, int] | None = None
        self._warm_flops = 0.0  # of the largest draw that the bench has run untimed

    def measure(self, groups: Sequence[Group]) -> None:
        """Measure the first round of all groups, then the rest while the budget lasts.

        In the first round, TP sizes above 1 are measured only while the budget lasts. The rest is
        visited twice, because some groups do not use up their share.
        """
        for number, group in enumerate(groups):
            if group.tp == 1 or self._budget.left_s > 0.0:
                self._visit(group, len(groups) - number, first=True)
        if self._rates is not None:
            self._rates.publish(self._trained)
        for _ in range(2):
            for number, group in enumerate(groups):
                self._visit(group, len(groups) - number, first=False)

    def _visit(self, group: Group, groups_left: int, first: bool) -> None:
        """Measure all that fits into a group's share of the remaining time."""
        if not group.rate.flops:
            self._estimate(group)
        reserved_s = self._budget.left_s * (1.0 - 1.0 / groups_left)
        while (chosen := self._next(group, reserved_s, first)) is not None:
            self._measure(group, chosen, reserved_s)
            if not first and self._rates is not None:
                training_s = self._rates.training_s(self._payload["training_flops"])
                if training_s is not None:
                    self._budget.limit_s, self._rates = cpu_budget_s(training_s), None

    def _estimate(self, group: Group) -> None:
        """Time the smallest draw of a group, so that the first one that counts is not its largest.

        A process measures every n-th draw, which may begin with any.
        """
        begins = next(iter([*group.first, *group.rest]), None)
        if begins is None or begins.draw in begins.variant.needed:
            return
        variant = begins.variant
        smallest = Measurement(variant, variant.needed[0])
        sizes, flops, bench = self._sizes(smallest), self._flops(smallest), self._bench_for(group)
        bench.times(sizes, variant.frozen)
        self._warm_flops = max(self._warm_flops, flops)
        begin_s = self._budget.clock()
        if bench.times(sizes, variant.frozen) is not None:
            group.rate.see(flops, self._budget.clock() - begin_s)

    def _next(self, group: Group, reserved_s: float, first: bool) -> Measurement | None:
        """Return the first unmeasured draw that fits the time, or the most doubtful draw to repeat.

        Draws are repeated after the first round only. Needed draws are returned even if they do not
        fit.
        """

        def fits(one: Measurement) -> bool:
            expected_s = group.rate.expected_s(self._flops(one))
            return expected_s < self._budget.left_s - reserved_s

        for one in group.first if first else [*group.first, *group.rest]:
            needed = first and one.draw in one.variant.needed
            if not self._times[one.name] and (needed or fits(one)):
                return one
        again = [
            one
            for one in [*group.first, *group.rest]
            if not first and 0 < self._times[one.name] < self._most and fits(one)
        ]
        return max(again, key=lambda one: _doubt(self.records[one.name]), default=None)

    def _measure(self, group: Group, one: Measurement, reserved_s: float) -> None:
        sizes, frozen, flops = self._sizes(one), one.variant.frozen, self._flops(one)
        bench = self._bench_for(group)
        if not self._warm_flops or (
            flops > GROWTH * self._warm_flops
            and 2.0 * group.rate.expected_s(flops) < self._budget.left_s - reserved_s
        ):
            bench.times(sizes, frozen)
            self._warm_flops = flops
        self._times[one.name] += 1
        begin_s = self._budget.clock()
        times = bench.times(sizes, frozen)
        if times is None:  # it does not fit into the device's memory
            self._times[one.name] = self._most
            return
        group.rate.see(flops, self._budget.clock() - begin_s)
        if one.name not in self.records:
            counted = one.draw in one.variant.memory_draws
            kept = bench.kept_bytes(sizes, frozen) if counted else None
            self.records[one.name] = Record(
                times={kind: [] for kind in times}, kept_bytes=kept or {}
            )
        for kind, pair in times.items():
            self.records[one.name]["times"][kind].append(list(pair))
        if group.tp == 1 and not frozen:
            took_s, done = self._trained.get(group.module, (0.0, 0.0))
            layers_s = sum(bench.counts[kind] * sum(pair) for kind, pair in times.items()) * 1e-3
            self._trained[group.module] = took_s + layers_s, done + flops
        self.report()

    def _bench_for(self, group: Group) -> Bench:
        if self._bench is None or self._bench_of != (group.module, group.tp):
            self._bench = None  # frees its memory before the next one allocates
            self._bench, self._warm_flops = self._make(group.module, group.tp), 0.0
            self._bench_of = group.module, group.tp
        return self._bench

    def _sizes(self, one: Measurement) -> dict[str, Any]:
        return self._payload["draws"][one.variant.module][one.draw]

    def _flops(self, one: Measurement) -> float:
        return float(self._payload["flops"][one.variant.module][one.draw])

    def report(self, now: bool = False) -> None:
        """Write the measurements so far, at most about once a second unless `now`."""
        if now or time.monotonic() - self._reported_s > REPORT_S:
            spending = {"spent_s": self._budget.spent_s, "budget_s": self._budget.limit_s}
            report = self._result | spending | {"records": self.records}
            write_whole(self._file, json.dumps(report))
            self._reported_s = time.monotonic()

    def wait_busily(self, group: Group) -> None:
        """Keep this core as busy as before."""
        bench = self._bench or self._bench_for(group)
        assert self._bench_of is not None
        bench.times(self._payload["draws"][self._bench_of[0]][0], False)


def _doubt(record: Record) -> float:
    """Return the spread of a draw's times as max / min; infinite for a single time."""
    sums = [sum(map(sum, passes)) for passes in zip(*record["times"].values(), strict=True)]
    return max(sums) / min(sums) if len(sums) > 1 and min(sums) else math.inf
