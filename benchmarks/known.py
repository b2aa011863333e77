"""Jobs of which is known what slows them: drawn faults, simulated or rehearsed, and what mending
each would gain."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rehearsal import edit
from benchmarks.strategies import disttrain
from disttrain_cli.spec.plan import Layout, read_plan
from disttrain_cli.spec.profile import Profile, read_profile
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from tests.analysis import simulated

Row = dict[str, Any]
#: Kinds that confidence was fitted on, and those that it never saw before it was scored.
DEVELOPED = (
    "clean",
    "rank",
    "stage",
    "link",
    "data",
    "rank and stage",
    "two ranks",
    "small",
    "few steps",
    "missing",
)
HELD_OUT = ("unit", "host")
#: By name, nodes of 8 GPUs and sequences of a step: each gets the planner's own layout.
JOBS = {"16 GPUs": (2, 32), "24 GPUs": (3, 48), "32 GPUs": (4, 64), "24 GPUs, two batches": (3, 96)}
WORKERS, MOST_STEPS = 8, 9  # cores that prepare a replica's data; steps recorded


@dataclass(frozen=True)
class Truth:
    """A fault that was put in, where it must be found, and the share of a step that mending it
    gains."""

    cause: str
    place: Row
    share: float
    together: float = 0.0  # with all other faults mended too


@dataclass(frozen=True)
class Drawn:
    """A job with faults."""

    job: str
    steps: int
    noise: float
    seed: int
    faults: tuple[FaultSpec, ...] = ()
    held_up: tuple[simulated.HeldUp, ...] = ()
    lost_ranks: int = 0  # whose traces are missing
    causes: tuple[tuple[str, Row], ...] = field(default=())  # of the faults, then of who is held up
    workers: int = WORKERS


def prepared(folder: Path, job: str) -> tuple[Profile, Layout]:
    """Profile and plan of a job, made once in a folder of its own."""
    own = folder / job.replace(" ", "-")
    if not (own / "plan.yaml").is_file():
        nodes, batch = JOBS[job]
        own.mkdir(parents=True, exist_ok=True)
        disttrain(own, "init", ".", "--preset", "mllm-9b")
        edit(
            own,
            cluster={"nodes": nodes},
            train={"global_batch_size": batch},
            preprocess={"workers": WORKERS},
        )
        disttrain(own, "profile")
        disttrain(own, "plan", "--strategy", "disaggregated", "--top", 0, "--out", "plan.yaml")
    return read_profile(own / "runs" / "mllm-9b" / "profile.json"), read_plan(
        own / "plan.yaml"
    ).plan


def draw(kind: str, seed: int, layout: Layout, job: str) -> Drawn:
    """A job of a kind; the size of its faults is drawn, from nothing to large ones."""
    random_ = random.Random(f"{kind} {seed}")
    fault, causes, held_up = list[FaultSpec](), list[tuple[str, Row]](), list[simulated.HeldUp]()
    steps, noise = random_.randint(4, MOST_STEPS), random_.choice((0.0, 0.01, 0.02, 0.04))

    def put(slow: str, factor: float) -> None:
        unit = random_.choice([one for one in layout.units if _may(slow, one.dp, one.pp)])
        stage, replica = random_.randrange(unit.pp), random_.randrange(unit.dp)
        one = slow in ("rank", "host")
        if slow == "link":
            unit, stage = random_.choice(
                [(one, stage) for one in layout.units for stage in range(one.pp)][:-1]
            )
        if slow == "worker":
            unit = layout.units[0]
            stage = 0
        if slow == "unit":
            stage = 0
        fault.append(
            FaultSpec(
                slow="stage" if slow == "unit" else slow,
                unit=unit.name,
                stage=stage,  # type: ignore[arg-type]
                replica=replica if one else None,
                factor=factor,
            )
        )
        causes.append(
            {
                "rank": ("worker", {"unit": unit.name, "stage": stage, "replica": replica}),
                "stage": ("stage", {"unit": unit.name, "stage": stage}),
                "unit": ("unit", {"unit": unit.name}),
                "link": ("communication", {"unit": unit.name, "stage": stage}),
                "worker": ("data", {"unit": unit.name}),
            }[slow]
        )

    def factor(least: float, most: float) -> float:
        return float(np.exp(random_.uniform(np.log(least), np.log(most))))

    if kind in ("few steps", "missing"):
        steps = random_.randint(2, 3) if kind == "few steps" else steps
        then = random_.choice(("clean", "rank", "stage", "link"))
    else:
        then = kind
    if then in ("rank", "rank and stage", "two ranks"):
        put("rank", factor(1.03, 1.7))
    if then == "two ranks":
        put("rank", factor(1.03, 1.7))
    if then in ("stage", "rank and stage"):
        put("stage", factor(1.03, 1.5))
    if then == "small":
        put(random_.choice(("rank", "stage")), factor(1.005, 1.06))
    if then == "link":
        put("link", factor(3.0, 200.0))
    if then == "data":
        put("worker", factor(50.0, 600.0))
    if then == "unit":
        put("unit", factor(1.1, 3.5))
    if then == "host":
        depth, unit, stage = random_.choice(
            [
                (number, unit, stage)
                for number, (unit, stage) in enumerate(
                    (unit, stage) for unit in layout.units for stage in range(unit.pp)
                )
            ]
        )
        replica = random_.randrange(unit.dp)
        once = random_.random() < 0.3
        held_up.append(
            simulated.HeldUp(
                depth,
                replica,
                factor(0.5, 3.0) if once else factor(0.005, 0.2),
                random_.randint(1, steps - 1) if once else None,
                random_.randrange(layout.microbatches) if once else None,
            )
        )
        causes.append(("host", {"unit": unit.name, "stage": stage, "replica": replica}))
    return Drawn(
        job,
        steps,
        noise,
        seed,
        tuple(fault),
        tuple(held_up),
        random_.randint(1, 2) if kind == "missing" else 0,
        tuple(causes),
    )


def _may(slow: str, dp: int, pp: int) -> bool:
    """Whether a fault of a unit can be told from another: the only rank of a stage is the stage."""
    return {"rank": dp > 1, "host": True, "stage": pp > 1, "unit": pp == 1}.get(slow, True)


def simulate(drawn: Drawn, profile: Profile, layout: Layout, traces: Path) -> list[Truth]:
    """Write the job's traces, and what mending each fault gains, played without it."""
    shutil.rmtree(traces, ignore_errors=True)
    common: Row = {
        "noise": drawn.noise,
        "seed": drawn.seed,
        "workers": drawn.workers if any(one.slow == "worker" for one in drawn.faults) else 0,
    }

    def step_s(faults: Sequence[FaultSpec], held_up: Sequence[simulated.HeldUp]) -> float:
        played = simulated.play(
            profile, layout, drawn.steps, faults=faults, held_up=held_up, **common
        )
        return float(np.mean([timeline.iteration_s for *_, timeline in played][1:]))

    simulated.write(
        traces, profile, layout, drawn.steps, faults=drawn.faults, held_up=drawn.held_up, **common
    )
    lost = random.Random(drawn.seed)
    ranks = sorted(traces.glob("rank-*"))
    for folder in lost.sample(ranks, drawn.lost_ranks):
        shutil.rmtree(folder)
    with_all, none = step_s(drawn.faults, drawn.held_up), step_s((), ())
    found = []
    for number, (cause, place) in enumerate(drawn.causes):
        faults = [one for place_, one in enumerate(drawn.faults) if place_ != number]
        held_up = [
            one for place_, one in enumerate(drawn.held_up, len(drawn.faults)) if place_ != number
        ]
        found.append(
            Truth(cause, place, 1 - step_s(faults, held_up) / with_all, 1 - none / with_all)
        )
    return found


def rehearse(drawn: Drawn, folder: Path, traces: Path) -> list[Truth]:
    """Rehearse the job in its prepared folder, and what mending each fault would gain, simulated.

    Traces are kept there: of the same job they are not made again.
    """
    own = folder / drawn.job.replace(" ", "-")
    profile, layout = prepared(folder, drawn.job)
    truths, kept = simulate(drawn, profile, layout, traces), own / "kept" / traces.name
    shutil.rmtree(traces)
    if kept.is_dir():
        shutil.copytree(kept, traces)
        return truths
    edit(
        own,
        train={"seed": drawn.seed},
        rehearse={
            "faults": [one.model_dump(exclude_none=True) for one in drawn.faults],
            "noise": drawn.noise,
        },
    )
    disttrain(own, "train", "--rehearse", "--plan", "plan.yaml", "--steps", min(4, drawn.steps))
    shutil.copytree(own / "runs" / "mllm-9b" / "rehearsal" / "traces", kept)
    shutil.copytree(kept, traces)
    return truths
