"""Rank of a training job: builds its stage, joins the others, and runs the steps.

Called by `launch`, or by `rank` under torchrun and srun, with the payload that `train.py` writes:
`run` (path of the run file), `plan`, `profile` (their JSON), `steps` (the last one), `logs` (a
folder), and of this start `name` (used in trace files), `resume` and `steps_file`, or `start_file`,
which holds these, and `console`, an open file for notes to the user. `profile_steps`: first step
that torch's profiler records and the one after the last, if any. `from`: folder of a fresh start's
initial weights, if any.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from disttrain_cli.calls import call
from disttrain_cli.costs.nccl import unpriced
from disttrain_cli.data.epochs.mixture import Mixture, mixture_of
from disttrain_cli.data.index.sample_index import Index, held_out
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.data.preparing import reads_files
from disttrain_cli.errors import MismatchError
from disttrain_cli.models.graph import describe as model_inputs
from disttrain_cli.models.graph import layer_table
from disttrain_cli.runtime.checkpoints import origin
from disttrain_cli.runtime.checkpoints.averaging import Average
from disttrain_cli.runtime.checkpoints.folder import (
    begun,
    describe,
    latest,
    step_of,
)
from disttrain_cli.runtime.engine.assemble import build_engine
from disttrain_cli.runtime.engine.faults import out_of_memory
from disttrain_cli.runtime.evaluation import Evaluation, Standing
from disttrain_cli.runtime.feeding import fetcher, fields_of, message_dtype
from disttrain_cli.runtime.launching.ending import reported_at_once
from disttrain_cli.runtime.launching.groups import check_groups
from disttrain_cli.runtime.launching.join import join
from disttrain_cli.runtime.launching.meeting import wait_until_built
from disttrain_cli.runtime.resources import peak_gib
from disttrain_cli.runtime.steps import first_step, run_task
from disttrain_cli.runtime.task import Task, publish
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.runtime.units.routes import place_of
from disttrain_cli.runtime.watching.device_clock import DeviceClock
from disttrain_cli.runtime.watching.judged import Judged
from disttrain_cli.runtime.watching.profiles import StepProfiler
from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
from disttrain_cli.runtime.watching.trackers import NewSamples, Tracking, figures_of, trackers_of
from disttrain_cli.runtime.watching.watch import StopRequests
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.rundir import stop_file, verdicts_file
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.stage_graph import RankCoords


def before_fork(payload: dict[str, Any]) -> list[str]:
    """Import the model's classes, build its layer table once, and check the model.

    The model is compared with the profile and with its initial weights. Returns notes on these for
    the user, which `--emit` shows by itself.

    Raises:
        MismatchError: the model is another than the profile's.
        SpecError: weights do not fit the model.
    """
    run = read_run(*payload["run"])
    if model_inputs(run) != ModelInputs.model_validate(payload["profile"]["inputs"]):
        raise MismatchError(
            "The model asks for other data than when it was profiled",
            "one of its folders has moved, or its configuration or image processor has changed",
            f"Profile and plan again: {call('profile')} && {call('plan')}",
        )
    layer_table(run)
    if "start_file" in payload:
        return []
    start = origin.where(Path(payload["from"]), run.dir.root) if "from" in payload else None
    notes = origin.starts(run, start, payload["resume"])
    return notes + (unpriced(os.environ) if payload["device"] == "cuda" else [])


def main(payload: dict[str, Any]) -> None:
    """Train until `payload["steps"]`."""
    with ExitStack() as stack, reported_at_once():
        job = join(payload, stack)
        task, coords = job.task, job.coords
        run, plan, rank0 = task.run, task.plan, coords.rank == 0
        table = layer_table(run)
        fields = fields_of([table[layer] for layer in coords.layers], coords.unit)

        stops = StopRequests(stop_file(task.dir.logs) if rank0 else None)
        tracks, samples = rank0 and run.file.train.track, None
        if tracks and run.file.samples.during:  # before building: drawings may end meanwhile
            samples = NewSamples(task.dir.images)
        if rank0:
            _remove_orders(task, job.index)
        now = wall_clock()
        tracer = Tracer(
            task.dir.traces,
            task.name,
            coords,
            now,
            task.say,
            DeviceClock(now) if job.device.type == "cuda" else None,
            run.file.train.keep_trace_steps,
            job.graph.world_size,
        )
        tracer.pulse = job.pulse
        stack.callback(tracer.close)
        start = (
            None
            if task.resume or "from" not in payload
            else origin.where(Path(payload["from"]), run.dir.root)
        )
        for note in origin.starts(run, start, task.resume) if rank0 else ():
            print(note)
        idle_gib = peak_gib(job.device)
        tracer.begin("preflight")
        grid = UnitGrid(job.graph, coords)
        with out_of_memory(coords, plan.plan, "preflight", -1):
            check_groups(grid, coords, job.device, run.file.train.timeout_s)
        tracer.begin("building")
        engine = build_engine(
            run,
            plan,
            job.graph,
            coords,
            job.device,
            tracer,
            origin.given_layers(run, start) if start else (),
            grid,
            partial(wait_until_built, job.store, job.graph, coords.rank, run.file.train.timeout_s),
        )
        if start is not None:
            origin.start_from(start, engine, run)
        average = Average(engine, run.file.train.ema) if run.file.train.ema else None
        newest = latest(task.dir.checkpoints) if task.resume else None
        first, spec = first_step(task, engine, average), run.file.train.evaluated
        evaluation = (
            Evaluation(
                engine,
                run,
                spec,
                job.index,
                fields,
                task.steps,
                Standing(**describe(newest).get("held_out", {})) if newest else None,
            )
            if spec and job.index.held_count
            else None
        )
        if rank0 and evaluation is not None:
            task.say(evaluation.plan)
        loader = stack.enter_context(open_loader(task, job.index, coords, fields, first))
        profiler = StepProfiler(
            range(*payload.get("profile_steps") or (0,)),
            task.dir.traces,
            task.name,
            tracer,
            coords.rank,
            job.device,
            task.say,
        )
        tracking = (
            Tracking(
                trackers_of(run, step_of(newest) if newest else None, task.say),
                figures_of(plan),
                Judged(verdicts_file(task.dir.logs)),
                samples,
            )
            if tracks
            else None
        )
        run_task(
            task,
            first,
            engine,
            loader,
            fetcher(loader, job.device, message_dtype(run.file.train), place_of(coords)),
            stops,
            [profiler, evaluation, tracking],
            average,
            idle_gib,
        )
        if loader.skipped:
            Path(task.dir.logs, f"skipped-rank-{coords.rank:05d}.json").write_text(
                json.dumps([[f"{s.shard}/{s.key}", s.reason] for s in loader.skipped])
            )


def _remove_orders(task: Task, index: Index) -> None:
    """Remove orders of the data that the run does not need from its newest checkpoint on."""
    train, batch = task.run.file.train, task.run.file.train.global_batch_size
    SequenceStream(mixture_of(index, train.seed, task.profile.data, batch)).remove_unneeded(
        begun(task.dir.checkpoints).step * batch,
        [Mixture(held_out(index), train.seed)] if train.evaluation and index.held_count else [],
    )


def preflight(payload: dict[str, Any]) -> None:
    """Join the other ranks, create and test the process groups, and end.

    Rank 0 reports how long each took.
    """
    with ExitStack() as stack, reported_at_once():
        job = join(payload, stack)
        job.pulse.begin("preflight")
        with out_of_memory(job.coords, job.task.plan.plan, "preflight", -1):
            took_s = check_groups(
                UnitGrid(job.graph, job.coords),
                job.coords,
                job.device,
                job.task.run.file.train.timeout_s,
            )
        if job.coords.rank == 0:
            took = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in took_s.items())
            publish(
                job.task.reports,
                {
                    "note": f"rank 0's groups over {dist.get_backend()}: {took}",
                    "done": 0,
                    "total": 0,
                },
            )
        dist.barrier()


def open_loader(
    task: Task, index: Index, coords: RankCoords, fields: set[str], first: int
) -> Loader:
    """Return a rank's loader over the run file's workers, or over its own threads.

    A stage that reads no file needs no worker, except for an ordering policy with a search. The
    reasons why workers make a rank wait are reported.
    """
    run, layout, profile = task.run, task.plan.plan, task.profile
    known: dict[str, Any] = {
        "unit": coords.unit.name,
        "replica": coords.replica,
        "fields": fields,
        "first_step": first,
    }
    searches = run.file.train.ordering_on(profile.device.kind) == "best"
    if not run.file.preprocess.addresses or not (searches or reads_files(fields)):
        return Loader(run, Orders(run.file, layout, index, profile, progress=_log), **known)
    from disttrain_cli.data.serving.client import PulledOrders, Workers

    def say(what: str, done: float, total: int) -> None:
        _log(what, done, total)
        publish(task.reports, {"note": what, "done": done, "total": total})

    workers = Workers(run, layout, index, profile, say)
    orders = (
        PulledOrders(run.file, layout, index, profile, workers)
        if searches
        else Orders(run.file, layout, index, profile, progress=_log)
    )
    return Loader(run, orders, source=workers, **known)


def _log(what: str, done: float, total: int) -> None:
    print(f"{what} {done}/{total}" if total else what, flush=True)
