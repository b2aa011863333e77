"""Synthetic step whose every slot has the most work that a plan's memory is priced for.

The first replica of every unit gets it (`costs.activations.worst_mix`): in the unit with the LLM
every sequence is the worst of the data, elsewhere one sequence is and the others are average.
Fractional items are rounded up, images to whole merge blocks.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from disttrain_cli.costs.activations import WHOLE, worst_mix, worst_work
from disttrain_cli.costs.experts import kept_load, working_load
from disttrain_cli.costs.layout import stages_of
from disttrain_cli.data.ordering.assigning import by_owner
from disttrain_cli.data.ordering.levelling import dealt
from disttrain_cli.data.slots import (
    Ints,
    ReplicaItems,
    Slot,
    SlotItems,
    StepOrder,
    no_items,
    slot_items,
)
from disttrain_cli.spec.heads import Head, TargetInput
from disttrain_cli.spec.index import KINDS
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.stage_graph import RankCoords
from disttrain_cli.spec.work import Work


def worst_step(profile: Profile, layout: Layout, slots: int) -> StepOrder:
    """Return a step of `slots` equal slots of the worst work; brokers tell them apart by id."""
    slot = worst_slot(profile, layout)
    labels, targets = (slots * len(items) for items in (slot.sequences, slot.items["target"]))
    return StepOrder(
        0, [replace(slot) for _ in range(slots)], labels * profile.inputs.sequence_length, targets
    )


def worst_slot(profile: Profile, layout: Layout) -> Slot:
    """Return a slot in which the first replica of every unit has the worst work."""
    inputs, sequences = profile.inputs, slot_sequences(profile, layout)
    worst = {
        head.item: _Items(profile, layout, head) for head in reversed(inputs.heads)
    }  # the first of several heads wins
    items = {
        item: worst[item].in_slot(sequences) if item in worst else slot_items() for item in KINDS
    }
    replicas: dict[str, list[ReplicaItems]] = {}
    for unit in layout.units:
        kinds = {inputs.item(module) for module in unit.modules}
        holds, none = inputs.llm in unit.modules, [no_items()] * unit.dp
        work = {
            item: by_owner(worst[item].owners(unit, holds), items[item].grid, dp=unit.dp)
            if item in worst and (holds or item in kinds)
            else none
            for item in items
        }
        work["sequence"] = np.split(np.arange(sequences), unit.dp) if holds else none
        replicas[unit.name] = [
            dict(zip(work, numbers, strict=True)) for numbers in zip(*work.values(), strict=True)
        ]
    lengths = sample_lengths(profile)
    return Slot(
        inputs=inputs,
        sequences=np.arange(sequences),
        sequence_tokens=np.full(sequences, sum(lengths)),
        sequence_length_sq=np.full(sequences, inputs.length_sq(lengths).sum()),
        items=items,
        replicas=replicas,
    )


def at_work(profile: Profile, layout: Layout, slot: Slot) -> Profile:
    """Return the profile with the worst sequences scaled to the first replicas' work in a slot.

    With it, `costs.activations` prices the work of this slot, whose items are not split.
    """
    sequences, modules = slot_sequences(profile, layout), dict(profile.modules)
    for unit in layout.units:
        for name in unit.modules:
            module = profile.modules[name]
            worst, mean, item = worst_work(profile, layout, unit, name)
            rest = module.work_per_sequence.scaled(
                mean
                + (item / module.work_per_sequence.items if module.work_per_sequence.items else 0.0)
            )
            items = slot.replicas[unit.name][0]
            own = dealt(slot, name, items, unit.dealt_over(name))[0]  # of the observed rank
            work = slot.work(name, own)
            # cuts carry rows, or whole sequences for the LLM
            ranks = unit.dp * unit.dealt_over(name)
            mean_tokens = module.work_per_sequence.tokens * sequences / ranks
            whole = name == profile.inputs.llm or not mean_tokens
            rows = 1.0 if whole else work.tokens / mean_tokens
            modules[name] = module.model_copy(
                update={
                    "cut_bytes_per_sequence": [
                        size * rows for size in module.cut_bytes_per_sequence
                    ],
                    "max_work_per_sequence": Work(
                        *(
                            (amount - other) / worst
                            for amount, other in zip(work, rest, strict=True)
                        )
                    ),
                }
            )
    return profile.model_copy(update={"modules": modules})


def sample_lengths(profile: Profile) -> list[int]:
    """Return the lengths in tokens of a worst sequence's samples.

    Samples have equal lengths, with about as many pairs of tokens in all as the sequence.
    """
    worst = profile.modules[profile.inputs.llm].max_work_per_sequence
    tokens = min(math.ceil(worst.tokens), profile.inputs.sequence_length)
    samples = max(
        1, math.ceil(int(profile.inputs.length_sq(tokens)) / max(1.0, worst.sum_length_sq))
    )
    return np.diff(np.arange(samples + 1) * tokens // samples).tolist()


def expert_loads(profile: Profile, layout: Layout, coords: RankCoords) -> list[float]:
    """Return, by layer of a rank, the rows at the fullest rank of an EP group over their mean.

    Their mean over the mixtures is the load for which saved activations are priced. The last one,
    in whose backward those of all others are still there, has that of the fullest mixture.
    """
    stages = stages_of(profile, layout)
    held = [
        (profile, module, profile.modules[module].costs[kind], coords.unit.shape)
        for stage in coords.stages
        for module, kind, _ in stages[stage.number].held
    ]
    loads = [1.0] * len(held)
    mixtures = [number for number, (_, _, cost, _) in enumerate(held) if cost.experts is not None]
    if mixtures:
        last, others = mixtures[-1], mixtures[:-1]
        loads[last] = working_load(*held[last])
        for number in others:
            kept = kept_load(*held[number])
            loads[number] = kept - (loads[last] - kept) / len(others)
    return loads


class _Items:
    """Items of a modality in a slot, for the module of `head`."""

    def __init__(self, profile: Profile, layout: Layout, head: Head) -> None:
        self._profile, self._head, module = profile, head, head.module
        self._llm, self._unit = layout.unit_of(profile.inputs.llm), layout.unit_of(module)
        of = profile.modules[module]
        self._mean, self._worst = of.work_per_sequence, of.max_work_per_sequence
        self._sequences = slot_sequences(profile, layout)
        self.inside = module in self._llm.modules
        worst = np.minimum(
            np.arange(self._sequences) + 1, layout.microbatch_size if self.inside else 1
        )
        until = np.ceil(
            worst * self._worst.items
            + (np.arange(self._sequences) + 1 - worst) * self._mean.items
            - WHOLE
        )
        self.counts: Ints = np.diff(until, prepend=0.0).astype(np.int64)  # by sequence

    def in_slot(self, sequences: int) -> SlotItems:
        """Return the items of a slot with this number of sequences."""
        sequence = np.repeat(np.arange(sequences), self.counts)
        return slot_items(sequence, None if self._head.alike else self.grids())

    def owners(self, unit: UnitPlan, holds_llm: bool) -> Ints:
        """Return the replica of every item."""
        if holds_llm:
            each = self._sequences // unit.dp
            return np.repeat(np.arange(self._sequences) // each, self.counts)
        total = int(self.counts.sum())
        first = min(total, math.ceil(self._mix(unit).items - WHOLE)) if unit.dp > 1 else total
        others = np.arange(total - first) * max(1, unit.dp - 1) // max(1, total - first) + 1
        return np.concatenate([np.zeros(first, np.int64), others])

    def grids(self) -> Ints:
        """Return rows and columns of every item.

        The first replica's items are together as large as its work, spread evenly in whole blocks.
        """
        unit, head = self._unit, self._head
        work = self._worst if self.inside else self._mix(unit)
        images = self.counts[0] if self.inside else int((self.owners(unit, False) == 0).sum())
        blocks = math.ceil(work.tokens / head.size(math.prod(head.grid_of(1, 1))) - WHOLE)
        if isinstance(head, TargetInput) and head.buckets is not None:  # no other sizes exist
            each = math.ceil(blocks / max(1, images))
            fitting = [grid for grid in head.buckets.grids if math.prod(grid) >= each]
            grid = min(fitting or [head.buckets.largest], key=math.prod)
            return np.tile(np.array(grid), (int(self.counts.sum()), 1))
        least, more = divmod(max(blocks, images), max(1, images))
        of_first = [
            head.grid_of(*_near_square(least + (number < more))) for number in range(max(1, images))
        ]
        return np.resize(np.array(of_first), (int(self.counts.sum()), 2))

    def _mix(self, unit: UnitPlan) -> Work:
        worst, mean, item = (
            float(part[0])
            for part in worst_mix(
                self._profile, unit.modules, self._sequences, np.array([float(unit.dp)])
            )
        )
        one = self._mean.scaled(item / self._mean.items) if self._mean.items else Work()
        return self._worst.scaled(worst) + self._mean.scaled(mean) + one


def _near_square(blocks: int) -> tuple[int, int]:
    """Return (rows, columns) with at least `blocks` blocks, near a square.

    There are a few more blocks where `blocks` has no suitable divisor.
    """
    rows = square = math.isqrt(blocks)
    while rows > 1 and blocks % rows > 0 and rows > square - 4:
        rows -= 1
    return rows, -(-blocks // rows)


def slot_sequences(profile: Profile, layout: Layout) -> int:
    """Return the number of sequences in a slot, over all replicas of the LLM."""
    return layout.unit_of(profile.inputs.llm).dp * layout.microbatch_size
