"""`disttrain train`: run a plan and show the prediction beside what happens."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from disttrain_cli.api import (
    check_start,
    checked_plan,
    find_origin,
    open_run,
    say_start,
    train,
)
from disttrain_cli.commands.common import (
    DEFAULT_RUN_FILE,
    JsonFlag,
    QuietFlag,
    RunFileArgument,
    next_command,
)
from disttrain_cli.commands.launching import Emit, show_ranks
from disttrain_cli.commands.launching import emit as write_scripts
from disttrain_cli.commands.launching import preflight as try_out
from disttrain_cli.commands.steps import LiveStep
from disttrain_cli.commands.train_modes import check_modes, steps_to_profile
from disttrain_cli.commands.train_tables import show_result
from disttrain_cli.console import Console
from disttrain_cli.errors import RankLostError
from disttrain_cli.naming import short_path

if TYPE_CHECKING:
    from disttrain_cli.runtime.train import TrainResult
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import Run, RunFile

EPILOG = """Examples:

$ disttrain train
$ disttrain train --dry-run
$ disttrain train --dry-run --device cuda
$ disttrain train --preflight
$ disttrain train --emit slurm
$ disttrain train --emit torchrun --out scripts
$ disttrain train --rehearse
$ disttrain train --resume
$ disttrain train --from runs/projectors
$ disttrain train --profile-steps 5:8
$ disttrain train demo/disttrain.yaml --plan monolithic.yaml

SIGTERM, a file logs/stop in the run's folder, or Ctrl-C finishes the step, writes a checkpoint and
ends with exit code 143 or 130; a second signal ends at once. Exit code 4 means that a rank failed;
the message names it and its log.
"""


def run(
    run_file: RunFileArgument = DEFAULT_RUN_FILE,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plan to run, instead of the run's own.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Optimizer steps in all, instead of the run file's."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest checkpoint.")
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
            help=(
                "Start at step 0 though there are checkpoints; what is there is moved to earlier/."
            ),
        ),
    ] = False,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse",
            help=(
                "Run the plan on emulated devices: real processes, messages and schedule,"
                " computing is "
                "waiting for as long as the profile says. See `rehearse` in the run file."
            ),
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
            help=(
                "With --dry-run: let every distinct stage take a step on a fake device of this"
                " kind, and show its memory "
                "beside the plan's, its messages, kernels and waits."
            )
        ),
    ] = None,
    emit: Annotated[
        Emit | None,
        typer.Option(
            help="Write scripts that start the ranks on the cluster's hosts, instead of starting "
            "them here."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder for what --emit writes, instead of one in the run's."
        ),
    ] = None,
    profile_steps: Annotated[
        str | None,
        typer.Option(
            metavar="A:B",
            help=(
                "Record torch's profile of the steps from A to before B, a file per rank in the"
                " run's "
                "traces/kineto."
            ),
        ),
    ] = None,
    preflight: Annotated[
        bool,
        typer.Option(
            "--preflight",
            help="Let the ranks meet, compare files and data, try out their groups, and end.",
        ),
    ] = False,
    json_mode: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train by the plan, or rehearse it on emulated devices; write checkpoints and traces."""
    console = Console(json_mode=json_mode, quiet=quiet)
    opened = open_run(run_file)
    check_modes(origin, rehearse, dry_run, device, emit, out)
    check_start(resume, restart, origin)
    profiled = steps_to_profile(profile_steps, rehearse, preflight)
    from disttrain_cli.planning.check import refuse_not_run

    weights = find_origin(origin)
    chosen, profile = checked_plan(opened, plan)
    total = steps if steps is not None else opened.file.train.steps
    if profiled is not None:
        from disttrain_cli.runtime.train import check_profiled

        check_profiled(profiled, total)
    if device is not None:
        from disttrain_cli.commands.dry_run import show_steps

        if not show_steps(console, opened, chosen, profile):
            raise SystemExit(1)
    elif dry_run:
        begin = partial(
            next_command,
            "train",
            run_file,
            plan=plan,
            steps=steps,
            profile_steps=profile_steps,
            **{"from": origin},
            resume=resume,
            restart=restart,
            rehearse=rehearse,
        )
        _show_dry_run(console, opened, chosen, profile, emit, rehearse, begin)
    elif rehearse:
        from disttrain_cli.commands.rehearsal import run_rehearsal

        run_rehearsal(console, run_file, opened, chosen, profile, steps, resume)
    elif emit is not None:
        refuse_not_run(chosen, opened.file, profile)
        if not preflight:
            say_start(opened, total, weights, resume, console.note)
        write_scripts(
            console,
            opened,
            chosen,
            profile,
            emit,
            plan=plan or opened.dir.plan,
            out=out,
            steps=steps,
            resume=resume,
            restart=restart,
            preflight=preflight,
            profile_steps=profiled,
            origin=weights,
        )
    elif preflight:
        refuse_not_run(chosen, opened.file, profile)
        try_out(console, opened, chosen, profile)
    else:
        again = next_command("train", run_file, plan=plan, steps=steps)
        with _ways_on(opened, again), console.progress() as progress:
            live = LiveStep(progress)
            result = train(
                opened,
                plan=chosen,
                steps=steps,
                resume=resume,
                restart=restart,
                origin=origin,
                profile_steps=profiled,
                on_step=live.on_step,
                progress=live,
                note=console.note,
            )
        console.result(result, result.run_dir)
        show_result(console, run_file, result, chosen, profile)
        _say_next(console, run_file, opened, result, again)


@contextmanager
def _ways_on(run: Run, again: str) -> Iterator[None]:
    """Have a lost rank's error say how to go on; `again` is the command."""
    from disttrain_cli.runtime.checkpoints.folder import latest

    try:
        yield
    except RankLostError as error:
        newest = latest(run.dir.checkpoints)
        error.next_step = (
            f"Go on from {newest.name}: {again} --resume"
            if newest
            else f"{error.next_step}\nThere is no checkpoint yet; start again: {again}"
        )
        raise


def _say_next(console: Console, run_file: Path, run: Run, result: TrainResult, again: str) -> None:
    """The command to run next; SystemExit where a signal or a stop file ended the run."""
    if result.stopped_by is not None:
        done = result.steps[-1]["step"] + 1 if result.steps else 0
        console.note(f"Stopped by {result.stopped_by} after step {done}.")
        console.hint(f"{again} --resume")
        raise SystemExit(130 if result.stopped_by == "SIGINT" else 143)
    console.hint(
        next_command("analyze", run_file)
        if run_file == DEFAULT_RUN_FILE
        else shlex.join(["disttrain", "analyze", short_path(run.dir.root)])
    )


def _show_dry_run(
    console: Console,
    run: Run,
    chosen: Plan,
    profile: Profile,
    emit: Emit | None,
    rehearse: bool,
    begin: Callable[..., str],
) -> None:
    """Ranks, groups, hosts and commands; `begin` is the command with further options."""
    from disttrain_cli.planning.check import not_run

    show_ranks(console, run, chosen, profile, emit, begin())
    if rehearse:
        _show_rehearsal(console, chosen, run.file)
    for reason in not_run(chosen, run.file, profile):
        console.note(f"Training does not run {reason.what} yet ({reason.why}): {reason.next_step}.")
    elsewhere = run.file.cluster.nodes > 1 and emit is None and not rehearse
    console.hint(begin(emit="slurm" if elsewhere else emit))


def _show_rehearsal(console: Console, chosen: Plan, run: RunFile) -> None:
    from disttrain_cli.runtime.rehearsal.setting import setting_of

    setting = setting_of(run, chosen)
    console.say(
        f"A rehearsal starts {setting.processes} processes, each for at most"
        f" {setting.gpus_per_process} GPUs of a stage, at {setting.time_scale:g} s here per second"
        " of the cluster."
    )
