"""`disttrain plan`: the best GPUs and parallelism for every module, and why."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from disttrain_cli.api import PlanResult
from disttrain_cli.api import plan as make_plan
from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    OutOption,
    QuietFlag,
    RunFileArgument,
    next_command,
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
from disttrain_cli.naming import short_path

EPILOG = """Examples:

$ disttrain plan
$ disttrain plan --gpus 4 --top 5
$ disttrain plan --strategy megatron --out monolithic.yaml
$ disttrain plan --json --quiet | jq .predicted.expected_s

Exit code 3 means that no layout fits; the message names the limit in the way.
"""


class Strategy(StrEnum):
    """Which layouts are searched."""

    auto = "auto"
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
            help="Layouts to search: auto, modules grouped into units as is fastest; disaggregated,"
            " each a unit of its own; megatron, all in one; or by a rule: distmm, paper.",
        ),
    ] = Strategy.auto,
    top: Annotated[
        int, typer.Option(min=0, metavar="K", help="How many runner-up plans to show.")
    ] = 3,
    out: OutOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Choose GPUs and parallelism for every module, exactly."""
    console = Console(json_mode=json_mode, quiet=quiet)
    with console.progress() as progress:
        result = make_plan(
            run_file,
            profile=profile,
            gpus=gpus,
            strategy=strategy.value,
            top=top,
            out=out,
            sensitivity=json_mode or not quiet,
            progress=progress,
            note=console.note,
        )
    console.result(_document(result), result.path)
    _render(console, result, run_file)
    hint = next_command("train", run_file, plan=out)
    console.hint(f"{hint} --rehearse" if result.not_run else hint)


def _document(result: PlanResult) -> dict[str, Any]:
    """What `--json` prints."""
    return result.plan.model_dump(mode="json") | {
        "explanation": asdict(result.explanation),
        "sensitivity": asdict(result.sensitivity) if result.sensitivity else None,
        "changes": asdict(result.changes) if result.changes else None,
        "orders": {name: order._asdict() for name, order in result.orders.items()},
        "not_run": [reason._asdict() for reason in result.not_run],
        "picture": result.picture and str(result.picture),
        "path": str(result.path),
    }


def _render(console: Console, result: PlanResult, run_file: Path) -> None:
    from disttrain_cli.planning.picture import gantt

    chosen, why, columns = result.plan, result.explanation, terminal_columns()
    show_layout(console, chosen, why, result.gpus, columns)
    show_changes(console, result.changes, short_path(result.previous), columns)
    sentences = [*why.sentences, *needs(chosen)]
    console.say(
        "\n"
        + "\n".join(textwrap.fill(line, columns, subsequent_indent=10 * " ") for line in sentences)
    )
    show_memory(console, chosen)
    show_strategies(console, chosen, why, result.orders, run_file)
    show_runners_up(console, chosen, why)
    show_sensitivity(console, chosen, result.sensitivity)
    later = any(unit.weight_delay for unit in chosen.plan.units)
    weights = ", W gradients of weights" if later else ""
    console.say(
        f"\nThe step (F forward, B backward{weights}, R reduction and optimizer, . waiting)"
    )
    for line in gantt(result.step.pipeline, result.step.timeline, chosen.plan, columns):
        console.say(line)
    if result.not_run:
        missing = ", ".join(f"{reason.what} ({reason.why})" for reason in result.not_run)
        console.say(
            "\n" + textwrap.fill(f"Training does not run yet, and refuses: {missing}.", columns)
        )
    search = chosen.search
    number = f"{search.candidates:,}" if search.candidates < 10**9 else f"{search.candidates:.1e}"
    picture = f" and {short_path(result.picture)}" if result.picture else ""
    console.note(
        f"\n{number} candidates in {1000 * search.solve_s:.0f} ms"
        f"{', solved exactly' if search.exact else ''}. "
        f"Wrote {short_path(result.path)}{picture}"
    )


def terminal_columns() -> int:
    """Width of the terminal, within what can be read."""
    return max(72, min(140, shutil.get_terminal_size((100, 24)).columns))
