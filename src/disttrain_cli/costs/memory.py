"""Peak memory of a stage: what it holds in the moment of a step in which it holds most.

The moment is in the backward of the first slot that leaves, or the forward before it: then all
slots in flight are kept, and one layer holds what it works with beside that. Gradients are reduced
and weights updated and gathered in place, when all activations are gone or, behind passes, those of
one slot are left, so that neither ever holds more. Bytes
per parameter follow DeepSpeed's engines as they are driven here.

What no operator shows is stated, not measured: the device's context, cuBLAS's workspaces, each
communicator's buffers, what the allocator cannot use of the memory that comes and goes
(`templates/hardware.yaml`), and what other kernels hold while they run (`models/workspaces.py`),
which layers' transients contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.activations import at_worst, deferred_share, kept_share, working_share
from disttrain_cli.costs.freezing import backwards
from disttrain_cli.costs.remembering import remembered
from disttrain_cli.spec.plan import Layout, StageMemory, UnitPlan
from disttrain_cli.spec.profile import LayerShard, Profile
from disttrain_cli.spec.stage_graph import Stage, neighbours, stage_graph

Floats = NDArray[np.float64]
Count = int | NDArray[np.int64]
GIB = float(2**30)
WEIGHT_BYTES = {"bf16": 2.0, "fp32": 4.0}
SENT_SLOTS = 2  # whose rows may not have left yet, each way over a cut


def bytes_per_parameter(precision: str, zero_stage: int) -> tuple[float, float]:
    """Bytes of one parameter that every replica keeps, and those its replicas share (divided by
    DP).

    bf16, ZeRO-1: 2 weight + 4 fp32 gradient (those in bf16 are gone as soon as they are added), and
    12 shared (fp32 weight, two moments). fp32: 4 weight + 4 gradient, and 8 of Adam's moments; with
    ZeRO-1 these are shared, and a copy of the weights.
    """
    if precision == "bf16":
        return 6.0, 12.0
    return (8.0, 12.0) if zero_stage == 1 else (16.0, 0.0)


def share_of_states(precision: str, dp_cp_size: Floats) -> Floats:
    """Part of the shared bytes that a rank has, by DP × CP: fp32 runs without ZeRO, so without its
    copy, on one replica."""
    return np.where((dp_cp_size == 1.0) & (precision == "fp32"), 8.0 / 12.0, 1.0 / dp_cp_size)


def communicators(cuts: int, *, tp: Count, dp: int, cp: Count = 1) -> Count:
    """NCCL communicators of a rank: the world's, its TP and CP groups', that of the ranks with the
    same weights, and one for each way over each of its cuts; without that of a tied weight's
    copies."""
    return 1 + (tp > 1) + (cp > 1) + (dp * cp > 1) + 2 * cuts


def cuts_of(profile: Profile, modules: Sequence[str]) -> int:
    """The most cuts to neighbours that a stage of a unit with these modules may have."""
    inside = [(before in modules, after in modules) for before, after in _pairs(profile)]
    entering, leaving = inside.count((False, True)), inside.count((True, False))
    return max(entering + leaving, entering + 1, leaving + 1)


def reserved_bytes(
    profile: Profile, modules: Sequence[str], *, tp: Count, dp: Floats, cp: Count = 1
) -> Floats:
    """What a rank of a unit has to leave free for the device's context, workspaces and
    communicators, by DP."""
    device = profile.device
    copies = any(profile.modules[name].tied for name in modules)
    cuts = cuts_of(profile, modules)
    count = communicators(cuts, tp=tp, dp=1, cp=cp) + (dp > 1) * (cp == 1) + copies
    mib = device.workspace_mib + count * device.communicator_mib
    return np.asarray(device.context_gib * GIB + mib * 2**20, dtype=np.float64)


class MessageBytes(NamedTuple):
    """Buffers of a rank with rows that have not left yet, of `SENT_SLOTS` slots, by DP [B]."""

    entering: Floats  # gradients, over the cut before the unit
    inside: Floats  # over the widest cut inside it, either way
    leaving: Floats  # over the cut after it

    def of_stage(self, first: bool, last: bool) -> Floats:
        """Both ways of a stage: over the unit's ends where it has these, else over the widest cut
        inside."""
        return (self.entering if first else self.inside) + (self.leaving if last else self.inside)


def message_bytes(
    profile: Profile,
    modules: Sequence[str],
    slot_sequences: float,
    *,
    tp_cp_size: Count,
    dp: Floats,
) -> MessageBytes:
    """Rows on their way from the stages of a unit; each of the ranks that share the work of a
    replica sends its part."""
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
    """Neighbouring modules: (sender, taker)."""
    names = list(profile.modules)
    return [
        (names[before], names[after])
        for before, after in neighbours(len(names), names.index(profile.inputs.llm))
    ]


@remembered
def state_bytes(
    profile: Profile,
    modules: Sequence[str],
    zero_stage: int,
    trained: Sequence[str] | None = None,
    *,
    tp: int,
) -> tuple[Floats, Floats]:
    """Bytes of weights, gradients and optimizer states of every layer [L] on one rank of a TP
    group.

    The first array is what every replica keeps, the second what the replicas of a unit share
    (divided by DP). A frozen weight has no more than itself.
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


def parameters(profile: Profile, modules: Sequence[str], *, tp: int) -> Floats:
    """Parameters of every layer of a unit [L] on one rank of a TP group."""
    return np.array([float(shard.parameters) for shard in _shards(profile, modules, tp=tp)])


def _shards(profile: Profile, modules: Sequence[str], *, tp: int) -> list[LayerShard]:
    return [
        profile.modules[name].costs[kind].tp[str(tp)]
        for name in modules
        for kind in profile.modules[name].layers
    ]


def layout_memory(profile: Profile, layout: Layout, limit_gib: float) -> list[StageMemory]:
    """Peak memory of every stage of a layout.

    Slots in flight on a stage of a 1F1B pipeline: the stages from it to the end of its line of
    units, at most n. Gradients in fp32 appear in a step's first backward, which has all slots in
    flight where there are no more; the search counts them in that moment too, and errs high there.

    Of two layers that share a weight, one has its states where both are on the stage; the gradient
    that the last of them makes waits for that of the first, unless it is computed later.
    """
    slot = layout.unit_of(profile.inputs.llm).dp * layout.microbatch_size
    waste = profile.device.fragmentation
    result: list[StageMemory] = []
    stages = stage_graph(layout, profile.inputs.llm).stages
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
        states = (weight, unsharded - weight, kept + shared * mine - unsharded)
        reserved = float(reserved_bytes(profile, unit.modules, tp=unit.tp, dp=dp, cp=unit.cp)[0])
        moved = message_bytes(profile, unit.modules, slot, tp_cp_size=unit.tp_cp_size, dp=dp)
        local = [stage for stage in stages if stage.unit is unit]
        for stage in local:
            flight = min(layout.microbatches, stage.to_end)
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
                for values in own:
                    values[sharer] -= values[owner]
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
            messages = float(moved.of_stage(stage.index == 0, stage.index == unit.pp - 1)[0])
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
    return result


def _states(
    profile: Profile, layout: Layout, unit: UnitPlan, zero_stage: int
) -> tuple[Floats, Floats]:
    """`state_bytes` of every layer of a unit [L]."""
    kept, shared = zip(
        *(
            state_bytes(profile, modules, zero_stage, layout.trained, tp=shape.tp)
            for modules, shape in unit.parts
        ),
        strict=True,
    )
    return np.concatenate(kept), np.concatenate(shared)


def tied_in(profile: Profile, stage: Stage) -> tuple[int, int] | None:
    """Places on a stage of the two layers that share a weight, if it has both."""
    tied = profile.tied_layers
    if tied is None or any(layer not in stage.layers for layer in tied):
        return None
    return tied[0] - stage.layers.start, tied[1] - stage.layers.start


def fits(profile: Profile, layout: Layout, limit_gib: float) -> bool:
    """True if every stage of a layout has room in so much memory."""
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
    """Bytes of kept activations, of what the running layer holds beside, and of gradients that do
    not exist yet, when a stage holds most.

    `activations`, `working` and `appearing` (gradients that the first backward brings) are by layer
    [L]. While layer i of the first backward runs, the layers after it have given back their
    activations and have gradients. The second backward has all gradients, and a slot less.

    Where gradients of weights wait for `delay` backwards more, a stage keeps the `deferred` bytes
    [L] of so many slots before, and in a backward of the layers after i of this slot; then no
    gradient is taken to be absent. The last `flight` backwards have a slot less each.
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
