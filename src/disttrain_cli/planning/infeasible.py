"""Explanation of infeasibility: the binding limit, and the smallest change that makes a layout fit.

Feasibility needs no times: for every unit, from the last, only the fewest stages of its shapes
count (`partition.fewest_stages`), and the units before depend only on the GPUs and stages used so
far. Large DP degrees are tried in steps of about a tenth, so a proposed change does help, and is
minimal to within that.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.calls import call
from disttrain_cli.costs.context import misfit
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.layouts import layout_with
from disttrain_cli.planning.options import Columns, layer_gib
from disttrain_cli.planning.partition import fewest_stages
from disttrain_cli.planning.units import Cluster, Unit, groupings, holder_of, shape_at, sharing
from disttrain_cli.spec.plan import Layout, Strategy
from disttrain_cli.spec.prediction import StageMemory
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape

Ints = NDArray[np.int64]
LONG = 16_384  # tokens of a sequence from which an unavailable CP is explained
EXACT_TO = 1.01  # ratio of sufficient to insufficient memory at which the bisection ends
FACTOR, MOST_GIB, MOST_GPUS = 4.0, 4.0**12, 64  # steps of memory; limits of both searches


class Fit(NamedTuple):
    """Shapes of the last units of a pipeline that fit, first unit first."""

    gpus: int
    stages: int  # stages after the preceding unit
    shapes: tuple[ParallelShape, ...]


def infeasible(profile: Profile, cluster: Cluster, strategy: Strategy) -> InfeasibleError:
    """Return the error that names the largest need in the least demanding layout, and remedies."""
    limit = _least_memory(profile, cluster, strategy)
    named = "" if strategy == "auto" else f" {strategy}"
    if limit is None:
        return InfeasibleError(
            f"No{named} layout exists on {cluster.gpus} GPUs",
            f"a global batch of {cluster.batch} sequences, nodes of {cluster.gpus_per_node} GPUs",
            "Use another number of devices, or another train.global_batch_size."
            if strategy == "auto"
            else f"Use another strategy: {call('plan', strategy='auto')}",
        )
    memory_gib, binding = limit
    device_gib = cluster.memory_gib + cluster.margin_gib
    helps = [f"Devices with {memory_gib + cluster.margin_gib:.3g} GiB (cluster.memory_gib)"]
    if memory_gib <= device_gib:
        helps.append("a smaller cluster.memory_margin_gib")
    gpus = _fewest_gpus(profile, cluster, strategy)
    if gpus is not None:
        helps.append(f"{gpus} GPUs of {device_gib:.3g} GiB")
    recomputing = replace(cluster, checkpointing="auto")
    if (
        cluster.checkpointing == "none"
        and profile.device.kind != "cpu"
        and layout_that_fits(profile, recomputing, strategy) is not None
    ):
        helps.append("activations recomputed (train.activation_checkpointing: auto)")
    return InfeasibleError(
        f"No{named} layout fits into the memory of {cluster.gpus} GPUs",
        f"memory is short: stage {binding.stage} of unit {binding.unit} needs"
        f" {binding.peak_gib:.3g} GiB at least, a device has {device_gib:.3g} GiB"
        + (f" less cluster.memory_margin_gib: {cluster.margin_gib:g}" if cluster.margin_gib else "")
        + _cannot_share(profile, cluster),
        f"{', or '.join(helps)} would suffice.",
    )


def _cannot_share(profile: Profile, cluster: Cluster) -> str:
    """Return why long sequences are not shared by a CP group; empty if not applicable."""
    llm, node = [profile.inputs.llm], cluster.gpus_per_node
    if profile.inputs.sequence_length < LONG or cluster.most_cp == 1 or node == 1:
        return ""
    why = misfit(profile, llm, sharing(cluster, cp=2 if node % 2 == 0 else node))
    return "" if why is None else f"; its sequences cannot be shared (CP): {why}"


def _least_memory(
    profile: Profile, cluster: Cluster, strategy: Strategy
) -> tuple[float, StageMemory] | None:
    """Return the smallest sufficient memory in GiB, and the fullest stage then; None if none is."""
    low = high = cluster.memory_gib
    best = None
    while best is None:
        low, high = high, high * FACTOR
        if high > cluster.memory_gib * MOST_GIB:
            return None
        best = layout_that_fits(profile, replace(cluster, memory_gib=high), strategy)
    while high / low > EXACT_TO:
        middle = (low * high) ** 0.5
        result = layout_that_fits(profile, replace(cluster, memory_gib=middle), strategy)
        low, high, best = (middle, high, best) if result is None else (low, middle, result)
    return high, max(layout_memory(profile, best, high), key=lambda stage: stage.peak_gib)


def _fewest_gpus(profile: Profile, cluster: Cluster, strategy: Strategy) -> int | None:
    """Return the smallest number of GPUs found sufficient; None if no tried number is."""
    few, many = cluster.gpus, cluster.gpus
    result = None
    while result is None and many < cluster.gpus * MOST_GPUS:
        few, many = many, many * 4
        result = layout_that_fits(profile, replace(cluster, gpus=many), strategy)
    if result is None:
        return None
    enough = result.gpus_used
    while enough - few > max(1, few // 50):
        middle = (few + enough) // 2
        result = layout_that_fits(profile, replace(cluster, gpus=middle), strategy)
        few, enough = (middle, enough) if result is None else (few, result.gpus_used)
    return enough


def layout_that_fits(profile: Profile, cluster: Cluster, strategy: Strategy) -> Layout | None:
    """Return some layout of a strategy, with few GPUs; None if nothing fits."""
    fits: list[tuple[int, int, int, Fit]] = []
    groups = groupings(profile, cluster, strategy)
    for place, units in enumerate(groups):
        for size in divisors(cluster.batch):
            partial, llm = [Fit(0, 0, ())], holder_of(units)
            for number in reversed(range(len(units))):
                partial = _before(
                    units[number], partial, size, cluster.gpus - number, parallel=number < llm
                )
            fits += [(fit.gpus, place, size, fit) for fit in partial]
    if not fits:
        return None
    _, place, size, fit = min(fits)
    return layout_with(groups[place], cluster, fit.shapes, size, strategy)


def _before(unit: Unit, partial: list[Fit], size: int, gpus: int, parallel: bool) -> list[Fit]:
    """Extend partial layouts by a shape of the preceding unit, within `gpus` GPUs.

    Of two partial layouts, one with fewer GPUs and no more stages suffices. Encoders are parallel
    (`parallel`): their stages do not precede another unit's.
    """
    kinds, slots = unit.kinds, unit.cluster.batch // size
    dps = np.array(divisors(size)) if unit.holds_llm else _spaced(gpus)
    variant, dp = (values.ravel() for values in np.meshgrid(np.arange(len(kinds.tp)), dps))
    small = (kinds.tp_cp_size[variant] * dp <= gpus) & (kinds.expert_replicas(variant, dp) > 0)
    variant, dp = variant[small], dp[small]
    if not len(dp):
        return []
    memory, untimed = layer_gib(Columns(unit, variant, dp, size)), np.zeros((len(dp), unit.layers))
    fits: list[Fit] = []
    for after in partial:
        pp = fewest_stages(untimed, *memory, slots, after.stages, np.zeros(len(dp)), unit.allowed)
        used = kinds.tp_cp_size[variant] * dp * pp + after.gpus
        for row in np.flatnonzero((used <= gpus) & (pp <= unit.layers)):
            shape = shape_at(kinds, variant[row], dp=int(dp[row]), pp=int(pp[row]))
            stages = after.stages if parallel else after.stages + int(pp[row])
            fits.append(Fit(int(used[row]), stages, (shape, *after.shapes)))
    best: list[Fit] = []
    for fit in sorted(fits):
        if not best or fit.stages < best[-1].stages:
            best.append(fit)
    return best


def _spaced(most: int) -> Ints:
    """Return DP degrees: every small one, larger ones in steps of about a tenth."""
    return np.unique(
        np.concatenate(
            [
                np.arange(1, min(most, 16) + 1),
                np.geomspace(1, most, 1 + int(np.log(most) / np.log(1.1))).astype(np.int64),
            ]
        )
    )
