"""How modules group into units, and the numbers of a unit that every option needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.calls import call
from disttrain_cli.costs.activations import kept_share, working_share
from disttrain_cli.costs.context import fits_nodes, misfit, most_cp
from disttrain_cli.costs.freezing import backwards
from disttrain_cli.costs.memory import GIB, state_bytes
from disttrain_cli.costs.remembering import remembered as known_by_profile
from disttrain_cli.costs.replicated import dealt_ms
from disttrain_cli.costs.stage import overlap_helps, tp_degrees, unit_times
from disttrain_cli.errors import InfeasibleError
from disttrain_cli.spec.plan import Layout, Strategy, UnitShape
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.model import unit_name
from disttrain_cli.spec.runfile.train import Ordering
from disttrain_cli.spec.stage_graph import in_line, neighbours

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: Of a sequence on each rank where keys and values are gathered: two chunks (`models.levelling`) of
#: a kernel's tile of queries.
LEAST_TOKENS = 256


@dataclass(frozen=True)
class Cluster:
    """What a layout must fit into, and what it may do to be faster."""

    gpus: int
    gpus_per_node: int
    memory_gib: float  # of one device, that a layout may use
    zero_stage: Literal[0, 1]
    batch: int  # packed sequences per step
    trained: tuple[str, ...] | None = None  # what is trained (`costs.freezing`); None = everything
    # policy under which global batches are simulated
    ordering: Ordering = "paper"
    cpu_node_cores: int = 64  # of one preprocessing node
    margin_gib: float = 0.0  # of a device's memory, that layouts leave free beyond that
    # of activations; auto = for each unit what is faster
    checkpointing: Literal["none", "full", "auto"] = "none"
    most_tp: int | None = None  # largest TP degree; None = what fits a node
    most_cp: int | None = None  # largest CP degree; None = any
    over_nodes: bool = True  # CP groups may lie on several nodes
    gathers: bool = True  # or gather keys and values instead of exchanging rows for heads
    splits: bool = False  # backwards into two parts (`planning.splitting`)
    overlaps: bool = False  # reductions and gathers with passes (`costs.overlap`)
    hides: bool = False  # a TP group's messages behind products, where that is faster
    climbs: bool = True  # the best layouts to better neighbours (`planning.climb`)


@dataclass(frozen=True)
class Kinds:
    """The distinct layers of a unit: L layers, K kinds, V variants (a TP and a CP degree, with or
    without checkpointing, rows exchanged for heads or keys and values gathered)."""

    of: Ints  # [L] kind of each layer
    count: Ints  # [K]
    tp: Ints  # [V]
    cp: Ints  # [V]
    gathers: NDArray[np.bool_]  # [V]
    checkpointing: NDArray[np.bool_]  # [V]
    base_ms: Floats  # [V, K] forward + backward + transfers: base + slope · sequences
    slope_ms: Floats
    # [V, K] weights, gradients, optimizer on one rank: kept by each replica, shared by all
    kept_gib: Floats
    shared_gib: Floats
    # [V, 4, K] of one slot on one rank, by its replica's work (`costs.activations.worst_mix`)
    activation_gib: Floats
    # [V, 4, K] the most of one slot that a layer holds while it runs, what it keeps among it
    working_gib: Floats

    @property
    def width(self) -> Ints:
        """[V] ranks that share the work of a replica on one stage: TP · CP."""
        return self.tp * self.cp

    def variant(
        self, tp: int, checkpointing: bool, cp: int = 1, gathers: bool = False
    ) -> int | None:
        """Number of a variant; None where there is none, or the other way of its CP groups is
        better everywhere."""
        same = (self.tp == tp) & (self.cp == cp) & (self.gathers == gathers)
        found = np.flatnonzero(same & (self.checkpointing == checkpointing))
        return int(found[0]) if len(found) else None


@dataclass(frozen=True)
class Unit:
    """Consecutive modules that will share one (TP, CP, DP, PP)."""

    name: str
    modules: tuple[str, ...]
    profile: Profile
    cluster: Cluster
    #: modules that TP does not divide: their items are dealt out (`UnitPlan.module_tp`)
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
        """Modules that TP divides."""
        return [name for name in self.modules if name not in self.replicated]

    def _parts(self, tp: int) -> list[tuple[list[str], int]]:
        """Modules one after the other, with the TP that divides each."""
        return [([name], 1 if name in self.replicated else tp) for name in self.modules]

    @cached_property
    def tps(self) -> list[int]:
        """TP degrees that were profiled, are allowed, and fit evenly into a node.

        Powers of two, and the whole node: each divides all larger ones, so that groups of any units
        beside each other stay inside nodes (`stage_graph`).
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
        """(TP, CP) degrees that are allowed, and together fit evenly into a node, as TP does
        alone, or are whole nodes."""
        node = self.cluster.gpus_per_node
        # whether messages of groups on several nodes have a price
        priced = self.profile.links.gpus_per_node == node
        room = max(node, self.cluster.gpus) if priced and self.cluster.over_nodes else node
        most = self.cluster.most_cp or room
        if not self.gathers:
            most = min(most, most_cp(self.profile, self.modules))
        most = 1 if self.replicated else most
        return [
            (tp, cp)
            for tp in self.tps
            for cp in range(1, min(room // tp, most) + 1)
            if fits_nodes(tp, cp, node)
            and (tp * cp >= node or (tp * cp).bit_count() == 1)
            and self.ways(tp, cp)
        ]

    @cached_property
    def gathers(self) -> bool:
        """Whether its CP groups may gather keys and values: those of the LLM, whose tokens can be
        levelled. Of encoders, which have as many heads of these as of queries, it sends no less."""
        return self.holds_llm and self.cluster.gathers

    def ways(self, tp: int, cp: int) -> list[bool]:
        """Whether its CP groups of this degree gather keys and values, or exchange rows for heads
        first: the ways that are allowed."""
        length = self.profile.inputs.sequence_length
        enough = cp > 1 and self.gathers and length >= LEAST_TOKENS * tp * cp
        return [
            gathers
            for gathers in ((False, True) if enough else (False,))
            if misfit(self.profile, self.modules, tp, cp, gathers) is None
        ]

    @cached_property
    def ends_ms(self) -> tuple[Floats, Floats]:
        """Transfers at the unit's two ends, forward and gradient, as (base, slope) per layer [L].

        A transfer holds up the rank at either end for latency + bytes / bandwidth; it is counted
        with the first layer (from every unit before) and the last one (to the unit after).
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

    def overlaps(self, tp: int, checkpointing: bool = False, cp: int = 1) -> bool:
        """Whether the messages of its TP groups travel behind products: where that is faster."""
        known = (self.profile, self.divided, tp, self.cluster.trained, checkpointing, cp)
        return self.cluster.hides and tp > 1 and overlap_helps(*known)

    def layer_ms(
        self,
        tp: int,
        checkpointing: bool = False,
        overlap: bool | None = None,
        cp: int = 1,
        gathers: bool = False,
    ) -> tuple[Floats, Floats]:
        """Forward + backward + transfers of every layer as (base, slope per sequence), in ms.

        Args:
            overlap: the TP group's messages travel behind products; None = where that is faster.
        """
        question = (tp, checkpointing, overlap, cp, gathers)
        if question not in self._layer_ms:
            hides = self.overlaps(tp, checkpointing, cp) if overlap is None else overlap
            base, slope = self.ends_ms
            trained, times = self.cluster.trained, list[tuple[Floats, Floats]]()
            for names, own_tp in self._parts(tp) if self.replicated else [(self.modules, tp)]:
                known = (self.profile, names, own_tp, trained, checkpointing)
                of = unit_times(*known, hides, cp, gathers)
                one = of.forward_base + of.backward_base, of.forward_slope + of.backward_slope
                dealt = names[0] in self.replicated
                times.append(self._dealt_ms(names[0], tp, *one) if dealt else one)
            self._layer_ms[question] = (
                np.concatenate([part for part, _ in times]) + base,
                np.concatenate([part for _, part in times]) + slope,
            )
        return self._layer_ms[question]

    def _dealt_ms(self, name: str, tp: int, base: Floats, slope: Floats) -> tuple[Floats, Floats]:
        """Times of the layers of a module whose items are dealt out, on the busiest of `tp` ranks,
        which has half an item more than its share at most, in the mean (`objective.busiest_load`);
        with what they exchange, on the last layer."""
        work = self.profile.modules[name].work_per_sequence
        if not work.items:
            return base, slope
        trains = any(one != "still" for one in backwards(self.profile, self.cluster.trained)[name])
        base, slope = base.copy(), slope.copy()
        for sent in dealt_ms(self.profile, name, tp, trains):
            base[-1] += sent.base
            slope[-1] += sent(work) - sent.base
        return base + slope / work.items * (tp - 1) / (2 * tp), slope / tp

    @cached_property
    def _layer_ms(self) -> dict[tuple[int, bool, bool | None, int, bool], tuple[Floats, Floats]]:
        return {}

    @cached_property
    def answers(self) -> dict[Hashable, Any]:
        """What `remembered` functions said of the unit."""
        return {}

    @cached_property
    def kinds(self) -> Kinds:
        """Time and memory of the unit's layers at every TP and CP degree, equal ones counted
        once."""
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
            gathers=cluster.gathers,
            hides=cluster.hides,
        )
        return _kinds(self.profile, self.modules, self.replicated, alike, self.widths)

    def kinds_at(self, widths: Sequence[tuple[int, int]]) -> Kinds:
        """`kinds` at these (TP, CP) degrees."""
        choices = {"none": [False], "full": [True], "auto": [False, True]}[
            self.cluster.checkpointing
        ]
        variants = [
            shape
            for tp, cp in widths
            for checkpointing in choices
            for shape in self._undominated(tp, cp, checkpointing)
        ]
        columns = np.stack([self._columns[shape] for shape in variants])  # [V, 12, L]
        numbers: dict[bytes, int] = {}
        of = np.array(
            [
                numbers.setdefault(columns[:, :, layer].tobytes(), len(numbers))
                for layer in range(self.layers)
            ]
        )
        one = columns[:, :, [int(np.argmax(of == kind)) for kind in range(len(numbers))]]
        tps, cps, gather, recomputing = (
            np.array([getattr(shape, name) for shape in variants])
            for name in ("tp", "cp", "gathers", "checkpointing")
        )
        return Kinds(
            of,
            np.bincount(of),
            tps,
            cps,
            gather,
            recomputing,
            one[:, 0],
            one[:, 1],
            one[:, 2],
            one[:, 3],
            one[:, 4:8],
            one[:, 8:],
        )

    def _undominated(self, tp: int, cp: int, checkpointing: bool) -> list[UnitShape]:
        """The ways of a CP group that are faster or take less memory than the other somewhere."""
        shapes = [UnitShape(tp, 1, 1, checkpointing, cp, gathers) for gathers in self.ways(tp, cp)]
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
    def _columns(self) -> dict[UnitShape, Floats]:
        return {}

    def _columns_of(self, shape: UnitShape) -> Floats:
        """[12, L] base and slope of times, states, memory of a slot, and of a running layer."""
        known, trained = (self.profile, self.modules), self.cluster.trained
        tp, cp, checkpointing = shape.tp, shape.cp, shape.checkpointing
        overlap = self.overlaps(tp, checkpointing, cp)
        if self.replicated:
            parts = [
                self._memory_of(names[0], tp, shape._replace(tp=own_tp), overlap)
                for names, own_tp in self._parts(tp)
            ]
            memory = list(np.concatenate(parts, axis=1))
        else:
            memory = [
                *state_bytes(*known, tp, self.cluster.zero_stage, trained),
                *kept_share(*known, shape, trained),
                *working_share(*known, shape, trained, overlap=overlap),
            ]
        times = self.layer_ms(tp, checkpointing, cp=cp, gathers=shape.gathers)
        return np.vstack([*times, *(row / GIB for row in memory)])

    def _memory_of(self, name: str, tp: int, shape: UnitShape, overlap: bool) -> Floats:
        """[10, L] bytes of the layers of one module on one of `tp` ranks; where items are dealt out
        over these, of the busiest one (`costs.activations.worst_work`)."""
        known, trained = (self.profile, [name]), self.cluster.trained
        states = state_bytes(*known, shape.tp, self.cluster.zero_stage, trained)
        shares = [
            kept_share(*known, shape, trained),
            working_share(*known, shape, trained, overlap=overlap),
        ]
        if name in self.replicated:
            shares = [
                np.stack([base + item, worst / tp, mean / tp, np.zeros_like(item)])
                for base, worst, mean, item in shares
            ]
        return np.vstack([*states, *shares])

    @cached_property
    def allowed(self) -> NDArray[np.bool_] | None:
        """[L+1, L+1] which layer ranges may form a stage; None = any."""
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
) -> Kinds:
    return Unit("", modules, profile, cluster, replicated).kinds_at(widths)


Function = TypeVar("Function", bound=Callable[..., Any])


def remembered(function: Function) -> Function:
    """A pure function of a unit and numbers, which the searches over one unit ask again and
    again."""

    @wraps(function)
    def answer(unit: Unit, *numbers: Hashable) -> Any:
        question = (function.__name__, *numbers)
        if question not in unit.answers:
            unit.answers[question] = function(unit, *numbers)
        return unit.answers[question]

    return cast(Function, answer)


def groupings(profile: Profile, cluster: Cluster, strategy: Strategy) -> list[list[Unit]]:
    """The units that a strategy's layouts may have, in pipeline order; the most units first.

    `auto`: the LLM's unit holds any run of encoders directly before the LLM and of generators
    directly behind it, each divided by its TP or whole on every rank (`replicating`); every other
    module is a unit of its own. `megatron` puts every module into one unit, in all of these
    ways, the others each into its own, as far as there are GPUs for it; `distmm` and `paper` know
    no CP.

    Raises:
        InfeasibleError: in every grouping a unit has no TP degree that fits a node.
    """
    names = list(profile.modules)
    llm = names.index(profile.inputs.llm)
    if strategy in ("distmm", "paper"):
        cluster = replace(cluster, most_cp=1)
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
    """Number of the unit that holds the LLM; those before it hold encoders and stand side by
    side."""
    return next(number for number, unit in enumerate(units) if unit.holds_llm)


def units_after(units: list[Unit]) -> list[int]:
    """Units behind each one on its own line."""
    return [count - 1 for count in in_line([1] * len(units), holder_of(units))]


def units_of(profile: Profile, cluster: Cluster, layout: Layout) -> list[Unit]:
    """The units of a layout, for its times by the formula."""
    return [
        Unit(plan.name, tuple(plan.modules), profile, cluster, plan.replicated)
        for plan in layout.units
    ]


def replicating(unit: Unit) -> list[Unit]:
    """The LLM's unit with some of the encoders and generators beside it whole on every rank of its
    TP groups, every choice of them; none where TP has one degree."""
    others = [name for name in unit.modules if name != unit.profile.inputs.llm]
    made = [
        replace(unit, replicated=names)
        for count in range(len(others), 0, -1)
        for names in itertools.combinations(others, count)
    ]
    return [one for one in made if one.tps]
