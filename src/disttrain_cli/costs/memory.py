"""Peak memory of a stage during a step.

The peak is in the backward of the first slot that leaves, or the forward before it: then the
activations of all slots in flight are saved, and one layer holds its working memory in addition.
Gradients are reduced and weights updated and gathered in place, when all activations are released
or, overlapped with passes, those of one slot are left, so that neither ever needs more. Bytes per
parameter follow DeepSpeed's engines as they are driven here.

Memory that no operator accounts for is specified, not measured: the device's context, cuBLAS's
workspaces, communicators (`nccl`), the allocator's fragmentation of transient memory
(`templates/hardware.yaml`), and workspaces of other kernels (`models/workspaces.py`), which layers'
transients include.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs import nccl
from disttrain_cli.costs.activations import at_worst, deferred_share, kept_share, working_share
from disttrain_cli.costs.experts import of_others, own_trained
from disttrain_cli.costs.freezing import backwards
from disttrain_cli.costs.memoised import memoised
from disttrain_cli.schedule.interleaved import passes
from disttrain_cli.schedule.one_f_one_b import slots_in_flight
from disttrain_cli.spec.layer_costs import LayerShard
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.prediction import StageMemory
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.stage_graph import Stage, StageGraph, neighbours, stage_graph
from disttrain_cli.spec.trace import BACKWARD, FORWARD

Floats = NDArray[np.float64]
Count = int | NDArray[np.int64]
Flags = bool | NDArray[np.bool_]
GIB = float(2**30)
WEIGHT_BYTES = {"bf16": 2.0, "fp32": 4.0}
SENT_SLOTS = 2  # slots whose rows may not have been sent yet, each way over a cut


def bytes_per_parameter(precision: str, zero_stage: int) -> tuple[float, float]:
    """Return the bytes of a parameter on every replica, and those sharded over replicas (1/DP).

    bf16, ZeRO-1: 2 weight + 4 fp32 gradient (those in bf16 are released as soon as they are added),
    and 12 sharded (fp32 weight, two moments). fp32: 4 weight + 4 gradient, and 8 of Adam's moments;
    with ZeRO-1 these are sharded, and a copy of the weights.
    """
    if precision == "bf16":
        return 6.0, 12.0
    return (8.0, 12.0) if zero_stage == 1 else (16.0, 0.0)


def share_of_states(
    precision: str, dp_cp_size: Floats, expert_replicas: Floats | None = None
) -> Floats:
    """Return the fraction of the sharded bytes that a rank holds, by DP × CP.

    With `expert_replicas`, that of its experts under EP. On one replica fp32 runs without ZeRO,
    hence without its copy of the weights.
    """
    alike = dp_cp_size if expert_replicas is None else expert_replicas
    return np.where((dp_cp_size == 1.0) & (precision == "fp32"), 8.0 / 12.0, 1.0 / alike)


def cuts_of(profile: Profile, modules: Sequence[str]) -> int:
    """Return the most cuts to neighbours that a stage of a unit with these modules may have."""
    inside = [(before in modules, after in modules) for before, after in _pairs(profile)]
    entering, leaving = inside.count((False, True)), inside.count((True, False))
    return max(entering + leaving, entering + 1, leaving + 1)


class Groups(NamedTuple):
    """Groups of a rank that NCCL connects for collectives, and its connections for messages."""

    world: nccl.Spread
    weights: nccl.Spread  # ranks with the same weights
    tensor: nccl.Spread
    context: nccl.Spread
    cuts: int  # to neighbours
    messages_mib: float | Floats
    gathers: Flags = False  # the CP group all-gathers keys and values
    overlap: bool = False  # messages of the TP group go round a ring
    copies: bool = True  # a tied weight may have its layers on two stages
    experts: nccl.Spread = nccl.Spread(1, 1, 1)  # the EP group
    expert_replicas: nccl.Spread = nccl.Spread(1, 1, 1)  # with an EP group

    @classmethod
    def of_stage(cls, profile: Profile, graph: StageGraph, stage: Stage) -> Groups:
        """Return the groups of the ranks of a stage."""
        node, unit, ranks = profile.cluster.gpus_per_node, stage.unit, stage.ranks
        spread = partial(nccl.Spread.of, node=node)
        return cls(  # the first of the stage's groups of each kind
            spread(range(graph.world_size), some=ranks),
            spread(ranks[:: unit.tp]),
            spread(ranks[: unit.tp]),
            spread(ranks[: unit.tp_cp_size : unit.tp]),
            len(stage.before) + len(stage.after),
            nccl.messages_mib(profile.device, graph, stage, node),
            unit.gathers,
            unit.tp_overlap,
            unit.pp > 1,
            *((spread(ranks[: unit.ep]), spread(ranks[:: unit.ep])) if unit.ep > 1 else ()),
        )


def reserved_bytes(profile: Profile, modules: Sequence[str], groups: Groups) -> Floats:
    """Return the bytes of a rank for the device's context, workspaces and communicators."""
    device = profile.device
    copies = groups.copies and any(profile.modules[name].tied for name in modules)
    spreads = (*groups[:4], groups.experts, groups.expert_replicas)
    count = sum(np.asarray(one.size) > 1 for one in spreads[1:]) + 1 + 2 * groups.cuts + copies
    mib = (
        device.workspace_mib
        + count * device.communicator_mib
        + groups.messages_mib
        + nccl.collective_mib(device, groups.world, nccl.WORLD_CTAS)
        + nccl.collective_mib(device, groups.weights)
        + nccl.collective_mib(device, groups.tensor, passes_on=groups.overlap)
        + nccl.context_mib(device, groups.context, groups.gathers)
        + nccl.context_mib(device, groups.experts, False)
        + nccl.collective_mib(device, groups.expert_replicas)
        + copies * nccl.collective_mib(device, nccl.Spread(2, 2, 1))
    )
    return np.asarray(device.context_gib * GIB + mib * 2**20, dtype=np.float64)


_reserved_bytes = memoised(reserved_bytes)  # of a rank: many stages have equal groups


class MessageBytes(NamedTuple):
    """Send buffers of a rank with rows not yet sent, of `SENT_SLOTS` slots, by DP [B]."""

    entering: Floats  # gradients, over the cut before the unit
    inside: Floats  # over the widest cut inside it, either way
    leaving: Floats  # over the cut after it

    def of_stage(self, first: bool, last: bool) -> Floats:
        """Return both ways of a stage: over the unit's ends, or over the widest cut inside."""
        return (self.entering if first else self.inside) + (self.leaving if last else self.inside)


def message_bytes(
    profile: Profile,
    modules: Sequence[str],
    slot_sequences: float,
    *,
    tp_cp_size: Count,
    dp: Floats,
) -> MessageBytes:
    """Return the send buffers of a unit's stages.

    Each of the ranks that share the work of a replica sends its part.
    """
    known = profile.modules
    senders = {
        before for before, after in _pairs(profile) if after in modules and before not in modules
    }
    *inside, leaving = (size for name in modules for size in known[name].cut_bytes_per_sequence)
    cuts = (
        sum(known[name].output_bytes_per_sequence for name in senders),
        max(inside, default=0.0),
        leaving,
    )
    return MessageBytes(*(SENT_SLOTS * size * slot_sequences / (tp_cp_size * dp) for size in cuts))


def _pairs(profile: Profile) -> list[tuple[str, str]]:
    """Return neighbouring modules: (sender, receiver)."""
    names = list(profile.modules)
    return [
        (names[before], names[after])
        for before, after in neighbours(len(names), names.index(profile.inputs.llm))
    ]


@memoised
def state_bytes(
    profile: Profile,
    modules: Sequence[str],
    zero_stage: int,
    trained: Sequence[str] | None = None,
    *,
    tp: int,
) -> tuple[Floats, Floats]:
    """Return bytes of weights, gradients and optimizer states of every layer [L] on one TP rank.

    The first array is held by every replica, the second is sharded over the replicas of a unit
    (divided by DP). A frozen weight has neither gradient nor optimizer state.
    """
    kept, shared = bytes_per_parameter(profile.precision, zero_stage)
    weight = WEIGHT_BYTES[profile.precision]
    trains = np.array(
        [does == "trained" for name in modules for does in backwards(profile, trained)[name]]
    )
    shards = _shards(profile, modules, tp=tp)
    count = np.array([float(shard.parameters) for shard in shards])
    trainable = np.array([float(shard.trainable) for shard in shards]) * trains
    return count * weight + trainable * (kept - weight), trainable * shared


def expert_state_bytes(
    profile: Profile,
    modules: Sequence[str],
    zero_stage: int,
    trained: Sequence[str] | None,
    shape: ParallelShape,
) -> Floats:
    """Return [3, L] changes to `state_bytes` under EP, and the bytes of a rank's own experts.

    The third row is sharded over the ranks with the same experts.
    """
    kept, shared = bytes_per_parameter(profile.precision, zero_stage)
    weight = WEIGHT_BYTES[profile.precision]
    columns: list[tuple[float, float, float]] = []
    for name in modules:
        layers = list(
            zip(profile.modules[name].layers, backwards(profile, trained)[name], strict=True)
        )
        each: dict[tuple[str, str], tuple[float, float, float]] = {}
        for kind, does in dict.fromkeys(layers):
            held, others = of_others(profile, name, kind, shape)
            own = own_trained(profile, name, kind, shape)
            others, own = (count * (does == "trained") for count in (others, own))
            each[kind, does] = (
                -held * weight - others * (kept - weight),
                -(others + own) * shared,
                own * shared,
            )
        columns += [each[layer] for layer in layers]
    return np.array(columns).T


def parameters(profile: Profile, modules: Sequence[str], *, tp: int) -> Floats:
    """Return the parameters of every layer of a unit [L] on one rank of a TP group."""
    return np.array([float(shard.parameters) for shard in _shards(profile, modules, tp=tp)])


def _shards(profile: Profile, modules: Sequence[str], *, tp: int) -> list[LayerShard]:
    return [
        profile.modules[name].costs[kind].tp[str(tp)]
        for name in modules
        for kind in profile.modules[name].layers
    ]


def layout_memory(profile: Profile, layout: Layout, limit_gib: float) -> list[StageMemory]:
    """Return the peak memory of every stage of a layout, or of its ranks' stages together.

    Slots in flight on a stage of a 1F1B pipeline: the stages from it to the end of its branch, at
    most n. Gradients in fp32 appear in a step's first backward, which has all slots in flight if
    there are no more; the search counts them in that moment too, and overestimates there.

    If two layers with a shared weight are on the stage, one of them has its states; the gradient
    that the last of them computes is held until that of the first, unless weight gradients are
    deferred.
    """
    slot = layout.unit_of(profile.inputs.llm).dp * layout.microbatch_size
    waste = profile.device.fragmentation
    result: list[StageMemory] = []
    graph = stage_graph(layout, profile.inputs.llm)
    for unit in layout.units:
        dp = np.array([float(unit.dp)])
        known = (profile, layout, unit)
        kept, shared = _states(*known, layout.zero_stage)
        activations = at_worst(kept_share, *known)
        whole, split = (
            np.maximum(activations, at_worst(working_share, *known, later, unit.tp_overlap))
            for later in (False, True)
        )
        deferred = at_worst(deferred_share, *known)
        weight = WEIGHT_BYTES[profile.precision] * np.concatenate(
            [parameters(profile, modules, tp=shape.tp) for modules, shape in unit.parts]
        )
        unsharded = _states(*known, 1)[0]
        mine = share_of_states(profile.precision, dp * unit.cp)
        states = np.array([weight, unsharded - weight, kept + shared * mine - unsharded])
        if unit.ep > 1:
            states = states - _of_other_experts(profile, layout, unit)
        moved = message_bytes(profile, unit.modules, slot, tp_cp_size=unit.tp_cp_size, dp=dp)
        local = [stage for stage in graph.stages if stage.unit is unit]
        for stage in local:
            groups = Groups.of_stage(profile, graph, stage)
            reserved = float(_reserved_bytes(profile, unit.modules, groups))
            flight = slots_in_flight(layout.microbatches, stage.to_end)
            span = slice(
                *(
                    layer - local[0].layers.start
                    for layer in (stage.layers.start, stage.layers.stop)
                )
            )
            later = stage.weight_delay is not None
            own = [values[span].copy() for values in states]
            working = (split if later else whole)[span]
            if (places := tied_in(profile, stage)) is not None:
                owner, sharer = places
                waiting = np.zeros_like(working)
                if not later and own[1][owner]:
                    waiting[owner:sharer] = weight[span][owner]
                working = working + waiting
            if (places := shared_by_ranks(profile, stage, local)) is not None:
                owner, sharer = places
                for values, of_unit in zip(own, states, strict=True):
                    values[sharer] -= of_unit[owner - local[0].layers.start]
            weight_bytes, gradient_bytes, optimizer_bytes = (float(each.sum()) for each in own)
            appear = profile.precision == "fp32" and flight == layout.microbatches
            keeps, transient, absent = _fullest_moment(
                activations[span],
                working,
                own[1] * appear,
                flight,
                layout.microbatches,
                deferred[span] * later,
                stage.weight_delay or 0,
            )
            messages = float(moved.of_stage(stage.index == 0, stage.index == unit.stages - 1)[0])
            moving = keeps + transient + messages
            parts = {
                "weights": weight_bytes,
                "gradients": gradient_bytes - absent,
                "optimizer": optimizer_bytes,
                "activations": keeps,
                "transient": transient,
                "messages": messages,
                "fragmentation": waste * moving,
                "reserve": reserved,
            }
            result.append(
                StageMemory(
                    unit=unit.name,
                    stage=stage.index,
                    peak_gib=sum(parts.values()) / GIB,
                    limit_gib=limit_gib,
                    **{f"{name}_gib": size / GIB for name, size in parts.items()},
                )
            )
        if unit.chunks > 1:
            spans = [slice(stage.layers.start, stage.layers.stop) for stage in local]
            sizes = [(activations[span], np.maximum(activations, whole)[span]) for span in spans]
            result = _of_devices(unit, layout.microbatches, result, sizes, waste)
    return result


def _of_devices(
    unit: UnitPlan,
    slots: int,
    stages: Sequence[StageMemory],
    sizes: Sequence[tuple[Floats, Floats]],
    waste: float,
) -> list[StageMemory]:
    """Return the memory of ranks with several stages each, in the order of interleaved 1F1B.

    Args:
        unit: the layout's only one.
        slots: of a step.
        stages: each as if it had ranks of its own.
        sizes: by stage, saved activations and working memory of its layers.
        waste: share of moving memory that fragmentation takes.
    """
    keeps = [float(kept.sum()) for kept, _ in sizes]
    runs = [float((np.cumsum(kept) - kept + working).max()) for kept, working in sizes]
    result: list[StageMemory] = []
    for device in range(unit.pp):
        held, most = 0.0, (0.0, 0.0)  # held from forwards, and at the fullest moment with the rest
        for what, stage, _ in passes(unit.pp, unit.chunks, slots, device):
            others = held - keeps[stage] * (what == BACKWARD)
            most = max(most, (others + runs[stage], others))
            held = others + keeps[stage] * (what == FORWARD)
        own = stages[device :: unit.pp]
        parts = {
            part: sum(getattr(one, f"{part}_gib") for one in own)
            for part in ("weights", "gradients", "optimizer", "messages")
        }
        parts["activations"], parts["transient"] = most[1] / GIB, (most[0] - most[1]) / GIB
        parts["fragmentation"] = waste * (most[0] / GIB + parts["messages"])
        parts["reserve"] = max(one.reserve_gib for one in own)
        result.append(
            StageMemory(
                unit=unit.name,
                stage=device,
                peak_gib=sum(parts.values()),
                limit_gib=own[0].limit_gib,
                **{f"{part}_gib": size for part, size in parts.items()},
            )
        )
    return result


def _states(
    profile: Profile, layout: Layout, unit: UnitPlan, zero_stage: int
) -> tuple[Floats, Floats]:
    """Return `state_bytes` of every layer of a unit [L]."""
    kept, shared = zip(
        *(
            state_bytes(profile, modules, zero_stage, layout.trained, tp=shape.tp)
            for modules, shape in unit.parts
        ),
        strict=True,
    )
    return np.concatenate(kept), np.concatenate(shared)


def _of_other_experts(profile: Profile, layout: Layout, unit: UnitPlan) -> Floats:
    """Return [3, L] by how much an EP group lessens weights, gradients and optimizer states."""
    precision, weight = profile.precision, WEIGHT_BYTES[profile.precision]
    kept, shared = bytes_per_parameter(precision, layout.zero_stage)
    unsharded, _ = bytes_per_parameter(precision, 1)
    ranks, alike = np.array(float(unit.dp_cp_size)), np.array(float(unit.expert_replicas))
    whole, divided = (
        kept - unsharded + shared * float(share_of_states(precision, ranks, replicas))
        for replicas in (None, alike)
    )
    columns: list[tuple[float, float, float]] = []
    for name in unit.modules:
        module = profile.modules[name]
        does = backwards(profile, layout.trained)[name]
        for kind, one in zip(module.layers, does, strict=True):
            held, trained = of_others(profile, name, kind, unit.shape)
            trained *= one == "trained"
            own = own_trained(profile, name, kind, unit.shape) * (one == "trained")
            columns.append(
                (
                    held * weight,
                    trained * (unsharded - weight),
                    (trained + own) * whole - own * divided,
                )
            )
    return np.array(columns).T


def tied_in(profile: Profile, stage: Stage) -> tuple[int, int] | None:
    """Return the local indices of the two layers with a shared weight, if a stage has both."""
    tied = profile.tied_layers
    if tied is None or any(layer not in stage.layers for layer in tied):
        return None
    return tied[0] - stage.layers.start, tied[1] - stage.layers.start


def shared_by_ranks(
    profile: Profile, stage: Stage, stages: Sequence[Stage]
) -> tuple[int, int] | None:
    """Return two layers with one weight if a stage has the second and its ranks have the first.

    The first is a layer of the model, the second an index in the stage.

    Args:
        stages: of the same unit; one of them on the same ranks may have the first.
    """
    tied = profile.tied_layers
    if tied is None or tied[1] not in stage.layers:
        return None
    both = any(tied[0] in one.layers and one.ranks == stage.ranks for one in stages)
    return (tied[0], tied[1] - stage.layers.start) if both else None


def fits(profile: Profile, layout: Layout, limit_gib: float) -> bool:
    """Return True if every stage of a layout fits into this much memory."""
    return all(
        stage.peak_gib <= stage.limit_gib for stage in layout_memory(profile, layout, limit_gib)
    )


def _fullest_moment(
    activations: Floats,
    working: Floats,
    appearing: Floats,
    flight: int,
    microbatches: int,
    deferred: Floats,
    delay: int,
) -> tuple[float, float, float]:
    """Return a stage's peak as saved activations, working memory, and gradients not yet allocated.

    `activations`, `working` and `appearing` (gradients that the first backward allocates) are by
    layer [L]. While layer i of the first backward runs, the layers after it have released their
    activations and have gradients. The second backward has all gradients, and one slot less.

    If weight gradients are deferred by `delay` backwards, a stage holds the `deferred` bytes [L] of
    that many earlier slots, and in a backward of the layers after i of this slot; then no gradient
    is assumed to be absent. The last `flight` backwards have one slot less each.
    """
    kept, done = np.cumsum(activations), np.cumsum(appearing)
    held = kept - activations + working
    if deferred.any():
        done_with = deferred.sum() - np.cumsum(deferred)  # by layers after each
        layer = int((held + done_with).argmax())
        others = max(
            (min(flight, microbatches - before) - 1) * kept[-1] + before * deferred.sum()
            for before in (min(delay, microbatches - flight), min(delay, microbatches - 1))
        )
        keeps = others + kept[layer] + done_with[layer]
        return float(keeps), float(held[layer] - kept[layer]), 0.0
    moments = [(flight, done - appearing)]
    if flight > 1 and appearing.any():
        moments.append((flight - 1, np.zeros_like(done)))
    best = []
    for slots, absent in moments:
        layer = int((held - absent).argmax())
        keeps = (slots - 1) * kept[-1] + kept[layer]
        best.append((float(keeps), float(held[layer] - kept[layer]), float(absent[layer])))
    return max(best, key=lambda moment: moment[0] + moment[1] - moment[2])
