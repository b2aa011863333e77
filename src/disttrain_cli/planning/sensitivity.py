"""What-if analysis: the best plan for other GPUs, images or batches, by the same exact search.

Every answer compares the formula's best layout with the formula's best after the change, so that
differences come from the change and not from the simulator. The formula ignores the reduction of
gradients: if the simulator chose fewer replicas of the LLM than the formula's best has, no answer
has more of them (in proportion to the batch; the ranks of a CP group count as replicas here, as
gradients are reduced over them, too). Images are scaled in the profile: sequences keep their
tokens, and each has that many times the images, to read and to generate.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from disttrain_cli.costs.stage import tp_degrees
from disttrain_cli.planning.finalists import Grouping, grouping
from disttrain_cli.planning.search import Candidate, search
from disttrain_cli.planning.solve import fewer_replicas
from disttrain_cli.planning.units import Cluster, Unit, groupings, holder_of
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.plan import Layout, Strategy
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import Progress
from disttrain_cli.spec.shape import ParallelShape

_PICTURES = ("image", "target")
SAME = 1e-9  # relative difference below which two times are equal


@dataclass(frozen=True)
class UnitMove:
    """GPUs of one unit before and after a change."""

    unit: str
    gpus: int
    gpus_then: int
    shape_then: tuple[int, int, int]  # (tp, dp, pp)
    cp_then: int


@dataclass(frozen=True)
class Change:
    """Best layout after a change, compared with the previous; `units` is empty if none fits."""

    what: str
    gpus: int  # available
    iteration_s: float | None = None  # by the formula
    sequences_per_s: float | None = None
    speedup: float | None = None  # ratio of sequences per second to those before
    units: list[UnitMove] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Sensitivity:
    """Effects of more GPUs, other data, other batches and disabled features."""

    most_llm_replicas: int | None  # limit in every answer; None: no limit
    now: Change
    one_more_gpu: Change
    one_more_node: Change
    # additional GPUs of the next faster layout; None: not within twice as many
    gpus_until_faster: int | None
    changes: list[Change]


#: By their modules, and those of them replicated over TP.
_Units = dict[tuple[tuple[str, ...], tuple[str, ...]], Unit]


@dataclass(frozen=True)
class _Best:
    total_ms: float
    gpus: int
    units: tuple[str, ...]
    shapes: tuple[ParallelShape, ...]
    llm_replicas: int  # ranks with the same weights, CP ranks included
    recomputes: bool  # True if any unit does


def sensitivity(
    profile: Profile, cluster: Cluster, layout: Layout, progress: Progress
) -> Sensitivity | None:
    """Solve again for one more GPU and node, other amounts of images, and other batches.

    Also without TP, CP or recomputed activations if the best layout has them (on a CPU, where plans
    never do, with TP and recomputing). Returns None if nothing fits the cluster itself.

    Args:
        cluster: constraints of the plan.
        layout: the plan's; its strategy is searched.
        progress: called with the searches done.
    """
    strategy = layout.strategy
    # for every size of cluster in the questions, with their cached results
    largest = replace(cluster, gpus=cluster.gpus + max(cluster.gpus, cluster.gpus_per_node))
    units = {
        (unit.modules, unit.replicated): unit
        for group in groupings(profile, largest, strategy)
        for unit in group
    }

    def known(data: Profile, machines: Cluster) -> _Units:
        same = replace(machines, gpus=cluster.gpus, batch=cluster.batch) == cluster
        return units if data is profile and same else {}

    likely = grouping(layout.units)
    before, most = _best(profile, cluster, strategy, None, units, likely), None
    if before is not None and layout.unit_of(profile.inputs.llm).dp_cp_size < before.llm_replicas:
        most = layout.unit_of(profile.inputs.llm).dp_cp_size
        before = _best(profile, cluster, strategy, most, units, likely)
    if before is None:
        return None

    def best(data: Profile, machines: Cluster, within_ms: float = math.inf) -> _Best | None:
        replicas = most and max(1, most * machines.batch // cluster.batch)
        return _best(data, machines, strategy, replicas, known(data, machines), likely, within_ms)

    def faster(more: int) -> int | None:
        """Return the GPUs of a faster layout on `more` additional ones."""
        found = best(profile, replace(cluster, gpus=cluster.gpus + more), before.total_ms)
        return found.gpus if found is not None and _faster(found, before) else None

    asked = _questions(profile, cluster, before)
    total = len(asked) + 2
    changes: list[Change] = []
    for name, data, machines in asked:
        progress("what-if searches", len(changes), total)
        if name == "images doubled" and _more_than_fits(profile, 2.0):
            changes.append(Change(name, cluster.gpus, note="exceeds the sequence length"))
        else:
            changes.append(_change(name, before, cluster, best(data, machines), machines))
    progress("what-if searches", total - 2, total)
    bigger = {
        more: replace(cluster, gpus=cluster.gpus + more) for more in (1, cluster.gpus_per_node)
    }
    # the current layout still fits a larger cluster
    by_gpus = {more: best(profile, machines, before.total_ms) for more, machines in bigger.items()}
    until = 1 if _faster(by_gpus[1], before) else _until_faster(cluster, faster)
    progress("what-if searches", total, total)
    one, node = (
        _change(f"one more {name}", before, cluster, by_gpus[more], bigger[more])
        for name, more in (("device", 1), ("node", cluster.gpus_per_node))
    )
    now = _change("now, by the formula", before, cluster, before, cluster)
    return Sensitivity(most, now, one, node, until, changes)


def _questions(
    profile: Profile, cluster: Cluster, before: _Best
) -> list[tuple[str, Profile, Cluster]]:
    """Return other data, batches and features, as (name, profile, cluster)."""
    images = {"images doubled": 2.0, "images halved": 0.5, "text only": 0.0}
    batches = {"batch doubled": 2 * cluster.batch, "batch halved": cluster.batch // 2}
    asked = [
        (name, scale_images(profile, factor), cluster)
        for name, factor in images.items()
        if _has_images(profile)
    ]
    asked += [
        (name, profile, replace(cluster, batch=batch))
        for name, batch in batches.items()
        if batch and (batch > cluster.batch or cluster.batch % 2 == 0)
    ]
    if any(shape.tp > 1 for shape in before.shapes):
        asked.append(("TP 1 everywhere", profile, replace(cluster, most_tp=1)))
    if any(shape.cp > 1 for shape in before.shapes):
        asked.append(("CP 1 everywhere", profile, replace(cluster, most_cp=1)))
    if any(shape.ep > 1 for shape in before.shapes):
        asked.append(("EP 1 everywhere", profile, replace(cluster, most_ep=1)))
    if before.recomputes:
        asked.append(("nothing recomputed", profile, replace(cluster, checkpointing="none")))
    if profile.device.kind == "cpu" and any(
        len(tp_degrees(profile, [name])) > 1 for name in profile.modules
    ):
        asked.append(
            ("with TP, recomputing", profile, replace(cluster, most_tp=None, checkpointing="auto"))
        )
    return asked


def scale_images(profile: Profile, factor: float) -> Profile:
    """Return the profile with `factor` times the images in every sequence, tokens unchanged.

    Audio is unchanged.
    """
    modules = dict(profile.modules)
    for name, module in profile.modules.items():
        cuts = module.cut_bytes_per_sequence
        if module.kind == "llm":  # only its output for a generator grows with images
            modules[name] = module.model_copy(
                update={"cut_bytes_per_sequence": [*cuts[:-1], cuts[-1] * factor]}
            )
        elif profile.inputs.item(name) in (*_PICTURES, "sequence"):
            modules[name] = module.model_copy(
                update={
                    "work_per_sequence": module.work_per_sequence.scaled(factor),
                    "max_work_per_sequence": module.max_work_per_sequence.scaled(factor),
                    "cut_bytes_per_sequence": [size * factor for size in cuts],
                }
            )
    return profile.model_copy(update={"modules": modules})


def _has_images(profile: Profile) -> bool:
    return any(
        profile.inputs.item(name) in _PICTURES and module.work_per_sequence.items > 0
        for name, module in profile.modules.items()
    )


def _more_than_fits(profile: Profile, factor: float) -> bool:
    others = sum(
        profile.data.count(item) * heads[0].rows("tokens").of(heads[0].size(1))
        for item in KINDS
        if item not in _PICTURES and (heads := profile.inputs.of(item))
    )
    return (
        factor * profile.data.image_tokens + others
        > profile.data.sequences * profile.inputs.sequence_length
    )


def _best(
    profile: Profile,
    cluster: Cluster,
    strategy: Strategy,
    most: int | None,
    known: _Units,
    likely: Grouping,
    within_ms: float = math.inf,
) -> _Best | None:
    """Return the formula's best layout, with at most `most` replicas of the LLM.

    Layouts longer than `within_ms` are not searched. Cached results of `known` units are reused.

    Args:
        likely: the grouping that is searched first.
    """
    found: list[tuple[float, int, list[Unit], Candidate]] = []
    groups = groupings(profile, cluster, strategy)
    # the likeliest first: its time limits the searches of the others; ties go by `groupings`
    for number in sorted(range(len(groups)), key=lambda number: grouping(groups[number]) != likely):
        units = [known.get((unit.modules, unit.replicated), unit) for unit in groups[number]]
        keep = None if most is None else fewer_replicas(units, most)
        limit = min([within_ms, *(total_ms for total_ms, *_ in found)])
        if candidates := search(units, cluster, 1, keep=keep, within_ms=limit).best:
            found.append((candidates[0].total_ms, number, units, candidates[0]))
    if not found:
        return None
    _, _, units, best = min(found, key=lambda one: one[:2])
    replicas = best.units[holder_of(units)].dp_cp_size
    return _Best(
        best.total_ms,
        best.gpus,
        tuple(unit.name for unit in units),
        best.units,
        replicas,
        any(unit.recompute for unit in best.units),
    )


def _faster(best: _Best | None, before: _Best) -> bool:
    return best is not None and best.total_ms < before.total_ms * (1 - SAME)


def _until_faster(cluster: Cluster, faster: Callable[[int], int | None]) -> int | None:
    """Return the fewest additional GPUs (at least two) with which a faster layout exists.

    The number is doubled until one does, then bisected: the best time of an exact search never
    grows with the GPUs it may use.

    Args:
        faster: returns the GPUs of a faster layout on that many more; None if there is none.
    """
    few, enough = 1, min(cluster.gpus_per_node, cluster.gpus)
    while (used := faster(enough)) is None:
        if enough == cluster.gpus:
            return None
        few, enough = enough, min(2 * enough, cluster.gpus)
    enough = used - cluster.gpus
    while enough - few > 1:
        middle = (few + enough) // 2
        used = faster(middle)
        few, enough = (middle, enough) if used is None else (few, used - cluster.gpus)
    return enough


def _change(
    what: str, before: _Best, cluster: Cluster, then: _Best | None, machines: Cluster
) -> Change:
    if then is None:
        return Change(what, machines.gpus, note="no layout fits")
    moves, note = [], ""
    if before.units != then.units:
        note = f"units: {', '.join(then.units)}"
    else:
        moves = [
            UnitMove(name, old.gpus, new.gpus, (new.tp, new.dp, new.pp), new.cp)
            for name, old, new in zip(then.units, before.shapes, then.shapes, strict=True)
        ]
    rate = machines.batch / (then.total_ms / 1e3)
    return Change(
        what,
        machines.gpus,
        then.total_ms / 1e3,
        rate,
        rate / (cluster.batch / (before.total_ms / 1e3)),
        moves,
        note,
    )
