"""The launcher's side of a training job: prepares the run's folder, starts the ranks, and collects
what they report."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from disttrain_cli.calls import argument, call
from disttrain_cli.data.epochs.mixture import mixture_of
from disttrain_cli.data.index.index_checks import check_profiled_data
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.latents import described
from disttrain_cli.data.metrics import check_scores
from disttrain_cli.data.packing import SequenceStream
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.runtime.checkpoints.folder import best_of, latest
from disttrain_cli.runtime.checkpoints.phases import check_begins
from disttrain_cli.runtime.launching.devices import visible_devices
from disttrain_cli.runtime.launching.payload import PREFLIGHT, TRAIN, payload_of
from disttrain_cli.runtime.launching.starts import (
    Reports,
    alone,
    check_fresh,
    job_of,
    run_ranks,
    step_to_resume,
)
from disttrain_cli.runtime.launching.supervise import (
    Planned,
    Replanned,
    Replanner,
    Supervisor,
    merged,
    stop_request,
)
from disttrain_cli.runtime.outputs.during import During, sample
from disttrain_cli.runtime.watching.core_wait import OtherProcesses
from disttrain_cli.spec.learning import Learning
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.samples import Samples


class TrainResult(BaseModel):
    """What `train --json` prints."""

    run_dir: str
    planned: Planned = Field(exclude=True)  # of the last start
    steps: list[dict[str, Any]]
    skipped_samples: list[dict[str, str]]
    resumed_from_step: int | None
    # folder of the checkpoint or export with whose weights it began
    started_from: str | None = None
    checkpoint: str | None  # the newest, or with train.evaluation.keep_best the best
    trace: str
    images: list[str]
    samples: Samples | None = None  # what the trained model drew and wrote, where it did
    learning: Learning = Learning("too early to say")
    restarts: list[str] = []  # why ranks were started again
    replans: list[Replanned] = []  # those of them that went on with another plan
    # mean number of cores of this host that other processes held; None where that is not known
    other_cores: float | None = None
    stopped_by: str | None = None  # which of `watch.REASONS` ended the run before its last step


def train(
    run: Run,
    plan: Plan,
    profile: Profile,
    *,
    steps: int | None = None,
    resume: bool = False,
    restart: bool = False,
    profile_steps: range | None = None,
    origin: Path | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
    note: Callable[[str], object] = lambda sentence: None,
    replanner: Replanner | None = None,
) -> TrainResult:
    """Run the plan to `steps` optimizer steps (the run file's, if not given) and generate sample
    images.

    SIGTERM and SIGINT end it after the step under way, with a checkpoint; a rank that dies or hangs
    starts it again, `train.restarts` times, and so does a better plan of `replanner`.

    The plan must have been checked against the run and profile (`planning.check`). A fresh start
    begins with the weights of `origin`, if given (`checkpoints.origin`). `resume` goes on from the
    newest checkpoint; where there is one, `restart` starts at step 0 and moves what is there to
    `earlier/`. Of the steps in `profile_steps` every rank leaves torch's profile. `note` is called
    with sentences about the weights that it starts from, once they are known to fit.

    Raises:
        SpecError: the plan's ranks belong on several hosts, there is nothing to resume from, or
            there is, and it is not said what to do with it; or a folder of the run cannot be
            written.
        DataError: what `samples.judge` needs is not installed.
        UsageError: the run has none of the steps to profile, or is past them.
        MismatchError: the dataset or the checkpoint is not the one of the profile, or no
            preprocessing worker is of this run.
        RankFailedError: a rank failed.
    """
    _check_one_host(run, plan, profile)
    check_scores(run.file.samples)
    index = _checked_index(run, profile)
    root, total = run.dir, steps if steps is not None else run.file.train.total_steps
    resumed = step_to_resume(run, profile, root, total) if resume else None
    if not (resume or restart):
        check_fresh(root)
    if not resume:
        check_begins(profile)
    if profile_steps is not None:
        check_profiled(profile_steps, total, resumed or 0)
    if run.file.preprocess.addresses:
        from disttrain_cli.data.serving.client import check_workers

        check_workers(run, plan.plan, index, profile, total, progress)
    batch = run.file.train.global_batch_size
    mixture = mixture_of(index, run.file.train.seed, profile.data, batch)
    SequenceStream(mixture, progress).epoch_of((resumed or 0) * batch)  # before ranks wait for it
    rows: list[dict[str, Any]] = []

    def take(step: dict[str, Any]) -> None:
        rows.append(step)
        if on_step is not None:
            on_step(step)

    during = During(run, profile, total, progress)
    said_once = cache(note)  # restarts repeat it

    def start(planned: Planned, resume: bool, watch: Callable[[], None]) -> Reports:
        def look() -> None:
            during.look()
            watch()

        return run_ranks(
            root,
            job_of(run, *planned),
            TRAIN,
            planned.plan.plan.gpus_used,
            payload_of(run, *planned, profile_steps, origin),
            steps=total,
            resume=resume,
            on_step=take,
            progress=progress,
            note=said_once,
            watch=look,
            variables=visible_devices(
                planned.profile.device.kind,
                planned.profile.device.count,
                planned.plan.plan.left_out,
                os.environ,
            ),
        )

    others = OtherProcesses()
    with closing(during), stop_request() as request:
        went = Supervisor(
            root,
            Planned(plan, profile),
            run.file.train.restarts,
            run.file.train.longest_hang_s,
            request,
            progress,
            lambda: len(rows),
            replanner,
        ).run(resume, start)
    other_cores = others.cores()
    spec = run.file.train.evaluated
    best = best_of(root.checkpoints) if spec and spec.keep_best else None
    newest = best or latest(root.checkpoints)
    samples = None
    if newest is not None and not went.stopped:
        progress("sampling", 0, 0)
        samples = sample(run, went.planned.profile, newest)
        asked = run.file.samples
        if samples is not None and (asked.answers or asked.metrics) and not samples.answers:
            why = "the data have no held-out conversation" if asked.answers else "it is 0"
            progress(f"warning: samples.answers: nothing was answered, {why}", 0, 0)
    return TrainResult(
        run_dir=str(root.root),
        planned=went.planned,
        steps=merged(rows),
        skipped_samples=_skipped(run, index),
        resumed_from_step=resumed,
        started_from=str(origin) if origin else None,
        checkpoint=str(newest) if newest else None,
        trace=str(root.traces),
        images=(
            [str(root.images / newest.name / one.file) for one in samples.drawn]
            if samples and newest
            else []
        ),
        samples=samples,
        restarts=went.restarts,
        replans=went.replans,
        other_cores=other_cores,
        stopped_by=went.stopped,
    )


def preflight(run: Run, plan: Plan, profile: Profile, *, progress: Progress = silent) -> list[str]:
    """Start the ranks, let them meet and try out their groups, and end; returns what rank 0 told.

    Raises:
        MismatchError: the dataset is not the one of the profile.
        RankFailedError: something does not work; the rank says what.
    """
    _checked_index(run, profile)
    told: list[str] = []

    def hear(what: str, done: float, total: int) -> None:
        told.append(what)
        progress(what, done, total)

    folder = run.dir.preflight
    with alone(folder):
        run_ranks(
            folder,
            job_of(run, plan, profile),
            PREFLIGHT,
            plan.plan.gpus_used,
            payload_of(run, plan, profile),
            steps=0,
            resume=True,
            on_step=None,
            progress=hear,
        )
    return told[1:]  # the first is the launcher's own


def check_profiled(steps: range, total: int, first: int = 0) -> None:
    """UsageError where a run of the steps from `first` to before `total` does not reach the steps
    to profile."""
    if steps.stop > total:
        raise UsageError(
            f"{argument('profile_steps', steps)} goes beyond the run's last step",
            f"the run has {total} steps, numbered from 0, so the range may end at {total}",
            "Give more steps, or an earlier range, such as"
            f" {argument('profile_steps', range(max(0, total - 3), total))}",
        )
    if steps.stop <= first:
        raise UsageError(
            f"{argument('profile_steps', steps)} is past",
            f"the run goes on from its checkpoint of step {first}",
            "Profile later steps:"
            f" {argument('profile_steps', range(first, min(total, first + 3)))}",
        )


def _check_one_host(run: Run, plan: Plan, profile: Profile) -> None:
    """SpecError where ranks with devices of their own belong on several hosts: they are not started
    from here."""
    cluster = run.file.cluster
    if (
        profile.device.kind == "cuda"
        and cluster.nodes > 1
        and plan.plan.gpus_used > cluster.gpus_per_node
    ):
        raise SpecError(
            f"The plan's {plan.plan.gpus_used} ranks belong on several hosts",
            f"cluster.nodes: {cluster.nodes}, cluster.gpus_per_node: {cluster.gpus_per_node}",
            f"Write scripts that start them there: {call('emit', kind='slurm')}, or"
            f" {argument('kind', 'torchrun')}",
        )


def _checked_index(run: Run, profile: Profile) -> Index:
    """The data's index; data other than those profiled, or latents of others, are refused before
    anything is moved or started."""
    index = read_index(run, profile.inputs)
    check_profiled_data(index.fingerprint, profile)
    described(run, index)
    return index


def _skipped(run: Run, index: Index) -> list[dict[str, str]]:
    """Samples that indexing left out, and images that training could not decode."""
    skipped = [(f"{entry.shard}/{entry.key}".rstrip("/"), entry.reason) for entry in index.skipped]
    # several ranks may name the same sample, and a JSON may have several of one `id`
    of_ranks = {
        (name, reason)
        for path in run.dir.logs.glob("skipped-rank-*.json")
        for name, reason in json.loads(path.read_text())
    }
    return [{"sample": name, "reason": reason} for name, reason in sorted([*skipped, *of_ranks])]
