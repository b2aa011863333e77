"""`disttrain train --dry-run --device cuda`: steps of all stages on a fake GPU.

It shows the operations and the memory of every stage without a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from disttrain_cli.api import dry_run_steps
from disttrain_cli.commands.common import percent
from disttrain_cli.commands.launching import span
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.console import Console
    from disttrain_cli.runtime.dryrun.dryrun import DryRun, StageReport
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.runfile import Run

MIB = 2**20 / 2**30


def show_steps(console: Console, run: Run, plan: Plan) -> bool:
    """Run one step of every distinct stage on a fake device and show it.

    Returns True if all stages would run.
    """
    with console.progress() as progress:
        result = dry_run_steps(run, plan=plan, progress=progress)
    console.result(result)
    _render(console, result, short_path(run.dir.logs / "dry-run"))
    return not result.problems


def _render(console: Console, result: DryRun, logs: str) -> None:
    major, minor = result.capability
    console.say(
        f"{len(result.stages)} distinct stages of {result.ranks} ranks ran a step on a fake"
        f" {result.device} (compute capability {major}.{minor}, {result.memory_gib:g} GiB), at the"
        " plan's worst-case work."
    )
    done = [stage for stage in result.stages if stage.seen.failure is None]
    for show in (_memory, _slot, _messages, _waits):
        show(console, done)
    order = result.order
    if not order.faults:
        console.say(
            f"{order.operations:,} messages and collectives of all ranks in {order.slots}"
            f" slot{'s' * (order.slots > 1)} complete if each of them blocks, as with NCCL."
        )
    if result.problems and not console.json_mode:
        console.error(
            "Training would fail or be slow",
            "\n".join(result.problems),
            f"See the stages' logs: {logs}",
        )


def _memory(console: Console, done: list[StageReport]) -> None:
    console.grid(
        "Memory in GiB: activations of a slot and peak of a step, executed and predicted; reserves"
        " that a dry run cannot show",
        done,
        [
            ("unit", lambda stage: stage.unit),
            ("stage", lambda stage: _stages(stage)),
            ("layers", lambda stage: ", ".join(map(span, stage.layers))),
            ("in flight", lambda stage: stage.seen.slots_in_flight),
            ("kept", lambda stage: f"{stage.seen.kept_gib:.3f}"),
            ("predicted", lambda stage: f"{stage.priced_kept_gib:.3f}"),
            ("peak", lambda stage: f"{stage.seen.peak_gib:.3f}"),
            ("predicted", lambda stage: f"{stage.priced_gib:.3f}"),
            ("reserves", lambda stage: f"{stage.unseen_gib:.3f}"),
            ("total", lambda stage: f"{stage.needed_gib:.3f}"),
            ("plan", lambda stage: f"{stage.planned_gib:.3f}"),
            ("share of limit", lambda stage: percent(stage.needed_gib / stage.limit_gib)),
        ],
    )


def _slot(console: Console, done: list[StageReport]) -> None:
    console.grid(
        "A slot of one rank, forward and backward",
        done,
        [
            ("unit", lambda stage: stage.unit),
            ("stage", lambda stage: _stages(stage)),
            ("rank", lambda stage: stage.seen.rank),
            ("weights on", lambda stage: ", ".join(stage.seen.devices)),
            ("kernels", lambda stage: stage.seen.kernels),
            ("on the host", lambda stage: stage.seen.host_operators),
            ("sends", lambda stage: stage.seen.sends),
            ("MiB", lambda stage: f"{stage.seen.send_gib / MIB:.1f}"),
            ("receives", lambda stage: stage.seen.receives),
            ("MiB", lambda stage: f"{stage.seen.receive_gib / MIB:.1f}"),
            ("collectives", lambda stage: stage.seen.collectives),
            ("MiB", lambda stage: f"{stage.seen.collective_gib / MIB:.1f}"),
        ],
    )


def _messages(console: Console, done: list[StageReport]) -> None:
    console.table(
        "Messages over the cuts per slot, rows of one rank",
        ["unit", "stage", "instruction", "tensor", "shape", "type"],
        [
            [
                stage.unit,
                _stages(stage),
                one.instruction.replace("_", " "),
                one.tensor,
                " × ".join(map(str, one.shape)),
                one.dtype,
            ]
            for stage in done
            for one in stage.seen.messages
        ],
    )


def _waits(console: Console, done: list[StageReport]) -> None:
    console.table(
        "Host synchronisations with the device",
        ["unit", "stage", "during", "what", "where", "per step"],
        [
            [
                stage.unit,
                _stages(stage),
                wait.instruction.replace("_", " ") or "end of the step",
                wait.what,
                wait.where,
                wait.times,
            ]
            for stage in done
            for wait in stage.seen.waits
        ],
    )


def _stages(stage: StageReport) -> str:
    numbers = stage.unit_stages
    together = numbers == list(range(numbers[0], numbers[-1] + 1))
    return span(numbers) if together else ", ".join(map(str, numbers))
