"""Comparison of a new plan with the current one, and the speed-up under the current profile.

A plan is made for one profile. When costs or data change (`disttrain profile`, `--calibrate`), the
current plan's layout is predicted again with the costs and global batches of the new plan, so that
the speed-up is the layout's and not the profile's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disttrain_cli.errors import SpecError
from disttrain_cli.planning.check import check_layout
from disttrain_cli.planning.explain import delays
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.units import Cluster, units_of
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

WORTH_PCT = 1.0  # gain in sequences per second below which the current plan is kept

Value = int | bool | str | list[int]


@dataclass(frozen=True)
class Difference:
    """One setting that differs in the new layout."""

    unit: str | None  # None: a setting of the entire layout
    what: str
    before: Value
    after: Value


@dataclass(frozen=True)
class Moved:
    """Time of a unit in the current plan, when planned and under the current profile."""

    unit: str
    then_ms: float  # its slowest stage for one slot, as predicted when the plan was made
    now_ms: float


@dataclass(frozen=True)
class Changes:
    """Comparison of the new plan with the current one.

    If the current plan no longer fits, it has no current times and no gain.
    """

    differences: list[Difference]
    # of the current plan, as predicted when it was made; None if it was edited by hand since
    old_iteration_s: float | None
    old_now_s: float | None  # of the same layout under the current profile
    new_s: float
    # gain in sequences per second over the current plan, under the current profile
    gain_pct: float | None
    keep: bool  # True if the current plan is still good
    unfit: str | None = None  # reason why the current plan no longer fits
    moved: list[Moved] = field(default_factory=list)


def not_comparable(old: Plan, new: Plan) -> str | None:
    """Return why two plans do different work, as "another global batch (24, now 48)"; else None."""
    for what, before, after in (
        ("model", old.fingerprints.model, new.fingerprints.model),
        ("global batch", old.plan.global_batch_size, new.plan.global_batch_size),
        ("strategy", old.plan.strategy, new.plan.strategy),
        ("model.trained", _trained(old.plan), _trained(new.plan)),
    ):
        if before != after:
            return f"another {what} ({before}, now {after})"
    return None


def changes(old: Plan, new: Plan, run: RunFile, profile: Profile, cluster: Cluster) -> Changes:
    """Compare `new` with `old`, the current plan, including the speed-up.

    Args:
        old, new: plans that do the same work (`not_comparable`); `new` was made from `profile`.
        cluster: constraints of the new plan.
    """
    edited = old.predicted.layout not in (None, fingerprint(old.plan))
    differing, then_s, new_s = (
        differences(old.plan, new.plan),
        None if edited else old.predicted.iteration_s,
        new.predicted.iteration_s,
    )
    try:
        check_layout(old, run, profile)
        now = predict(units_of(profile, cluster, old.plan), old.plan, cluster)
        unfit = _unfit(old.plan, now, cluster)
    except SpecError as error:
        unfit = f"{error.what} ({error.why})"
    if unfit is not None:
        return Changes(differing, then_s, None, new_s, None, False, unfit)
    gain_pct = 100 * (now.iteration_s / new_s - 1)
    return Changes(
        differing,
        then_s,
        now.iteration_s,
        new_s,
        gain_pct,
        gain_pct < WORTH_PCT,
        moved=[] if edited else _moved(old.predicted, now),
    )


def differences(old: Layout, new: Layout) -> list[Difference]:
    """Return every difference of two layouts, unit by unit, then of the entire layout."""
    differing: list[tuple[str | None, str, Value, Value]] = []
    if [(unit.name, unit.modules) for unit in old.units] != [
        (unit.name, unit.modules) for unit in new.units
    ]:
        differing.append((None, "units", old.describe(), new.describe()))
    else:
        for mine, theirs in zip(old.units, new.units, strict=True):
            differing += [
                (mine.name, "devices", mine.gpus, theirs.gpus),
                (mine.name, "TP", mine.tp, theirs.tp),
                (
                    mine.name,
                    "whole modules",
                    ", ".join(mine.module_tp),
                    ", ".join(theirs.module_tp),
                ),
                (mine.name, "CP", mine.cp, theirs.cp),
                (mine.name, "CP messages", mine.cp_comm_type, theirs.cp_comm_type),
                (mine.name, "EP", mine.ep, theirs.ep),
                (mine.name, "DP", mine.dp, theirs.dp),
                (mine.name, "PP", mine.pp, theirs.pp),
                (mine.name, "stages per rank", mine.chunks, theirs.chunks),
                (mine.name, "layers per stage", mine.layers_per_stage, theirs.layers_per_stage),
                (mine.name, "recomputes", mine.checkpointing, theirs.checkpointing),
                (mine.name, "weight gradients deferred", delays(mine), delays(theirs)),
                (mine.name, "TP messages overlapped", mine.tp_overlap, theirs.tp_overlap),
                (mine.name, "EP messages overlapped", mine.ep_overlap, theirs.ep_overlap),
            ]
    differing += [
        (None, "microbatch", old.microbatch_size, new.microbatch_size),
        (None, "ZeRO", old.zero_stage, new.zero_stage),
        (None, "reductions overlapped", old.overlap, new.overlap),
    ]
    return [Difference(*one) for one in differing if one[2] != one[3]]


def _trained(layout: Layout) -> str:
    return "all" if layout.trained is None else ", ".join(sorted(layout.trained))


def _unfit(layout: Layout, now: Prediction, cluster: Cluster) -> str | None:
    """Return the limit of the cluster that a layout exceeds, in words; None if it fits."""
    if layout.gpus_used > cluster.gpus:
        return f"It needs {layout.gpus_used:,} devices (there are {cluster.gpus:,})"
    fullest = max(now.memory, key=lambda stage: stage.peak_gib / stage.limit_gib)
    if fullest.peak_gib > fullest.limit_gib:
        return (
            f"Stage {fullest.stage} of {fullest.unit} needs {fullest.peak_gib:.3g} GiB "
            f"(of a device, plans may use {fullest.limit_gib:.3g})"
        )
    return None


def _moved(then: Prediction, now: Prediction) -> list[Moved]:
    before = {time.unit: time.stage_ms for time in then.units}
    return [
        Moved(time.unit, before[time.unit], time.stage_ms)
        for time in now.units
        if time.unit in before
    ]
