"""`disttrain plan`: the best GPUs and parallelism for every module, and the reasons."""

from __future__ import annotations

import re
import shutil
import textwrap
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from disttrain_cli.api import compare_clusters, open_run
from disttrain_cli.api import plan as make_plan
from disttrain_cli.api.planning import PlanResult
from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    OutOption,
    QuietFlag,
    RunFileArgument,
    SetOption,
    next_command,
)
from disttrain_cli.commands.plan_tables import (
    needs,
    show_changes,
    show_clusters,
    show_layout,
    show_memory,
    show_runners_up,
    show_sensitivity,
    show_strategies,
)
from disttrain_cli.console import Console
from disttrain_cli.errors import UsageError
from disttrain_cli.naming import short_path

EPILOG = """Examples:

$ disttrain plan
$ disttrain plan --gpus 4 --top 5
$ disttrain plan --strategy megatron --out monolithic.yaml
$ disttrain plan --json --quiet | jq .predicted.expected_s
$ disttrain plan --gpus 8,16,64 --device H100,B200

With several numbers, or with --device, every number of every device is planned, and one table
compares time and cost of the training (cluster.price_per_gpu_hour); no plan is written. Exit code 3
means that no layout fits; the message names the limit in the way.
"""


TOP = 3  # runner-up plans
#: Pattern of an entry in an option's list, and its description for messages.
COUNT = r"0*[1-9][0-9]{0,4}", "numbers from 1 to 65,536"
DEVICE = r"(analytic:)?[A-Za-z0-9._-]+", "names of the hardware catalogue"


class Strategy(StrEnum):
    """Set of layouts to search."""

    auto = "auto"
    disaggregated = "disaggregated"
    megatron = "megatron"


def run(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile to plan from, instead of the run's."),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Use at most N devices of the cluster; several numbers are compared.",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Compare clusters of these devices of the catalogue (disttrain profile --help).",
        ),
    ] = None,
    strategy: Annotated[
        Strategy,
        typer.Option(
            metavar="NAME",
            help="Layouts to search: auto, modules grouped into the fastest units; disaggregated,"
            " a unit per module; megatron, one unit.",
        ),
    ] = Strategy.auto,
    top: Annotated[
        int, typer.Option(min=0, metavar="K", help="Number of runner-up plans to show.")
    ] = TOP,
    out: OutOption = None,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Choose GPUs and parallelism for every module, exactly."""
    console = Console(json_mode=json_mode, quiet=quiet)
    counts = [int(count) for count in _listed("--gpus", COUNT, gpus)]
    devices = _listed("--device", DEVICE, device)
    if devices or len(counts) > 1:
        single = {"--out": out, "--top": top != TOP, "--profile": devices and profile}
        for option in (option for option, is_set in single.items() if is_set):
            raise UsageError(
                f"{option} is of a single plan",
                "with several numbers of devices, or --device, clusters are compared in one table",
                "disttrain plan --help",
            )
        opened = open_run(run_file, *settings or ())
        with console.progress() as progress:
            offers = compare_clusters(
                opened,
                gpus=counts,
                devices=devices,
                profile=profile,
                strategy=strategy.value,
                progress=progress,
                note=console.note,
            )
        console.result({"clusters": [asdict(offer) for offer in offers]})
        show_clusters(console, offers, opened.file, terminal_columns())
        return
    with console.progress() as progress:
        result = make_plan(
            open_run(run_file, *settings or ()),
            profile=profile,
            gpus=counts[0] if counts else None,
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


def _listed(option: str, kind: tuple[str, str], text: str | None) -> list[str]:
    """Split an option at its commas.

    Raises:
        UsageError: an entry is not of the kind, or is named twice.
    """
    listed = [] if text is None else [one.strip() for one in text.split(",")]
    for one in listed:
        twice = sum(_same(one) == _same(other) for other in listed) > 1
        wrong = not re.fullmatch(kind[0], one) or (kind == COUNT and int(one) > 65_536)
        if twice or wrong:
            raise UsageError(
                f"{option} {'names twice' if twice else 'cannot be'} {one!r}",
                f"given: {text!r}; allowed: {kind[1]}, with commas between them",
                "disttrain plan --help",
            )
    return listed


def _same(one: str) -> str:
    """Return the common form of all spellings of a number of devices, or of a device."""
    return one.lower().removeprefix("analytic:").lstrip("0")


def _document(result: PlanResult) -> dict[str, Any]:
    """Return the document that `--json` prints."""
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
    weights = ", W weight gradients" if later else ""
    console.say(
        f"\nThe step (F forward, B backward{weights}, R reduction and optimizer, . waiting)"
    )
    for line in gantt(result.step.pipeline, result.step.timeline, chosen.plan, columns):
        console.say(line)
    if result.not_run:
        missing = ", ".join(f"{reason.what} ({reason.why})" for reason in result.not_run)
        console.say("\n" + textwrap.fill(f"Training cannot run this plan yet: {missing}.", columns))
    search = chosen.search
    number = f"{search.candidates:,}" if search.candidates < 10**9 else f"{search.candidates:.1e}"
    picture = f" and {short_path(result.picture)}" if result.picture else ""
    console.note(
        f"\n{number} candidates in {1000 * search.solve_s:.0f} ms"
        f"{', solved exactly' if search.exact else ''}. "
        f"Wrote {short_path(result.path)}{picture}"
    )


def terminal_columns() -> int:
    """Return the width of the terminal, limited to a readable range."""
    return max(72, min(140, shutil.get_terminal_size((100, 24)).columns))
