"""Explanation of context and expert parallelism: the plan compared with the best plan without.

For long sequences without CP, the plan is compared with the best layouts with it (in the LLM): the
formula's best few, simulated over the same global batches as the plan, and those that the plan was
ranked with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.context import misfit
from disttrain_cli.planning.bounds import Keep
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.finalists import CP_GAIN, shares
from disttrain_cli.planning.infeasible import LONG
from disttrain_cli.planning.layouts import layout_of
from disttrain_cli.planning.options import Rows
from disttrain_cli.planning.predict import batches, predict
from disttrain_cli.planning.search import search
from disttrain_cli.planning.solve import ranked_as, ranking, run_by
from disttrain_cli.planning.split_backward import timed
from disttrain_cli.planning.units import Cluster, Unit, groupings, sharing, units_of
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile

TRIED = 6  # of the formula's best layouts, simulated


def sharing_sentence(plan: Plan, profile: Profile, cluster: Cluster, draws: Draws) -> str | None:
    """Return CP's gain in a plan, or why a plan for long sequences has none; None if irrelevant.

    Args:
        cluster: constraints of the plan.
        draws: the batches on which it was simulated.
    """
    length, strategy = profile.inputs.sequence_length, plan.plan.strategy
    cluster = run_by(cluster, strategy)
    if shares(plan.plan):
        shared = ", ".join(
            f"{unit.name} over {unit.cp} ranks"
            + (", which gather keys and values" if unit.gathers else "")
            for unit in plan.plan.units
            if unit.cp > 1
        )
        other_s = min(
            (
                other.iteration_s
                for other in plan.alternatives
                if other.plan and not shares(other.plan)
            ),
            default=None,
        )
        if other_s is None:  # not among the runners-up
            alone = replace(cluster, most_cp=1)
            for best in ranking(profile, alone, strategy, draws=draws)[0][:1]:
                units = units_of(profile, alone, best.layout)
                other_s = predict(units, best.layout, alone, draws).iteration_s
        return f"Context   sequences are shared (CP), {shared}: {_without(plan, other_s)}."
    if length < LONG or strategy not in ("auto", "disaggregated") or cluster.most_cp == 1:
        return None
    groups = groupings(profile, cluster, strategy)
    if all(cp == 1 for units in groups for unit in units for _, cp in unit.widths):
        why = (
            misfit(profile, [profile.inputs.llm], sharing(cluster, cp=2))
            or "no group fits evenly into a node"
        )
        return f"Context   sequences of {length:,} tokens are not shared (CP): {why}."
    found = [
        layout_of(units, cluster, one, strategy)
        for units in groups
        for one in search(units, cluster, TRIED, keep=_shared(units)).best
    ]
    ranked_s = [
        other.iteration_s
        for other in (*plan.alternatives, *plan.baselines.values())
        if other and other.plan and other.plan.unit_of(profile.inputs.llm).cp > 1
    ]
    other_s = min(ranked_s + _times_s(profile, cluster, found, draws), default=None)
    return f"Context   sequences of {length:,} tokens are not shared (CP): {_with(plan, other_s)}."


def experts_sentence(plan: Plan, profile: Profile, cluster: Cluster, draws: Draws) -> str | None:
    """Return EP's gain in a plan, or that a plan for mixtures of experts has none.

    None if no unit may have an EP group.

    Args:
        cluster: constraints of the plan.
        draws: the batches on which it was simulated.
    """
    strategy = plan.plan.strategy
    divided = [unit for unit in plan.plan.units if unit.ep > 1]
    if not divided:
        if all(len(unit.eps) == 1 for unit in units_of(profile, cluster, plan.plan)):
            return None
        return "Experts   whole on every rank (EP 1), which is faster and fits."
    alone = replace(run_by(cluster, strategy), most_ep=1)
    known_s = [
        other.iteration_s
        for other in (*plan.alternatives, *plan.baselines.values())
        if other and other.plan and all(unit.ep == 1 for unit in other.plan.units)
    ]
    found = [
        layout_of(units, alone, one, strategy)
        for units in groupings(profile, alone, strategy)
        for one in search(units, alone, TRIED).best
    ]
    other_s = min(known_s + _times_s(profile, alone, found, draws), default=None)
    each = ", ".join(f"{unit.name} over {unit.ep} ranks" for unit in divided)
    return f"Experts   are divided (EP), {each}: {_without(plan, other_s)}."


def _times_s(
    profile: Profile, cluster: Cluster, layouts: Sequence[Layout], draws: Draws
) -> list[float]:
    """Return the simulated times of some layouts."""
    ranked = ranked_as(cluster)
    numbers = batches(ranked)
    return [timed(profile, ranked, layout, numbers, draws)[1] for layout in layouts]


def _shared(units: list[Unit]) -> Keep:
    """Return a filter for layouts in which the LLM's unit shares tokens."""

    def keep(number: int, _: int, rows: Rows) -> NDArray[np.bool_]:
        return (rows.cp > 1) | (not units[number].holds_llm)

    return keep


def _without(plan: Plan, other_s: float | None) -> str:
    if other_s is None:
        return "no layout without it fits"
    return f"the best layout found without it takes {_longer(plan, other_s)}"


def _with(plan: Plan, other_s: float | None) -> str:
    if other_s is None:
        return "no layout with CP fits"
    faster = other_s < plan.predicted.iteration_s
    doubt = f"; below the accuracy of CP costs ({100 * CP_GAIN:g} %)" if faster else ""
    return f"the best layout found with it takes {_longer(plan, other_s)}{doubt}"


def _longer(plan: Plan, other_s: float) -> str:
    """Format another layout's time relative to the plan's."""
    from disttrain_cli.planning.explain import two_digits

    percent = 100 * (other_s / plan.predicted.iteration_s - 1)
    return f"{two_digits(abs(percent))} % {'longer' if percent >= 0 else 'less'}"
