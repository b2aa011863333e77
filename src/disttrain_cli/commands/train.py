"""`disttrain train`: run a plan and show the prediction next to the measurements."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from disttrain_cli.api import dry_run, emit, train
from disttrain_cli.api import preflight as try_out
from disttrain_cli.api.ranks import Kind
from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    QuietFlag,
    RunFileArgument,
    SetOption,
    next_command,
)
from disttrain_cli.commands.launching import show_preflight, show_ranks, show_written
from disttrain_cli.commands.steps import LiveStep
from disttrain_cli.commands.train_modes import Asked, Chosen, choose
from disttrain_cli.commands.train_tables import show_result
from disttrain_cli.console import Console
from disttrain_cli.errors import RankLostError, Terminated
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.runtime.train import TrainResult
    from disttrain_cli.spec.runfile import Run, RunFile

EPILOG = """Examples:

$ disttrain train
$ disttrain train --dry-run
$ disttrain train --dry-run --device cuda
$ disttrain train --preflight
$ disttrain train --emit slurm
$ disttrain train --emit torchrun --out scripts
$ disttrain train --emit jobset
$ disttrain train --rehearse
$ disttrain train --resume
$ disttrain train --from runs/projectors
$ disttrain train --profile-steps 5:8
$ disttrain train demo/disttrain.yaml --plan monolithic.yaml

A run without a plan is planned first, and profiled first if it has no profile, as disttrain profile
and disttrain plan do, if its cluster is this machine. Other clusters, --resume and all options that
do not start training need a plan.

SIGTERM, a file logs/stop in the run's folder, or Ctrl-C finishes the step, writes a checkpoint and
ends with exit code 143 or 130; a second signal ends at once. Exit code 4 means that a rank failed;
the message names it and its log.
"""


def run(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan to run, instead of the run's.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Total number of optimizer steps, instead of the run file's."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint.")
    ] = False,
    origin: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="RUN|EXPORT",
            help="Start at step 0 from all weights of another run (its folder or run file: "
            "its newest checkpoint; or a checkpoint's folder), or of a folder that `disttrain"
            " export` wrote.",
        ),
    ] = None,
    restart: Annotated[
        bool,
        typer.Option(
            "--restart",
            help="Start at step 0 even if there are checkpoints; existing files are moved to"
            " earlier/.",
        ),
    ] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help="Run the plan on emulated devices: real processes, messages and schedule;"
            " computing is replaced by waiting for the time that the profile predicts. See"
            " `rehearse` in the run file.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Show ranks, groups, hosts, memory and commands; start nothing."
        ),
    ] = False,
    device: Annotated[
        Literal["cuda"] | None,
        typer.Option(
            help="With --dry-run: run a step of every distinct stage on a fake device of this"
            " kind, and show its memory next to the plan's, its messages, kernels and waits."
        ),
    ] = None,
    emit: Annotated[
        Kind | None,
        typer.Option(
            help="Write files that launch the ranks on the cluster's hosts (scripts, a Kubernetes"
            " JobSet, a SkyPilot task), instead of launching them here."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for the files of --emit, instead of one in the run's folder.",
        ),
    ] = None,
    profile_steps: Annotated[
        str | None,
        typer.Option(
            metavar="A:B",
            help="Record torch's profile of steps A to B (exclusive), a file per rank in the run's"
            " traces/kineto.",
        ),
    ] = None,
    preflight: Annotated[
        bool,
        typer.Option(
            "--preflight",
            help="Connect the ranks, compare files and data, test their groups, and end.",
        ),
    ] = False,
    settings: SetOption = None,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train by the plan, or rehearse it on emulated devices; write checkpoints and traces."""
    console = Console(json_mode=json_mode, quiet=quiet)
    asked = Asked(
        run_file=run_file,
        settings=tuple(settings or ()),
        plan=plan,
        steps=steps,
        resume=resume,
        restart=restart,
        origin=origin,
        profile_steps=profile_steps,
        rehearse=rehearse,
        preflight=preflight,
        dry_run=dry_run,
        device=device,
        emit=emit,
        out=out,
    )
    signal.signal(signal.SIGTERM, _terminate)
    chosen = choose(asked)
    if device is not None:
        _step_on_fakes(console, chosen)
    elif dry_run:
        _show_dry_run(console, asked, chosen)
    elif rehearse:
        from disttrain_cli.commands.rehearsal import run_rehearsal

        run_rehearsal(console, run_file, chosen.run, chosen.plan, chosen.profile, steps, resume)
    elif emit is not None:
        _write_scripts(console, emit, asked, chosen)
    elif preflight:
        with console.progress() as progress:
            done = try_out(chosen.run, plan=chosen.plan, progress=progress)
        show_preflight(console, done)
    else:
        _train(console, asked, chosen)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Handle SIGTERM while no rank runs (`stop_request` handles it then): end as on Ctrl-C."""
    raise Terminated


def _train(console: Console, asked: Asked, chosen: Chosen) -> None:
    again = next_command("train", asked.run_file, plan=asked.plan, steps=asked.steps)
    origin = {} if asked.origin is None else {"from": asked.origin}
    first = next_command("train", asked.run_file, plan=asked.plan, steps=asked.steps, **origin)
    with (
        _ways_on(chosen.run, again, first + " --restart" * asked.restart),
        console.progress() as progress,
    ):
        live = LiveStep(progress)
        result = train(
            chosen.run,
            plan=asked.plan,
            steps=asked.steps,
            resume=asked.resume,
            restart=asked.restart,
            origin=asked.origin,
            profile_steps=chosen.profiled,
            on_step=live.on_step,
            progress=live,
            note=console.note,
        )
    console.result(result, result.run_dir)
    show_result(console, asked.run_file, result)
    _say_next(console, asked.run_file, chosen.run, result, again)


def _step_on_fakes(console: Console, chosen: Chosen) -> None:
    """Run a step of every stage on a fake device; raises SystemExit if a stage would not run."""
    from disttrain_cli.commands.dry_run import show_steps

    if not show_steps(console, chosen.run, chosen.plan):
        raise SystemExit(1)


def _write_scripts(console: Console, kind: Kind, asked: Asked, chosen: Chosen) -> None:
    written = emit(
        chosen.run,
        kind=kind,
        plan=asked.plan,
        out=asked.out,
        steps=asked.steps,
        resume=asked.resume,
        restart=asked.restart,
        origin=asked.origin,
        profile_steps=chosen.profiled,
        preflight=asked.preflight,
        note=console.note,
    )
    show_written(console, written)


@contextmanager
def _ways_on(run: Run, again: str, first: str) -> Iterator[None]:
    """Add to a lost rank's error how to continue.

    Args:
        again: the command to which `--resume` is added.
        first: the command that started the run.
    """
    from disttrain_cli.runtime.checkpoints.folder import latest

    try:
        yield
    except RankLostError as error:
        newest = latest(run.dir.checkpoints) if error.begun else None
        error.next_step = (
            f"Resume from {newest.name}: {again} --resume"
            if newest
            else f"{error.next_step}\nThere is no checkpoint yet; restart: {first}"
        )
        raise


def _say_next(console: Console, run_file: Path, run: Run, result: TrainResult, again: str) -> None:
    """Print the command to run next; raises SystemExit if a signal or stop file ended the run."""
    if result.stopped_by is not None:
        done = result.steps[-1]["step"] + 1 if result.steps else 0
        console.note(f"Stopped by {result.stopped_by} after step {done}.")
        console.hint(f"{again} --resume")
        raise SystemExit(130 if result.stopped_by == "SIGINT" else 143)
    console.hint(
        next_command("analyze", run_file)
        if run_file == DEFAULT_RUN_FILE and not run.settings  # settings may name another run
        else shlex.join(["disttrain", "analyze", short_path(run.dir.root)])
    )


def _show_dry_run(console: Console, asked: Asked, chosen: Chosen) -> None:
    """Print ranks, groups, hosts and commands."""
    from disttrain_cli.planning.check import not_run

    run, plan = chosen.run, chosen.plan
    begin = partial(
        next_command,
        "train",
        asked.run_file,
        plan=asked.plan,
        steps=asked.steps,
        profile_steps=asked.profile_steps,
        **{"from": asked.origin},
        resume=asked.resume,
        restart=asked.restart,
        rehearse=asked.rehearse,
    )
    show_ranks(console, dry_run(run, plan=plan, kind=asked.emit, command=begin()))
    if asked.rehearse:
        _show_rehearsal(console, chosen, run.file)
    reasons = not_run(plan, run.file, chosen.profile)
    for reason in reasons:
        console.note(f"Training does not run {reason.what} yet ({reason.why}): {reason.next_step}.")
    if reasons and not asked.rehearse:
        rehearsed = {"plan": asked.plan, "steps": asked.steps, "rehearse": True}
        console.hint(next_command("train", asked.run_file, **rehearsed))
        return
    elsewhere = run.file.cluster.nodes > 1 and asked.emit is None and not asked.rehearse
    console.hint(begin(emit="slurm" if elsewhere else asked.emit))


def _show_rehearsal(console: Console, chosen: Chosen, run: RunFile) -> None:
    from disttrain_cli.runtime.rehearsal.setting import setting_of

    setting = setting_of(run, chosen.plan, chosen.profile)
    console.say(
        f"A rehearsal starts {setting.processes} processes, each for at most"
        f" {setting.gpus_per_process} GPUs of a stage, at {setting.time_scale:g} s per second"
        " of the cluster."
    )
