"""Assignment of ranks to hosts, and a step of every stage on a fake device, without a start.

`dry_run` assigns the ranks and starts nothing; `dry_run_steps` runs one step per distinct stage.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from disttrain_cli.api.opening import check_choice, open_run
from disttrain_cli.api.planning import checked_plan
from disttrain_cli.calls import DEFAULT_RUN_FILE
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.runtime.dryrun.dryrun import DryRun
    from disttrain_cli.runtime.launching.emit.hosts import Node
    from disttrain_cli.spec.plan import Layout, Plan
    from disttrain_cli.spec.runfile import Run
    from disttrain_cli.spec.stage_graph import StageGraph

Kind = Literal["torchrun", "slurm", "jobset", "skypilot"]


@dataclass(frozen=True)
class StageRanks:
    """A stage of the pipeline, and the ranks that run it."""

    stage: int
    unit: str
    unit_stage: int
    tp: int
    cp: int
    ep: int
    dp: int
    ranks: list[int]
    hosts: list[str]
    layers: list[int]  # the first and the last
    peak_gib: float | None  # as predicted


@dataclass(frozen=True)
class HostRanks:
    """A host, and the ranks on it."""

    host: str
    ranks: list[int]


@dataclass(frozen=True)
class Ranks:
    """A plan's ranks, their groups and hosts, and the commands that start them."""

    plan: Layout
    ranks: int
    stages: list[StageRanks]
    groups: dict[str, list[list[int]]]  # of "tp", "cp", "ep" and "dp", by stage
    hosts: list[HostRanks]
    commands: list[str]  # shell commands


def dry_run(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    plan: Plan | Path | str | None = None,
    kind: Kind | None = None,
    command: str = "",
) -> Ranks:
    """Assign the ranks of a plan to hosts; nothing is started or written.

    Args:
        plan: the plan, or its file, instead of the run's own.
        kind: the kind of `emit` whose commands are returned.
        command: the command line that trains here, if it has more options than the run file.

    Raises:
        As `checked_plan`; SpecError also where the hosts are too few.
    """
    if kind is not None:
        check_choice("kind", kind, Kind)
    opened = open_run(run)
    chosen, profile = checked_plan(opened, plan)
    from disttrain_cli.runtime.launching.emit.hosts import hosts_of, place_ranks
    from disttrain_cli.spec.stage_graph import stage_graph

    graph = stage_graph(chosen.plan, profile.inputs.llm)
    nodes = place_ranks(graph, hosts_of(opened))
    sets = [word for setting in opened.settings for word in ("--set", setting)]
    start = command or shlex.join(["disttrain", "train", str(opened.path), *sets])
    return Ranks(
        plan=chosen.plan,
        ranks=graph.world_size,
        stages=_stages(chosen, graph, nodes),
        groups={what: _groups(graph, what) for what in ("tp", "cp", "ep", "dp")},
        hosts=[HostRanks(node.host, list(node.ranks)) for node in nodes],
        commands=_commands(opened, nodes, kind, start),
    )


def dry_run_steps(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    plan: Plan | Path | str | None = None,
    progress: Progress = silent,
) -> DryRun:
    """Run one step of every distinct stage of a plan on a fake CUDA device.

    Raises:
        As `checked_plan` and `runtime.dryrun.dryrun.dry_run`.
    """
    opened = open_run(run)
    chosen, profile = checked_plan(opened, plan)
    from disttrain_cli.runtime.dryrun.dryrun import dry_run as step

    return step(opened, chosen, profile, progress)


def _stages(chosen: Plan, graph: StageGraph, nodes: Sequence[Node]) -> list[StageRanks]:
    memory = {(stage.unit, stage.stage): stage for stage in chosen.predicted.memory}
    return [
        StageRanks(
            stage=stage.number,
            unit=stage.unit.name,
            unit_stage=stage.index,
            tp=stage.tp,
            cp=stage.cp,
            ep=stage.ep,
            dp=stage.unit.dp,
            ranks=list(stage.ranks),
            hosts=[
                node.host
                for node in nodes
                if stage.ranks[0] <= node.ranks[-1] and node.ranks[0] <= stage.ranks[-1]
            ],
            layers=[stage.layers.start, stage.layers.stop - 1],
            peak_gib=getattr(memory.get((stage.unit.name, stage.index)), "peak_gib", None),
        )
        for stage in graph.stages
    ]


def _groups(graph: StageGraph, what: str) -> list[list[int]]:
    """Return all groups of tensor, context, expert or data parallelism, by stage."""
    stages = graph.first_stages
    if what == "tp":
        return [group for stage in stages for group in stage.tp_groups()]
    if what == "cp":
        return [group for stage in stages if stage.cp > 1 for group in stage.cp_groups()]
    if what == "ep":
        return [group for stage in stages if stage.ep > 1 for group in stage.ep_groups()]
    return [stage.dp_group(tp_rank) for stage in stages for tp_rank in range(stage.tp)]


def _commands(run: Run, nodes: Sequence[Node], kind: Kind | None, train: str) -> list[str]:
    """Return the commands to type; scripts have the names that `--emit` would give them."""
    from disttrain_cli.runtime.launching.emit import jobset, skypilot, slurm, torchrun

    folder = default_folder(run)
    for name, emitter in (("slurm", slurm), ("jobset", jobset), ("skypilot", skypilot)):
        if kind == name:
            return emitter.commands(folder)
    if kind == "torchrun" or (len(nodes) > 1 and run.file.cluster.hostfile is not None):
        return torchrun.commands(nodes, folder)
    if len(nodes) == 1:
        return [train]
    ways = ("slurm", "torchrun   (with cluster.hostfile)", "jobset", "skypilot")
    return [f"{train} --emit {way}" for way in ways]


def default_folder(run: Run) -> Path:
    """Return the folder of launch scripts if the user names none."""
    return run.dir.root / "launch"
