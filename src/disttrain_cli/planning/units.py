"""Grouping of modules into units, and the numbers of a unit that every option needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Literal, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.calls import call
from disttrain_cli.costs.activations import kept_share, working_share
from disttrain_cli.costs.context import fits_nodes, misfit, most_cp
from disttrain_cli.costs.freezing import backwards
from disttrain_cli.costs.memoised import memoised as known_by_profile
from disttrain_cli.costs.memory import GIB, expert_state_bytes, state_bytes
from disttrain_cli.costs.replicated import dealt_ms
from disttrain_cli.costs.stage import overlap_helps, tp_degrees, unit_times
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.spec.plan import Layout, Strategy
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.model import unit_name
from disttrain_cli.spec.runfile.train import Ordering
from disttrain_cli.spec.shape import CpCommType, ParallelShape
from disttrain_cli.spec.stage_graph import in_line, neighbours

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: Fewest tokens of a sequence on each rank with gathered keys and values: two chunks
#: (`models.levelling`) of a kernel's tile of queries.
LEAST_TOKENS = 256


@dataclass(frozen=True)
class Cluster:
    """Constraints of a layout, and its allowed features."""

    gpus: int
    gpus_per_node: int
    memory_gib: float  # of one device, usable by a layout
    zero_stage: Literal[0, 1]
    batch: int  # packed sequences per step
    trained: tuple[str, ...] | None = None  # trained modules (`costs.freezing`); None = all
    # policy under which global batches are simulated
    ordering: Ordering = "paper"
    cpu_node_cores: int = 64  # of one preprocessing node
    margin_gib: float = 0.0  # of a device's memory, left free in addition
    # of activations; auto = the faster choice for each unit
    checkpointing: Literal["none", "full", "auto"] = "none"
    most_tp: int | None = None  # largest TP degree; None = what fits a node
    most_cp: int | None = None  # largest CP degree; None = any
    most_ep: int | None = None  # largest EP degree; None = any
    over_nodes: bool = True  # CP groups may span several nodes
    cp_comm_types: tuple[CpCommType, ...] = ("a2a", "all_gather")  # allowed for CP groups
    splits: bool = False  # split backward (`planning.split_backward`)
    overlaps: bool = False  # reductions and gathers overlapped with passes (`costs.overlap`)
    hides: bool = False  # messages of TP and EP groups overlapped with GEMMs, if that is faster
    climbs: bool = True  # hill climb from the best layouts (`planning.climb`)


class Shapes(Protocol):
    """Table with a shape in each row, as columns."""

    @property
    def tp(self) -> Ints: ...
    @property
    def cp(self) -> Ints: ...
    @property
    def ep(self) -> Ints: ...
    @property
    def all_gather(self) -> NDArray[np.bool_]: ...
    @property
    def recompute(self) -> NDArray[np.bool_]: ...


def shape_at(table: Shapes, row: int, *, dp: int = 1, pp: int = 1) -> ParallelShape:
    """Return the shape in a row of a table."""
    return ParallelShape(
        tp=int(table.tp[row]),
        cp=int(table.cp[row]),
        ep=int(table.ep[row]),
        dp=dp,
        pp=pp,
        recompute=bool(table.recompute[row]),
        cp_comm_type="all_gather" if table.all_gather[row] else "a2a",
    )


@dataclass(frozen=True)
class Kinds:
    """Distinct layers of a unit: L layers, K kinds, V variants.

    A variant is a TP, a CP and an EP degree, with or without checkpointing, and a `cp_comm_type`.
    """

    of: Ints  # [L] kind of each layer
    count: Ints  # [K]
    tp: Ints  # [V]
    cp: Ints  # [V]
    ep: Ints  # [V]
    all_gather: NDArray[np.bool_]  # [V] of `cp_comm_type`
    recompute: NDArray[np.bool_]  # [V]
    base_ms: Floats  # [V, K] forward + backward + transfers: base + slope · sequences
    slope_ms: Floats
    # [V, K] weights, gradients, optimizer on one rank: held by each replica, sharded over all
    kept_gib: Floats
    shared_gib: Floats
    # [V, 4, K] of one slot on one rank, by its replica's work (`costs.activations.worst_mix`)
    activation_gib: Floats
    # [V, 4, K] peak of one slot while a layer runs, including its saved activations
    working_gib: Floats
    # [V, K] states of a rank's experts under EP, sharded over the ranks that hold the same ones
    experts_gib: Floats

    @cached_property
    def divides_experts(self) -> bool:
        """True if any variant has an EP degree above 1."""
        return bool((self.ep > 1).any())

    def expert_replicas(self, variant: Ints, dp: Ints) -> Ints:
        """Return [B] the ranks of a stage that hold the same experts; 0 if EP does not fit."""
        ranks, ep = self.tp_cp_size[variant] * dp, self.ep[variant]
        return np.where(ranks % ep == 0, ranks // ep, 0)

    @property
    def tp_cp_size(self) -> Ints:
        """[V] ranks that share the work of a replica on one stage."""
        return self.tp * self.cp

    def variant(self, shape: ParallelShape) -> int | None:
        """Return the variant index of a shape; None if it does not exist or is dominated.

        It is dominated if the other `cp_comm_type` is better everywhere.
        """
        gathers = shape.cp_comm_type == "all_gather"
        same = (self.tp == shape.tp) & (self.cp == shape.cp) & (self.all_gather == gathers)
        same &= (self.ep == shape.ep) & (shape.tp_cp_size * shape.dp % shape.ep == 0)
        found = np.flatnonzero(same & (self.recompute == shape.recompute))
        return int(found[0]) if len(found) else None


def sharing(cluster: Cluster, *, cp: int) -> ParallelShape:
    """Return a stage shape whose CP groups use the most permissive allowed `cp_comm_type`."""
    return ParallelShape(cp=cp, cp_comm_type=cluster.cp_comm_types[-1])


@dataclass(frozen=True)
class Unit:
    """Consecutive modules that share one (TP, CP, EP, DP, PP)."""

    name: str
    modules: tuple[str, ...]
    profile: Profile
    cluster: Cluster
    #: modules replicated over TP, their items distributed (`UnitPlan.module_tp`)
    replicated: tuple[str, ...] = ()

    @cached_property
    def holds_llm(self) -> bool:
        return self.profile.inputs.llm in self.modules

    @cached_property
    def layers(self) -> int:
        return sum(len(self.profile.modules[name].layers) for name in self.modules)

    @cached_property
    def items_per_sequence(self) -> float:
        """Images that one packed sequence brings (units without the LLM)."""
        return self.profile.modules[self.modules[0]].work_per_sequence.items

    @cached_property
    def divided(self) -> list[str]:
        """Modules that TP shards."""
        return [name for name in self.modules if name not in self.replicated]

    def _parts(self, shape: ParallelShape) -> list[tuple[list[str], ParallelShape]]:
        """Return the modules in order, each with the shape that shards it."""
        whole = replace(shape, tp=1)
        return [([name], whole if name in self.replicated else shape) for name in self.modules]

    @cached_property
    def tps(self) -> list[int]:
        """TP degrees that were profiled, are allowed, and fit evenly into a node.

        Powers of two, and the entire node: each divides all larger ones, so that groups of any
        adjacent units stay inside nodes (`stage_graph`).
        """
        node = self.cluster.gpus_per_node
        return [
            tp
            for tp in tp_degrees(self.profile, self.divided)
            if node % tp == 0
            and (tp > 1 or not self.replicated)
            and tp <= (self.cluster.most_tp or node)
            and (tp == node or tp.bit_count() == 1)
        ]

    @cached_property
    def widths(self) -> list[tuple[int, int]]:
        """(TP, CP) degrees that are allowed and together fit evenly into a node or fill nodes.

        TP alone fits into a node.
        """
        node = self.cluster.gpus_per_node
        # True if the profile has costs for groups that span several nodes
        priced = self.profile.links.gpus_per_node == node
        room = max(node, self.cluster.gpus) if priced and self.cluster.over_nodes else node
        most = self.cluster.most_cp or room
        if not self.gathers:
            most = min(most, most_cp(self.profile, self.modules))
        most = 1 if self.replicated else most
        # of all ranks together: powers of two within a node, and multiples of it
        inside = [1 << bit for bit in range(node.bit_length()) if 1 << bit < node]
        return [
            (tp, ranks // tp)
            for tp in self.tps
            for ranks in (*inside, *range(node, min(room, most * tp) + 1, node))
            if ranks % tp == 0
            and ranks // tp <= most
            and fits_nodes(ParallelShape(tp=tp, cp=ranks // tp), node)
            and self.ways(tp=tp, cp=ranks // tp)
        ]

    @cached_property
    def eps(self) -> list[int]:
        """EP degrees that are allowed and divide the experts of all its layers; 1 without any."""
        counts = (
            cost.experts.total
            for name in self.modules
            for cost in self.profile.modules[name].costs.values()
            if cost.experts is not None
        )
        total, gpus = math.gcd(*counts), self.cluster.gpus
        most = min(total, gpus, self.cluster.most_ep or gpus)
        return [ep for ep in range(1, most + 1) if total % ep == 0] or [1]

    @cached_property
    def gathers(self) -> bool:
        """True if its CP groups may gather keys and values.

        Those of the LLM may, whose tokens can be balanced. In encoders, which have as many heads of
        keys and values as of queries, gathering sends no less.
        """
        return self.holds_llm and "all_gather" in self.cluster.cp_comm_types

    def ways(self, *, tp: int, cp: int) -> list[ParallelShape]:
        """Return the shapes of a replica's stage at these degrees, one per `cp_comm_type`."""
        length = self.profile.inputs.sequence_length
        enough = cp > 1 and self.gathers and length >= LEAST_TOKENS * tp * cp
        kinds: tuple[CpCommType, ...] = ("a2a", "all_gather") if enough else ("a2a",)
        shapes = [ParallelShape(tp=tp, cp=cp, cp_comm_type=kind) for kind in kinds]
        return [one for one in shapes if misfit(self.profile, self.modules, one) is None]

    @cached_property
    def ends_ms(self) -> tuple[Floats, Floats]:
        """Transfers at the unit's two ends, forward and gradient, as (base, slope) per layer [L].

        A transfer blocks the rank at either end for latency + bytes / bandwidth; it is counted with
        the first layer (from every unit before) and the last one (to the unit after).
        """
        base, slope = np.zeros(self.layers), np.zeros(self.layers)
        names = list(self.profile.modules)
        link = self.profile.links
        for sender, taker in neighbours(len(names), names.index(self.profile.inputs.llm)):
            if (names[sender] in self.modules) != (names[taker] in self.modules):
                layer = -1 if names[sender] in self.modules else 0
                size = self.profile.modules[names[sender]].output_bytes_per_sequence
                base[layer] += 2 * link.p2p_us / 1e3
                slope[layer] += 2 * size * 8 / (link.p2p_gbps * 1e9) * 1e3
        return base, slope

    def overlaps(self, shape: ParallelShape) -> bool:
        """Return True if overlapping its TP messages with GEMMs is faster."""
        if not self.cluster.hides or shape.tp == 1:
            return False
        alike = replace(shape.of_replica, cp_comm_type="a2a", ep=1, ep_overlap=False)
        return overlap_helps(self.profile, self.divided, alike, "tp", self.cluster.trained)

    def overlaps_exchanges(self, shape: ParallelShape) -> bool:
        """Return True if overlapping exchanges of its EP groups with experts is faster."""
        if not self.cluster.hides or shape.ep == 1:
            return False
        alike = replace(shape.of_replica, cp_comm_type="a2a", recompute=False, ep_overlap=False)
        return overlap_helps(self.profile, self.divided, alike, "ep", self.cluster.trained)

    def layer_ms(self, shape: ParallelShape, overlap: bool | None = None) -> tuple[Floats, Floats]:
        """Return time and transfers of every layer as (base, slope per sequence), in ms.

        The time is that of forward and backward.

        Args:
            overlap: TP messages overlap with GEMMs; None = if that is faster, and exchanges of EP
                groups, too.
        """
        shape = shape.of_replica
        if overlap is None:
            shape = replace(shape, ep_overlap=self.overlaps_exchanges(shape))
        question = (shape, overlap)
        if question not in self._layer_ms:
            hides = self.overlaps(shape) if overlap is None else overlap
            base, slope = self.ends_ms
            trained, times = self.cluster.trained, list[tuple[Floats, Floats]]()
            for names, own in self._parts(shape) if self.replicated else [(self.modules, shape)]:
                of = unit_times(self.profile, names, own, trained, hides)
                one = of.forward_base + of.backward_base, of.forward_slope + of.backward_slope
                dealt = names[0] in self.replicated
                times.append(self._dealt_ms(names[0], *one, tp=shape.tp) if dealt else one)
            self._layer_ms[question] = (
                np.concatenate([part for part, _ in times]) + base,
                np.concatenate([part for _, part in times]) + slope,
            )
        return self._layer_ms[question]

    def _dealt_ms(
        self, name: str, base: Floats, slope: Floats, *, tp: int
    ) -> tuple[Floats, Floats]:
        """Return layer times of a module whose items are distributed, on the busiest of `tp` ranks.

        The mean excess over its share is at most half an item (`objective.busiest_load`); the last
        layer includes the exchanges.
        """
        work = self.profile.modules[name].work_per_sequence
        if not work.items:
            return base, slope
        trains = any(one != "still" for one in backwards(self.profile, self.cluster.trained)[name])
        base, slope = base.copy(), slope.copy()
        for sent in dealt_ms(self.profile, name, trains, tp=tp):
            base[-1] += sent.base
            slope[-1] += sent(work) - sent.base
        return base + slope / work.items * (tp - 1) / (2 * tp), slope / tp

    @cached_property
    def _layer_ms(self) -> dict[tuple[ParallelShape, bool | None], tuple[Floats, Floats]]:
        return {}

    @cached_property
    def answers(self) -> dict[Hashable, Any]:
        """Cached results of functions decorated with `memoised`."""
        return {}

    @cached_property
    def kinds(self) -> Kinds:
        """Time and memory of the unit's layers at every TP, CP and EP degree, by kind of layer."""
        cluster = self.cluster
        # clusters of other sizes, or for other batches, have the same layers
        alike = Cluster(
            gpus=0,
            gpus_per_node=0,
            memory_gib=0.0,
            zero_stage=cluster.zero_stage,
            batch=0,
            trained=cluster.trained,
            checkpointing=cluster.checkpointing,
            cp_comm_types=cluster.cp_comm_types,
            hides=cluster.hides,
        )
        return _kinds(
            self.profile, self.modules, self.replicated, alike, self.widths, tuple(self.eps)
        )

    def kinds_at(self, widths: Sequence[tuple[int, int]], eps: Sequence[int]) -> Kinds:
        """Return `kinds` at these (TP, CP) degrees and EP degrees."""
        choices = {"none": [False], "full": [True], "auto": [False, True]}[
            self.cluster.checkpointing
        ]
        variants = [
            shape
            for tp, cp in widths
            for recompute in choices
            for ep in eps
            for shape in self._undominated(
                [replace(one, recompute=recompute, ep=ep) for one in self.ways(tp=tp, cp=cp)]
            )
        ]
        columns = np.stack([self._columns[shape] for shape in variants])  # [V, 13, L]
        numbers: dict[bytes, int] = {}
        of = np.array(
            [
                numbers.setdefault(columns[:, :, layer].tobytes(), len(numbers))
                for layer in range(self.layers)
            ]
        )
        one = columns[:, :, [int(np.argmax(of == kind)) for kind in range(len(numbers))]]
        return Kinds(
            of,
            np.bincount(of),
            np.array([shape.tp for shape in variants]),
            np.array([shape.cp for shape in variants]),
            np.array([shape.ep for shape in variants]),
            np.array([shape.cp_comm_type == "all_gather" for shape in variants]),
            np.array([shape.recompute for shape in variants]),
            one[:, 0],
            one[:, 1],
            one[:, 2],
            one[:, 3],
            one[:, 4:8],
            one[:, 8:12],
            one[:, 12],
        )

    def _undominated(self, shapes: list[ParallelShape]) -> list[ParallelShape]:
        """Return the shapes of a CP group that are faster or smaller than the other somewhere."""
        for shape in shapes:
            self._columns[shape] = self._columns_of(shape)
        if len(shapes) == 1:
            return shapes
        # a replica of the LLM has a sequence of each slot at least
        first, second = (self._columns[shape].copy() for shape in shapes)
        for columns in (first, second):
            columns[0] += columns[1]
        if (first <= second).all():
            return shapes[:1]
        return shapes[1:] if (second <= first).all() else shapes

    @cached_property
    def _columns(self) -> dict[ParallelShape, Floats]:
        return {}

    def _columns_of(self, shape: ParallelShape) -> Floats:
        """Return [13, L] columns of a variant.

        They are base and slope of times, states, memory of a slot and when running, and states of
        experts under EP.
        """
        known, trained = (self.profile, self.modules), self.cluster.trained
        overlap = self.overlaps(shape)
        shape = replace(shape, ep_overlap=self.overlaps_exchanges(shape))
        if self.replicated:
            parts = [
                self._memory_of(names[0], own, overlap, ranks=shape.tp)
                for names, own in self._parts(shape)
            ]
            memory = list(np.concatenate(parts, axis=1))
        else:
            memory = [
                *state_bytes(*known, self.cluster.zero_stage, trained, tp=shape.tp),
                *kept_share(*known, shape, trained),
                *working_share(*known, shape, trained, overlap=overlap),
            ]
        of_experts = np.zeros(self.layers)
        if shape.ep > 1:
            zero = self.cluster.zero_stage
            *changes, of_experts = expert_state_bytes(*known, zero, trained, shape)
            memory[:2] = [row + change for row, change in zip(memory, changes, strict=False)]
        times = self.layer_ms(shape)
        return np.vstack([*times, *(row / GIB for row in [*memory, of_experts])])

    def _memory_of(self, name: str, shape: ParallelShape, overlap: bool, *, ranks: int) -> Floats:
        """Return [10, L] bytes of one module's layers on one of the `ranks` of a TP group.

        If items are distributed over these, on the busiest one (`costs.activations.worst_work`).
        """
        known, trained = (self.profile, [name]), self.cluster.trained
        states = state_bytes(*known, self.cluster.zero_stage, trained, tp=shape.tp)
        shares = [
            kept_share(*known, shape, trained),
            working_share(*known, shape, trained, overlap=overlap),
        ]
        if name in self.replicated:
            shares = [
                np.stack([base + item, worst / ranks, mean / ranks, np.zeros_like(item)])
                for base, worst, mean, item in shares
            ]
        return np.vstack([*states, *shares])

    @cached_property
    def allowed(self) -> NDArray[np.bool_] | None:
        """[L+1, L+1] mask of layer ranges that may form a stage; None = any."""
        if not self.replicated:
            return None
        mask = np.ones((self.layers + 1, self.layers + 1), dtype=bool)
        stop = 0
        for name in self.modules:
            start, stop = stop, stop + len(self.profile.modules[name].layers)
            if name in self.replicated:
                mask[:, start + 1 : stop] = mask[start + 1 : stop, :] = False
        return mask


@known_by_profile
def _kinds(
    profile: Profile,
    modules: tuple[str, ...],
    replicated: tuple[str, ...],
    cluster: Cluster,
    widths: Sequence[tuple[int, int]],
    eps: Sequence[int],
) -> Kinds:
    return Unit("", modules, profile, cluster, replicated).kinds_at(widths, eps)


Function = TypeVar("Function", bound=Callable[..., Any])


def memoised(function: Function) -> Function:
    """Cache a pure function of a unit and numbers on the unit, for repeated searches."""

    @wraps(function)
    def answer(unit: Unit, *numbers: Hashable) -> Any:
        question = (function.__name__, *numbers)
        if question not in unit.answers:
            unit.answers[question] = function(unit, *numbers)
        return unit.answers[question]

    return cast(Function, answer)


def groupings(profile: Profile, cluster: Cluster, strategy: Strategy) -> list[list[Unit]]:
    """Return the units that a strategy's layouts may have, in pipeline order; the most units first.

    `auto`: the LLM's unit holds any run of encoders directly before the LLM and of generators
    directly after it, each sharded by its TP or replicated on every rank (`replicating`); every
    other module is a unit of its own. `megatron` puts every module into one unit, in all of these
    ways, `disaggregated` each into its own, as far as there are GPUs for it.

    Raises:
        InfeasibleError: in every grouping a unit has no TP degree that fits a node.
    """
    names = list(profile.modules)
    llm = names.index(profile.inputs.llm)
    known: dict[tuple[str, ...], Unit] = {}

    def unit(modules: Sequence[str]) -> Unit:
        key = tuple(modules)
        if key not in known:
            known[key] = Unit(unit_name(key, len(names)), key, profile, cluster)
        return known[key]

    groups = [
        [*map(unit, zip(names[:first])), unit(names[first:stop]), *map(unit, zip(names[stop:]))]
        for first, stop in itertools.product(range(llm, -1, -1), range(llm + 1, len(names) + 1))
        if first + 1 + len(names) - stop <= cluster.gpus
    ]
    groups.sort(key=len, reverse=True)
    if strategy != "auto":
        groups = groups[-1:] if strategy == "megatron" else groups[:1]
    if strategy in ("auto", "megatron"):
        groups += [
            [whole if unit.holds_llm else unit for unit in units]
            for units in groups
            for whole in replicating(units[holder_of(units)])
        ]
    possible = [units for units in groups if all(one.tps for one in units)]
    if not possible:
        lacking = next(one for one in groups[0] if not one.tps)
        raise InfeasibleError(
            f"No TP degree of unit {lacking.name} fits a node",
            f"profiled: TP {tp_degrees(profile, lacking.modules)}; cluster.gpus_per_node:"
            f" {cluster.gpus_per_node}",
            f"Profile again: {call('profile')}",
        )
    return possible


def holder_of(units: list[Unit]) -> int:
    """Return the index of the unit with the LLM; units before it hold parallel encoders."""
    return next(number for number, unit in enumerate(units) if unit.holds_llm)


def units_after(units: list[Unit]) -> list[int]:
    """Return the number of units after each one on its own branch."""
    return [count - 1 for count in in_line([1] * len(units), holder_of(units))]


def units_of(profile: Profile, cluster: Cluster, layout: Layout) -> list[Unit]:
    """Return the units of a layout, for its times by the formula."""
    return [
        Unit(plan.name, tuple(plan.modules), profile, cluster, plan.replicated)
        for plan in layout.units
    ]


def replicating(unit: Unit) -> list[Unit]:
    """Return the LLM's unit with every choice of its other modules replicated over TP.

    Empty if TP has one degree only.
    """
    others = [name for name in unit.modules if name != unit.profile.inputs.llm]
    made = [
        replace(unit, replicated=names)
        for count in range(len(others), 0, -1)
        for names in itertools.combinations(others, count)
    ]
    return [one for one in made if one.tps]
