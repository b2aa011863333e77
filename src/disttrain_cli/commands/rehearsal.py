"""`disttrain train --rehearse`: run a plan on emulated devices, and compare with the prediction."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.commands.common import percent
from disttrain_cli.commands.steps import LiveStep, say_drift
from disttrain_cli.commands.train_tables import say_replans
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.analysis.result.rows import OperationRow
    from disttrain_cli.console import Console
    from disttrain_cli.runtime.rehearsal.rehearse import RehearsalResult
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import Run

MOST_OPERATIONS = 16  # shown; --json has all
LATE_SHARE = 0.02  # of a step: delay beyond the simulated step from which on a note is printed


def run_rehearsal(
    console: Console,
    run_file: Path,
    run: Run,
    plan: Plan,
    profile: Profile,
    steps: int | None,
    resume: bool,
) -> None:
    """Rehearse a checked plan, and show the result."""
    from msgspec.structs import asdict

    from disttrain_cli.analysis.job.database import open_database
    from disttrain_cli.analysis.job.operations import compare_operations
    from disttrain_cli.api import rehearse

    with console.progress() as progress:
        live = LiveStep(progress, learns=False)
        result = rehearse(
            run,
            plan=plan,
            steps=steps,
            resume=resume,
            on_step=live.on_step,
            progress=live,
            note=console.note,
        )
    operations = (
        compare_operations(open_database([Path(result.run_dir)])) if len(result.steps) > 1 else []
    )
    console.result(
        result.model_dump(mode="json") | {"operations": [asdict(row) for row in operations]},
        result.run_dir,
    )
    _render(console, run_file, result, operations, plan, profile)
    if result.stopped_by is not None:
        console.note(f"Stopped by {result.stopped_by}.")
        raise SystemExit(130 if result.stopped_by == "SIGINT" else 143)
    console.hint(shlex.join(["disttrain", "analyze", short_path(Path(result.run_dir))]))


def _render(
    console: Console,
    run_file: Path,
    result: RehearsalResult,
    operations: list[OperationRow],
    plan: Plan,
    profile: Profile,
) -> None:
    console.say(
        f"{result.processes} processes emulated {result.gpus} GPUs (at most"
        f" {result.gpus_per_process} each), {result.time_scale:g} s per second of the cluster;"
        f" messages {_MESSAGES[result.messages]}."
    )
    console.grid(
        "Seconds per step of the cluster; simulated with the same steps, processes and faults",
        list(zip(result.steps, result.simulated, strict=True)),
        [
            ("step", lambda both: both[0]["step"]),
            ("predicted", lambda both: f"{both[1]['predicted_iteration_s']:.3f}"),
            ("simulated", lambda both: f"{both[1]['iteration_s']:.3f}"),
            ("rehearsed", lambda both: f"{both[0]['iteration_s']:.3f}"),
            (
                "error",
                lambda both: (
                    f"{100 * (both[0]['iteration_s'] / both[1]['iteration_s'] - 1):+.1f} %"
                ),
            ),
            ("sequences/s", lambda both: f"{both[0]['sequences_per_s']:.2f}"),
            ("MFU", lambda both: percent(both[0]["mfu"])),
            ("data wait ms", lambda both: f"{1000 * both[0]['data_wait_s']:.0f}"),
        ],
    )
    if profile.device.shared_by > 1:
        console.say(
            "Predictions are for ranks that share the cores of this machine, as in training; in"
            " simulation and rehearsal each has a device, as slow as measured while all of them"
            " computed."
        )
    console.grid(
        "Predicted and rehearsed by operation, ms; sorted by the effect on the step",
        operations[1 : 1 + MOST_OPERATIONS],
        [
            ("unit", lambda row: row.unit or "job"),
            ("stage", lambda row: "–" if row.stage is None else row.stage),
            ("operation", lambda row: _operation(row)),
            ("planned", lambda row: _ms(row.planned)),
            ("same work", lambda row: _ms(row.predicted)),
            ("rehearsed", lambda row: _ms(row.measured)),
            ("error", lambda row: "–" if row.error_pct is None else f"{row.error_pct:+.1f} %"),
            ("share of step", lambda row: percent(row.share_of_step)),
        ],
    )
    for why in result.restarts:
        console.say(f"Restarted: {why}")
    say_replans(console, result.replans)
    late = result.late_ms
    console.say(
        f"\nEmulation   this host was {late.mean:.2f} ms behind an operation's start on average (99"
        f" % within {late.p99:.1f} ms), and used {result.cpu_ms_per_operation:.1f} ms of CPU time"
        " per operation"
    )
    if len(result.steps) > 1 and _behind(result) > LATE_SHARE:
        console.note(
            f"Steps are {percent(_behind(result))} longer than simulated. If the host was far"
            " behind, it was too busy: stop other processes, or set rehearse.time_scale above"
            f" {result.time_scale:g}."
        )
    say_drift(console, run_file, profile, plan, result.steps, Path(result.run_dir))
    console.say(f"Checkpoint  {short_path(Path(result.checkpoint))}")
    console.say(f"Traces      {short_path(Path(result.trace))}")


_MESSAGES = {"scaled": "with one number per row", "real": "in full size"}


def _behind(result: RehearsalResult) -> float:
    """Return the share by which the steps after the first are longer than simulated."""
    pairs = [
        (row["iteration_s"], expected["iteration_s"])
        for row, expected in zip(result.steps, result.simulated, strict=True)
    ][1:]
    return sum(row for row, _ in pairs) / sum(expected for _, expected in pairs) - 1


def _operation(row: OperationRow) -> str:
    return row.operation.replace("_", " ") + (f" {row.module}" if row.module else "")


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"
