"""Shapes of one unit for a given slot, as columns of numbers.

`Rows` leave PP open: the unit's time exact, its slowest stage bounded from below. `price` makes the
slowest stage exact, under memory, for the remaining options (a row with a PP).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.activations import worst_mix
from disttrain_cli.costs.memory import (
    GIB,
    Groups,
    MessageBytes,
    cuts_of,
    message_bytes,
    reserved_bytes,
    share_of_states,
)
from disttrain_cli.costs.nccl import Spread, most_messages_mib
from disttrain_cli.planning.objective import busiest_load
from disttrain_cli.planning.partition import fewest_stages, most_of_a_slot, slowest_stage, split
from disttrain_cli.planning.units import Unit, memoised
from disttrain_cli.spec.shape import ParallelShape

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Table = TypeVar("Table", bound="DataclassInstance")
EVERY_AFTER = 1 << 30  # any number of later stages
NEVER = 1 << 20  # more stages than any unit has layers
SAFE = 1 - 1e-9  # lower bounds stay bounds under rounding


def take(table: Table, rows: Flags | Ints) -> Table:
    """Return the chosen rows of a table."""
    if rows.dtype == np.bool_:
        rows = np.flatnonzero(rows)
    return type(table)(*(column.take(rows, axis=0) for column in vars(table).values()))


def join(parts: list[Table]) -> Table:
    """Concatenate the rows of several tables."""
    columns = zip(*(vars(part).values() for part in parts), strict=True)
    return type(parts[0])(*map(np.concatenate, columns))


@dataclass(frozen=True)
class Rows:
    """Columns of equal length; row = one (TP, CP, EP, DP, recompute) of a unit for a slot size."""

    tp: Ints
    cp: Ints
    ep: Ints  # divides TP · CP · DP
    all_gather: Flags  # `Kinds`
    dp: Ints
    recompute: Flags
    stage_gpus: Ints  # TP · CP · DP
    unit_ms: Floats  # the entire unit for one slot on its busiest replica
    least_stages: Ints  # PP is at least this, with memory spread evenly
    state_gib: Floats  # static memory of the entire unit, and memory per slot in flight
    active_gib: Floats
    most_room_gib: Floats  # a device's memory for them, on the stage that sends least
    layer_ms: Floats  # the longest layer
    bulk_ms: Floats  # lower bound of the time of each of `bulk` layers
    bulk: Ints
    layers: Ints  # PP is at most this

    def __len__(self) -> int:
        return len(self.tp)

    def behind(self, flight: int) -> Rows:
        """Return the rows that may fit with at least `flight` slots in flight on every stage."""
        spread = np.ceil((self.state_gib + self.active_gib * flight) / self.most_room_gib * SAFE)
        least = np.maximum(self.least_stages, np.minimum(spread, NEVER)).astype(np.int64)
        fits = least <= self.layers
        rows = replace(self, least_stages=least)
        return rows if fits.all() else take(rows, fits)

    def slowest_ms(self, pp: Ints) -> Floats:
        """Return a lower bound of the slowest stage at `pp`, which broadcasts against the rows.

        No partition beats the even one, nor the longest layer; of equal layers some stage has at
        least count / PP, rounded up.
        """
        longest = np.maximum(self.unit_ms / pp, self.layer_ms)
        return np.maximum(longest, -(-self.bulk // pp) * self.bulk_ms) * SAFE

    def stages(self, slowest_ms: float) -> Ints:
        """Return [B] lower bounds of PP for a slowest stage; `NEVER` if no partition is so fast."""
        within = slowest_ms / SAFE
        even = np.ceil(self.unit_ms / max(within, 1e-300) * SAFE)
        with np.errstate(divide="ignore", invalid="ignore"):
            each = np.minimum(
                np.floor(np.where(self.bulk_ms > 0, within / self.bulk_ms, self.bulk)), self.bulk
            )
            full = np.ceil(self.bulk / each)
        possible = (self.layer_ms <= within) & (each >= 1)
        count = np.maximum(np.maximum(even, full), 1.0)
        return np.maximum(
            np.where(possible, np.minimum(count, NEVER), NEVER), self.least_stages
        ).astype(np.int64)


@dataclass(frozen=True)
class Options:
    """Columns of equal length; row = one shape of the unit."""

    tp: Ints
    cp: Ints
    ep: Ints
    all_gather: Flags
    dp: Ints
    pp: Ints
    recompute: Flags
    gpus: Ints
    unit_ms: Floats
    stage_ms: Floats  # its slowest stage: a lower bound until priced
    after_from: Ints  # the row holds if `after_from` ≤ stages of later units < `after_to`
    after_to: Ints

    def __len__(self) -> int:
        return len(self.tp)


def options_of(rows: Rows, row: Ints, pp: Ints) -> Options:
    """Return options from row indices and their PP."""
    chosen = take(rows, row)
    return Options(
        chosen.tp,
        chosen.cp,
        chosen.ep,
        chosen.all_gather,
        chosen.dp,
        pp,
        chosen.recompute,
        chosen.stage_gpus * pp,
        chosen.unit_ms,
        chosen.slowest_ms(pp),
        np.zeros_like(pp),
        np.full_like(pp, EVERY_AFTER),
    )


@memoised
def list_rows(
    unit: Unit, slot_sequences: int, slots: int, most_gpus: int, later_units: int
) -> Rows:
    """Return every (TP, CP, EP, DP, recompute) of at most `most_gpus` GPUs.

    DP divides the slot if the unit holds the LLM. `later_units` follow, of at least one stage each.
    Rows whose memory cannot fit at any PP are omitted.
    """
    kinds = unit.kinds
    divides = np.arange(1, most_gpus + 1)
    if unit.holds_llm:
        divides = divides[slot_sequences % divides == 0]
    counts = np.searchsorted(divides, most_gpus // kinds.tp_cp_size, side="right")
    variant = np.repeat(np.arange(len(counts)), counts)
    dp = np.concatenate([divides[:count] for count in counts.tolist()])
    if kinds.divides_experts:
        whole = kinds.expert_replicas(variant, dp) > 0
        variant, dp = variant[whole], dp[whole]
    columns = Columns(unit, variant, dp, slot_sequences)
    times, most_room = kind_ms(columns), most_room_gib(columns)
    states, activations, working = kind_gib(columns)
    flight = min(slots, later_units + 1)
    bulk, bulk_ms = _bulk(times, kinds.count)
    none = np.zeros_like(dp)
    rows = Rows(
        kinds.tp[variant],
        kinds.cp[variant],
        kinds.ep[variant],
        kinds.all_gather[variant],
        dp,
        kinds.recompute[variant],
        kinds.tp_cp_size[variant] * dp,
        times @ kinds.count,
        none + 1,
        states @ kinds.count - _shared_gib(unit, states),
        activations @ kinds.count,
        most_room,
        times.max(axis=1, initial=0.0),
        bulk_ms,
        none + bulk,
        none + unit.layers,
    )
    fits = ((states + activations * (flight - 1) + working).max(axis=1) * SAFE <= most_room) & (
        most_room > 0
    )
    rows = (rows if fits.all() else take(rows, fits)).behind(flight)
    fits = rows.stage_gpus * rows.least_stages <= most_gpus
    return rows if fits.all() else take(rows, fits)


def _bulk(times: Floats, count: Ints) -> tuple[int, Floats]:
    """Return a number of layers and [B] the minimum time of each, from the costliest kind."""
    if not len(times) or not count.any():
        return 1, np.zeros(len(times))
    kind = int((times[-1] * count).argmax())
    as_long = (times >= times[:, [kind]]).all(axis=0)
    return int(count[as_long].sum()), times[:, kind]


class Columns(NamedTuple):
    """Shapes of a unit but for PP, as columns [B], and the sequences of a slot."""

    unit: Unit
    variant: Ints  # `Kinds`
    dp: Ints
    slot_sequences: int


def kind_ms(columns: Columns) -> Floats:
    """Return [B, K] times of layer kinds for one slot on the busiest replica."""
    unit, variant, dp, slot_sequences = columns
    load = busiest_load(unit.holds_llm, slot_sequences, unit.items_per_sequence, dp.astype(float))
    return np.maximum(
        0.0, unit.kinds.base_ms[variant] + unit.kinds.slope_ms[variant] * load[:, None]
    )


def kind_gib(columns: Columns) -> tuple[Floats, Floats, Floats]:
    """Return [B, K] static memory, memory per slot in flight, and a running slot's peak."""
    unit, variant, dp, slot_sequences = columns
    kinds, replicas, profile = unit.kinds, dp.astype(float), unit.profile
    mix = np.stack(
        [np.ones_like(replicas), *worst_mix(profile, unit.modules, slot_sequences, replicas)],
        axis=1,
    )
    mix *= 1.0 + profile.device.fragmentation
    share = share_of_states(profile.precision, replicas * kinds.cp[variant])[:, None]
    states, activations, working = np.empty((3, len(dp), len(kinds.count)))
    in_order = bool((variant[1:] >= variant[:-1]).all())
    order = np.arange(len(variant)) if in_order else np.argsort(variant, kind="stable")
    ends = np.cumsum(np.bincount(variant)).tolist()
    for number, (begin, stop) in enumerate(pairwise([0, *ends])):
        if begin == stop:
            continue
        # contiguous rows are not copied
        mine: Ints | slice = slice(begin, stop) if in_order else order[begin:stop]
        states[mine] = kinds.kept_gib[number] + kinds.shared_gib[number] * share[mine]
        activations[mine] = mix[mine] @ kinds.activation_gib[number]
        working[mine] = mix[mine] @ kinds.working_gib[number]
    if kinds.divides_experts:
        alike = kinds.expert_replicas(variant, dp).astype(float)
        share = share_of_states(profile.precision, replicas * kinds.cp[variant], alike)
        states += kinds.experts_gib[variant] * share[:, None]
    return states, activations, np.maximum(activations, working)


def _shared_gib(unit: Unit, states: Floats) -> Floats:
    """Return [B] the static memory of a tied weight, counted twice by kind if on one stage."""
    first = 0
    for name in unit.modules:
        module = unit.profile.modules[name]
        if module.tied:
            return np.asarray(states[:, unit.kinds.of[first + module.tied[0]]])
        first += len(module.layers)
    return np.zeros(len(states))


def room_gib(columns: Columns, first: bool, last: bool) -> Floats:
    """Return [B] a device's memory for layers, on a stage with or without the unit's ends."""
    room, sent = _room_and_messages_gib(*columns)
    return np.asarray(room - sent.of_stage(first, last))


def most_room_gib(columns: Columns) -> Floats:
    """Return [B] a device's memory for layers on the stage that sends least."""
    room, sent = _room_and_messages_gib(*columns)
    least = np.minimum(sent.entering, sent.inside) + np.minimum(sent.leaving, sent.inside)
    return np.asarray(room - least)


def _room_and_messages_gib(
    unit: Unit, variant: Ints, dp: Ints, slot_sequences: int
) -> tuple[Floats, MessageBytes]:
    """Return [B] a device's memory without reserves, and the memory of messages."""
    ranks = unit.kinds.tp_cp_size[variant]
    sending = message_bytes(
        unit.profile, unit.modules, slot_sequences, tp_cp_size=ranks, dp=dp.astype(float)
    )
    moving = 1.0 + unit.profile.device.fragmentation
    sent = MessageBytes(*(moving * part / GIB for part in sending))
    return _room_gib(unit, variant.tobytes(), dp.tobytes()), sent


@memoised
def _room_gib(unit: Unit, variants: bytes, dps: bytes) -> Floats:
    """Return [B] a device's memory without reserves, which no slot size changes.

    Arguments are arrays of int64, as bytes: the key of a cache.
    """
    variant, dp = (np.frombuffer(each, dtype=np.int64) for each in (variants, dps))
    known, kinds, replicas = (unit.profile, unit.modules), unit.kinds, dp.astype(float)
    gpus, node = unit.cluster.gpus, unit.cluster.gpus_per_node
    tp, cuts = kinds.tp[variant], cuts_of(*known)
    groups = Groups(
        Spread(gpus, gpus if gpus <= node else 1, -(-gpus // node)),
        Spread.dearest(replicas * kinds.cp[variant], tp, node),
        Spread.dearest(tp, 1, node),
        Spread.dearest(kinds.cp[variant], tp, node),
        cuts,
        most_messages_mib(
            unit.profile.device,
            cuts,
            kinds.tp_cp_size[variant] * dp,
            gpus,
            node,
            outer=len(unit.modules) < len(unit.profile.modules),
        ),
        kinds.all_gather[variant],
        unit.cluster.hides,
    )
    if kinds.divides_experts:
        ep = kinds.ep[variant]
        alike = np.where(ep > 1, kinds.expert_replicas(variant, dp), 1)
        groups = groups._replace(
            experts=Spread.dearest(ep, 1, node), expert_replicas=Spread.dearest(alike, ep, node)
        )
    return np.asarray(unit.cluster.memory_gib - reserved_bytes(*known, groups) / GIB)


def layer_gib(columns: Columns) -> tuple[Floats, Floats, Floats, Floats]:
    """Return `kind_gib` of every layer [B, L], and [B] a device's memory in the unit's middle.

    Differences of that memory on the first and last stage are added to the static memory of the
    first and last layer.
    """
    states, activations, working = (part[:, columns.unit.kinds.of] for part in kind_gib(columns))
    free, sent = _room_and_messages_gib(*columns)
    room, first, last = (
        free - sent.of_stage(*ends) for ends in ((False, False), (True, False), (False, True))
    )
    states[:, 0] += room - first
    states[:, -1] += room - last
    return states, activations, working, room


def price(
    unit: Unit, options: Options, slot_sequences: int, slots: int, afters: Ints, within_ms: Floats
) -> Options:
    """Return every option's exact slowest stage under memory, by later stages in `afters` (sorted).

    Later stages add slots in flight, so an option may need a slower partition, or fail, in a longer
    pipeline; such an option becomes several rows. Options that fit nowhere, and some of those that
    have a stage slower than `within_ms` or whose stages could be fewer, are dropped.
    """
    alone = options.pp == 1
    whole = _price_single_stage(unit, take(options, alone), slot_sequences, slots)
    several = take(options, ~alone)
    return join(
        [
            whole,
            *_price_split(unit, several, slot_sequences, slots, afters, within_ms[~alone]),
        ]
    )


def _price_single_stage(unit: Unit, options: Options, slot_sequences: int, slots: int) -> Options:
    """Price options of one stage: the number of slots in flight that fit."""
    if not len(options):
        return options
    kinds = unit.kinds
    columns = Columns(unit, _variants(unit, options), options.dp, slot_sequences)
    states, activations, working = kind_gib(columns)
    left = (
        room_gib(columns, first=True, last=True)
        - states @ kinds.count
        + _shared_gib(unit, states)
        - most_of_a_slot(activations[:, kinds.of], working[:, kinds.of])
    )
    flight = 1 + np.floor(left / np.maximum(activations @ kinds.count, 1e-300) + 1e-12)
    until = np.where(flight >= slots, EVERY_AFTER, np.clip(flight, 0, EVERY_AFTER)).astype(np.int64)
    priced = replace(options, stage_ms=options.unit_ms, after_to=until)
    return take(priced, (left >= 0) & (flight >= 1))


def _price_split(
    unit: Unit,
    options: Options,
    slot_sequences: int,
    slots: int,
    afters: Ints,
    within_ms: Floats,
) -> list[Options]:
    """Price options of several stages: the best partition for every number of slots in flight."""
    if not len(options):
        return []
    variants = _variants(unit, options)
    needed = fewest_stages(
        *_layers(Columns(unit, variants, options.dp, slot_sequences)),
        slots,
        int(afters[0]),
        within_ms / SAFE,
        unit.allowed,
    )
    variants, options = variants[needed <= options.pp], take(options, needed <= options.pp)
    if not len(options):
        return []
    flights = np.unique(np.minimum(afters, slots))

    def slowest(after: int, mine: Flags) -> Floats:
        """Return [B] the slowest stage of these options; inf for the others."""
        dps = int(options.dp.max()) + 1
        rows, of_row = np.unique(variants[mine] * dps + options.dp[mine], return_inverse=True)
        pp, result = options.pp[mine], np.full(len(options), np.inf)
        layers = _layers(Columns(unit, rows // dps, rows % dps, slot_sequences))
        table = slowest_stage(*layers, slots, after, int(pp.max()), unit.allowed)
        result[mine] = table[of_row, pp]
        return result

    every = np.ones(len(options), dtype=bool)
    least = slowest(int(flights[0]), every)
    most = least if len(flights) == 1 else slowest(int(flights[-1]), every)
    steady = least == most  # memory only grows with later stages
    parts = [_held(options, steady, least, 0, EVERY_AFTER)]
    if steady.all():
        return parts
    for flight, following in pairwise([*flights.tolist(), EVERY_AFTER]):
        if flight == flights[0]:
            exact = least
        else:
            exact = most if following == EVERY_AFTER else slowest(flight, ~steady)
        parts.append(_held(options, ~steady, exact, flight, following))
    return parts


def _held(options: Options, rows: Flags, stage_ms: Floats, since: int, until: int) -> Options:
    """Return the rows that fit, with their slowest stage and the valid range of later stages."""
    fits = rows & np.isfinite(stage_ms)
    kept = take(options, fits)
    none = np.zeros_like(kept.pp)
    return replace(kept, stage_ms=stage_ms[fits], after_from=none + since, after_to=none + until)


def _variants(unit: Unit, table: Rows | Options) -> Ints:
    """Return [B] the variant index of each row."""
    kinds = unit.kinds
    same = (table.tp[:, None] == kinds.tp) & (table.cp[:, None] == kinds.cp)
    same &= table.ep[:, None] == kinds.ep
    same &= table.all_gather[:, None] == kinds.all_gather
    return (same & (table.recompute[:, None] == kinds.recompute)).argmax(axis=1)


def _layers(columns: Columns) -> tuple[Floats, Floats, Floats, Floats, Floats]:
    """Return [B, L] times and memory of every layer, and [B] the available memory.

    The memory columns are static, per slot in flight, and while the layer runs.
    """
    return kind_ms(columns)[:, columns.unit.kinds.of], *layer_gib(columns)


@memoised
def slowest_by_stages(
    unit: Unit, shape: ParallelShape, slot_sequences: int, slots: int, after: int, most_gpus: int
) -> Floats:
    """Return [PP] the slowest stage of one row by PP, within the GPUs; inf if none fits.

    `after` stages follow; `shape` has PP 1.
    """
    most = min(unit.layers, most_gpus // shape.gpus)
    variant = np.array([unit.kinds.variant(shape)])
    layers = _layers(Columns(unit, variant, np.array([shape.dp]), slot_sequences))
    return slowest_stage(*layers, slots, after, most, unit.allowed)[0]


@memoised
def layers_per_stage(
    unit: Unit, shape: ParallelShape, slot_sequences: int, slots: int, after: int
) -> list[int] | None:
    """Return the partition of a priced option; None if none fits."""
    variant = unit.kinds.variant(shape)
    if variant is None:
        return None
    times, states, activations, working, room = _layers(
        Columns(unit, np.array([variant]), np.array([shape.dp]), slot_sequences)
    )
    return split(
        times[0],
        states[0],
        activations[0],
        working[0],
        float(room[0]),
        slots,
        after,
        shape.pp,
        unit.allowed,
    )
