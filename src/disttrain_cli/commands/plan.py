"""`disttrain plan`: the best GPUs and parallelism for every module, and why."""

from __future__ import annotations

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
    open_run,
    percent,
    short_path,
)
from disttrain_cli.console import Console

if TYPE_CHECKING:
    from disttrain_cli.spec.plan import Plan

EPILOG = """Examples:

$ disttrain plan
$ disttrain plan --gpus 4 --top 5
$ disttrain plan --strategy megatron --out monolithic.yaml
$ disttrain plan --json --quiet | jq .predicted.iteration_s

Exit code 3 means that no layout fits; the message names what binds.
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
        Path | None, typer.Option(metavar="FILE", help="Profile to plan from, instead of the run's own.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Use at most N devices, not the whole cluster.")
    ] = None,
    strategy: Annotated[
        Strategy,
        typer.Option(metavar="NAME", help="Layouts to search: disaggregated, or a baseline: megatron, distmm, paper."),
    ] = Strategy.disaggregated,
    top: Annotated[int, typer.Option(min=0, metavar="K", help="How many runner-up plans to show.")] = 3,
    out: OutOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Choose GPUs and parallelism for every module, exactly."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file)
    from disttrain_cli.planning.solve import solve
    from disttrain_cli.spec.plan import write_plan
    from disttrain_cli.spec.profile import read_profile

    costs = read_profile(profile or opened.dir.profile)
    found = solve(opened.file, costs, gpus=gpus, strategy=strategy.value, top=top)
    path = write_plan(out or opened.dir.plan, found)
    console.result(found.model_dump(mode="json") | {"path": str(path)}, path)
    _render(console, found, path)
    console.hint(next_command("train", run_file, plan=out))


def _render(console: Console, found: Plan, path: Path) -> None:
    from disttrain_cli.planning.explain import explain

    layout, predicted, search = found.plan, found.predicted, found.search
    console.say(f"{layout.strategy} plan on {layout.gpus_used} device(s): {layout.microbatches} slot(s) per step, "
                f"{layout.microbatch_size} sequence(s) per LLM replica and slot, {layout.global_batch_size} per step")
    times = {time.unit: time for time in predicted.units}
    rows: list[list[object]] = []
    for unit in layout.units:
        time = times.get(unit.name)
        rows.append([unit.name, " + ".join(unit.modules), unit.tp, unit.dp, unit.pp, unit.gpus,
                     "/".join(map(str, unit.layers_per_stage)), f"{time.stage_ms:.1f}" if time else ""])
    console.table("Units, in pipeline order",
                  ["unit", "modules", "TP", "DP", "PP", "devices", "layers per stage", "ms per slot"], rows)
    console.table("Memory predicted", ["unit", "stage", "peak GiB", "limit GiB"],
                  [[stage.unit, stage.stage, f"{stage.peak_gib:.3f}", f"{stage.limit_gib:.3f}"]
                   for stage in predicted.memory])
    chosen = ["this plan", f"{predicted.iteration_s:.3f}", f"{predicted.sequences_per_s:.2f}", percent(predicted.mfu),
              layout.gpus_used, layout.describe()]
    baselines = [[name, "does not fit"] + [""] * 4 if base is None else
                 [name, f"{base.iteration_s:.3f}", f"{base.sequences_per_s:.2f}", percent(base.mfu), base.gpus_used,
                  base.layout]
                 for name, base in found.baselines.items()]
    console.table("Prediction, beside what other strategies would give",
                  ["strategy", "s per step", "sequences/s", "MFU", "devices", "layout"], [chosen, *baselines])
    console.table("Runner-up plans", ["by the formula", "s per step", "devices", "layout"],
                  [[f"+{other.slower_pct:.1f} %", f"{other.iteration_s:.3f}", other.gpus_used, other.layout]
                   for other in found.alternatives])
    console.say("\n" + "\n".join(explain(found).time))
    console.note(f"{search.candidates:,} candidates in {1000 * search.solve_s:.0f} ms"
                 f"{', solved exactly' if search.exact else ''}. Wrote {short_path(path)}")
