"""Which sequences, images and targets every replica gets in every slot of a step: a pure function.

Policy `none` keeps the packed order. Policy `paper` levels the sequences of the global batch over the LLM's
replicas (each still gets n * M), levels each replica's microbatches, puts the k-th largest of every replica into
one slot, and orders the slots by the interval rule.
Under every policy encoders and generators on their own units are levelled image by image within a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from disttrain_cli.data.arrays import ranges
from disttrain_cli.data.intervals import interval_order
from disttrain_cli.data.levelling import level
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.slots import Ints, ReplicaItems, Slot, StepOrder
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan

#: Integer cost of each sequence of a batch, by module name.
Costs = Mapping[str, Ints]
CostsOf = Callable[[Packing], Costs]

NO_ITEMS: Ints = np.zeros(0, dtype=np.int64)


def count_costs(batch: Packing) -> dict[str, Ints]:
    """Costs where nothing was measured: tokens, patches read, latent pixels generated."""
    inputs = batch.index.inputs
    costs = {inputs.llm: batch.tokens}
    if inputs.image is not None:
        costs[inputs.image.module] = batch.of_sequences(batch.image_start, batch.image_grid.prod(axis=1))
    if inputs.target is not None:
        costs[inputs.target.module] = np.diff(batch.target_start) * inputs.target.latent_pixels
    return costs


def order_step(batch: Packing, layout: Layout, step: int, policy: str, costs: Costs | None = None) -> StepOrder:
    """Order one global batch: the sequences step · BS … (step + 1) · BS - 1 of the stream.

    Depends on nothing but its arguments; `costs` default to counts. The set of sequences never changes, and
    every image and target is given to exactly one replica of each unit that works on it.
    """
    assert len(batch) == layout.global_batch_size
    inputs = batch.index.inputs
    if policy == "none":
        dp = layout.unit_of(inputs.llm).dp
        places = np.arange(len(batch)).reshape(layout.microbatches, dp, layout.microbatch_size)
    else:
        assert policy == "paper"
        places = _paper(layout, inputs, count_costs(batch) if costs is None else costs)
    return StepOrder(
        step=step,
        slots=[_slot(batch, layout, inputs, members) for members in places],
        label_tokens=int(batch.label_tokens.sum()),
        targets=len(batch.target_segment),
    )


def _paper(layout: Layout, inputs: ModelInputs, costs: Costs) -> Ints:
    """Places in the batch [slots, LLM replicas, M]."""
    llm = layout.unit_of(inputs.llm)
    n, m = layout.microbatches, layout.microbatch_size
    size = _unit_costs(llm, costs)
    places = np.empty((n, llm.dp, m), dtype=np.int64)
    for replica, own in enumerate(level(size, llm.dp, n * m)):
        microbatches = [own[group] for group in level(size[own], n, m)]
        microbatches.sort(key=lambda group: (-int(size[group].sum()), int(group.min())))
        places[:, replica] = microbatches
    return places[interval_order(_stage_costs(layout, inputs, costs, places))]


def _stage_costs(layout: Layout, inputs: ModelInputs, costs: Costs, places: Ints) -> Ints:
    """Cost of each slot on each stage of the pipeline [slots, stages]: the slowest replica's share."""
    columns: list[Ints] = []
    for unit in layout.units:
        of_replicas = _unit_costs(unit, costs)[places].sum(axis=2)  # [slots, LLM replicas]
        # A unit without the LLM levels the slot's items over its own replicas.
        levelled = -(-of_replicas.sum(axis=1) // unit.dp)
        of_slot = of_replicas.max(axis=1) if inputs.llm in unit.modules else levelled
        columns += [of_slot // unit.pp] * unit.pp
    return np.stack(columns, axis=1)


def _unit_costs(unit: UnitPlan, costs: Costs) -> Ints:
    """Cost of each sequence in one unit; modules without costs count nothing."""
    some = next(iter(costs.values()))
    return sum((costs[module] for module in unit.modules if module in costs), np.zeros(len(some), dtype=np.int64))


def _slot(batch: Packing, layout: Layout, inputs: ModelInputs, members: Ints) -> Slot:
    """One slot from the places of its sequences [LLM replicas, M]."""
    chosen = members.reshape(-1)
    image_count, target_count = np.diff(batch.image_start)[chosen], np.diff(batch.target_start)[chosen]
    grid = batch.image_grid[ranges(batch.image_start[chosen], image_count)]
    image_sequence = np.repeat(np.arange(len(chosen)), image_count)
    target_sequence = np.repeat(np.arange(len(chosen)), target_count)
    return Slot(
        inputs=inputs,
        sequences=batch.ids[chosen],
        sequence_tokens=batch.tokens[chosen],
        sequence_length_sq=batch.length_sq[chosen],
        image_sequence=image_sequence,
        image_grid=grid,
        target_sequence=target_sequence,
        replicas={
            unit.name: _replicas(unit, inputs, members.shape, image_sequence, grid, target_sequence)
            for unit in layout.units
        },
    )


def _replicas(
    unit: UnitPlan,
    inputs: ModelInputs,
    shape: tuple[int, ...],
    image_sequence: Ints,
    grid: Ints,
    target_sequence: Ints,
) -> list[ReplicaItems]:
    """Items of every replica of one unit; with the LLM in it, those of the replica's own sequences."""
    dp, m = shape
    sequences = [NO_ITEMS] * unit.dp
    images, targets = sequences, sequences
    if inputs.llm in unit.modules:
        sequences = list(np.arange(dp * m).reshape(dp, m))
        images = _by_owner(image_sequence // m, dp, grid)
        targets = _by_owner(target_sequence // m, dp)
    else:
        if inputs.image is not None and inputs.image.module in unit.modules:
            images = _by_owner(_owners(level(grid.prod(axis=1), unit.dp)), unit.dp, grid)
        if inputs.target is not None and inputs.target.module in unit.modules:
            # All targets cost the same: neighbours stay together, for fewer transfers.
            targets = np.array_split(np.arange(len(target_sequence)), unit.dp)
    return [ReplicaItems(*items) for items in zip(sequences, images, targets, strict=True)]


def _owners(groups: list[Ints]) -> Ints:
    """The replica of each item."""
    owner = np.empty(sum(len(group) for group in groups), dtype=np.int64)
    for replica, group in enumerate(groups):
        owner[group] = replica
    return owner


def _by_owner(owner: Ints, dp: int, grid: Ints | None = None) -> list[Ints]:
    """Item numbers of each replica in ascending order; with `grid`, equal grids (rows, columns) adjacent."""
    keys = (owner,) if grid is None else (grid[:, 1], grid[:, 0], owner)
    return np.split(np.lexsort(keys), np.cumsum(np.bincount(owner, minlength=dp))[:-1])
