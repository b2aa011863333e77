"""Layouts: `plan`, costs of other clusters (`compare_clusters`), and plans read back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from disttrain_cli.api.measuring import passes_of
from disttrain_cli.api.opening import (
    Note,
    check_choice,
    check_list,
    check_number,
    ignore,
    not_over,
    open_run,
    path_of,
)
from disttrain_cli.calls import DEFAULT_RUN_FILE, call
from disttrain_cli.errors import InfeasibleError, SpecError
from disttrain_cli.naming import short_path
from disttrain_cli.spec.progress import Progress, silent

if TYPE_CHECKING:
    from disttrain_cli.planning.changes import Changes
    from disttrain_cli.planning.check import NotRun
    from disttrain_cli.planning.explain import Explanation
    from disttrain_cli.planning.predict import Step
    from disttrain_cli.planning.purchase import Offer
    from disttrain_cli.planning.ranges import Order
    from disttrain_cli.planning.sensitivity import Sensitivity
    from disttrain_cli.spec.plan import Plan
    from disttrain_cli.spec.profile import Profile
    from disttrain_cli.spec.runfile import Run, RunFile

Strategy = Literal["auto", "disaggregated", "megatron"]


@dataclass(frozen=True)
class PlanResult:
    """The best plan, the reasons for it, and its file."""

    plan: Plan
    path: Path
    picture: Path | None  # SVG of the step; None where the plan went to a pipe or device
    explanation: Explanation
    step: Step  # as simulated
    sensitivity: Sensitivity | None  # None where it was not asked for, or nothing else fits
    previous: Path  # file of the previous plan, if any
    changes: Changes | None  # against the previous plan, where both can be compared
    not_run: list[NotRun]  # parts of the plan that training refuses, but not a rehearsal
    gpus: int  # number of devices that the plan had to fit into
    orders: dict[str, Order]  # runners-up and baselines against the plan, at other costs


def plan(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    profile: Path | str | None = None,
    gpus: int | None = None,
    strategy: Strategy = "auto",
    top: int = 3,
    out: Path | str | None = None,
    sensitivity: bool = True,
    progress: Progress = silent,
    note: Note = ignore,
) -> PlanResult:
    """Choose GPUs and parallelism for every module, and write them to `plan.yaml`.

    Args:
        profile: file to plan from instead of the run's own; its device may be another.
        gpus: maximum number of devices to use, instead of the whole cluster.
        strategy: layouts to search: "auto" (any grouping of modules into units), or a baseline's.
        top: number of runner-up plans to record.
        out: file to write instead of the one in the run's folder.
        sensitivity: also compute the effect of other clusters, data and batches (takes seconds).

    Raises:
        InfeasibleError: no layout fits; the limit that prevents it is named.
        MismatchError: the profile is of another model, cluster or device.
        SpecError: the run file or the profile is missing or wrong.
        UsageError: `out` is one of the files that are read.
    """
    check_choice("strategy", strategy, Strategy)
    check_number("gpus", gpus, 1)
    check_number("top", top, 0)
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
    from disttrain_cli.planning.sharing import experts_sentence, sharing_sentence
    from disttrain_cli.planning.solve import cluster_of, ranked_as, solve
    from disttrain_cli.planning.units import units_of
    from disttrain_cli.simulation.faults import check_faults
    from disttrain_cli.spec.hostfile import read_hostfile
    from disttrain_cli.spec.plan import write_plan
    from disttrain_cli.spec.profile import profile_of
    from disttrain_cli.spec.whole import is_own_file

    target, profile_path = path_of(out), path_of(profile) or opened.dir.profile
    not_over(target, opened.path, profile_path, opened.dir.index)
    costs = profile_of(opened, profile_path)
    if profile is None:  # naming a profile implies its device
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
    previous = target if target is not None and is_own_file(target) else opened.dir.plan
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
    path = write_plan(target or opened.dir.plan, best)
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
                sharing_sentence(best, costs, cluster, draws),
                experts_sentence(best, costs, cluster, draws),
                passes_of(opened, costs),
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


def compare_clusters(
    run: Run | Path | str = DEFAULT_RUN_FILE,
    *,
    gpus: Sequence[int] = (),
    devices: Sequence[str] = (),
    profile: Path | str | None = None,
    strategy: Strategy = "auto",
    progress: Progress = silent,
    note: Note = ignore,
) -> list[Offer]:
    """Plan for every device count and type, and return time and cost; no plan is written.

    Args:
        gpus: numbers of devices; if none, the number of the run file's cluster.
        devices: names of the hardware catalogue; if none, the device of the profile, or of the run
            file. The run's profile is used for its own device, others are computed.
        profile: file to plan from; its device is the only one.
        strategy: as for `plan`.

    Raises:
        InfeasibleError: no layout fits any of them; others as `profile` and `plan`.
    """
    check_choice("strategy", strategy, Strategy)
    check_list("gpus", gpus)
    check_list("devices", devices)
    for count in gpus:
        check_number("gpus", count, 1)
    from disttrain_cli.planning.check import check_device
    from disttrain_cli.planning.draws import Draws
    from disttrain_cli.planning.purchase import offer
    from disttrain_cli.planning.ranges import with_range
    from disttrain_cli.planning.solve import cluster_of, ranked_as, solve
    from disttrain_cli.spec.prices import read_prices
    from disttrain_cli.spec.profile import profile_of

    opened = open_run(run)
    stated = opened.file.cluster.device.partition(":")[2]  # empty for a device of this machine
    path = path_of(profile) or opened.dir.profile
    none_needed = devices or (stated and not profile)
    known = None if none_needed and not path.is_file() else profile_of(opened, path)
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
            "Name more devices or larger ones:"
            f" {call('compare_clusters', gpus='N', devices='NAME')}",
        )
    return offers


def _costs_on(
    run: Run, device: str, gpus: int, known: Profile | None, progress: Progress, note: Note
) -> tuple[RunFile, Profile]:
    """Return the run file for a cluster of `gpus` devices of this name, and its profile.

    The profile is `known` where it is that device's, else it is computed.
    """
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
    """Return the profile for the cluster that the run file has now.

    The run's own profile, if that is at `path`, is replaced.

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
    """Return the existing plan; None, and a note, where it cannot be read."""
    from disttrain_cli.spec.plan import read_plan

    if not path.is_file():
        return None
    try:
        return read_plan(path)
    except SpecError as error:
        note(f"Not compared with {short_path(path)}: {error.what}.")
        return None


def checked_plan(run: Run, plan: Plan | Path | str | None = None) -> tuple[Plan, Profile]:
    """Read and check a plan (by default the run's), and return it with the run's profile.

    A layout that was edited by hand is predicted again.

    Raises:
        MismatchError, SpecError: as `planning.check.check`, or one of the files is missing or
            wrong.
    """
    from disttrain_cli.planning.check import check, check_memory
    from disttrain_cli.planning.solve import with_own_prediction
    from disttrain_cli.spec.plan import read_plan
    from disttrain_cli.spec.profile import profile_of

    given = run.dir.plan if plan is None else plan
    chosen = read_plan(Path(given)) if isinstance(given, Path | str) else given
    costs = profile_of(run)
    run.file.train.count_epochs(costs.data.sequences)
    check(chosen, run.file, costs)
    chosen = with_own_prediction(chosen, run.file, costs)
    check_memory(chosen, costs)
    return chosen, costs
