"""What `disttrain train` shows and writes instead of training: `--dry-run`, `--emit`,
`--preflight`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from disttrain_cli.console import Console
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.runtime.launching.emit.hosts import Node
    from disttrain_cli.runtime.launching.emit.scripts import Emitted, Start
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import Run
    from disttrain_cli.spec.stage_graph import StageGraph

Emit = Literal["torchrun", "slurm", "jobset", "skypilot"]
MOST_HOSTS = 12  # shown; --json has all
MOST_GROUPS = 3


def show_ranks(
    console: Console, run: Run, chosen: Plan, profile: Profile, kind: Emit | None, train: str
) -> None:
    """Who would run what, where, with whom, and how it would be started (`train`); nothing is
    started or written."""
    from disttrain_cli.runtime.launching.emit.hosts import hosts_of, place_ranks
    from disttrain_cli.spec.stage_graph import stage_graph

    graph = stage_graph(chosen.plan, profile.inputs.llm)
    nodes = place_ranks(graph, hosts_of(run))
    stages = _stages(chosen, graph, nodes)
    commands = _commands(run, nodes, kind, train)
    console.result(
        {
            "plan": chosen.plan.model_dump(mode="json"),
            "ranks": graph.world_size,
            "stages": stages,
            "groups": {what: _groups(graph, what) for what in ("tp", "cp", "dp")},
            "hosts": [{"host": node.host, "ranks": list(node.ranks)} for node in nodes],
            "commands": commands,
        }
    )
    console.say(
        f"{graph.world_size} ranks on {len(nodes)} host(s), {chosen.plan.microbatches} slots per"
        " step. Nothing was started."
    )
    console.table(
        "Stages; ranks of equal TP rank are a data-parallel group",
        [
            "stage",
            "unit",
            "stage of unit",
            "TP",
            "CP",
            "DP",
            "ranks",
            "hosts",
            "layers",
            "peak GiB",
        ],
        [
            [
                stage["stage"],
                stage["unit"],
                stage["unit_stage"],
                stage["tp"],
                stage["cp"],
                stage["dp"],
                span(stage["ranks"]),
                (
                    stage["hosts"][0]
                    if len(stage["hosts"]) == 1
                    else f"{stage['hosts'][0]} … {stage['hosts'][-1]}"
                ),
                span(stage["layers"]),
                "–" if stage["peak_gib"] is None else f"{stage['peak_gib']:.3f}",
            ]
            for stage in stages
        ],
    )
    for what, name in (
        ("tp", "Tensor-parallel"),
        ("cp", "Context-parallel"),
        ("dp", "Data-parallel"),
    ):
        groups = [group for group in _groups(graph, what) if len(group) > 1]
        if groups:
            shown = ", ".join(_listed(group) for group in groups[:MOST_GROUPS])
            more = f" and {len(groups) - MOST_GROUPS} more" if len(groups) > MOST_GROUPS else ""
            console.say(f"{name} groups: {shown}{more}")
    if len(nodes) > 1:
        console.table(
            "Hosts",
            ["host", "ranks"],
            [[node.host, span(node.ranks)] for node in nodes[:MOST_HOSTS]],
        )
        if len(nodes) > MOST_HOSTS:
            console.say(f"and {len(nodes) - MOST_HOSTS} more")
    console.say("\nTo start them:")
    for command in commands[:MOST_HOSTS]:
        console.say(f"  {command}")
    if len(commands) > MOST_HOSTS:
        console.say(f"  and {len(commands) - MOST_HOSTS} more")


def _stages(chosen: Plan, graph: StageGraph, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    memory = {(stage.unit, stage.stage): stage for stage in chosen.predicted.memory}
    return [
        {
            "stage": stage.number,
            "unit": stage.unit.name,
            "unit_stage": stage.index,
            "tp": stage.tp,
            "cp": stage.cp,
            "dp": stage.unit.dp,
            "ranks": list(stage.ranks),
            "hosts": [
                node.host
                for node in nodes
                if stage.ranks[0] <= node.ranks[-1] and node.ranks[0] <= stage.ranks[-1]
            ],
            "layers": [stage.layers.start, stage.layers.stop - 1],
            "peak_gib": getattr(memory.get((stage.unit.name, stage.index)), "peak_gib", None),
        }
        for stage in graph.stages
    ]


def _groups(graph: StageGraph, what: str) -> list[list[int]]:
    """All groups of tensor, context or data parallelism, by stage."""
    if what == "tp":
        return [group for stage in graph.stages for group in stage.tp_groups()]
    if what == "cp":
        return [group for stage in graph.stages if stage.cp > 1 for group in stage.cp_groups()]
    return [stage.dp_group(tp_rank) for stage in graph.stages for tp_rank in range(stage.tp)]


def _commands(run: Run, nodes: Sequence[Node], kind: Emit | None, train: str) -> list[str]:
    """What to type; scripts have the names that `--emit` would give them."""
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
    """Where scripts go if the user names no folder."""
    return run.dir.root / "launch"


def emit(
    console: Console,
    run: Run,
    chosen: Plan,
    profile: Profile,
    kind: Emit,
    start: Start,
    *,
    plan: Path,
    out: Path | None,
) -> None:
    """Write the scripts and say how to start them."""
    from disttrain_cli.runtime.launching.emit.jobset import emit_jobset
    from disttrain_cli.runtime.launching.emit.skypilot import emit_skypilot
    from disttrain_cli.runtime.launching.emit.slurm import emit_slurm
    from disttrain_cli.runtime.launching.emit.torchrun import emit_torchrun

    folder = out or default_folder(run)
    if kind == "torchrun":
        written = emit_torchrun(run, chosen, profile, folder, start)
    else:
        emitter = {"slurm": emit_slurm, "jobset": emit_jobset, "skypilot": emit_skypilot}[kind]
        written = emitter(run, chosen, profile, folder, start, plan_file=plan)
    console.result(written, written.scripts[0])
    _say_written(console, written)


def _say_written(console: Console, written: Emitted) -> None:
    console.say(f"Job file    {short_path(Path(written.job))}")
    for script in written.scripts:
        console.say(f"Script      {short_path(Path(script))}")
    console.say(
        "\nStart it with:"
        if len(written.commands) == 1
        else "\nStart all of them, each on its host:"
    )
    for command in written.commands:
        console.say(f"  {command}")


def preflight(console: Console, run: Run, chosen: Plan, profile: Profile) -> None:
    """Start the ranks, let them try out their groups, and report the result."""
    from disttrain_cli.runtime.train import preflight as try_out

    with console.progress() as progress:
        told = try_out(run, chosen, profile, progress=progress)
    console.result({"ranks": chosen.plan.gpus_used, "told": told})
    console.say(
        f"{chosen.plan.gpus_used} ranks met, have the same program, files and data, and all their"
        " groups work."
    )
    for line in told:
        console.say(line)


def span(numbers: Sequence[int]) -> str:
    """3–7, or 3."""
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}–{last}"


def _listed(group: Sequence[int]) -> str:
    """Ranks of a group: a span where they are neighbours, else with their distance."""
    step = group[1] - group[0]
    return (
        span(group)
        if step == 1
        else (
            f"{group[0]}, {group[1]} … {group[-1]} (every {step}th)"
            if len(group) > 2
            else f"{group[0]} and {group[1]}"
        )
    )
