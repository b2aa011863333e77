"""`disttrain plan`: the best GPUs and parallelism for every module, and why."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    OutOption,
    QuietFlag,
    RunFileArgument,
    next_command,
    not_over,
    open_run,
    short_path,
)
from disttrain_cli.commands.plan_tables import (
    needs,
    show_changes,
    show_layout,
    show_memory,
    show_runners_up,
    show_sensitivity,
    show_strategies,
)
from disttrain_cli.console import Console
from disttrain_cli.errors import SpecError

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan

EPILOG = """Examples:

$ disttrain plan
$ disttrain plan --gpus 4 --top 5
$ disttrain plan --strategy megatron --out monolithic.yaml
$ disttrain plan --json --quiet | jq .predicted.iteration_s

Exit code 3 means that no layout fits; the message names the limit in the way.
"""


class Strategy(StrEnum):
    """Which layouts are searched."""

    disaggregated = "disaggregated"
    megatron = "megatron"
    distmm = "distmm"
    paper = "paper"


def run(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile to plan from, instead of the run's own."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(
            min=1, max=65_536, metavar="N", help="Use at most N devices, not the whole cluster."
        ),
    ] = None,
    strategy: Annotated[
        Strategy,
        typer.Option(
            metavar="NAME",
            help="Layouts to search: disaggregated, or a baseline: megatron, distmm, paper.",
        ),
    ] = Strategy.disaggregated,
    top: Annotated[
        int, typer.Option(min=0, metavar="K", help="How many runner-up plans to show.")
    ] = 3,
    out: OutOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Choose GPUs and parallelism for every module, exactly."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file)
    from disttrain_cli.planning.changes import changes, not_comparable
    from disttrain_cli.planning.check import check_device, not_run
    from disttrain_cli.planning.explain import explain
    from disttrain_cli.planning.picture import gantt, svg
    from disttrain_cli.planning.predict import simulated_step
    from disttrain_cli.planning.sensitivity import sensitivity
    from disttrain_cli.planning.solve import cluster_of, solve
    from disttrain_cli.planning.units import units_of
    from disttrain_cli.simulation.faults import check_faults
    from disttrain_cli.spec.hostfile import read_hostfile
    from disttrain_cli.spec.plan import write_plan
    from disttrain_cli.spec.profile import read_profile
    from disttrain_cli.spec.whole import is_own_file, write_whole

    profile_path = profile or opened.dir.profile
    not_over(out, opened.path, profile_path, opened.dir.index)
    costs = read_profile(profile_path)
    if opened.file.cluster.hostfile is not None:
        read_hostfile(opened.resolve(opened.file.cluster.hostfile))
    if profile is None:  # who names a profile means its device
        check_device(opened.file, costs)
    cluster = cluster_of(opened.file, costs, gpus)
    found = solve(opened.file, costs, gpus=gpus, strategy=strategy.value, top=top)
    before_path = out if out is not None and is_own_file(out) else opened.dir.plan
    before = plan_in_place(console, before_path)
    another = before and not_comparable(before, found)
    change = changes(before, found, opened.file, costs, cluster) if before and not another else None
    if another:
        console.note(f"Not compared with {short_path(before_path)}: it was made for {another}.")
    path = write_plan(out or opened.dir.plan, found)
    units = units_of(costs, cluster, found.plan)
    step = simulated_step(costs, found.plan, cluster)
    picture = None
    if is_own_file(path):
        picture = write_whole(
            path.with_name(path.name.removesuffix(".yaml") + ".svg"),
            svg(step.pipeline, step.timeline, found.plan),
        )
    why = explain(found, units, step)
    with console.progress() as progress:
        what_if = (
            sensitivity(costs, cluster, found.plan, progress) if json_mode or not quiet else None
        )
    refused = not_run(found, opened.file, costs)
    try:
        check_faults(step.stages, opened.file.rehearse.faults, costs)
    except SpecError as error:
        console.note(f"Note: a rehearsal refuses this plan. {error.what}: {error.why}.")
    console.result(
        found.model_dump(mode="json")
        | {
            "explanation": asdict(why),
            "sensitivity": asdict(what_if) if what_if else None,
            "changes": asdict(change) if change else None,
            "not_run": [reason._asdict() for reason in refused],
            "picture": picture and str(picture),
            "path": str(path),
        },
        path,
    )
    show_layout(console, found, why, cluster.gpus)
    columns = terminal_columns()
    show_changes(console, change, short_path(before_path), columns)
    console.say(
        "\n"
        + "\n".join(
            textwrap.fill(line, columns, subsequent_indent=10 * " ")
            for line in [*why.sentences, *needs(found)]
        )
    )
    show_memory(console, found)
    show_strategies(console, found, why, run_file)
    show_runners_up(console, found, why)
    show_sensitivity(console, found, what_if)
    console.say(
        "\n".join(
            [
                "\nThe step (F forward, B backward, R reduction and optimizer, . waiting)",
                *gantt(step.pipeline, step.timeline, found.plan, columns),
            ]
        )
    )
    if refused:
        missing = ", ".join(f"{reason.what} ({reason.why})" for reason in refused)
        console.say(
            "\n" + textwrap.fill(f"Training does not run yet, and refuses: {missing}.", columns)
        )
    search = found.search
    number = f"{search.candidates:,}" if search.candidates < 10**9 else f"{search.candidates:.1e}"
    console.note(
        f"\n{number} candidates in {1000 * search.solve_s:.0f} ms"
        f"{', solved exactly' if search.exact else ''}. "
        f"Wrote {short_path(path)}" + (f" and {short_path(picture)}" if picture else "")
    )
    if not refused:
        console.hint(next_command("train", run_file, plan=out))
    else:
        console.hint(f"{next_command('train', run_file, plan=out)} --rehearse")


def plan_in_place(console: Console, path: Path) -> Plan | None:
    """The plan that is there already; None, and a note, where it cannot be read."""
    from disttrain_cli.spec.plan import read_plan

    if not path.is_file():
        return None
    try:
        return read_plan(path)
    except SpecError as error:
        console.note(f"Not compared with {short_path(path)}: {error.what}.")
        return None


def terminal_columns() -> int:
    """Width of the terminal, within what can be read."""
    return max(72, min(140, shutil.get_terminal_size((100, 24)).columns))
