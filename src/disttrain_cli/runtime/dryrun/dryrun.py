"""One step of every distinct stage of a plan on a fake device, checked against the plan."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from disttrain_cli.costs.activations import at_worst, kept_share
from disttrain_cli.costs.hardware import CAPABILITY, lookup
from disttrain_cli.costs.memory import GIB, layout_memory
from disttrain_cli.errors import RankFailedError, SpecError
from disttrain_cli.models.graph import layer_table
from disttrain_cli.models.tying import tied_layers
from disttrain_cli.runtime.dryrun.shim import environment
from disttrain_cli.runtime.dryrun.stages import (
    PROGRESS,
    OrderSeen,
    StageSeen,
    distinct,
    slots_seen,
)
from disttrain_cli.runtime.dryrun.worst import at_work, worst_slot
from disttrain_cli.runtime.launching.launch import launch
from disttrain_cli.runtime.launching.payload import payload_of
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.stage_graph import Stage, StageGraph, stage_graph

WORKER = "disttrain_cli.runtime.dryrun.worker:main"
WAYS_BACK = {"send_activation": "receive_gradient", "receive_activation": "send_gradient"}
#: Source of waits that are meant: an EP group's numbers of rows, read once per mixture and pass.
MEANT = "models/host.py"
CRUMBS_GIB = 2**-10  # memory that a step may leave allocated: losses and other scalars


class StageReport(BaseModel):
    """A distinct stage of the plan: its observed step and the expected memory."""

    unit: str
    unit_stages: list[int]  # indices in the unit of the identical stages
    # first and last layer's index in the model, of each stage on the rank
    layers: list[tuple[int, int]]
    seen: StageSeen
    priced_kept_gib: float  # saved activations of the same work
    priced_gib: float  # peak of the same work, without `unseen_gib`
    unseen_gib: float  # not seen on a fake device: fragmentation, CUDA context, communicators
    planned_gib: float  # the plan's peak with `unseen_gib`; its worst case may split items
    limit_gib: float

    @property
    def needed_gib(self) -> float:
        """Device memory that the stage needs, in GiB."""
        return max(self.seen.peak_gib, self.seen.built_gib) + self.unseen_gib


class DryRun(BaseModel):
    """Output of `train --dry-run --device cuda --json`."""

    device: str
    capability: tuple[int, int]
    memory_gib: float
    ranks: int
    microbatches: int
    stages: list[StageReport]
    order: OrderSeen
    problems: list[str]  # reasons why training would fail or be slow; empty = it would run


def dry_run(run: Run, plan: Plan, profile: Profile, progress: Progress = silent) -> DryRun:
    """Run a step of every distinct stage of a plan on fake devices, one process per core at a time.

    The plan must have been checked against the run and profile (`planning.check`). Only logs are
    written.

    Raises:
        DisttrainError: this machine cannot emulate a CUDA device.
        SpecError: the run's folder of logs cannot be written.
        RankFailedError: a process ended without reporting a cause.
    """
    variables = environment() | {"DS_ACCELERATOR": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    table = layer_table(run)
    graph = stage_graph(plan.plan, profile.inputs.llm, tied_layers(table))
    groups = distinct(graph, table, plan.plan.microbatches)
    # longest first, for an even load of the cores
    groups.sort(
        key=lambda group: (
            sum(len(one.layers) for one in graph.together(group[0]))
            * slots_seen(group[0], plan.plan.microbatches)
        ),
        reverse=True,
    )
    memory_gib = run.file.cluster.memory_gib or profile.device.memory_gib
    capability = _capability(profile.device.name)
    at_once = min(len(groups) + 1, len(os.sched_getaffinity(0)))
    payload = payload_of(run, plan, profile) | {
        "stages": [[stage.number for stage in group] for group in groups],
        "name": profile.device.name,
        "memory_gib": memory_gib,
        "capability": list(capability),
        "at_once": at_once,
    }
    logs = run.dir.logs / "dry-run"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SpecError(
            f"Cannot write into {run.dir.logs}",
            str(error.strerror),
            "Make it a folder that you can write; then run the command again.",
        ) from None
    with tempfile.TemporaryDirectory(prefix="disttrain-dry-run-") as folder:
        shares = Path(folder, PROGRESS)
        np.zeros(len(groups) + 1).tofile(shares)

        def poll() -> None:
            done = float(np.fromfile(shares).sum())
            if done:
                what = "steps of distinct stages, and the order of all messages"
                progress(what, done, len(groups) + 1)
            else:  # no estimate from the imports' time, which does not predict that of the steps
                progress("importing the model's classes", 0, 0)

        try:
            launch(
                len(groups) + 1,
                WORKER,
                payload | {"folder": folder},
                logs,
                on_poll=poll,
                variables=variables,
            )
        except RankFailedError as error:
            error.why += f"\nranks of the dry run: {_who_is_who(groups)}"
            raise
        seen = [
            StageSeen.model_validate_json(Path(folder, f"stage-{number}.json").read_text())
            for number in range(1, len(groups) + 1)
        ]
        order = OrderSeen.model_validate_json(Path(folder, "order.json").read_text())
    seen.sort(key=lambda one: one.stages)
    stages = reports(profile, plan.plan, graph, seen, memory_gib)
    return DryRun(
        device=profile.device.name,
        capability=capability,
        memory_gib=memory_gib,
        ranks=graph.world_size,
        microbatches=plan.plan.microbatches,
        stages=stages,
        order=order,
        problems=[*(problem for stage in stages for problem in problems(stage)), *order.faults],
    )


def _who_is_who(groups: Sequence[Sequence[Stage]]) -> str:
    """Return text that maps the dry run's processes to stages."""
    named = [f"{group[0].unit.name} stage {group[0].index}" for group in groups]
    return ", ".join(
        f"{number} {what}" for number, what in enumerate(["the order of messages", *named])
    )


def _capability(device: str) -> tuple[int, int]:
    try:
        return lookup(device).capability
    except SpecError:
        return CAPABILITY


def reports(
    profile: Profile,
    layout: Layout,
    graph: StageGraph,
    seen: Sequence[StageSeen],
    memory_gib: float,
) -> list[StageReport]:
    """Return each distinct stage's observations, planned memory and price of the same work."""
    exact = at_work(profile, layout, worst_slot(profile, layout))
    of_plan, priced = (
        {(memory.unit, memory.stage): memory for memory in layout_memory(given, layout, memory_gib)}
        for given in (profile, exact)
    )
    rows = []
    for one in seen:
        stages = [graph.stages[number] for number in one.stages]
        own = graph.together(stages[0])
        unit, key = stages[0].unit, (stages[0].unit.name, stages[0].index)
        kept = at_worst(kept_share, exact, layout, unit)
        begins = list(accumulate(unit.layers_per_stage, initial=0))
        price = priced[key]
        unseen_gib = price.fragmentation_gib + price.reserve_gib
        rows.append(
            StageReport(
                unit=unit.name,
                unit_stages=[stage.index for stage in stages],
                layers=[(stage.layers.start, stage.layers.stop - 1) for stage in own],
                seen=one,
                priced_kept_gib=sum(
                    float(kept[begins[stage.index] : begins[stage.index + 1]].sum())
                    for stage in own
                )
                / GIB,
                priced_gib=price.peak_gib - unseen_gib,
                unseen_gib=unseen_gib,
                planned_gib=of_plan[key].peak_gib,
                limit_gib=memory_gib,
            )
        )
    return rows


def problems(stage: StageReport) -> list[str]:
    """Return the reasons why training would fail on a stage or be slow; empty if there are none."""
    where, seen = f"unit {stage.unit}, stage {stage.unit_stages[0]}", stage.seen
    if seen.failure is not None:
        return [f"{where}: {seen.failure.what} ({seen.failure.where})"]
    texts = [
        f"{where}: the host waits for the device in a slot, {wait.times} times in {seen.slots}"
        f" slots: {wait.instruction.replace('_', ' ')}, {wait.what} ({wait.where})"
        for wait in seen.waits
        if wait.instruction and not wait.where.startswith(MEANT)
    ]
    crossing = {(one.instruction, one.tensor): f"{one.shape} {one.dtype}" for one in seen.messages}
    for (instruction, tensor), given in crossing.items():
        way = WAYS_BACK.get(instruction)
        if way is not None and (back := crossing.get((way, tensor), given)) != given:
            texts.append(
                f"{where}: {tensor} crosses a cut as {given} ({instruction.replace('_', ' ')}), "
                f"and its gradient as {back}"
            )
    if seen.leaked_gib > CRUMBS_GIB:
        texts.append(
            f"{where}: {seen.leaked_gib:.3f} GiB more are held after a step than before it "
            f"({seen.slots} slots)"
        )
    if stage.needed_gib > stage.limit_gib:
        texts.append(f"{where}: {stage.needed_gib:.2f} GiB do not fit into {stage.limit_gib:g} GiB")
    return texts
