"""`disttrain plan` as a function: a run file and a profile in, a plan out."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.calls import argument, call
from disttrain_cli.costs.freezing import owners
from disttrain_cli.costs.hardware import RULES
from disttrain_cli.costs.memory import fits
from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.planning.bounds import Keep
from disttrain_cli.planning.climb import climb
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.finalists import (
    AHEAD,
    Limits,
    Ranked,
    chosen_first,
    diverse,
    faster_zero,
    grouping,
    one_batch_s,
    rank,
    rounds,
)
from disttrain_cli.planning.infeasible import infeasible
from disttrain_cli.planning.interleaved import with_chunks
from disttrain_cli.planning.layouts import baseline_layout, layout_of, layout_with
from disttrain_cli.planning.options import Rows
from disttrain_cli.planning.predict import predict, simulated_s
from disttrain_cli.planning.ranges import TIE, compared
from disttrain_cli.planning.search import Candidate, SearchResult, search
from disttrain_cli.planning.sharded import sharded
from disttrain_cli.planning.split_backward import timed, whole
from disttrain_cli.planning.units import Cluster, Unit, groupings, units_of
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Alternative, Baseline, Layout, Plan, Search, Strategy
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from disttrain_cli.spec.shape import ParallelShape

BASELINES: tuple[Strategy, ...] = ("disaggregated", "megatron")
POOL = 16  # of the formula's best, from which a round's different finalists are selected
CLIMBED = 2  # finalists whose neighbours are simulated
TRIED = 4  # of the best layouts, simulated under the training policy if `CLOSE`
CLOSE = 1.02  # highest ratio to the best time, scaled by the training policy's gain
NEAR = 2  # finalists with another shape of the LLM near the best one's


def cluster_of(run: RunFile, profile: Profile, gpus: int | None = None) -> Cluster:
    """Return the constraints of layouts: the profile's devices, or `gpus` of them.

    Ranks that share the cores of a CPU split neither layers nor backwards, and recompute only if
    the run file requires it: they would gain nothing from it.
    """
    count = profile.device.count if gpus is None else gpus
    if count < 1:
        raise SpecError("A plan needs at least one GPU", f"given: {argument('gpus', count)}")
    cpu, recompute = profile.device.kind == "cpu", run.train.activation_checkpointing
    return Cluster(
        gpus=count,
        gpus_per_node=run.cluster.gpus_per_node,
        memory_gib=run.cluster.usable_gib(profile.device.memory_gib),
        margin_gib=run.cluster.memory_margin_gib,
        zero_stage=0 if run.train.zero_stage == 0 else 1,
        batch=run.train.global_batch_size,
        trained=None if run.model.trained is None else tuple(run.model.trained),
        checkpointing="none" if cpu and recompute == "auto" else recompute,
        most_tp=1 if cpu else None,
        most_cp=1 if cpu else None,
        most_ep=1 if cpu else None,
        splits=not cpu,
        overlaps=not cpu,
        hides=not cpu,
        ordering=run.train.ordering_on(profile.device.kind),
        cpu_node_cores=run.cluster.cpu_node_cores,
    )


def check_profile(run: RunFile, profile: Profile) -> None:
    """Reject a profile of another model or cluster, or computed by another version's rules.

    Raises:
        MismatchError: both fingerprints are named.
        SpecError: a name that is to be trained has no weights in the profile's model.
    """
    for what, mine, theirs in (
        ("model", run.model_fingerprint(), profile.fingerprints.model),
        ("cluster", run.cluster_fingerprint(), profile.fingerprints.cluster),
    ):
        if mine != theirs:
            raise MismatchError(
                f"The profile was made for another {what}",
                f"{what} of the run file: {mine}; of the profile: {theirs}",
                f"Profile again: {call('profile')}",
            )
    if profile.device.kind == "analytic" and profile.provenance.get("rules") != RULES:
        raise MismatchError(
            "The profile was computed by another version's rules",
            f"now: {RULES}; then: {profile.provenance.get('rules', 'not said')}",
            f"Profile again: {call('profile')}",
        )
    run.check_owners(owners(profile))


def solve(
    run: RunFile,
    profile: Profile,
    *,
    gpus: int | None = None,
    strategy: Strategy = "auto",
    top: int = 5,
    draws: Draws | None = None,
) -> Plan:
    """Return a strategy's best plan with prediction, baselines, and the `top` next best layouts.

    Strategies differ in their possible units (`units.groupings`) and in their overlap: `auto` and
    `disaggregated` have split backwards (`split_backward`), reductions and gathers overlapped with
    passes (`costs.overlap`) and a TP group's messages overlapped with GEMMs (`Unit.overlaps`),
    `megatron` the last two; with a single unit all may have several stages on each rank
    (`interleaved`). All of them are ranked and predicted under the ordering of training.

    The formula's best layouts are simulated, and for `auto` the other strategies' own choices with
    them: a plan is no slower than a baseline, except for ties. Among layouts that tie with the
    fastest, within the uncertainty of costs, the one with the fewest units is chosen. Ranks share
    tokens (CP), and CP groups span several nodes, only if the best plan without takes longer, by
    `CP_GAIN` at least.

    Args:
        draws: the batches on which layouts are simulated (`cluster_of`); None = new ones.

    Raises:
        MismatchError: the profile belongs to another model or cluster.
        InfeasibleError: no layout fits; names the stage that does not fit and the smallest change
            that helps.
    """
    check_profile(run, profile)
    cluster, either_zero = cluster_of(run, profile, gpus), run.train.zero_stage == "auto"
    return solve_for(profile, cluster, strategy, top, either_zero, draws)


def solve_for(
    profile: Profile,
    cluster: Cluster,
    strategy: Strategy = "auto",
    top: int = 0,
    either_zero: bool = False,
    draws: Draws | None = None,
) -> Plan:
    """Return `solve`'s plan for a cluster with its allowed features.

    Args:
        either_zero: every layout may use the faster ZeRO stage, as far as it fits.
    """
    everything, cluster = cluster, run_by(cluster, strategy)
    started = time.perf_counter()
    draws = draws or Draws(profile, ranked_as(cluster))
    baselines: dict[Strategy, Baseline | None] = {}
    others: list[Layout] = []
    combinations = simulated = 0
    for name in BASELINES:
        if name == strategy:
            continue
        theirs = run_by(everything, name)
        found, looked_at, tried = ranking(profile, theirs, name, top, either_zero, [], draws)
        baselines[name] = None
        if found:
            found, shown = _as_trained(profile, theirs, found, draws)
            baselines[name] = _baseline(found[0].layout, shown)
        if strategy == "auto":
            combinations, simulated = combinations + looked_at, simulated + tried
            others += _as_ours(profile, cluster, [one.layout for one in found])
    ranked, looked_at, tried = ranking(profile, cluster, strategy, top, either_zero, others, draws)
    combinations, simulated = combinations + looked_at, simulated + tried
    if not ranked:
        raise infeasible(profile, cluster, strategy)
    ranked, predicted = _as_trained(profile, cluster, ranked, draws)
    # relevant if training differs from the ranking: shared cores, another ordering
    limit_s = min([one.iteration_s for one in baselines.values() if one], default=math.inf)
    if limit_s < predicted.iteration_s:
        for layout in others:
            prediction = _predicted(profile, cluster, layout, draws)
            if prediction.iteration_s < predicted.iteration_s:
                predicted = prediction
                alone_s = (
                    simulated_s(profile, layout, ranked_as(cluster), shared=False)
                    if profile.device.kind == "cpu"
                    else prediction.iteration_s
                )
                ranked = [
                    Ranked(layout, alone_s),
                    *(one for one in ranked if one.layout != layout),
                ]
    simplest = _simplest(profile, cluster, draws, ranked)
    if simplest is not ranked[0]:
        predicted = _predicted(profile, cluster, simplest.layout, draws)
        ranked = [simplest, *(one for one in ranked if one is not simplest)]
    best = ranked[0]
    solve_s = time.perf_counter() - started
    if strategy in BASELINES:
        baselines[strategy] = _baseline(best.layout, predicted)
    # Runners-up ranked by another policy than the training policy are shown scaled by the best
    # layout's ratio between the two.
    scale = (
        predicted.iteration_s / _shown_s(profile, cluster, best)
        if ranked_as(cluster) != cluster
        else 1.0
    )
    return Plan(
        fingerprints=profile.fingerprints.model_copy(update={"profile": fingerprint(profile)}),
        provenance=profile.provenance,
        plan=best.layout,
        predicted=predicted,
        baselines={name: baselines[name] for name in BASELINES}
        | ({"fsdp": sharded(profile, everything, draws)} if profile.device.kind != "cpu" else {}),
        alternatives=[
            Alternative(
                layout=_described(other.layout),
                gpus_used=other.layout.gpus_used,
                iteration_s=_shown_s(profile, cluster, other) * scale,
                plan=other.layout,
                slower_pct=100 * (other.iteration_s / best.iteration_s - 1),
            )
            for other in ranked[1 : top + 1]
        ],
        search=Search(solve_s=solve_s, candidates=combinations, exact=True, simulated=simulated),
    )


def ranking(
    profile: Profile,
    cluster: Cluster,
    strategy: Strategy,
    top: int = 0,
    either_zero: bool = False,
    others: Sequence[Layout] = (),
    draws: Draws | None = None,
) -> tuple[list[Ranked], int, int]:
    """Return layouts of a strategy, best first, and the numbers of candidates and simulations.

    If the best layout shares tokens (CP), the best without it are ranked, too. If training orders
    by the policy `best`, layouts are ranked by `paper`, which takes milliseconds for each.

    Args:
        top: runners-up wanted in addition to the best layout.
        either_zero: every layout may use the faster ZeRO stage, as far as it fits.
        others: layouts that are simulated with those of the strategy; for `auto` the best of
            `disaggregated` and `megatron`, whose units are not searched again.
        draws: the batches on which all are simulated; None = new ones.
    """
    combinations = simulated = 0
    cluster = ranked_as(cluster)
    draws = draws or Draws(profile, cluster)

    def as_layout(units: list[Unit], candidate: Candidate) -> Layout:
        layout = layout_of(units, cluster, candidate, strategy)
        return faster_zero(profile, cluster, layout) if either_zero else layout

    def ranked_within(cluster: Cluster) -> list[Ranked]:
        nonlocal simulated

        def find(units: list[Unit], limits: Limits, best: int) -> SearchResult:
            nonlocal combinations
            result = best_by_formula(units, cluster, best, limits)
            combinations += result.combinations
            return result

        groups = unclimbed = groupings(profile, cluster, strategy)
        if strategy == "auto" and others:
            # `megatron` has climbed without split backwards
            unclimbed = _unlike(profile, cluster, groups, ["disaggregated"]) or groups
            groups = _unlike(profile, cluster, groups, BASELINES)
        finalists = rounds(
            profile,
            cluster,
            draws,
            groups,
            find,
            as_layout,
            top + 1,
            POOL,
            NEAR,
            [whole(layout).model_copy(update={"strategy": strategy}) for layout in others],
        )
        if cluster.climbs:
            finalists += _climbed(unclimbed, cluster, draws, strategy, either_zero, finalists)
        simulated += len(finalists)
        ranked = rank(profile, cluster, draws, finalists, top + 1)
        if profile.device.kind == "cpu":
            return ranked
        return with_chunks(profile, cluster, draws, ranked)

    ranked = ranked_within(cluster)
    for width, simpler in (
        (cluster.gpus_per_node, replace(cluster, over_nodes=False)),
        (1, replace(cluster, most_cp=1)),
    ):
        if ranked and any(
            unit.cp > 1 and unit.tp_cp_size > width for unit in ranked[0].layout.units
        ):
            known = [one.layout for one in ranked]
            more = [one for one in ranked_within(simpler) if one.layout not in known]
            every = sorted([*ranked, *more], key=lambda one: one.iteration_s)
            ranked = chosen_first(every, cluster.gpus_per_node)
    return ranked, combinations, simulated


def _unlike(
    profile: Profile, cluster: Cluster, groups: list[list[Unit]], strategies: Sequence[Strategy]
) -> list[list[Unit]]:
    """Return the groupings that none of these strategies has."""
    theirs = [
        grouping(units)
        for strategy in strategies
        for units in groupings(profile, cluster, strategy)
    ]
    return [units for units in groups if grouping(units) not in theirs]


def _climbed(
    groups: list[list[Unit]],
    cluster: Cluster,
    draws: Draws,
    strategy: Strategy,
    either_zero: bool,
    finalists: list[Ranked],
) -> list[Ranked]:
    """Return better neighbours of the best, mutually different finalists.

    Starts differ in grouping or the LLM's shape and are nearly as fast as any; also tried are the
    starts with other modules replicated over TP.
    """
    profile = groups[0][0].profile

    def build(
        units: list[Unit], shapes: Sequence[ParallelShape], slot_sequences: int
    ) -> Layout | None:
        layout = layout_with(units, cluster, shapes, slot_sequences, strategy)
        return faster_zero(profile, cluster, layout) if either_zero and layout else layout

    def has_room(layout: Layout) -> bool:
        return fits(profile, layout, cluster.memory_gib)

    def seconds(layout: Layout) -> float:
        return one_batch_s(profile, layout, cluster, draws)

    def as_run(layout: Layout) -> tuple[Layout, float]:
        return timed(profile, cluster, layout, draws=draws)

    def dealt_otherwise(layout: Layout) -> Iterator[Layout]:
        """Yield the layout with other modules replicated on each rank of a TP group."""
        shapes = [unit.shape for unit in layout.units]
        slot_sequences = layout.global_batch_size // layout.microbatches
        for units in groups:
            if (
                grouping(units) != grouping(layout.units)
                and [list(unit.modules) for unit in units] == [one.modules for one in layout.units]
                and all(
                    (one.tp, one.cp) in unit.widths for unit, one in zip(units, shapes, strict=True)
                )
                and (other := build(units, shapes, slot_sequences)) is not None
                and has_room(other)
            ):
                yield other

    seen: set[str] = set()
    by_grouping = {grouping(units): units for units in groups}
    fastest_s = min((one.iteration_s for one in finalists), default=0.0)
    best = sorted(
        (
            one
            for one in finalists
            if grouping(one.layout.units) in by_grouping and one.iteration_s <= AHEAD * fastest_s
        ),
        key=lambda one: one.iteration_s,
    )
    starts = diverse(
        best,
        lambda one: (grouping(one.layout.units), one.layout.unit_of(profile.inputs.llm).shape),
        CLIMBED,
    )
    found, known = [], [whole(one.layout) for one in finalists]
    for start in starts:
        for layout in dealt_otherwise(start.layout):
            if layout not in known:
                known.append(layout)
                found.append(Ranked(*as_run(layout)))
        units = by_grouping[grouping(start.layout.units)]
        way = climb(
            units,
            cluster,
            start.layout,
            start.iteration_s,
            partial(build, units),
            has_room,
            seconds,
            as_run,
            seen,
        )
        found += [Ranked(*one) for one in way]
    return found


def _as_trained(
    profile: Profile, cluster: Cluster, ranked: list[Ranked], draws: Draws
) -> tuple[list[Ranked], Prediction]:
    """Return the layouts ranked by the training policy, and the prediction of the best one.

    Under another policy than the ranking's only the first few are simulated, if they are close
    relative to that policy's gain: the times of the others are scaled by the best one's ratio.
    """
    predictions = [_predicted(profile, cluster, ranked[0].layout, draws)]
    if ranked_as(cluster) == cluster or profile.device.kind == "cpu":
        return ranked, predictions[0]
    first_s = ranked[0].iteration_s
    gained = max(1.0, first_s / predictions[0].iteration_s)  # others may gain as much, or nothing
    predictions += [
        _predicted(profile, cluster, one.layout, draws)
        for one in ranked[1:TRIED]
        if one.iteration_s <= CLOSE * gained * first_s
    ]
    times_s = [prediction.iteration_s for prediction in predictions]
    scale = times_s[0] / first_s
    count = len(times_s)
    shown = [
        *(Ranked(one.layout, time_s) for one, time_s in zip(ranked[:count], times_s, strict=True)),
        *(Ranked(one.layout, scale * one.iteration_s) for one in ranked[count:]),
    ]
    fastest = sorted(shown[:count], key=lambda one: one.iteration_s)
    best = chosen_first(fastest, cluster.gpus_per_node)[0]
    others = sorted((one for one in shown if one is not best), key=lambda one: one.iteration_s)
    return [best, *others], predictions[shown.index(best)]


def _simplest(profile: Profile, cluster: Cluster, draws: Draws, ranked: list[Ranked]) -> Ranked:
    """Return the first layout, or one with fewer units that ties with it (`ranges.compared`).

    A tie is judged within the uncertainty of costs; the one with the fewest units is preferred.
    """
    best = ranked[0]
    if profile.device.kind == "cpu":
        return best
    for other in sorted(ranked[1:], key=lambda one: len(one.layout.units)):
        fewer = len(other.layout.units) < len(best.layout.units)
        if fewer and other.iteration_s < best.iteration_s * (1 + TIE):
            order = compared(profile, ranked_as(cluster), draws, best.layout, other.layout)
            if order.verdict in ("tie", "second"):
                return other
    return best


def _as_ours(profile: Profile, cluster: Cluster, layouts: list[Layout]) -> list[Layout]:
    """Return layouts of other strategies as `auto` runs them, as far as they fit."""
    ours = [
        baseline_layout(layout, units_of(profile, cluster, layout), "auto") for layout in layouts
    ]
    return [layout for layout in ours if fits(profile, layout, cluster.memory_gib)]


def _predicted(
    profile: Profile, cluster: Cluster, layout: Layout, draws: Draws | None = None
) -> Prediction:
    return predict(units_of(profile, cluster, layout), layout, cluster, draws)


def with_own_prediction(plan: Plan, run: RunFile, profile: Profile) -> Plan:
    """Return the plan; if its layout was edited by hand, with a new prediction."""
    if plan.predicted.layout in (None, fingerprint(plan.plan)):
        return plan
    predicted = _predicted(profile, cluster_of(run, profile), plan.plan)
    return plan.model_copy(update={"predicted": predicted})


def run_by(cluster: Cluster, strategy: Strategy) -> Cluster:
    """Return the cluster with the features that a strategy's layouts use."""
    return replace(cluster, splits=False) if strategy == "megatron" else cluster


def ranked_as(cluster: Cluster) -> Cluster:
    """Return the cluster with the policy under which layouts are ranked."""
    return replace(cluster, ordering="paper") if cluster.ordering == "best" else cluster


def best_by_formula(units: list[Unit], cluster: Cluster, top: int, limits: Limits) -> SearchResult:
    """Return the formula's best layouts of these units within limits."""
    return search(
        units,
        replace(cluster, gpus=cluster.gpus - limits.fewer),
        top,
        keep=None if limits.any_llm else within_limits(units, limits),
        within_ms=limits.within_ms,
    )


def within_limits(units: list[Unit], limits: Limits) -> Keep:
    """Return a filter for replicas, TP and CP degrees of the LLM's unit."""

    def keep(number: int, _: int, rows: Rows) -> NDArray[np.bool_]:
        if not units[number].holds_llm:
            return np.ones(len(rows), dtype=bool)
        holders = rows.cp * rows.dp
        kept = (holders >= limits.least) & (holders <= (limits.most or holders))
        for tp, cp, dp in limits.without:
            kept &= (rows.tp != tp) | (rows.cp != cp) | (rows.dp != dp)
        return kept

    return keep


def fewer_replicas(units: list[Unit], most: int) -> Keep:
    """Return a filter for at most `most` ranks with the same weights in the LLM's unit."""
    return within_limits(units, Limits(math.inf, most))


def _described(layout: Layout) -> str:
    return f"{layout.describe()}, M {layout.microbatch_size}"


def _shown_s(profile: Profile, cluster: Cluster, other: Ranked) -> float:
    """Return the time shown next to the prediction; on a CPU with shared cores."""
    if profile.device.kind != "cpu":
        return other.iteration_s
    return simulated_s(profile, other.layout, ranked_as(cluster))


def _baseline(layout: Layout, predicted: Prediction) -> Baseline:
    return Baseline(
        iteration_s=predicted.iteration_s,
        sequences_per_s=predicted.sequences_per_s,
        mfu=predicted.mfu,
        gpus_used=layout.gpus_used,
        layout=_described(layout),
        plan=layout,
    )
