"""Runs: `train`, `rehearse` on emulated devices, `preflight`, and `emit` for other launchers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.api import measuring, planning
from disttrain_cli.api.measuring import passes_of
from disttrain_cli.api.opening import Note, check_choice, check_number, ignore, open_run, path_of
from disttrain_cli.api.planning import checked_plan
from disttrain_cli.api.ranks import Kind, default_folder
from disttrain_cli.calls import DEFAULT_RUN_FILE, argument, call, now_read_by, read_by
from disttrain_cli.errors import UsageError
from disttrain_cli.naming import short_path
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.runtime.launching.emit.scripts import Emitted
    from disttrain_cli.runtime.rehearsal.rehearse import RehearsalResult
    from disttrain_cli.runtime.train import TrainResult
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import Run


@dataclass(frozen=True)
class Preflight:
    """The number of ranks that joined, and the messages of rank 0."""

    ranks: int
    reports: list[str]


def train(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    plan: Plan | Path | str | None = None,
    steps: int | None = None,
    resume: bool = False,
    restart: bool = False,
    origin: Path | str | None = None,
    profile_steps: range | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
    note: Note = ignore,
) -> TrainResult:
    """Train by the plan, with a process per rank on this host; write checkpoints and traces.

    A run without a plan is planned first, and profiled if it has no profile either, where its
    cluster is this machine (`plans_itself`).

    Args:
        plan: the plan to run, or its file, instead of the run's own.
        steps: total number of optimizer steps, instead of the run file's.
        resume: continue from the newest checkpoint.
        restart: start at step 0 although there are checkpoints; existing outputs are moved to
            `earlier/`.
        origin: run, checkpoint or export whose weights are loaded for step 0.
        profile_steps: steps for which every rank writes a torch profiler trace.
        on_step: called with the figures of every finished step (`watching.lines.reported`).

    Raises:
        UsageError: arguments exclude each other.
        MismatchError, SpecError: the plan does not belong to the run file and profile, or asks for
            something that training does not support.
        RankFailedError: a rank failed; its log is named.
        DisttrainError: another training of this run is under way.
        Others as `runtime.train.train`.
    """
    check_start(resume, restart, origin)
    check_number("steps", steps, 1)
    opened = open_run(run)
    from disttrain_cli.data.metrics import check_scores
    from disttrain_cli.mitigation.learned import learned
    from disttrain_cli.mitigation.replanning import monitored_job
    from disttrain_cli.planning.check import refuse_not_run
    from disttrain_cli.runtime import train as running
    from disttrain_cli.runtime.launching.starts import alone, check_fresh

    weights = find_origin(origin)
    lacks_plan = plan is None and not opened.dir.plan.is_file()
    if lacks_plan and (resume or not plans_itself(opened)):
        checked_plan(opened)  # raises before the run's folder is written
    again = _again("train", plan=plan, steps=steps, profile_steps=profile_steps, origin=origin)
    once = cache(note)  # a profile has notes of the start, too: the folders of weights
    with alone(opened.dir):
        if lacks_plan:
            check_scores(opened.file.samples)
            if not restart:
                check_fresh(opened.dir, again)
            _plan_here(opened, progress, once)
        chosen, costs = checked_plan(opened, plan)
        total = steps if steps is not None else opened.file.train.total_steps
        if profile_steps is not None:
            running.check_profiled(profile_steps, total)
        refuse_not_run(chosen, opened.file, costs)
        if not resume:
            opened.fetch_weights(progress)
        say_start(opened, total, note)
        if passes := passes_of(opened, costs, total):
            note(passes)
        file = Path(plan) if isinstance(plan, Path | str) else opened.dir.plan
        with monitored_job(opened, opened.dir, chosen, costs, file, note) as replanner:
            result = running.train(
                opened,
                chosen,
                costs,
                steps=steps,
                resume=resume,
                restart=restart,
                profile_steps=profile_steps,
                origin=weights,
                on_step=on_step,
                progress=progress,
                note=once,
                again=again,
                replanner=replanner,
            )
    verdict = learned(opened, costs, result.samples, note)
    return result.model_copy(update={"learning": verdict})


def _again(function: str, **given: Any) -> Callable[..., str]:
    """Return what spells a call again, with `resume` or `restart`; to resume takes no origin."""
    known = {name: one for name, one in given.items() if isinstance(one, str | int | range | Path)}

    def again(**how: bool) -> str:
        left_out = ("origin",) if "resume" in how else ()
        kept = {name: one for name, one in known.items() if name not in left_out}
        return call(function, **kept, **how)

    return again


def plans_itself(run: Run) -> bool:
    """Return True if `train` makes the plan that a run lacks.

    It does so if the run's cluster is this machine and it has data to train on.
    """
    from disttrain_cli.spec.profile import read_profile

    cluster, path = run.file.cluster, run.dir.profile
    return not (
        cluster.nodes > 1
        or cluster.hostfile is not None
        or cluster.device.startswith("analytic:")
        or run.file.data.distribution is not None
        or (path.is_file() and read_profile(path).device.kind == "analytic")
    )


def _plan_here(run: Run, progress: Progress, note: Note) -> None:
    """Profile a run that has no profile, and plan it; raises as `profile` and `plan`."""
    reader = now_read_by()  # who called `train`, not this function
    if not run.dir.profile.is_file():
        path = measuring.profile(run, progress=progress, note=note).path
        note(f"Wrote {short_path(path)}: the run had no profile.")
    made = planning.plan(run, sensitivity=False, progress=progress, note=note)
    read_by(reader)
    note(f"Wrote {short_path(made.path)}: the run had no plan. {made.plan.plan.describe()}")


def check_start(resume: bool, restart: bool, origin: Path | str | None) -> None:
    """Raise UsageError if arguments ask for two different starts at once."""
    resuming, starting = argument("resume", True), argument("origin")
    if resume and restart:
        raise UsageError(
            f"{resuming} and {argument('restart', True)} exclude each other",
            "one resumes from the newest checkpoint, the other starts at step 0",
            "Use one of them.",
        )
    if origin is not None and resume:
        raise UsageError(
            f"{starting} cannot be combined with {resuming}",
            f"{resuming} continues with this run's weights; {starting} starts at step 0",
            "Remove one of the two.",
        )


def find_origin(origin: Path | str | None) -> Path | None:
    """Return the folder of the checkpoint or export that `origin` names; SpecError if none."""
    if origin is None:
        return None
    from disttrain_cli.runtime.checkpoints.origin import find

    return find(Path(origin))


def say_start(run: Run, total: int, note: Note) -> None:
    """Report modules that learn nothing in the last of `total` steps, and exposed secrets.

    A secret is a token that other users can read.
    """
    from disttrain_cli.data.serving.access import exposed
    from disttrain_cli.runtime.engine.schedule import beyond_schedule

    token = run.file.preprocess.token_file
    secrets = {"preprocess.token_file": None if token is None else run.resolve(token)}
    for sentence in [*beyond_schedule(run, total), *exposed(secrets)]:
        note(sentence)


def rehearse(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    plan: Plan | Path | str | None = None,
    steps: int | None = None,
    resume: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
    note: Note = ignore,
) -> RehearsalResult:
    """Run a plan on emulated devices: real processes, messages and schedule.

    Arguments are those of `train`. Where the run replans, the new plan is written to the
    rehearsal's own folder; the run's plan is unchanged.

    Raises:
        As `checked_plan` and `runtime.rehearsal.rehearse.rehearse`.
    """
    check_number("steps", steps, 1)
    opened = open_run(run)
    chosen, profile = checked_plan(opened, plan)
    from disttrain_cli.mitigation.replanning import goes_on_with, monitored_job
    from disttrain_cli.runtime.launching.starts import alone
    from disttrain_cli.runtime.rehearsal import rehearse as rehearsing

    folder = opened.dir.rehearsal
    with alone(folder):
        now = goes_on_with(folder, chosen) if resume else chosen
        if now is not chosen:
            note(f"The rehearsal continues with its last plan, {short_path(folder.plan)}.")
        with monitored_job(
            opened, folder, now, profile, folder.plan, note, emulated=True
        ) as replanner:
            return rehearsing.rehearse(
                opened,
                chosen,
                profile,
                now=now,
                steps=steps,
                resume=resume,
                on_step=on_step,
                progress=progress,
                replanner=replanner,
            )


def preflight(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    plan: Plan | Path | str | None = None,
    progress: Progress = silent,
) -> Preflight:
    """Start the ranks, compare their files and data, test their process groups, and end.

    Raises:
        As `checked_plan` and `runtime.train.preflight`.
    """
    opened = open_run(run)
    chosen, profile = _trained(opened, plan)
    from disttrain_cli.runtime.train import preflight as try_out

    return Preflight(chosen.plan.gpus_used, try_out(opened, chosen, profile, progress=progress))


def _trained(run: Run, plan: Plan | Path | str | None) -> tuple[Plan, Profile]:
    """Return a plan as `checked_plan` reads it; SpecError if training cannot run it."""
    from disttrain_cli.planning.check import refuse_not_run

    chosen, profile = checked_plan(run, plan)
    refuse_not_run(chosen, run.file, profile)
    return chosen, profile


def emit(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    kind: Kind,
    plan: Plan | Path | str | None = None,
    out: Path | str | None = None,
    steps: int | None = None,
    resume: bool = False,
    restart: bool = False,
    origin: Path | str | None = None,
    profile_steps: range | None = None,
    preflight: bool = False,
    note: Note = ignore,
) -> Emitted:
    """Write scripts or jobs that start the ranks on the cluster's hosts.

    Arguments that are not listed here are those of `train`.

    Args:
        kind: "torchrun", "slurm" (scripts), "jobset" (Kubernetes) or "skypilot".
        out: folder to write instead of `launch/` in the run's.
        preflight: the ranks run the checks of the function `preflight`, instead of training.

    Raises:
        As `train`; SpecError also where the hosts are too few.
    """
    check_start(resume, restart, origin)
    check_choice("kind", kind, Kind)
    check_number("steps", steps, 1)
    if preflight and profile_steps is not None:
        raise UsageError(
            f"{argument('profile_steps')} cannot be combined with {argument('preflight', True)}",
            "a preflight runs no step",
            "Remove one of the two.",
        )
    opened = open_run(run)
    from disttrain_cli.runtime.launching.emit.startable import check_planned, check_startable
    from disttrain_cli.runtime.launching.starts import check_fresh

    if not (resume or restart or preflight):
        given = {"plan": plan, "steps": steps, "profile_steps": profile_steps, "origin": origin}
        check_fresh(opened.dir, _again("emit", kind=kind, **given, out=out))
    folder = path_of(out) or default_folder(opened)
    file = opened.dir.plan if plan is None else folder / "plan.yaml"
    if isinstance(plan, Path | str):
        file = Path(plan)
    notes = check_startable(opened, kind, folder, file, preflight=preflight)
    weights = find_origin(origin)
    chosen, profile = _trained(opened, plan)
    for sentence in (*notes, *check_planned(opened, chosen, profile, kind)):
        note(sentence)
    total = steps if steps is not None else opened.file.train.total_steps
    from disttrain_cli.runtime.checkpoints.origin import starts
    from disttrain_cli.runtime.launching.emit import jobset, skypilot, slurm, torchrun
    from disttrain_cli.runtime.launching.emit.scripts import Start
    from disttrain_cli.runtime.train import check_profiled
    from disttrain_cli.spec.plan import Plan, write_plan

    if profile_steps is not None:
        check_profiled(profile_steps, total)
    if not preflight:
        for sentence in starts(opened, weights, resume):
            note(sentence)
        say_start(opened, total, note)
    if isinstance(plan, Plan):
        write_plan(file, plan)
    start = Start(
        total,
        resume=resume,
        preflight=preflight,
        profile_steps=profile_steps,
        restart=restart,
        origin=weights,
    )
    if kind == "torchrun":
        return torchrun.emit_torchrun(opened, chosen, profile, folder, start)
    emitter = {
        "slurm": slurm.emit_slurm,
        "jobset": jobset.emit_jobset,
        "skypilot": skypilot.emit_skypilot,
    }[kind]
    return emitter(opened, chosen, profile, folder, start, plan_file=file)
