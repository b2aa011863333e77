"""The four commands as functions, for notebooks and scripts: `profile`, `plan`, `train`, `analyze`.

The commands are made of them, so both read the same run file, leave the same files in `runs/NAME/`
and raise the same errors (`errors.DisttrainError`). Nothing is printed: `progress` is called while
something lasts, `note` with a sentence that a user should know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from disttrain_cli.errors import InfeasibleError, SpecError, UsageError
from disttrain_cli.naming import DEFAULT_RUN_FILE, short_path, with_named
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.analysis.compare import Change, Times
    from disttrain_cli.analysis.result.summary import Analysis
    from disttrain_cli.analysis.watching.looking import Look
    from disttrain_cli.planning.changes import Changes
    from disttrain_cli.planning.check import NotRun
    from disttrain_cli.planning.explain import Explanation
    from disttrain_cli.planning.predict import Step
    from disttrain_cli.planning.purchase import Offer
    from disttrain_cli.planning.ranges import Order
    from disttrain_cli.planning.sensitivity import Sensitivity
    from disttrain_cli.runtime.rehearsal.rehearse import RehearsalResult
    from disttrain_cli.runtime.train import TrainResult
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.rundir import RunDir
    from disttrain_cli.spec.runfile import Run, RunFile

Strategy = Literal["auto", "disaggregated", "megatron", "distmm", "paper"]
Note = Callable[[str], None]


@dataclass(frozen=True)
class ProfileResult:
    """What everything costs, and where that was written."""

    profile: Profile
    path: Path
    passes: str = ""  # over the data in training, in words; empty where that is not one number


@dataclass(frozen=True)
class PlanResult:
    """The best plan, why it is the best, and where it was written."""

    plan: Plan
    path: Path
    picture: Path | None  # SVG of the step; None where the plan went to a pipe or device
    explanation: Explanation
    step: Step  # as simulated
    sensitivity: Sensitivity | None  # None where it was not asked for, or nothing else fits
    previous: Path  # the plan that was there before, if any
    changes: Changes | None  # against the previous plan, where both can be compared
    not_run: list[NotRun]  # what training refuses; a rehearsal does not
    gpus: int  # what the plan had to fit into
    orders: dict[str, Order]  # runners-up and baselines beside the plan, at other costs


@dataclass(frozen=True)
class AnalyzeResult:
    """What the traces say, the report page, and the changes against an earlier run."""

    analysis: Analysis
    report: Path | None  # None where the traces are not in a run's folder and no file was named
    changes: list[Change]
    times: Times | None  # what steps took in both; None where no other run was named


def ignore(note: str) -> None:
    """Take no note."""


def open_run(run: Run | Path | str, *settings: str) -> Run:
    """A run that was read already, or the run file of this name; a folder stands for the
    `disttrain.yaml` in it.

    Args:
        settings: changes of the run file, such as "train.steps=100"; the values are YAML.

    Raises:
        SpecError: it is missing or wrong; the line is named.
        UsageError: a setting is wrong.
    """
    if not isinstance(run, Path | str):
        return run
    from disttrain_cli.spec.runfile import read_run

    path = Path(run)
    return read_run(path / DEFAULT_RUN_FILE if path.is_dir() else path, *settings)


def not_over(out: Path | None, *inputs: Path) -> None:
    """Raise UsageError where `out`, a file to write, is one of those that are read."""
    for path in inputs:
        if out is not None and out.exists() and path.exists() and out.samefile(path):
            raise UsageError(
                f"{out} is what this command reads",
                "it would be replaced",
                "Name another file to write.",
            )


def check_device_name(device: str) -> None:
    """UsageError where no device is called so."""
    from disttrain_cli.spec.runfile.cluster import DEVICE

    if not DEVICE.allows(device):
        raise UsageError(
            f"There is no device {device!r}",
            f"allowed: {DEVICE.words}",
            "disttrain profile --help",
        )


def profile(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    device: str = "auto",
    reindex: bool = False,
    out: Path | None = None,
    progress: Progress = silent,
    note: Note = ignore,
) -> ProfileResult:
    """Find out what every module, link and sample costs, and write it to `profile.json`.

    Args:
        device: "auto", "cpu", "cuda", or "analytic:NAME" for a device of the hardware catalogue.
        reindex: read all shards again, also where some changed since they were indexed.
        out: file to write instead of the one in the run's folder.

    Raises:
        UsageError: no such device, or `out` is what is read. Others as `profiling.measure`.
    """
    check_device_name(device)
    opened = open_run(run)
    not_over(out, opened.path, opened.dir.index)
    from disttrain_cli.data.tokenizer import doubtful_template
    from disttrain_cli.models.adapters import check_adapters
    from disttrain_cli.models.graph import layer_table
    from disttrain_cli.models.weights import starting_weights
    from disttrain_cli.profiling.measure import measure
    from disttrain_cli.spec.whole import write_whole

    stated = opened.file.cluster.device
    if device != "auto" and stated not in ("auto", device):
        note(f"cluster.device is {stated}; this profile, and plans from it, are of {device}.")
    layer_table(opened)  # what is wrong with the model is named before the data is read
    adapters = check_adapters(opened, opened.file.model.order)
    for sentence in starting_weights(opened) + adapters + doubtful_template(opened):
        note(sentence)
    if reindex:
        _reindex(opened, progress)
    costs = measure(opened, device, progress)
    path = write_whole(out or opened.dir.profile, costs.model_dump_json(indent=2) + "\n")
    return ProfileResult(costs, path, _passes(opened, costs))


def _reindex(run: Run, progress: Progress) -> None:
    """Index the data anew; the old index stays until the new one is whole."""
    from disttrain_cli.data.index import build_index
    from disttrain_cli.data.shard_files import drop_files
    from disttrain_cli.models.graph import describe

    drop_files(run)
    build_index(run, describe(run), progress)


def plan(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    profile: Path | None = None,
    gpus: int | None = None,
    strategy: Strategy = "auto",
    top: int = 3,
    out: Path | None = None,
    sensitivity: bool = True,
    progress: Progress = silent,
    note: Note = ignore,
) -> PlanResult:
    """Choose GPUs and parallelism for every module, and write them to `plan.yaml`.

    Args:
        profile: file to plan from instead of the run's own; its device may be another.
        gpus: use at most so many devices, not the whole cluster.
        strategy: which layouts are searched: auto, any grouping of modules into units, or those of
            a baseline.
        top: how many runner-up plans to keep.
        out: file to write instead of the one in the run's folder.
        sensitivity: also ask what other clusters, data and batches would change (seconds).

    Raises:
        InfeasibleError: no layout fits; the limit in the way is named.
        MismatchError: the profile is of another model, cluster or device.
        SpecError: the run file or the profile is missing or wrong.
        UsageError: `out` is what is read.
    """
    opened = open_run(run)
    from disttrain_cli.planning.changes import changes, not_comparable
    from disttrain_cli.planning.check import check_device, not_run
    from disttrain_cli.planning.draws import Draws
    from disttrain_cli.planning.explain import explain
    from disttrain_cli.planning.picture import draw
    from disttrain_cli.planning.predict import simulated_step
    from disttrain_cli.planning.ranges import (
        order_sentence,
        orders_of,
        range_sentence,
        with_range,
    )
    from disttrain_cli.planning.sensitivity import sensitivity as ask_sensitivity
    from disttrain_cli.planning.sharing import sharing_sentence
    from disttrain_cli.planning.solve import cluster_of, ranked_as, solve
    from disttrain_cli.planning.units import units_of
    from disttrain_cli.simulation.faults import check_faults
    from disttrain_cli.spec.hostfile import read_hostfile
    from disttrain_cli.spec.plan import write_plan
    from disttrain_cli.spec.profile import read_profile
    from disttrain_cli.spec.whole import is_own_file

    profile_path = profile or opened.dir.profile
    not_over(out, opened.path, profile_path, opened.dir.index)
    costs = read_profile(profile_path)
    if profile is None:  # who names a profile means its device
        check_device(opened.file, costs)
    costs = _resized(opened, costs, profile_path, note)
    if opened.file.cluster.hostfile is not None:
        read_hostfile(opened.resolve(opened.file.cluster.hostfile))
    if len(costs.data.phases) > 1:
        first = costs.data.priced_step
        note(f"Priced are the data from step {first:,} on, the phase with the most steps to go.")
    cluster = cluster_of(opened.file, costs, gpus)
    ranked = ranked_as(cluster)
    draws = Draws(costs, ranked)
    best = solve(opened.file, costs, gpus=gpus, strategy=strategy, top=top, draws=draws)
    predicted = with_range(best.predicted, costs, best.plan, ranked, draws)
    best = best.model_copy(update={"predicted": predicted})
    orders = orders_of(best, costs, ranked, draws)
    previous = out if out is not None and is_own_file(out) else opened.dir.plan
    before = _plan_before(previous, note)
    change = None
    if before is not None and (another := not_comparable(before, best)):
        note(f"Not compared with {short_path(previous)}: it was made for {another}.")
    elif before is not None:
        change = changes(before, best, opened.file, costs, cluster)
    used, there = best.plan.gpus_used, costs.device.count
    if used > there:
        nodes = -(-used // opened.file.cluster.gpus_per_node)
        note(
            f"The cluster has {there:,} of this plan's {used:,} devices: training needs"
            f" cluster.nodes: {nodes:,}."
        )
    path = write_plan(out or opened.dir.plan, best)
    step = simulated_step(costs, best.plan, cluster, draws=draws)
    picture = draw(path, step.pipeline, step.timeline, best.plan)
    explanation = explain(
        best,
        units_of(costs, cluster, best.plan),
        step,
        [
            sentence
            for sentence in (
                range_sentence(predicted),
                order_sentence(orders),
                sharing_sentence(best, costs, cluster),
                _passes(opened, costs),
            )
            if sentence
        ],
    )
    what_if = ask_sensitivity(costs, cluster, best.plan, progress) if sensitivity else None
    refused = not_run(best, opened.file, costs)
    try:
        check_faults(step.stages, opened.file.rehearse.faults, costs)
    except SpecError as error:
        note(f"Note: a rehearsal refuses this plan. {error.what}: {error.why}.")
    return PlanResult(
        plan=best,
        path=path,
        picture=picture,
        explanation=explanation,
        step=step,
        sensitivity=what_if,
        previous=previous,
        changes=change,
        not_run=refused,
        gpus=cluster.gpus,
        orders=orders,
    )


def _passes(run: Run, profile: Profile, steps: int | None = None) -> str:
    """Number of passes of training over the data, as a sentence; empty where phases of the data
    differ, or there are none."""
    train, given, data = run.file.train, run.file.data, profile.data
    train.count_epochs(data.sequences)
    if given.distribution is not None or given.curriculum:
        return ""
    steps, batch = steps or train.total_steps, train.global_batch_size
    passes = f"{steps * batch / data.sequences:,.3g} passes over {data.sequences:,} sequences"
    weights = data.phase_at(0).weights
    if any(weight != 1 for weight in weights):
        drawn = ", ".join(
            f"{name} × {weight:g}" for name, weight in zip(given.names, weights, strict=False)
        )
        passes += f" (in one, sources are drawn by weight: {drawn})"
    return f"Training {steps:,} steps × {batch:,} = {passes}"


def compare_clusters(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    gpus: Sequence[int] = (),
    devices: Sequence[str] = (),
    profile: Path | None = None,
    strategy: Strategy = "auto",
    progress: Progress = silent,
    note: Note = ignore,
) -> list[Offer]:
    """Plan for every number of every device, and say what training takes and costs there; no plan
    is written.

    Args:
        gpus: numbers of devices; those of the run file's cluster if none.
        devices: names of the hardware catalogue; the device of the profile, or of the run file, if
            none. The run's profile is used for its own device, others are computed.
        profile: file to plan from; its device is the only one.
        strategy: as `plan`.

    Raises:
        InfeasibleError: no layout fits any of them; others as `profile` and `plan`.
    """
    from disttrain_cli.planning.check import check_device
    from disttrain_cli.planning.draws import Draws
    from disttrain_cli.planning.purchase import offer
    from disttrain_cli.planning.ranges import with_range
    from disttrain_cli.planning.solve import cluster_of, ranked_as, solve
    from disttrain_cli.spec.prices import read_prices
    from disttrain_cli.spec.profile import read_profile

    opened = open_run(run)
    stated = opened.file.cluster.device.partition(":")[2]  # empty where it is one that is here
    path = profile or opened.dir.profile
    none_needed = devices or (stated and not profile)
    known = None if none_needed and not path.is_file() else read_profile(path)
    if known and not (profile or devices):
        check_device(opened.file, known)
    prices = read_prices(opened, stated or (known.device.name if known else ""))
    counts = gpus or [opened.file.cluster.gpus]
    names = [name.removeprefix("analytic:") for name in devices]
    offers: list[Offer] = []
    for device in names or [known.device.name if known else stated]:
        file, costs = _costs_on(opened, device, max(counts), known, progress, note)
        file.train.count_epochs(costs.data.sequences)
        for count in counts:
            progress("plan clusters", len(offers), len(counts) * max(1, len(devices)))
            cluster = ranked_as(cluster_of(file, costs, count))
            draws = Draws(costs, cluster)
            try:
                best = solve(file, costs, gpus=count, strategy=strategy, top=0, draws=draws)
            except InfeasibleError as error:
                offers.append(offer(costs, count, file.train.total_steps, prices, error.why))
                continue
            predicted = with_range(best.predicted, costs, best.plan, cluster, draws)
            best = best.model_copy(update={"predicted": predicted})
            offers.append(offer(costs, count, file.train.total_steps, prices, best))
    if all(one.unfit for one in offers):
        raise InfeasibleError(
            f"No {strategy} layout fits any of these clusters",
            "\n".join(f"{one.gpus:,} × {one.device}: {one.unfit}" for one in offers),
            "Name more devices or larger ones: disttrain plan --gpus N --device NAME",
        )
    return offers


def _costs_on(
    run: Run, device: str, gpus: int, known: Profile | None, progress: Progress, note: Note
) -> tuple[RunFile, Profile]:
    """The run file of a cluster of so many devices of a name, and its profile: `known` where it is
    that device's, else computed."""
    from disttrain_cli.planning.purchase import catalogue_name
    from disttrain_cli.planning.resize import computed, resized

    cluster = run.file.cluster
    changes: dict[str, Any] = {"nodes": max(cluster.nodes, -(-gpus // cluster.gpus_per_node))}
    its_own = known and device.lower() in (
        known.device.name.lower(),
        catalogue_name(known.device.name).lower(),
    )
    if not its_own and f"analytic:{device}".lower() != cluster.device.lower():
        figures = {"peak_tflops": None, "memory_gib": None}
        links = cluster.links.model_copy(update={"intra_node_gbps": None})
        if cluster.model_copy(update={**figures, "links": links}) != cluster:
            note(f"{device} has the catalogue's figures; those of the run file are not of it.")
        changes |= {**figures, "links": links}
    file = run.file.model_copy(update={"cluster": cluster.model_copy(update=changes)})
    if its_own and known:
        file = file if computed(known) else run.file
        return file, resized(file, known)
    from disttrain_cli.profiling.analytic import analytic_profile

    return file, analytic_profile(run.model_copy(update={"file": file}), device, progress)


def _resized(run: Run, profiled: Profile, path: Path, note: Note) -> Profile:
    """The profile for the cluster that the run file has now; the run's own, at `path`, is replaced.

    Raises:
        MismatchError, SpecError: as `plan`.
    """
    from disttrain_cli.planning.check import names_device
    from disttrain_cli.planning.resize import resized
    from disttrain_cli.spec.whole import write_whole

    wanted, before = run.file.cluster, profiled.cluster
    costs = resized(run.file, profiled)
    if costs is not profiled and path == run.dir.profile:
        write_whole(path, costs.model_dump_json(indent=2) + "\n")
    if (before.nodes, before.gpus_per_node) != (wanted.nodes, wanted.gpus_per_node):
        note(
            f"Profiled for {before.nodes} × {before.gpus_per_node} devices, planned for "
            f"{wanted.nodes} × {wanted.gpus_per_node}; layers cost the same on both."
        )
    if wanted.gpus_per_node > before.gpus_per_node:
        note("Larger TP sizes than were profiled are not tried; profile again to try them.")
    if not names_device(wanted.device, costs.device):
        note(
            f"Planned for {costs.device.name}, the device of the profile; "
            f"cluster.device: {wanted.device}."
        )
    return costs


def _plan_before(path: Path, note: Note) -> Plan | None:
    """The plan that is there already; None, and a note, where it cannot be read."""
    from disttrain_cli.spec.plan import read_plan

    if not path.is_file():
        return None
    try:
        return read_plan(path)
    except SpecError as error:
        note(f"Not compared with {short_path(path)}: {error.what}.")
        return None


def plans_itself(run: Run) -> bool:
    """True if `train` makes the plan that a run lacks: its cluster is this machine, and it has data
    to train on."""
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
    """Profile a run, where it has no profile, and plan it; raises as `profile` and `plan`."""
    if not run.dir.profile.is_file():
        note(
            f"Wrote {short_path(profile(run, progress=progress, note=note).path)}: the run had no"
            " profile."
        )
    made = plan(run, sensitivity=False, progress=progress, note=note)
    note(f"Wrote {short_path(made.path)}: the run had no plan. {made.plan.plan.describe()}")


def checked_plan(run: Run, plan: Plan | Path | None = None) -> tuple[Plan, Profile]:
    """A plan (the run's, if none is given), and the run's profile, from which it was made.

    A layout that was edited by hand is predicted again.

    Raises:
        MismatchError, SpecError: as `planning.check.check`, or one of the files is missing or
            wrong.
    """
    from disttrain_cli.planning.check import check, check_memory
    from disttrain_cli.planning.solve import with_own_prediction
    from disttrain_cli.spec.plan import read_plan
    from disttrain_cli.spec.profile import read_profile

    chosen = read_plan(plan or run.dir.plan) if plan is None or isinstance(plan, Path) else plan
    costs = read_profile(run.dir.profile)
    run.file.train.count_epochs(costs.data.sequences)
    check(chosen, run.file, costs)
    chosen = with_own_prediction(chosen, run.file, costs)
    check_memory(chosen, costs)
    return chosen, costs


def train(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    plan: Plan | Path | None = None,
    steps: int | None = None,
    resume: bool = False,
    restart: bool = False,
    origin: Path | None = None,
    profile_steps: range | None = None,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
    note: Note = ignore,
) -> TrainResult:
    """Train by the plan, with a process per rank on this host; write checkpoints and traces.

    A run that has no plan yet is planned first, and profiled where it has no profile either, if its
    cluster is this machine (`plans_itself`).

    Args:
        plan: the plan to run, or its file, instead of the run's own.
        steps: optimizer steps in all, instead of the run file's.
        resume: go on from the newest checkpoint.
        restart: start at step 0 though there are checkpoints; what is there is moved to `earlier/`.
        origin: run, checkpoint or export with whose weights step 0 begins.
        profile_steps: steps of which every rank leaves torch's profile.
        on_step: called with the figures of every finished step (`watching.lines.reported`).

    Raises:
        UsageError: arguments exclude each other.
        MismatchError, SpecError: the plan does not belong to the run file and profile, or asks for
            what training does not do.
        RankFailedError: a rank failed; its log is named.
        DisttrainError: another training of this run is under way.
        Others as `runtime.train.train`.
    """
    check_start(resume, restart, origin)
    opened = open_run(run)
    from disttrain_cli.analysis.job.files import recorded_steps
    from disttrain_cli.analysis.learning import learning
    from disttrain_cli.data.digits import check_judge
    from disttrain_cli.mitigation.looking_after import looked_after
    from disttrain_cli.planning.check import refuse_not_run
    from disttrain_cli.runtime import train as running
    from disttrain_cli.runtime.launching.starts import alone, check_fresh

    weights = find_origin(origin)
    lacks_plan = plan is None and not opened.dir.plan.is_file()
    if lacks_plan and (resume or not plans_itself(opened)):
        checked_plan(opened)  # raises before the run's folder is written
    with alone(opened.dir):
        if lacks_plan:
            check_judge(opened)
            if not restart:
                check_fresh(opened.dir)
            _plan_here(opened, progress, note)
        chosen, costs = checked_plan(opened, plan)
        total = steps if steps is not None else opened.file.train.total_steps
        if profile_steps is not None:
            running.check_profiled(profile_steps, total)
        refuse_not_run(chosen, opened.file, costs)
        if not resume:
            opened.fetch_weights(progress)
        say_start(opened, total, note)
        if passes := _passes(opened, costs, total):
            note(passes)
        file = plan if isinstance(plan, Path) else opened.dir.plan
        with looked_after(opened, opened.dir, chosen, costs, file, note) as replanner:
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
                note=note,
                replanner=replanner,
            )
    samples = result.samples
    learned = learning(
        recorded_steps(opened.dir.traces),
        costs,
        opened.file.train.global_batch_size,
        (samples.matched, len(samples.answers)) if samples else None,
    )
    return result.model_copy(update={"learning": learned})


def rehearse(
    run: Run,
    plan: Plan,
    profile: Profile,
    *,
    steps: int | None = None,
    resume: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = silent,
    note: Note = ignore,
) -> RehearsalResult:
    """Rehearse a plan that was checked (`checked_plan`), on emulated devices.

    Arguments are those of `train`. Where the run re-plans, what it would do is in the rehearsal's
    own folder; the run's plan stays.

    Raises:
        As `runtime.rehearsal.rehearse.rehearse`.
    """
    from disttrain_cli.mitigation.looking_after import looked_after
    from disttrain_cli.mitigation.replanning import goes_on_with
    from disttrain_cli.runtime.launching.starts import alone
    from disttrain_cli.runtime.rehearsal import rehearse as rehearsing

    folder = run.dir.rehearsal
    with alone(folder):
        now = goes_on_with(folder, plan) if resume else plan
        if now is not plan:
            note(f"The rehearsal goes on with the plan it ended with, {short_path(folder.plan)}.")
        with looked_after(run, folder, now, profile, folder.plan, note, emulated=True) as replanner:
            return rehearsing.rehearse(
                run,
                plan,
                profile,
                now=now,
                steps=steps,
                resume=resume,
                on_step=on_step,
                progress=progress,
                replanner=replanner,
            )


def check_start(resume: bool, restart: bool, origin: Path | None) -> None:
    """UsageError where a run is to start in two ways at once."""
    if resume and restart:
        raise UsageError(
            "--resume and --restart exclude each other",
            "one goes on from the newest checkpoint, the other starts at step 0",
            "Give one of them.",
        )
    if origin is not None and resume:
        raise UsageError(
            "--from does not go with --resume",
            "--resume goes on with this run's own weights; --from starts at step 0",
            "Leave one of the two out.",
        )


def find_origin(origin: Path | None) -> Path | None:
    """The folder of the checkpoint or export that `origin` names; SpecError where there is none."""
    if origin is None:
        return None
    from disttrain_cli.runtime.checkpoints.origin import find

    return find(origin)


def say_start(run: Run, total: int, note: Note) -> None:
    """Note which modules learn nothing in the last of `total` steps, and a token that other users
    can read."""
    from disttrain_cli.data.serving.access import exposed
    from disttrain_cli.runtime.engine.schedule import beyond_schedule

    token = run.file.preprocess.token_file
    secrets = {"preprocess.token_file": None if token is None else run.resolve(token)}
    for sentence in [*beyond_schedule(run, total), *exposed(secrets)]:
        note(sentence)


def analyze(
    paths: Sequence[Path | str] = (),
    *,
    html: Path | None = None,
    compare: Path | None = None,
    progress: Progress = silent,
) -> AnalyzeResult:
    """Explain a run from its traces, and write the report page.

    Args:
        paths: run folders, trace folders, or traces of any PyTorch job (Kineto); if none is given,
            the run of ./disttrain.yaml.
        html: file of the report page instead of the one in the run's folder.
        compare: an earlier run to set beside this one.

    Raises:
        DataError: nothing in a path can be read, or the paths are of different formats.
        UsageError: `html` is one of the paths.
    """
    named = [Path(path) for path in paths]
    folders = named or [open_run(DEFAULT_RUN_FILE).dir.root]
    not_over(html, *folders)
    from disttrain_cli.analysis import analyze as analysing
    from disttrain_cli.analysis.compare import compare as changes_between
    from disttrain_cli.analysis.compare import compare_times
    from disttrain_cli.analysis.sampled import samples_of
    from disttrain_cli.spec.rundir import RunDir, run_folder

    # before traces are held open: DuckDB opens a file once in a process
    samples = [] if compare is None else [samples_of(of, progress) for of in ([compare], folders)]
    analysis, pictures = analysing.analyze_open(folders, progress)
    analysis = _with_named(analysis, named)
    root = run_folder(folders[0])
    report = html or (root and RunDir(root).report)
    if report is not None:
        from disttrain_cli.analysis.report import write_report

        write_report(analysis, pictures(), _samples(RunDir(root)) if root else [], report)
    if compare is None:
        return AnalyzeResult(analysis, report, [], None)
    return AnalyzeResult(
        analysis,
        report,
        changes_between(analysing.analyze([compare]), analysis),
        compare_times(*samples),
    )


def watch(
    run: Path | str | None = None,
    *,
    steps: int | None = None,
    every_s: float | None = None,
    once: bool = False,
) -> Iterator[Look]:
    """Judge the last steps of a run while it runs, until it is over.

    Args:
        run: its folder, or that of a rehearsal; if none is given, the run of ./disttrain.yaml.
        steps: how many steps are judged.
        every_s: seconds between two looks at least; None: as many as keep them at 0.5 % of this
            host's cores.
        once: look once, at a run that may be over.

    Raises:
        DataError: there is no such folder, or nothing in its traces can be judged (`once`).
        SpecError: its traces are of another version.
    """
    folder = Path(run) if run is not None else open_run(DEFAULT_RUN_FILE).dir.root
    from disttrain_cli.analysis.watching.looking import STEPS, look_once, looks
    from disttrain_cli.errors import DataError
    from disttrain_cli.spec.rundir import run_folder

    root = run_folder(folder) or folder
    if not root.is_dir():
        raise DataError(
            f"There is no run's folder at {folder}",
            "verdicts are made of the traces in it",
            "Name a run's folder (runs/NAME), or start the run: disttrain train",
        )
    last = steps or STEPS
    seen = iter([look_once(root, last)]) if once else looks(root, last, every_s)
    named = [] if run is None else [folder]
    for look in seen:
        yield replace(look, analysis=_with_named(look.analysis, named))


def _samples(root: RunDir) -> list[Path]:
    """What tells of the samples after the newest step, with the images drawn and read."""
    from disttrain_cli.spec.samples import FILE, read_samples

    folder = max(
        (path for path in root.images.glob("step-*") if path.is_dir()), default=root.images
    )
    samples = read_samples(folder)
    if samples is None:
        return sorted(folder.glob("*.png"))
    return [folder / name for name in (FILE, *(one.file for one in samples.drawn), *samples.read)]


def _with_named(analysis: Analysis, paths: Sequence[Path]) -> Analysis:
    """The analysis with next commands that ask the traces which the user named."""
    from msgspec.structs import replace

    def named(command: str) -> str:
        return with_named(command, traces=paths)

    return replace(
        analysis,
        verdict=replace(analysis.verdict, next_command=named(analysis.verdict.next_command)),
        causes=[
            replace(cause, next_command=named(cause.next_command)) for cause in analysis.causes
        ],
        remedies=[replace(one, command=named(one.command)) for one in analysis.remedies],
    )
