"""`disttrain plan` as a function: a run file and a profile in, a plan out."""

from __future__ import annotations

import dataclasses
import time

from disttrain_cli.errors import InfeasibleError, MismatchError, SpecError
from disttrain_cli.planning.baselines import distmm, paper
from disttrain_cli.planning.options import layers_per_stage
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.search import Candidate, Found, search
from disttrain_cli.planning.units import Cluster, Unit, group
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import (
    Alternative,
    Baseline,
    Layout,
    Plan,
    Prediction,
    Search,
    StageMemory,
    Strategy,
    UnitPlan,
)
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

BASELINES: tuple[Strategy, ...] = ("megatron", "distmm", "paper")


def cluster_of(run: RunFile, profile: Profile, gpus: int | None = None) -> Cluster:
    """What the layout must fit into: the profile's devices, or `gpus` of them."""
    count = profile.device.count if gpus is None else gpus
    if count < 1:
        raise SpecError("A plan needs at least one GPU", f"--gpus: {count}")
    return Cluster(count, min(run.cluster.gpus_per_node, count),
                   run.cluster.memory_gib or profile.device.memory_gib, run.train.zero_stage,
                   run.train.global_batch_size)


def check_profile(run: RunFile, profile: Profile) -> None:
    """Refuse a profile that was measured for another model or cluster.

    Raises:
        MismatchError: both fingerprints are named.
    """
    for what, mine, theirs in (("model", run.model_fingerprint(), profile.fingerprints.model),
                               ("cluster", run.cluster_fingerprint(), profile.fingerprints.cluster)):
        if mine != theirs:
            raise MismatchError(f"The profile was made for another {what}",
                                f"{what} of the run file: {mine}; of the profile: {theirs}",
                                "Profile again: disttrain profile")


def solve(run: RunFile, profile: Profile, *, gpus: int | None = None, strategy: Strategy = "disaggregated",
          top: int = 5) -> Plan:
    """The best plan of a strategy, its prediction, the baselines, and the `top` next best layouts.

    Raises:
        MismatchError: the profile belongs to another model or cluster.
        InfeasibleError: no layout fits; names the stage that binds and the smallest change that helps.
    """
    check_profile(run, profile)
    cluster = cluster_of(run, profile, gpus)
    started = time.perf_counter()
    units, found = candidates(profile, cluster, strategy, top + 1)
    if not found.best:
        raise infeasible(profile, cluster, strategy)
    layouts = [layout_of(units, cluster, candidate, strategy) for candidate in found.best]
    solve_s = time.perf_counter() - started
    best = found.best[0]
    return Plan(
        fingerprints=profile.fingerprints.model_copy(update={"profile": fingerprint(profile)}),
        provenance=profile.provenance,
        plan=layouts[0], predicted=predict(units, layouts[0], cluster),
        baselines={name: baseline(profile, cluster, name) for name in BASELINES},
        alternatives=[
            Alternative(layout=_described(layout), gpus_used=layout.gpus_used,
                        iteration_s=predict(units, layout, cluster).iteration_s,
                        slower_pct=100 * (candidate.total_ms / best.total_ms - 1))
            for candidate, layout in list(zip(found.best, layouts, strict=True))[1:]],
        search=Search(solve_s=solve_s, candidates=found.combinations, exact=strategy != "paper"))


def candidates(profile: Profile, cluster: Cluster, strategy: Strategy, top: int) -> tuple[list[Unit], Found]:
    """Units of a strategy and its best layouts."""
    units = group(profile, cluster, strategy)
    if strategy == "distmm":
        return units, distmm(units, cluster, top)
    if strategy == "paper":
        return units, paper(units, cluster, top)
    return units, search(units, cluster, top)


def layout_of(units: list[Unit], cluster: Cluster, candidate: Candidate, strategy: Strategy) -> Layout:
    """The layout of a candidate, with the layers of every stage."""
    slots = cluster.batch // candidate.slot_sequences
    plans: list[UnitPlan] = []
    after = candidate.stages
    for unit, (tp, dp, pp) in zip(units, candidate.shapes, strict=True):
        after -= pp
        layers = layers_per_stage(unit, tp, dp, pp, candidate.slot_sequences, slots, after)
        assert layers is not None, "the search kept a shape that does not fit"
        plans.append(UnitPlan(name=unit.name, modules=list(unit.modules), tp=tp, dp=dp, pp=pp, gpus=tp * dp * pp,
                              layers_per_stage=layers))
    return Layout(strategy=strategy, global_batch_size=cluster.batch, microbatch_size=candidate.microbatch,
                  microbatches=slots, gpus_used=candidate.gpus, units=plans)


def _described(layout: Layout) -> str:
    return f"{layout.describe()}, M {layout.microbatch_size}"


def baseline(profile: Profile, cluster: Cluster, strategy: Strategy) -> Baseline | None:
    """The best layout of another strategy in the same simulator; None where none fits."""
    units, found = candidates(profile, cluster, strategy, 1)
    if not found.best:
        return None
    layout = layout_of(units, cluster, found.best[0], strategy)
    predicted: Prediction = predict(units, layout, cluster)
    return Baseline(iteration_s=predicted.iteration_s, sequences_per_s=predicted.sequences_per_s,
                    mfu=predicted.mfu, gpus_used=layout.gpus_used, layout=_described(layout))


def infeasible(profile: Profile, cluster: Cluster, strategy: Strategy) -> InfeasibleError:
    """Why nothing fits: the stage that needs most in the least demanding layout, and what would help."""
    binding = _least_memory(profile, cluster, strategy)
    if binding is None:
        return InfeasibleError(f"No {strategy} layout exists on {cluster.gpus} GPUs",
                               f"a global batch of {cluster.batch} sequences, nodes of {cluster.gpus_per_node} GPUs",
                               "Use another strategy: disttrain plan --strategy disaggregated")
    gpus = next((count for count in (cluster.gpus * factor for factor in (2, 4, 8, 16))
                 if candidates(profile, dataclasses.replace(cluster, gpus=count), strategy, 1)[1].best), None)
    help_ = f"Devices with {binding.peak_gib:.3g} GiB (cluster.memory_gib)"
    if gpus is not None:
        help_ += f", or about {_fewest_gpus(profile, cluster, strategy, gpus)} GPUs of {cluster.memory_gib:.3g} GiB"
    return InfeasibleError(
        f"No {strategy} layout fits into the memory of {cluster.gpus} GPUs",
        f"memory binds: stage {binding.stage} of unit {binding.unit} needs {binding.peak_gib:.3g} GiB at least, "
        f"a device has {cluster.memory_gib:.3g} GiB", help_ + " would do.")


def _least_memory(profile: Profile, cluster: Cluster, strategy: Strategy) -> StageMemory | None:
    """The fullest stage of a layout under the smallest memory limit that any layout fits into (to 1 %)."""
    low, high = cluster.memory_gib, cluster.memory_gib
    while not candidates(profile, dataclasses.replace(cluster, memory_gib=high), strategy, 1)[1].best:
        low, high = high, high * 4
        if high > cluster.memory_gib * 4**12:
            return None
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        if candidates(profile, dataclasses.replace(cluster, memory_gib=middle), strategy, 1)[1].best:
            high = middle
        else:
            low = middle
    roomy = dataclasses.replace(cluster, memory_gib=high)
    units, found = candidates(profile, roomy, strategy, 1)
    layout = layout_of(units, roomy, found.best[0], strategy)
    return max(predict(units, layout, roomy).memory, key=lambda stage: stage.peak_gib)


def _fewest_gpus(profile: Profile, cluster: Cluster, strategy: Strategy, enough: int) -> int:
    """The smallest number of GPUs found to fit, by halving between too few and enough."""
    few = cluster.gpus
    while enough - few > max(1, few // 50):
        middle = (few + enough) // 2
        if candidates(profile, dataclasses.replace(cluster, gpus=middle), strategy, 1)[1].best:
            enough = middle
        else:
            few = middle
    return enough
