"""Range of a predicted step, simulated at expected and pessimistic costs (`costs.doubts`).

Layouts are ranked by the profile's own costs. Two of them are compared at both other levels, on the
same global batches: a difference of less than `TIE` at both is a tie, and if their order differs
between both, neither is known to be faster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from disttrain_cli.costs.doubts import Level, costs_at, doubts_of, lacks_network
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.predict import simulated_s
from disttrain_cli.planning.units import Cluster
from disttrain_cli.spec.plan import Alternative, Baseline, Layout, Plan
from disttrain_cli.spec.prediction import Basis, Prediction
from disttrain_cli.spec.profile import Profile

TIE = 0.01  # share of a step below which a difference at both levels is a tie
#: Bases of doubts in words.
BASES: dict[Basis, str] = {
    "measured": "from measurements",
    "stated": "from others' figures",
    "assumed": "assumed",
}


class Order(NamedTuple):
    """Comparison of two layouts by time."""

    verdict: Literal["first", "second", "tie", "flips"]
    expected: float  # time of the second over that of the first, less 1, at the expected costs
    pessimistic: float


def compared(
    profile: Profile, cluster: Cluster, draws: Draws, first: Layout, second: Layout
) -> Order:
    """Compare two layouts at expected and pessimistic costs, every rank on a device of its own.

    Args:
        draws: the global batches, of this profile, that both run.
    """
    return order_of(*(_both_s(profile, cluster, draws, layout) for layout in (first, second)))


def _both_s(
    profile: Profile, cluster: Cluster, draws: Draws, layout: Layout
) -> tuple[float, float]:
    """Return the time of a layout's step at the expected and at the pessimistic costs."""
    expected, pessimistic = (
        costs_at(profile, level, cluster.gpus) for level in ("expected", "pessimistic")
    )
    return (
        simulated_s(expected, layout, cluster, shared=False, draws=draws),
        simulated_s(pessimistic, layout, cluster, shared=False, draws=draws),
    )


def order_of(first_s: tuple[float, float], second_s: tuple[float, float]) -> Order:
    """Return the order of two layouts by their times at expected and pessimistic costs."""
    expected, pessimistic = (
        theirs / mine - 1 for mine, theirs in zip(first_s, second_s, strict=True)
    )
    if max(abs(expected), abs(pessimistic)) < TIE:
        return Order("tie", expected, pessimistic)
    if expected * pessimistic < 0:
        return Order("flips", expected, pessimistic)
    return Order("first" if expected + pessimistic > 0 else "second", expected, pessimistic)


def with_range(
    predicted: Prediction, profile: Profile, layout: Layout, cluster: Cluster, draws: Draws
) -> Prediction:
    """Return the prediction of a layout with its expected step, range, and doubts.

    Args:
        cluster: with the policy under which layouts are ranked; times are scaled to the
            prediction's, which may be of another.
        draws: the global batches, of this profile and policy.
    """
    profiles = {level: costs_at(profile, level, cluster.gpus) for level in get_args(Level)}
    ranked_s = {
        id(costs): simulated_s(costs, layout, cluster, draws=draws)
        for costs in (profile, *profiles.values())
    }
    low_s, expected_s, high_s = (
        predicted.iteration_s * ranked_s[id(costs)] / ranked_s[id(profile)]
        for costs in profiles.values()
    )
    hides = any(unit.tp_overlap for unit in layout.units)
    doubts = {
        doubt.what: doubt.basis
        for doubt in doubts_of(profile, cluster.gpus)
        if hides or doubt.changes != {"tp_overlap"}
    }
    return predicted.model_copy(
        update={"expected_s": expected_s, "range_s": (low_s, high_s), "doubts": doubts}
    )


def orders_of(plan: Plan, profile: Profile, cluster: Cluster, draws: Draws) -> dict[str, Order]:
    """Return the comparisons of a plan with its runners-up and baselines, by name.

    Equal layouts are omitted; empty if ranks share cores, which level their differences.
    """
    if profile.device.kind == "cpu":
        return {}
    others: dict[str, Alternative | Baseline | None] = dict(plan.baselines)
    others |= {f"#{number}": other for number, other in enumerate(plan.alternatives, 2)}
    plan_s = _both_s(profile, cluster, draws, plan.plan)
    return {
        name: order_of(plan_s, _both_s(profile, cluster, draws, other.plan))
        for name, other in others.items()
        if other
        and other.plan
        and other.plan.model_copy(update={"strategy": plan.plan.strategy}) != plan.plan
    }


def grounds(profile: Profile, gpus: int) -> str:
    """Return the origin of a prediction's costs, in words: measured or not."""
    costs = "kernels and links" if gpus > 1 else "kernels"
    between = gpus > profile.cluster.gpus_per_node
    network = " and the run file's network between nodes"
    if "calibrated" in profile.provenance:
        said = f"{costs} corrected by a run's traces"
    elif profile.device.kind == "analytic":
        return f"the catalogue's {costs}{network if between else ''}, none of them measured here"
    else:
        said = f"measured {costs}"
    return f"{said}{network}, which was not measured" if lacks_network(profile, gpus) else said


def range_sentence(predicted: Prediction) -> str | None:
    """Return a sentence about the doubts behind a range, by their bases."""
    if predicted.range_s is None or not predicted.doubts:
        return None
    found: dict[Basis, list[str]] = {}
    for what, basis in predicted.doubts.items():
        found.setdefault(basis, []).append(what)
    parts = "; ".join(f"{BASES[basis]}: {', '.join(names)}" for basis, names in found.items())
    slower_pct = 100 * (predicted.range_s[1] / predicted.iteration_s - 1)
    return (
        f"Range     up to {slower_pct:.0f} % slower than at the profile's costs, which rank and"
        f" compare layouts here. Sources of doubt: {parts}."
    )


def order_sentence(orders: Mapping[str, Order]) -> str | None:
    """Return a sentence about layouts that may be as fast as the plan or faster; else None."""
    flips = [
        f"{name} takes {_percent(order.expected)} at the expected and"
        f" {_percent(order.pessimistic)} at the pessimistic costs"
        for name, order in orders.items()
        if order.verdict in ("flips", "second")
    ]
    ties = [name for name, order in orders.items() if order.verdict == "tie"]
    said = [
        *([f"{', '.join(ties)} within {100 * TIE:g} % of the plan at both costs"] if ties else []),
        *flips,
    ]
    return f"Order     uncertain: {'; '.join(said)}." if said else None


def _percent(share: float) -> str:
    return f"{100 * abs(share):.1f} % {'more' if share > 0 else 'less'}"
