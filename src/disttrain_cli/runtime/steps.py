"""Step loop of a rank: train until the last step or a stop request, and call the hooks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

from disttrain_cli.data.slots import StepOrder
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints.averaging import Average
from disttrain_cli.runtime.checkpoints.folder import made_from, recorded
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.optimizer import set_lrs
from disttrain_cli.runtime.hooks import Data, Hook, Step
from disttrain_cli.runtime.launching.ending import reported_at_once
from disttrain_cli.runtime.reports import Reports
from disttrain_cli.runtime.resources import Resources
from disttrain_cli.runtime.task import Task
from disttrain_cli.runtime.watching.watch import StopRequests
from disttrain_cli.spec.rundir import stopped_file
from disttrain_cli.spec.whole import write_whole

FetchOf = Callable[[StepOrder], Callable[[int], Batch]]


def first_step(task: Task, engine: UnitEngine, average: Average | None = None) -> int:
    """Return the step at which this start begins, with the newest checkpoint loaded if it resumes.

    Raises what `checkpoint.load` raises.
    """
    if not task.resume:
        return 0
    made = made_from(task.run, task.profile)
    return checkpoint.resume(task.dir.checkpoints, made, engine, average)


def run_task(
    task: Task,
    first: int,
    engine: UnitEngine,
    data: Data,
    fetch_of: FetchOf,
    stops: StopRequests,
    hooks: Iterable[Hook | None] = (),
    average: Average | None = None,
    idle_gib: float | None = None,
) -> None:
    """Train the steps of a task from `first` on, with checkpoints and reports.

    If a stop is requested, the reason is left for the launcher (`rundir.stopped_file`).

    Args:
        hooks: of this kind of job, added to those of every job; None for those that are not in use.
        average: of the weights, to be saved.
        idle_gib: memory of the process before it had a stage; None: memory is not recorded.

    Raises:
        NotFiniteError, OutOfMemoryError: as `UnitEngine.run_step`; then nothing is saved.
        DisttrainError: a checkpoint could not be written.
    """
    spec = task.run.file.train
    saver = checkpoint.Saver(
        task.dir.checkpoints,
        recorded(task.run, task.profile),
        engine,
        spec.checkpoint.keep,
        average,
        spec.evaluated is not None and spec.evaluated.keep_best,
        spec.checkpoint.every_steps,
    )
    resources = Resources(task, first, engine, idle_gib)
    reports = [] if engine.coords.rank else [task.narration, Reports(task, engine, data)]
    called = [
        hook for hook in (*hooks, average, resources, stops, *reports, saver) if hook is not None
    ]
    stopped = run_steps(range(first, task.steps), engine, data, fetch_of, called)
    if stopped and os.environ["LOCAL_RANK"] == "0":  # every host's script may read it
        write_whole(stopped_file(task.dir.logs), stopped)


def run_steps(
    steps: range, engine: UnitEngine, data: Data, fetch_of: FetchOf, hooks: Sequence[Hook]
) -> str:
    """Train the steps, or until a rank's stop request or a hook ends them.

    Returns the one of `watch.REASONS` that ended them before the last step, or "".
    """
    tracer, measured = engine.tracer, dict[str, float]()

    def measure() -> list[float]:
        for hook in hooks:
            measured.update(hook.measure())
        return list(measured.values())

    with ExitStack() as stack, reported_at_once():
        for hook in hooks:
            stack.enter_context(hook)
        for number in steps:
            tracer.step = number
            tracer.begin("order")
            order = data.order(number)
            engine.get_ready()
            for hook in hooks:
                hook.begin(number)
            start_ns, skipped = tracer.now(), engine.skipped_steps
            set_lrs(engine.optimizer, engine.train_spec, number)
            engine.run_step(order, fetch_of(order), measure)
            step = Step(
                number,
                order,
                last=number == steps[-1],
                updated=engine.skipped_steps == skipped,
                largest=dict(zip(measured, engine.largest, strict=True)),
                start_ns=start_ns,
            )
            for hook in hooks:
                hook.stepped(step)
            step.end_ns = tracer.now()
            for hook in hooks:
                hook.ended(step)
            step.saves |= step.ending
            for hook in hooks:
                hook.reported(step)
            tracer.end_step()
            if step.ending:
                return "" if step.last or step.ends else step.stop
    return ""
