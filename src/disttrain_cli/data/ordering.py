"""Which sequences, images and targets every replica gets in every slot of a step: pure functions.

Policy `none` keeps the packed order. Policy `paper` levels the sequences of the global batch over the LLM's
replicas (each still gets n * M), levels each replica's microbatches, puts the k-th largest of every replica into
one slot, and orders the slots by the interval rule.
Under every policy encoders and generators on their own units are levelled image by image within a slot.

`assign` gives the sequences their places from sizes alone, in training and in the planner's simulation;
`order_step` adds the items of every replica, `loads.replica_loads` their amounts.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from disttrain_cli.data.arrays import ranges
from disttrain_cli.data.intervals import interval_order
from disttrain_cli.data.levelling import even_shares, level, owners
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.sizes import Sizes, sizes_of
from disttrain_cli.data.slots import Ints, ReplicaItems, Slot, StepOrder
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan

#: Integer cost of each sequence of a batch, by module name.
Costs = Mapping[str, Ints]

NO_ITEMS: Ints = np.zeros(0, dtype=np.int64)


def count_costs(sizes: Sizes, inputs: ModelInputs) -> dict[str, Ints]:
    """Costs where nothing was measured: tokens, patches read, positions heard, latent pixels generated."""
    costs = {inputs.llm: sizes.tokens}
    if inputs.image is not None:
        costs[inputs.image.module] = sizes.per_sequence(sizes.patches)
    if inputs.audio is not None:
        costs[inputs.audio.module] = sizes.clips * inputs.audio.positions
    if inputs.target is not None:
        costs[inputs.target.module] = sizes.targets * inputs.target.latent_pixels
    return costs


def assign(costs: Costs, layout: Layout, llm: str, policy: str) -> Ints:
    """Places in the batch [n slots, LLM replicas, M] under a policy; `llm` names the LLM among the modules.

    Every sequence of the global batch has one place. Modules without costs count nothing; the policy `none` needs
    no costs.
    """
    dp, n, m = layout.unit_of(llm).dp, layout.microbatches, layout.microbatch_size
    assert dp * n * m == layout.global_batch_size
    if policy == "none":
        return np.arange(layout.global_batch_size).reshape(n, dp, m)
    assert policy == "paper"
    size = _unit_costs(layout.unit_of(llm), costs)
    places = np.empty((n, dp, m), dtype=np.int64)
    for replica, own in enumerate(level(size, dp, n * m)):
        microbatches = own[np.stack(level(size[own], n, m))]
        largest_first = np.lexsort((microbatches.min(axis=1), -size[microbatches].sum(axis=1)))
        places[:, replica] = microbatches[largest_first]
    return places[interval_order(_stage_costs(layout, llm, costs, places))]


def order_step(batch: Packing, layout: Layout, step: int, policy: str, costs: Costs | None = None) -> StepOrder:
    """Order one global batch: the sequences step · BS … (step + 1) · BS - 1 of the stream.

    Depends on nothing but its arguments; `costs` default to counts. The set of sequences never changes, and
    every image and target is given to exactly one replica of each unit that works on it.
    """
    assert len(batch) == layout.global_batch_size
    inputs = batch.index.inputs
    if costs is None:
        costs = count_costs(sizes_of(batch), inputs)
    return StepOrder(
        step=step,
        slots=[_slot(batch, layout, inputs, members) for members in assign(costs, layout, inputs.llm, policy)],
        label_tokens=int(batch.label_tokens.sum()),
        targets=len(batch.target_segment),
    )


def _stage_costs(layout: Layout, llm: str, costs: Costs, places: Ints) -> Ints:
    """Cost of each slot on each stage of the pipeline [slots, stages]: the slowest replica's share."""
    columns: list[Ints] = []
    for unit in layout.units:
        of_replicas = _unit_costs(unit, costs)[places].sum(axis=2)  # [slots, LLM replicas]
        # A unit without the LLM levels the slot's items over its own replicas.
        levelled = -(-of_replicas.sum(axis=1) // unit.dp)
        of_slot = of_replicas.max(axis=1) if llm in unit.modules else levelled
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
            images = _by_owner(owners(grid.prod(axis=1), unit.dp), unit.dp, grid)
        if inputs.target is not None and inputs.target.module in unit.modules:
            # All targets cost the same: neighbours stay together, for fewer transfers.
            shares = even_shares(len(target_sequence), unit.dp)
            targets = np.split(np.arange(len(target_sequence)), np.cumsum(shares)[:-1])
    return [ReplicaItems(*items) for items in zip(sequences, images, targets, strict=True)]


def _by_owner(owner: Ints, dp: int, grid: Ints | None = None) -> list[Ints]:
    """Item numbers of each replica in ascending order; with `grid`, equal grids (rows, columns) adjacent."""
    keys = (owner,) if grid is None else (grid[:, 1], grid[:, 0], owner)
    return np.split(np.lexsort(keys), np.cumsum(np.bincount(owner, minlength=dp))[:-1])
