"""The shapes (TP, DP, PP) that one unit may have for a given slot, as columns of numbers.

`list_options` is cheap: whole-unit time exact, slowest stage bounded from below. `price` makes the slowest
stage exact, under memory, for those options that the search still wants.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.memory import worst_mix
from disttrain_cli.planning.objective import busiest_load
from disttrain_cli.planning.partition import slowest_stage, split
from disttrain_cli.planning.units import Unit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
EVERY_AFTER = 1 << 30  # "however many stages come after"


@dataclass(frozen=True)
class Options:
    """Columns of equal length; row = one shape of the unit."""

    tp: Ints
    dp: Ints
    pp: Ints
    gpus: Ints
    unit_ms: Floats  # the whole unit for one slot on its busiest replica
    stage_ms: Floats  # its slowest stage: a lower bound until priced
    after_from: Ints  # the row holds when `after_from` ≤ stages of later units < `after_to`
    after_to: Ints

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: NDArray[np.bool_] | Ints) -> Options:
        """The chosen rows."""
        return Options(*(getattr(self, field.name)[rows] for field in fields(self)))


def join(parts: list[Options]) -> Options:
    """Rows of several tables, one after the other."""
    return Options(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Options)))


def layer_ms(unit: Unit, tp: int, dp: Floats, slot_sequences: int) -> Floats:
    """[B, L] time of every layer for one slot on the busiest replica, by DP."""
    base, slope = unit.layer_ms(tp)
    load = busiest_load(unit.holds_llm, slot_sequences, unit.items_per_sequence, dp)
    return np.maximum(0.0, base + slope * load[:, None])


def layer_gib(unit: Unit, tp: int, dp: Floats, slot_sequences: int) -> tuple[Floats, Floats]:
    """[B, L] static memory, and memory per slot in flight, of every layer by DP."""
    kept, shared = unit.states_gib
    base, worst, mean, item = unit.activations_gib
    a, b, c = worst_mix(unit.holds_llm, slot_sequences, dp)
    activations = base + worst * a[:, None] + mean * b[:, None] + item * c[:, None]
    return (kept + shared / dp[:, None]) / tp, activations / tp


def list_options(unit: Unit, slot_sequences: int, most_gpus: int, dps: Ints | None = None) -> Options:
    """Every shape of at most `most_gpus` GPUs: DP divides the slot where the unit holds the LLM, else is free.

    `stage_ms` is a lower bound: no split beats the even one, nor the largest layer, and some stage has at least
    layers / PP of them, rounded up. Shapes whose states cannot fit even when spread evenly are left out.
    """
    limit = unit.cluster.memory_gib
    stages = np.arange(len(unit.modules) if unit.fenced else 1, unit.layers + 1)
    columns: list[tuple[NDArray, ...]] = []
    for tp in unit.tps:
        choices = np.arange(1, most_gpus // tp + 1)
        if unit.holds_llm:
            choices = choices[slot_sequences % choices == 0]
        if dps is not None:
            choices = np.intersect1d(choices, dps)
        if not len(choices):
            continue
        times = layer_ms(unit, tp, choices.astype(float), slot_sequences)
        whole = times.sum(axis=1)
        slowest = _slowest_bound(times, stages)
        states, activations = layer_gib(unit, tp, choices.astype(float), slot_sequences)
        least = states.sum(axis=1) + activations.sum(axis=1)
        row, column = np.nonzero((choices[:, None] * tp * stages <= most_gpus) & (least[:, None] <= limit * stages))
        pp, dp = stages[column], choices[row]
        columns.append((np.full(len(row), tp), dp, pp, tp * dp * pp, whole[row], slowest[row, column]))
    if not columns:
        empty, none = np.zeros(0, dtype=np.int64), np.zeros(0)
        return Options(empty, empty, empty, empty, none, none, empty, empty)
    tp_, dp_, pp_, gpus, unit_ms, stage_ms = (np.concatenate(part) for part in zip(*columns, strict=True))
    return Options(tp_, dp_, pp_, gpus, unit_ms, stage_ms, np.zeros_like(gpus), np.full_like(gpus, EVERY_AFTER))


def _slowest_bound(times: Floats, stages: Ints) -> Floats:
    """[B, P] lower bound of the slowest of `stages` [P] stages; [B, L] layer times."""
    layers = times.shape[1]
    prefix = np.concatenate([np.zeros((len(times), 1)), np.cumsum(times, axis=1)], axis=1)
    counts = -(-layers // stages)
    runs = {count: (prefix[:, count:] - prefix[:, :-count]).min(axis=1) for count in np.unique(counts)}
    fullest = np.stack([runs[count] for count in counts], axis=1)
    even = prefix[:, -1:] / stages
    return np.maximum(np.maximum(even, fullest), times.max(axis=1)[:, None]) * (1 - 1e-9)


def price(unit: Unit, options: Options, slot_sequences: int, slots: int, afters: Ints) -> Options:
    """Exact slowest stage of every option under memory, for each number of later stages in `afters` (sorted).

    Later stages add slots in flight, so an option may need a slower split, or fail, behind a longer pipeline;
    such an option becomes several rows. Options that fit nowhere are dropped.
    """
    parts: list[Options] = []
    for tp in np.unique(options.tp):
        mine = options.take(options.tp == tp)
        dps, row = np.unique(mine.dp, return_inverse=True)
        most = int(mine.pp.max())
        times = layer_ms(unit, int(tp), dps.astype(float), slot_sequences)
        states, activations = layer_gib(unit, int(tp), dps.astype(float), slot_sequences)
        previous = 0
        table: Floats | None = None
        flights = np.minimum(afters, slots)
        for index, after in enumerate(flights):
            last = index == len(flights) - 1
            if not last and flights[index + 1] == after:
                continue
            if table is None or not _roomy(states, activations, unit.cluster.memory_gib, slots):
                table = slowest_stage(times, states, activations, unit.cluster.memory_gib, slots, int(after), most,
                                      unit.allowed)
            exact = table[row, mine.pp]
            until = EVERY_AFTER if last else int(afters[index]) + 1
            fits = np.isfinite(exact)
            kept = mine.take(fits)
            parts.append(Options(kept.tp, kept.dp, kept.pp, kept.gpus, kept.unit_ms, exact[fits],
                                 np.full(len(kept), previous), np.full(len(kept), until)))
            previous = until
    return join(parts) if parts else options.take(np.zeros(0, dtype=np.int64))


def _roomy(states: Floats, activations: Floats, limit: float, slots: int) -> bool:
    """Whether even a single stage with every slot in flight fits, so that memory plays no part."""
    return bool((states.sum(axis=1) + activations.sum(axis=1) * slots <= limit).all())


def layers_per_stage(unit: Unit, tp: int, dp: int, pp: int, slot_sequences: int, slots: int,
                     after: int) -> list[int] | None:
    """The split behind a priced option; None where none fits."""
    one = np.array([float(dp)])
    times = layer_ms(unit, tp, one, slot_sequences)[0]
    states, activations = (values[0] for values in layer_gib(unit, tp, one, slot_sequences))
    return split(times, states, activations, unit.cluster.memory_gib, slots, after, pp, unit.allowed)
