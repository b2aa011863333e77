"""What a new plan changes against the one in place, and what that gains under the profile of now.

A plan is made for one profile. When costs or data move (`disttrain profile`, `--calibrate`), its
layout is predicted again on the costs and global batches of the new plan, so that the gain is the
layout's and not the profile's.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disttrain_cli.errors import SpecError
from disttrain_cli.planning.check import check_layout
from disttrain_cli.planning.explain import delays
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.units import Cluster, units_of
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout, Plan, Prediction
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

WORTH_PCT = 1.0  # more sequences per second, below which the plan in place is still good

Value = int | bool | str | list[int]


@dataclass(frozen=True)
class Difference:
    """One thing that the new layout does differently."""

    unit: str | None  # None: of the whole layout
    what: str
    before: Value
    after: Value


@dataclass(frozen=True)
class Moved:
    """What the profile of now makes of a unit of the plan in place."""

    unit: str
    then_ms: float  # its slowest stage for one slot, as predicted when the plan was made
    now_ms: float


@dataclass(frozen=True)
class Changes:
    """The new plan beside the one in place; where that does not fit any more, no times of now and
    no gain."""

    differences: list[Difference]
    # of the plan in place, as predicted when it was made; None where it was edited by hand since
    old_iteration_s: float | None
    old_now_s: float | None  # the same layout under the profile of now
    new_s: float
    # more sequences per second than the plan in place, under the profile of now
    gain_pct: float | None
    keep: bool  # whether the plan in place is still good
    unfit: str | None = None  # why the plan in place does not fit any more
    moved: list[Moved] = field(default_factory=list)


def not_comparable(old: Plan, new: Plan) -> str | None:
    """Why two plans do different work, as "another global batch (24, now 48)"; None where they do
    the same."""
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
    """What `new` changes against `old`, the plan in place, and the gain.

    Args:
        old, new: plans that do the same work (`not_comparable`); `new` was made from `profile`.
        cluster: what the new plan had to fit into.
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
    """Every difference of two layouts, unit by unit, then of the whole layout."""
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
                (mine.name, "CP", mine.cp, theirs.cp),
                (mine.name, "CP messages", mine.cp_comm_type, theirs.cp_comm_type),
                (mine.name, "DP", mine.dp, theirs.dp),
                (mine.name, "PP", mine.pp, theirs.pp),
                (mine.name, "layers per stage", mine.layers_per_stage, theirs.layers_per_stage),
                (mine.name, "recomputes", mine.checkpointing, theirs.checkpointing),
                (mine.name, "weights after", delays(mine), delays(theirs)),
                (mine.name, "TP messages hidden", mine.tp_overlap, theirs.tp_overlap),
            ]
    differing += [
        (None, "microbatch", old.microbatch_size, new.microbatch_size),
        (None, "ZeRO", old.zero_stage, new.zero_stage),
        (None, "reductions behind passes", old.overlap, new.overlap),
    ]
    return [Difference(*one) for one in differing if one[2] != one[3]]


def _trained(layout: Layout) -> str:
    return "all" if layout.trained is None else ", ".join(sorted(layout.trained))


def _unfit(layout: Layout, now: Prediction, cluster: Cluster) -> str | None:
    """What of the cluster a layout exceeds."""
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
