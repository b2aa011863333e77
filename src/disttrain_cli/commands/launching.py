"""Output of `disttrain train` modes that do not train: `--dry-run`, `--emit`, `--preflight`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.console import Console
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.api.ranks import Ranks
    from disttrain_cli.api.training import Preflight
    from disttrain_cli.runtime.launching.emit.scripts import Emitted

MOST_HOSTS = 12  # shown; --json has all
MOST_GROUPS = 3


def show_ranks(console: Console, found: Ranks) -> None:
    """Print stages, ranks, groups and hosts, and the commands that start them."""
    console.result(asdict(found) | {"plan": found.plan.model_dump(mode="json")})
    console.say(
        f"{found.ranks} ranks on {len(found.hosts)} host(s), {found.plan.microbatches} slot(s)"
        " per step. Nothing was started."
    )
    console.grid(
        "Stages; ranks of equal TP rank are a data-parallel group",
        found.stages,
        [
            ("stage", lambda stage: stage.stage),
            ("unit", lambda stage: stage.unit),
            ("stage of unit", lambda stage: stage.unit_stage),
            ("TP", lambda stage: stage.tp),
            ("CP", lambda stage: stage.cp),
            ("EP", lambda stage: stage.ep),
            ("DP", lambda stage: stage.dp),
            ("ranks", lambda stage: span(stage.ranks)),
            (
                "hosts",
                lambda stage: (
                    stage.hosts[0]
                    if len(stage.hosts) == 1
                    else f"{stage.hosts[0]} … {stage.hosts[-1]}"
                ),
            ),
            ("layers", lambda stage: span(stage.layers)),
            ("peak GiB", lambda stage: "–" if stage.peak_gib is None else f"{stage.peak_gib:.3f}"),
        ],
    )
    for what, name in (
        ("tp", "Tensor-parallel"),
        ("cp", "Context-parallel"),
        ("ep", "Expert-parallel"),
        ("dp", "Data-parallel"),
    ):
        groups = [group for group in found.groups[what] if len(group) > 1]
        if groups:
            shown = ", ".join(_listed(group) for group in groups[:MOST_GROUPS])
            more = f" and {len(groups) - MOST_GROUPS} more" if len(groups) > MOST_GROUPS else ""
            console.say(f"{name} groups: {shown}{more}")
    if len(found.hosts) > 1:
        console.table(
            "Hosts",
            ["host", "ranks"],
            [[node.host, span(node.ranks)] for node in found.hosts[:MOST_HOSTS]],
        )
        if len(found.hosts) > MOST_HOSTS:
            console.say(f"and {len(found.hosts) - MOST_HOSTS} more")
    console.say("\nTo start them:")
    for command in found.commands[:MOST_HOSTS]:
        console.say(f"  {command}")
    if len(found.commands) > MOST_HOSTS:
        console.say(f"  and {len(found.commands) - MOST_HOSTS} more")


def show_written(console: Console, written: Emitted) -> None:
    """Print the written scripts, and how to start them."""
    console.result(written, written.scripts[0])
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


def show_preflight(console: Console, done: Preflight) -> None:
    """Print the result of a preflight."""
    console.result(asdict(done))
    console.say(
        f"{done.ranks} ranks connected, have the same program, files and data, and all their"
        " groups work."
    )
    for line in done.reports:
        console.say(line)


def span(numbers: Sequence[int]) -> str:
    """Format numbers as their range: 3–7, or 3."""
    first, last = numbers[0], numbers[-1]
    return str(first) if first == last else f"{first}–{last}"


def _listed(group: Sequence[int]) -> str:
    """Format the ranks of a group: a range if they are consecutive, else with their stride."""
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
