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
from disttrain_cli.data.ordering.intervals import interval_order
from disttrain_cli.data.ordering.levelling import image_owners, item_shares, level
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.sizes import Sizes
from disttrain_cli.data.slots import Assignment, Ints, ReplicaItems, Slot, StepOrder
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


def assign(costs: Costs, layout: Layout, llm: str, policy: str) -> Assignment:
    """Places of the sequences under the policies `none` and `paper`; `llm` names the LLM among the modules.

    Every sequence of the global batch has one place. Modules without costs count nothing; the policy `none` needs
    no costs.
    """
    dp, n, m = layout.unit_of(llm).dp, layout.microbatches, layout.microbatch_size
    assert dp * n * m == layout.global_batch_size
    if policy == "none":
        return Assignment(np.arange(layout.global_batch_size).reshape(n, dp, m))
    assert policy == "paper"
    size = _unit_costs(layout.unit_of(llm), costs)
    replicas = np.stack(level(size, dp, n * m))
    microbatches = replicas[..., None]  # [DP, n, M]
    if m > 1:
        microbatches = np.stack([own[np.stack(level(size[own], n, m))] for own in replicas])
    largest_first = np.lexsort((microbatches.min(axis=2), -size[microbatches].sum(axis=2)), axis=-1)
    places = np.take_along_axis(microbatches, largest_first[..., None], axis=1).swapaxes(0, 1)
    return Assignment(places[interval_order(_stage_costs(layout, llm, costs, places))])


def order_step(batch: Packing, layout: Layout, step: int, assignment: Assignment) -> StepOrder:
    """Order one global batch: the sequences step · BS … (step + 1) · BS - 1 of the stream.

    Depends on nothing but its arguments. The set of sequences never changes, and every image and target is given to
    exactly one replica of each unit that works on it.
    """
    assert len(batch) == layout.global_batch_size
    images, targets = _owners(batch, layout, assignment)
    return StepOrder(
        step=step,
        slots=[_slot(batch, layout, members, {unit: own[slot] for unit, own in images.items()},
                     {unit: own[slot] for unit, own in targets.items()})
               for slot, members in enumerate(assignment.places)],
        label_tokens=int(batch.label_tokens.sum()),
        targets=len(batch.target_segment),
    )


def _owners(batch: Packing, layout: Layout,
            assignment: Assignment) -> tuple[dict[str, list[Ints]], dict[str, list[Ints]]]:
    """By unit, for every slot: the replica of each of its images, and of each of its targets, in canonical order."""
    inputs, places, carry = batch.index.inputs, assignment.places, assignment.carry
    slots, dp, m = places.shape
    images: dict[str, list[Ints]] = {}
    targets: dict[str, list[Ints]] = {}
    image_counts, target_counts = (np.diff(start)[places].reshape(slots, -1)
                                   for start in (batch.image_start, batch.target_start))
    for unit in layout.units:
        if inputs.llm in unit.modules:
            own = np.arange(dp * m) // m
            images[unit.name] = [np.repeat(own, counts) for counts in image_counts]
            targets[unit.name] = [np.repeat(own, counts) for counts in target_counts]
            continue
        if inputs.image is not None and inputs.image.module in unit.modules:
            of_slot = image_counts.sum(axis=1)
            chosen = places.reshape(-1)
            listed = ranges(batch.image_start[chosen], image_counts.reshape(-1))
            owner = image_owners(batch.image_grid[listed].prod(axis=1), of_slot, unit.dp, carry)
            images[unit.name] = np.split(owner, np.cumsum(of_slot)[:-1])
        if inputs.target is not None and inputs.target.module in unit.modules:
            # All targets cost the same: neighbours stay together, for fewer transfers.
            shares = item_shares(target_counts.sum(axis=1), unit.dp, carry)
            targets[unit.name] = [np.repeat(np.arange(unit.dp), own) for own in shares]
    return images, targets


def _stage_costs(layout: Layout, llm: str, costs: Costs, places: Ints) -> Ints:
    """Cost of each slot on each stage of the pipeline [slots, stages]: the slowest replica's share.

    Encoders on units of their own stand side by side: of their stages as far from the LLM the slowest counts.
    """
    beside = np.zeros((len(places), max([0, *(unit.pp for unit in layout.units[:layout.place_of(llm)])])), np.int64)
    line: list[Ints] = []
    for place, unit in enumerate(layout.units):
        of_replicas = _unit_costs(unit, costs)[places].sum(axis=2)  # [slots, LLM replicas]
        # A unit without the LLM levels the slot's items over its own replicas.
        levelled = -(-of_replicas.sum(axis=1) // unit.dp)
        of_slot = (of_replicas.max(axis=1) if llm in unit.modules else levelled) // unit.pp
        if place < layout.place_of(llm):
            own = beside[:, beside.shape[1] - unit.pp:]
            np.maximum(own, of_slot[:, None], out=own)
        else:
            line += [of_slot] * unit.pp
    return np.concatenate([beside, np.stack(line, axis=1)], axis=1)


def _unit_costs(unit: UnitPlan, costs: Costs) -> Ints:
    """Cost of each sequence in one unit; modules without costs count nothing."""
    some = next(iter(costs.values()))
    return sum((costs[module] for module in unit.modules if module in costs), np.zeros(len(some), dtype=np.int64))


def _slot(batch: Packing, layout: Layout, members: Ints, images: Mapping[str, Ints],
          targets: Mapping[str, Ints]) -> Slot:
    """One slot from the places of its sequences [LLM replicas, M] and, by unit, the replicas of images and targets."""
    inputs, chosen = batch.index.inputs, members.reshape(-1)
    image_count, target_count = np.diff(batch.image_start)[chosen], np.diff(batch.target_start)[chosen]
    grid = batch.image_grid[ranges(batch.image_start[chosen], image_count)]
    nothing = [NO_ITEMS]
    replicas = {}
    for unit in layout.units:
        sequences = list(np.arange(len(chosen)).reshape(members.shape)) if inputs.llm in unit.modules \
            else nothing * unit.dp
        own_images = _by_owner(images[unit.name], unit.dp, grid) if unit.name in images else nothing * unit.dp
        own_targets = _by_owner(targets[unit.name], unit.dp) if unit.name in targets else nothing * unit.dp
        replicas[unit.name] = [ReplicaItems(*items) for items in zip(sequences, own_images, own_targets, strict=True)]
    return Slot(
        inputs=inputs,
        sequences=batch.ids[chosen],
        sequence_tokens=batch.tokens[chosen],
        sequence_length_sq=batch.length_sq[chosen],
        image_sequence=np.repeat(np.arange(len(chosen)), image_count),
        image_grid=grid,
        target_sequence=np.repeat(np.arange(len(chosen)), target_count),
        replicas=replicas,
    )


def _by_owner(owner: Ints, dp: int, grid: Ints | None = None) -> list[Ints]:
    """Item numbers of each replica in ascending order; with `grid`, equal grids (rows, columns) adjacent."""
    keys = (owner,) if grid is None else (grid[:, 1], grid[:, 0], owner)
    return np.split(np.lexsort(keys), np.cumsum(np.bincount(owner, minlength=dp))[:-1])
