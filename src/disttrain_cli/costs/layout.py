"""Stages of a layout with their costs: times, FLOPs, bytes over cuts, reduction, optimizer step.

Costs stay polynomials of the work (`spec.work.Work`), summed over the layers of each module on a
stage: simulator, rehearsal and analysis evaluate them at the work of every replica in every slot.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.experts import (
    exchanged_ms,
    local_shard,
    of_others,
    own_trained,
    placed,
)
from disttrain_cli.costs.flops import flops_parts
from disttrain_cli.costs.freezing import Backward, backwards
from disttrain_cli.costs.links import COLLECTIVES, all_gather_s, all_reduce_s, p2p_s, ring_link
from disttrain_cli.costs.memoised import memoised
from disttrain_cli.costs.memory import WEIGHT_BYTES, shared_by_ranks
from disttrain_cli.costs.replicated import dealt_ms
from disttrain_cli.costs.stage import backward_parts, forward_parts, shard_of
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import LinkTimes, Profile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.stage_graph import Stage, cuts_of, stage_graph

Floats = NDArray[np.float64]
#: Time of a collective by links, bytes and ranks (`costs.links`).
Collective = Callable[[LinkTimes, float, int], float]
GRADIENT_BYTES = 4.0  # reduced in fp32 in both precisions


@dataclass(frozen=True)
class Cost:
    """Cost of one module's layers on one stage.

    Coefficients [4] are those of base, items, tokens, Σ length² (`spec.work.Work`).
    """

    module: str
    forward_ms: Floats
    backward_ms: Floats  # without the weight gradients of a split backward
    weight_ms: Floats  # weight gradients of a split backward; zero if unsplit
    flops: Floats  # forward and backward of all ranks of the replica
    forward_flops: Floats  # the forward's part of them
    weight_flops: Floats  # weight-gradient part of them

    @property
    def parts_ms(self) -> tuple[Floats, Floats, Floats]:
        """Times by operation (`spec.trace.COMPUTE`)."""
        return self.forward_ms, self.backward_ms, self.weight_ms

    @property
    def parts_flops(self) -> tuple[Floats, Floats, Floats]:
        """FLOPs by operation (`spec.trace.COMPUTE`)."""
        backward = self.flops - self.forward_flops - self.weight_flops
        return self.forward_flops, backward, self.weight_flops


@dataclass(frozen=True)
class CostedStage(Stage):
    """Stage of the graph with its costs."""

    costs: list[Cost]
    # (module, kind, type of backward) of every layer
    held: list[tuple[str, str, Backward]]
    # parameters that one rank trains, by layer; a weight shared by two of them counts once
    numbers: list[int]
    # parameters among these in experts that an EP group divides, by layer
    expert_numbers: list[int]
    copied: int  # parameters among these that another stage has a copy of
    cut_bytes: float  # sent to each following stage per packed sequence
    # True if a layer up to here is trained, so that gradients come back over the cut
    gradients_back: bool
    begins: list[str]  # modules whose first layer it holds: it loads their inputs

    @property
    def trained(self) -> float:
        """Parameters that one rank trains."""
        return float(sum(self.numbers))

    @property
    def trained_experts(self) -> float:
        """Parameters among these in experts that an EP group divides."""
        return float(sum(self.expert_numbers))


def stages_of(profile: Profile, layout: Layout) -> list[CostedStage]:
    """Return all stages in pipeline order."""
    does = backwards(profile, layout.trained)
    stages: list[CostedStage] = []
    known: dict[Hashable, list[Cost]] = {}  # many stages hold the same layers
    graph = stage_graph(layout, profile.inputs.llm, profile.tied_layers)
    for stage in graph.stages:
        unit, start = stage.unit, sum(stage.unit.layers_per_stage[: stage.index])
        layers = [
            (name, layer)
            for name in unit.modules
            for layer in range(len(profile.modules[name].layers))
        ]
        local = layers[start : start + len(stage.layers)]
        kinds = [
            (name, profile.modules[name].layers[layer], does[name][layer]) for name, layer in local
        ]
        nodes = placed(profile, stage).ep_nodes
        alike = unit.name, stage.weight_delay is None, nodes, tuple(kinds)
        if alike not in known:
            known[alike] = list(_costs(profile, stage, kinds))
        counts = {kind: _trained(profile, unit, *kind) for kind in dict.fromkeys(kinds)}
        numbers, expert_numbers = map(list, zip(*(counts[kind] for kind in kinds), strict=True))
        shared = _shared(profile, unit, does)
        if (places := shared_by_ranks(profile, stage, graph.stages)) is not None:
            numbers[places[1]] -= shared
        stages.append(
            CostedStage(
                **vars(stage),
                costs=known[alike],
                held=kinds,
                numbers=numbers,
                expert_numbers=expert_numbers,
                copied=0 if stage.twin is None else shared,
                cut_bytes=_cut_bytes(profile, layout, unit, *local[-1]),
                gradients_back=any(what == "trained" for *_, what in kinds)
                or any(stages[sender].gradients_back for sender in stage.before),
                begins=[name for name, layer in local if layer == 0],
            )
        )
    return stages


def _trained(
    profile: Profile, unit: UnitPlan, name: str, kind: str, does: Backward
) -> tuple[int, int]:
    """Return the parameters of a layer that one rank trains, and those in its divided experts."""
    if does != "trained":
        return 0, 0
    shard, shape = shard_of(profile.modules[name], kind, tp=unit.tp_of(name)), unit.shape
    return (
        shard.trainable - round(of_others(profile, name, kind, shape)[1]),
        round(own_trained(profile, name, kind, shape)),
    )


def by_device(stages: Sequence[CostedStage]) -> list[CostedStage]:
    """Return the stages, those on the same ranks (`UnitPlan.chunks`) as one with all layers.

    It has the place of the first, by which rows of a reduction and of a step are recorded.
    """
    alike: dict[tuple[int, ...], list[CostedStage]] = {}
    for stage in stages:
        alike.setdefault(stage.ranks, []).append(stage)
    return [
        replace(
            own[0],
            twin=next((one.twin for one in own if one.twin is not None), None),
            copied=sum(one.copied for one in own),
            held=[layer for one in own for layer in one.held],
            numbers=[count for one in own for count in one.numbers],
            expert_numbers=[count for one in own for count in one.expert_numbers],
            begins=[name for one in own for name in one.begins],
        )
        if len(own) > 1
        else own[0]
        for own in alike.values()
    ]


def _shared(profile: Profile, unit: UnitPlan, does: Mapping[str, Sequence[Backward]]) -> int:
    """Return the trained parameters that two layers of a unit share, on one rank."""
    for name in unit.modules:
        module = profile.modules[name]
        if module.tied and does[name][module.tied[0]] == "trained":
            return shard_of(module, module.layers[module.tied[0]], tp=unit.tp_of(name)).trainable
    return 0


def _cut_bytes(profile: Profile, layout: Layout, unit: UnitPlan, name: str, layer: int) -> float:
    """Return the bytes of one packed sequence over the cut after a layer.

    They include outputs of encoders of the same unit, and the LLM's output for later generators.
    """
    names, modules = list(profile.modules), profile.modules
    here, llm = names.index(name), names.index(profile.inputs.llm)
    passing = [other for other in unit.modules if names.index(other) < here < llm]
    parts = names[llm] in unit.modules and unit is not layout.units[-1]
    # True if the generator's own projector, which reads the LLM's output, is still to come
    read = layer < min(modules[name].projector, default=0)
    if (
        here > llm
        and not read
        and (parts or any(names.index(other) > here for other in unit.modules))
    ):
        passing.append(names[llm])
    return modules[name].cut_bytes_per_sequence[layer] + sum(
        modules[other].output_bytes_per_sequence for other in passing
    )


def _costs(
    profile: Profile, stage: Stage, kinds: Sequence[tuple[str, str, Backward]]
) -> Iterator[Cost]:
    """Yield the costs of each module on a stage, from its layers.

    `kinds` has (module, kind of layer, type of backward) of every layer. Times are those of a rank,
    by the work of its entire replica, or by its own if items are distributed over the TP group.
    """
    of_stage = placed(profile, stage)
    for name in dict.fromkeys(module for module, _, _ in kinds):
        rows, shape = np.zeros((6, 4)), replace(of_stage, tp=stage.unit.tp_of(name), dp=1, pp=1)
        for kind, does in {(kind, does): None for module, kind, does in kinds if module == name}:
            later = does == "trained" and stage.weight_delay is not None
            one = _layer(profile, name, kind, does, shape, stage.unit.tp_overlap, later)
            rows += kinds.count((name, kind, does)) * one
        if name in stage.unit.module_tp:
            back = any(does != "still" for module, _, does in kinds if module == name)
            rows[:2] += [_sum([sent]) for sent in dealt_ms(profile, name, back, tp=stage.tp)]
        rows[1] -= rows[2]
        yield Cost(name, *rows)


@memoised
def _layer(
    profile: Profile,
    name: str,
    kind: str,
    does: Backward,
    shape: ParallelShape,
    overlap: bool,
    later: bool,
) -> Floats:
    """Return [6, 4] costs of one layer, in the order of `Cost`; the backward is unsplit."""
    module = profile.modules[name]
    shard = local_shard(profile, name, kind, shape, shard_of(module, kind, tp=shape.tp))
    layer = module.costs[kind]
    counted = flops_parts(layer, does)
    parts = (
        forward_parts(shard, overlap),
        backward_parts(shard, does, shape.recompute, overlap, later),
        [shard.weight_ms] * later,
        counted,
        counted[:1],
        [layer.weight_flops] * later,
    )
    one = np.array([_sum(polynomials) for polynomials in parts])
    one[:3, 1:] /= shape.cp
    for row, exchanged in enumerate(exchanged_ms(profile, name, layer, shape, does)):
        one[row] += _sum([exchanged])
    return one


def _sum(polynomials: list[Polynomial]) -> Floats:
    rows = [(p.base, p.per_item, p.per_token, p.per_length_sq) for p in polynomials]
    return np.array(rows).sum(axis=0) if rows else np.zeros(4)


def amount(coefficients: Floats, work: Floats) -> Floats:
    """Return a cost [n, DP] at the work [n, DP, 3] of every replica in every slot; 0 without work.

    Computed elementwise, so that every machine gets the same numbers.
    """
    base, per_item, per_token, per_length_sq = coefficients.tolist()
    items, tokens, length_sq = np.moveaxis(work, -1, 0)
    value = np.maximum(
        0.0, base + per_item * items + per_token * tokens + per_length_sq * length_sq
    )
    return np.where((items != 0) | (tokens != 0) | (length_sq != 0), value, 0.0)


def replica_ms(coefficients: Floats, loads: Floats, replicas: int, together: int = 1) -> Floats:
    """Return [n, DP] `amount` of a time at the work [n, DP, 3] of every replica.

    If `loads` has several ranks per replica [n, DP · TP, 3], the busiest one counts; and of
    `together` neighbouring replicas, which wait for each other in every layer, the busiest one.
    """
    each = amount(coefficients, loads).reshape(len(loads), replicas, -1).max(axis=2)
    if together == 1:
        return each
    return each.reshape(len(each), -1, together).max(axis=2).repeat(together, axis=1)


def crossings(stages: list[CostedStage]) -> list[tuple[CostedStage, CostedStage]]:
    """Return both stages of all cuts, in the order of `spec.stage_graph.cuts_of`."""
    return [(stages[sender], stages[taker]) for sender, taker in cuts_of(stages)]


def in_one_node(ranks: Sequence[int], gpus_per_node: int) -> bool:
    """Return True if all of these ranks are in the same node."""
    return min(ranks) // gpus_per_node == max(ranks) // gpus_per_node


def ends_of(*stages: Stage) -> list[int]:
    """Return the first and the last rank of each of these stages."""
    return [stage.ranks[end] for stage in stages for end in (0, -1)]


def link_between(
    profile: Profile, before: CostedStage, after: CostedStage, gpus_per_node: int
) -> LinkTimes:
    """Return the links between two neighbouring stages."""
    return profile.links.of(in_one_node(ends_of(before, after), gpus_per_node))


def replicas_link(
    profile: Profile, stage: CostedStage, gpus_per_node: int, rings: int | None = None
) -> LinkTimes:
    """Return the links of a ring of ranks that hold the same weights (`Stage.dp_group`).

    All `rings` of a stage (one for each TP rank; of experts, for each EP rank) run at once. A stage
    that begins or ends inside a node has fewer ranks there, and its rings are as narrow as in that
    node.
    """
    width = ring_width(stage, gpus_per_node, rings)
    return profile.links if width is None else ring_link(profile.links, width)


def ring_width(stage: Stage, gpus_per_node: int, rings: int | None = None) -> int | None:
    """Return the fewest ranks of a stage's rings in any of its nodes; None inside one node."""
    if in_one_node(ends_of(stage), gpus_per_node):
        return None
    first, stop = stage.ranks[0], stage.ranks[-1] + 1
    fewest = min(
        gpus_per_node, -first % gpus_per_node or gpus_per_node, (stop - 1) % gpus_per_node + 1
    )
    return max(1, fewest // (rings or stage.tp))


def transfers_s(
    profile: Profile, layout: Layout, stages: list[CostedStage], gpus_per_node: int
) -> Floats:
    """Return [S-1] the time of one slot's tensors over each cut (`crossings`), either way.

    They are split over all ranks of the narrower side, including those of a TP group.
    """
    sequences = layout.global_batch_size // layout.microbatches
    return np.array(
        [
            p2p_s(
                link_between(profile, before, after, gpus_per_node),
                before.cut_bytes * sequences / min(len(before.ranks), len(after.ranks)),
            )
            for before, after in crossings(stages)
        ]
    )


def reduction_of(layout: Layout) -> str:
    """Return the collective that sums gradients over replicas (`costs.links.COLLECTIVES`).

    Under ZeRO-1 a replica needs only the sum of its own share: half of an all-reduce.
    """
    return "reduce_scatter" if layout.zero_stage == 1 else "all_reduce"


def reduce_s(profile: Profile, layout: Layout, stage: CostedStage, gpus_per_node: int) -> float:
    """Return the time of reducing a stage's gradients over replicas, without overlap.

    It includes the sum over a tied weight's copies and over a TP group (`after_s`).
    """
    replicas_s = reduction_s(
        layout, weight_rings(profile, stage, gpus_per_node), stage.trained, stage.trained_experts
    )
    return replicas_s + after_s(profile, layout, stage, gpus_per_node)


def after_s(profile: Profile, layout: Layout, stage: CostedStage, gpus_per_node: int) -> float:
    """Return the time of gradient sums after the reduction over replicas, which nothing overlaps.

    They are those of a tied weight's copies, and of modules replicated over a TP group.
    """
    partial = partial_bytes(layout, stage)
    partial_s = all_reduce_s(profile.links, partial, stage.tp) if partial else 0.0
    return copies_s(profile, layout, stage, gpus_per_node) + partial_s


def partial_bytes(layout: Layout, stage: CostedStage) -> float:
    """Return the bytes of gradients that are summed over a TP group with replicated modules.

    Each rank has the gradients of its own items; under ZeRO-1 only a replica's share of them.
    """
    whole = sum(
        number
        for (module, *_), number in zip(stage.held, stage.numbers, strict=True)
        if module in stage.unit.module_tp
    )
    return whole * GRADIENT_BYTES / (stage.unit.dp_cp_size if layout.zero_stage == 1 else 1)


def copies_s(profile: Profile, layout: Layout, stage: CostedStage, gpus_per_node: int) -> float:
    """Return the time of summing the gradients of a tied weight's copies on two stages.

    Under ZeRO-1 only a replica's share of them; all pairs of ranks send at once.
    """
    if stage.twin is None or not stage.copied:
        return 0.0
    devices = stage.unit.pp  # of the one unit that the two stages belong to
    twin = stage.index + stage.twin - stage.number
    distance = (twin % devices - stage.index % devices) * len(stage.ranks)
    inside = all(in_one_node([rank, rank + distance], gpus_per_node) for rank in stage.ranks)
    share = stage.unit.dp_cp_size if layout.zero_stage == 1 else 1
    return all_reduce_s(profile.links.of(inside), stage.copied * GRADIENT_BYTES / share, 2)


class Rings(NamedTuple):
    """Rings of a stage's ranks with the same weights, and of those with the same experts."""

    link: LinkTimes
    size: int
    experts_link: LinkTimes
    experts_size: int

    def times_s(
        self, collective_s: Collective, number_bytes: float, numbers: float, experts: float
    ) -> float:
        """Return the time of a collective over both, one after the other.

        Args:
            numbers: all numbers on a rank, `experts` of them in experts that an EP group divides.
        """
        return sum(
            collective_s(link, count * number_bytes, size)
            for link, count, size in (
                (self.link, numbers - experts, self.size),
                (self.experts_link, experts, self.experts_size),
            )
            if count
        )


def weight_rings(profile: Profile, stage: CostedStage, gpus_per_node: int) -> Rings:
    """Return the rings over which a stage reduces gradients and gathers weights."""
    return Rings(
        replicas_link(profile, stage, gpus_per_node),
        stage.unit.dp_cp_size,
        replicas_link(profile, stage, gpus_per_node, stage.ep),
        stage.unit.expert_replicas,
    )


def reduction_s(layout: Layout, rings: Rings, numbers: float, experts: float) -> float:
    """Return the time of reducing `numbers` gradients over the ranks with the same weights.

    `experts` of them are in experts that an EP group divides.
    """
    return rings.times_s(COLLECTIVES[reduction_of(layout)], GRADIENT_BYTES, numbers, experts)


def gather_s(
    profile: Profile, layout: Layout, rings: Rings, numbers: float, experts: float
) -> float:
    """Return the time of gathering `numbers` weights from the ranks that hold the same ones.

    Under ZeRO-1 each of these updates a share; without ZeRO the time is 0. `experts` as in
    `reduction_s`.
    """
    if layout.zero_stage == 0:
        return 0.0
    return rings.times_s(all_gather_s, WEIGHT_BYTES[profile.precision], numbers, experts)


def update_s(profile: Profile, layout: Layout, stage: CostedStage) -> float:
    """Return the optimizer's own time; under ZeRO-1 for a rank's share."""
    zero, experts = layout.zero_stage, stage.trained_experts
    mine = (stage.trained - experts) / (stage.unit.dp_cp_size if zero else 1)
    mine += experts / (stage.unit.expert_replicas if zero else 1)
    return mine * profile.device.optimizer_ns_per_parameter * 1e-9


def optimizer_s(profile: Profile, layout: Layout, stage: CostedStage, gpus_per_node: int) -> float:
    """Return the time of a stage's optimizer step.

    Under ZeRO-1 it covers a replica's share, whose weights are then gathered.
    """
    rings = weight_rings(profile, stage, gpus_per_node)
    return update_s(profile, layout, stage) + gather_s(
        profile, layout, rings, stage.trained, stage.trained_experts
    )
