"""The policy `best`: what it costs, how level its replicas are, and how near its order of slots is
to the best of all.

Plans of the presets on 1,296 A800 for batches of 1,920 sequences of the distribution `laion-like`,
as in benchmarks/paper.py. CPU time of one core. "busiest rank" is the longest time that a rank
computes in a step over what no order can go below: the mean over replicas on the busiest stage. A
module's load is its patches or its images to generate; the lower bound is the mean over replicas,
of images to generate rounded up. "over the step" is the largest replica's load of all slots; "per
slot" the sum over slots of the largest ÷ that of the bounds.

Orders of up to 8 slots are compared with all of them, in pipelines of random skewed slots
(log-normal, sigma 0.7). Run from the repository with the `dev` extra installed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise, permutations
from statistics import mean
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks.common import Tables, main
from benchmarks.paper import GPUS, LLM_PP, megatron_lm, one_unit, ours, profiled, shapes
from disttrain_cli.data.ordering import apart, sequencing, shaping
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.best import Best
from disttrain_cli.data.ordering.intervals import interval_order
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.ordering.sequencing import search_order
from disttrain_cli.data.sizes import Sizes, sampled_batch, sizes_of_sample
from disttrain_cli.data.slots import Assignment
from disttrain_cli.planning.units import Cluster
from disttrain_cli.simulation.makespan import orders_s
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from tests.planning import synthetic

STEPS = 5
SLOTS, STAGES, INSTANCES = (4, 6, 8), (2, 4, 8), 10


@dataclass(frozen=True)
class Case:
    """A plan to order batches for."""

    preset: str
    plan: str
    profile: Profile
    layout: Layout
    cluster: Cluster


def cases(small: bool) -> Iterator[Case]:
    """The planner's units, the paper's Megatron-LM, and one unit where it fits."""
    for preset in ("mllm-9b", "mllm-72b", "mllm-15b")[: 1 if small else None]:
        run, profile = made_up() if small else profiled(preset)
        gpus = run.cluster.gpus if small else GPUS
        mine, _, cluster = ours(run, profile, gpus, "disaggregated")
        yield Case(preset, "units", profile, mine, cluster)
        for name, other in (
            ("Megatron-LM of the paper", megatron_lm(profile, cluster, LLM_PP[preset])),
            ("one unit", one_unit(profile, cluster)),
        ):
            if other is not None:
                yield Case(preset, name, profile, other[0], cluster)


def made_up() -> tuple[RunFile, Profile]:
    """The paper's 9B model with plausible costs, for 96 GPUs."""
    run = synthetic.run_file(batch=128, gpus=96, nodes=12, precision="bf16")
    return run, synthetic.paper_9b(run)


def batch_of(case: Case, number: int) -> Sizes:
    return sampled_batch(
        sizes_of_sample(case.profile.data.sample), case.layout.global_batch_size, number
    )


def cost_of(case: Case, steps: int) -> tuple[dict[str, Any], list[Assignment]]:
    """CPU time and evaluations of ordering, and the orders of some steps."""
    counted = [0]

    def counting(evaluate: Any) -> Any:
        def evaluated(*arguments: Any) -> Any:
            times_s = evaluate(*arguments)
            counted[0] += len(times_s)
            return times_s

        return evaluated

    with ExitStack() as stack:
        for module, name in (
            (shaping, "iterations_s"),
            (apart, "iterations_s"),
            (sequencing, "orders_s"),
        ):
            stack.enter_context(patch.object(module, name, counting(getattr(module, name))))
        best, orders, seconds = (
            Best(case.profile, case.layout, case.cluster.gpus_per_node, case.cluster.memory_gib),
            [],
            [],
        )
        for number in range(-1, steps):  # the first one counts what is found once for a run
            sizes, start = batch_of(case, max(0, number)), time.process_time()
            found = best.order(sizes)
            seconds.append(time.process_time() - start)
            if number < 0:
                counted[0] = 0
            else:
                orders.append(found)
    step_s = mean(
        simulate(best.pipeline(batch_of(case, number), one)).iteration_s
        for number, one in enumerate(orders)
    )
    counts, llm = count_costs(sizes, case.profile.inputs), case.profile.inputs.llm
    start = time.process_time()
    assign(counts, case.layout, llm, "paper")
    return {
        "model": case.preset,
        "plan": case.plan,
        "layout": shapes(case.layout),
        "slots": case.layout.microbatches,
        "paper, CPU ms": 1e3 * (time.process_time() - start),
        "best, CPU ms": 1e3 * mean(seconds[1:]),
        "once more for a run, CPU ms": 1e3 * max(0.0, seconds[0] - mean(seconds[1:])),
        "evaluations": counted[0] / steps,
        "step s": step_s,
        "CPU time over the step": mean(seconds[1:]) / step_s,
    }, orders


def ratios(case: Case, orders: list[Assignment]) -> dict[str, tuple[float, float]]:
    """By module whose load varies: largest load over the lower bound, over the step and per slot;
    mean over steps."""
    found: dict[str, list[tuple[float, float]]] = {}
    inputs, best = case.profile.inputs, Best(case.profile, case.layout, 8, case.cluster.memory_gib)
    for number, one in enumerate(orders):
        sizes = batch_of(case, number)
        costs = best.costs(sizes)
        for module, loads in replica_loads(sizes, inputs, case.layout, one).items():
            if not np.ptp(costs[module]):
                continue
            alike = inputs.target is not None and module == inputs.target.module
            amounts = loads[..., 0] if alike else loads[..., 1]  # [n, DP]
            bounds = [amounts.sum(axis=0).mean(), amounts.mean(axis=1)]
            step, slot = (np.ceil(bound) if alike else bound for bound in bounds)
            found.setdefault(module, []).append(
                (
                    float(amounts.sum(axis=0).max() / step),
                    float(amounts.max(axis=1).sum() / slot.sum()),
                )
            )
    return {
        module: (mean(step for step, _ in own), mean(slot for _, slot in own))
        for module, own in found.items()
    }


def by_policy(case: Case, orders: list[Assignment]) -> dict[str, list[Assignment]]:
    """Assignments of the steps by policy; `orders` are those of `best`."""
    inputs = case.profile.inputs
    return {
        name: [
            assign(count_costs(batch_of(case, number), inputs), case.layout, inputs.llm, name)
            for number in range(len(orders))
        ]
        for name in ("none", "paper")
    } | {"best": orders}


def busiest(case: Case, orders: list[Assignment]) -> dict[str, Any]:
    """The busiest rank's time over the busiest stage's mean, by policy."""
    best = Best(case.profile, case.layout, case.cluster.gpus_per_node, case.cluster.memory_gib)

    def ratio(number: int, order: Assignment) -> float:
        pipeline = best.pipeline(batch_of(case, number), order)
        loads_s = (pipeline.forward_s + pipeline.backward_s).sum(axis=0)  # [S, R]
        return float(loads_s.max() / (loads_s.sum(axis=1) / pipeline.replicas).max())

    return {"model": case.preset, "plan": case.plan, "layout": shapes(case.layout)} | {
        name: mean(ratio(*one) for one in enumerate(own))
        for name, own in by_policy(case, orders).items()
    }


def intra(case: Case, orders: list[Assignment]) -> list[dict[str, Any]]:
    """How level the replicas of every module are, by policy."""
    found = {name: ratios(case, own) for name, own in by_policy(case, orders).items()}
    return [
        {
            "model": case.preset,
            "plan": case.plan,
            "module": module,
            "replicas": case.layout.unit_of(module).dp,
            **{f"{name}, over the step": own[module][0] for name, own in found.items()},
            **{f"{name}, per slot": own[module][1] for name, own in found.items()},
        }
        for module in found["best"]
    ]


def inter(slots: int, stages: int, instances: int) -> dict[str, Any]:
    """Orders of slots over the best of all of them."""
    searched, published, packed = [], [], []
    every = np.array(list(permutations(range(slots))))
    for seed in range(instances):
        times_s = np.random.default_rng(seed).lognormal(0, 0.7, size=(slots, stages, 1))
        pipeline = Pipeline(
            np.ones(stages, np.int64),
            np.arange(stages) == 0,
            tuple(pairwise(range(stages))),
            times_s,
            2 * times_s,
            np.zeros(stages - 1),
            np.zeros(stages),
        )
        best_s = float(orders_s(pipeline, every).min())
        paper = interval_order(np.rint(3e6 * times_s[..., 0]).astype(np.int64))
        start_s = orders_s(pipeline, np.stack([np.arange(slots), paper]))
        searched.append(search_order(pipeline, [np.arange(slots), paper])[1] / best_s)
        packed.append(float(start_s[0]) / best_s)
        published.append(float(start_s[1]) / best_s)
    return {
        "slots": slots,
        "stages": stages,
        "pipelines": instances,
        "best, mean": mean(searched),
        "best, worst": max(searched),
        "paper, mean": mean(published),
        "paper, worst": max(published),
        "none, mean": mean(packed),
        "none, worst": max(packed),
    }


def measure(small: bool = False) -> Tables:
    """Four tables."""
    cost_rows, busiest_rows, level_rows = [], [], []
    for case in cases(small):
        row, orders = cost_of(case, 1 if small else STEPS)
        cost_rows.append(row)
        busiest_rows.append(busiest(case, orders))
        level_rows += intra(case, orders)
    return {
        "Ordering a batch": cost_rows,
        "Busiest rank over the lower bound": busiest_rows,
        "Largest load over the lower bound": level_rows,
        "Simulated step over the best of all orders": [
            inter(slots, stages, 2 if small else INSTANCES)
            for slots in SLOTS[: 1 if small else None]
            for stages in STAGES[: 1 if small else None]
        ],
    }


if __name__ == "__main__":
    main(__doc__, measure)
