"""Assignment of sequences and items to replicas in every slot of a step: pure functions.

Policy `none` keeps the packed order. Policy `paper` balances the sequences of the global batch over
the LLM's replicas (each still has n * M), balances each replica's microbatches, puts the k-th
largest of every replica into one slot, and orders the slots by the interval rule. Under every
policy, encoders and generators on separate units are balanced image by image within a slot.

`assign` computes the positions of the sequences from sizes alone, in training and in the planner's
simulation; `order_step` adds the items of every replica, `loads.replica_loads` their work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from disttrain_cli.data.arrays import ranges
from disttrain_cli.data.ordering.intervals import interval_order
from disttrain_cli.data.ordering.levelling import image_owners, item_shares, level
from disttrain_cli.data.sizes import Sizes
from disttrain_cli.data.slots import (
    Assignment,
    Ints,
    ReplicaItems,
    Slot,
    SlotItems,
    StepOrder,
    no_items,
)
from disttrain_cli.spec.heads import Item
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout

if TYPE_CHECKING:
    from disttrain_cli.data.packing import Members, Packing

#: Integer cost of each sequence of a batch, by module name.
Costs = Mapping[str, Ints]


def count_costs(sizes: Sizes, inputs: ModelInputs) -> dict[str, Ints]:
    """Return costs without measurements: tokens, and sizes of items.

    An item's size is its patches read, audio positions or latent pixels generated.
    """
    costs = {inputs.llm: sizes.tokens}
    for head in inputs.heads:
        areas = sizes.items[head.item]
        costs[head.module] = areas.per_sequence(head.size(areas.area))
    return costs


def assign(costs: Costs, layout: Layout, llm: str, policy: str) -> Assignment:
    """Return the positions of the sequences under the policies `none` and `paper`.

    Every sequence of the global batch has one position. Modules without costs are ignored; the
    policy `none` needs no costs.

    Args:
        llm: name of the LLM among the modules.
    """
    unit, n, m = layout.unit_of(llm), layout.microbatches, layout.microbatch_size
    assert unit.dp * n * m == layout.global_batch_size
    if policy == "none":
        return Assignment(np.arange(layout.global_batch_size).reshape(n, unit.dp, m))
    assert policy == "paper"
    positions = levelled_slots(unit_costs(unit.modules, costs), n, m, dp=unit.dp)
    return Assignment(positions[slot_order(layout, llm, costs, positions)])


def levelled_slots(size: Ints, n: int, m: int, *, dp: int) -> Ints:
    """Return positions [n, DP, M] of sequences of these costs.

    Every replica has an equal share, and the k-th largest microbatch of each lies in slot k.
    """
    replicas = np.stack(level(size, dp, n * m))
    microbatches = replicas[..., None]  # [DP, n, M]
    if m > 1:
        microbatches = np.stack(
            [members_of[np.stack(level(size[members_of], n, m))] for members_of in replicas]
        )
    largest_first = np.lexsort((microbatches.min(axis=2), -size[microbatches].sum(axis=2)), axis=-1)
    return np.take_along_axis(microbatches, largest_first[..., None], axis=1).swapaxes(0, 1)


def slot_order(layout: Layout, llm: str, costs: Costs, positions: Ints) -> Ints:
    """Return the order [n] of slots of these sequences by the interval rule."""
    return interval_order(_stage_costs(layout, llm, costs, positions))


def order_step(batch: Packing, layout: Layout, step: int, assignment: Assignment) -> StepOrder:
    """Order one global batch: the sequences step · BS … (step + 1) · BS - 1 of the stream.

    The result depends only on the arguments. The set of sequences never changes, and every item is
    assigned to exactly one replica of each unit that processes it.
    """
    assert len(batch) == layout.global_batch_size
    owners = _owners(batch, layout, assignment)
    return StepOrder(
        step=step,
        slots=[
            _slot(batch, layout, members, {key: of_slots[slot] for key, of_slots in owners.items()})
            for slot, members in enumerate(assignment.positions)
        ],
        label_tokens=int(batch.label_tokens.sum()),
        targets=len(batch.items["target"]),
    )


def _owners(
    batch: Packing, layout: Layout, assignment: Assignment
) -> dict[tuple[str, Item], list[Ints]]:
    """Return, by unit and item, the replica of each item of every slot, in canonical order.

    Only units that process such items are included.
    """
    inputs, positions, carry = batch.index.inputs, assignment.positions, assignment.carry
    slots, dp, m = positions.shape
    owners: dict[tuple[str, Item], list[Ints]] = {}
    alike = {head.item: head.alike for head in inputs.heads}
    for item, members in batch.items.items():
        counts = members.counts[positions].reshape(slots, -1)
        of_slot = counts.sum(axis=1)
        for unit in layout.units:
            if inputs.llm in unit.modules:
                replica_of = np.arange(dp * m) // m
                owners[unit.name, item] = [
                    np.repeat(replica_of, of_sequences) for of_sequences in counts
                ]
            elif item not in map(inputs.item, unit.modules):
                continue
            elif alike[item]:  # adjacent items stay together, for fewer transfers
                shares = item_shares(of_slot, unit.dp, carry)
                owners[unit.name, item] = [
                    np.repeat(np.arange(unit.dp), replica_of) for replica_of in shares
                ]
            else:
                listed = ranges(members.start[positions.reshape(-1)], counts.reshape(-1))
                owner = image_owners(members.area[listed], of_slot, unit.dp, carry)
                owners[unit.name, item] = np.split(owner, np.cumsum(of_slot)[:-1])
    return owners


def _stage_costs(layout: Layout, llm: str, costs: Costs, positions: Ints) -> Ints:
    """Return the cost [slots, stages] of each slot on each pipeline stage: its slowest replica's.

    Encoders on separate units run in parallel, and so do generators: of their stages at the same
    distance from the LLM, the slowest counts. Several stages of a rank count as one.
    """
    meet = layout.index_of(llm)
    before, after = (
        np.zeros((len(positions), max([0, *(unit.pp for unit in units)])), np.int64)
        for units in (layout.units[:meet], layout.units[meet + 1 :])
    )
    line: list[Ints] = []
    for index, unit in enumerate(layout.units):
        of_replicas = unit_costs(unit.modules, costs)[positions].sum(
            axis=2
        )  # [slots, LLM replicas]
        # A unit without the LLM balances the slot's items over its replicas.
        levelled = -(-of_replicas.sum(axis=1) // unit.dp)
        of_slot = (of_replicas.max(axis=1) if llm in unit.modules else levelled) // unit.pp
        if index == meet:
            line += [of_slot] * unit.pp
        else:
            columns = (
                before[:, before.shape[1] - unit.pp :] if index < meet else after[:, : unit.pp]
            )
            np.maximum(columns, of_slot[:, None], out=columns)
    return np.concatenate([before, np.stack(line, axis=1), after], axis=1)


def unit_costs(modules: Sequence[str], costs: Costs) -> Ints:
    """Return the cost of each sequence in a unit of these modules.

    Modules without costs are ignored.
    """
    some = next(iter(costs.values()))
    return sum(
        (costs[module] for module in modules if module in costs),
        np.zeros(len(some), dtype=np.int64),
    )


def _slot(
    batch: Packing, layout: Layout, members: Ints, owners: Mapping[tuple[str, Item], Ints]
) -> Slot:
    """Build one slot from its sequences and the replica of every item.

    Args:
        members: [LLM replicas, M] positions of the sequences.
        owners: by unit and item, the replica of every item.
    """
    inputs, chosen = batch.index.inputs, members.reshape(-1)
    items = {item: _chosen(of_unit, chosen) for item, of_unit in batch.items.items()}
    replicas: dict[str, list[ReplicaItems]] = {}
    for unit in layout.units:
        none = [no_items()] * unit.dp
        of_unit = {
            item: (
                by_owner(owners[unit.name, item], of_slot.grid, dp=unit.dp)
                if (unit.name, item) in owners
                else none
            )
            for item, of_slot in items.items()
        }
        of_unit["sequence"] = (
            list(np.arange(len(chosen)).reshape(members.shape))
            if inputs.llm in unit.modules
            else none
        )
        replicas[unit.name] = [
            dict(zip(of_unit, numbers, strict=True))
            for numbers in zip(*of_unit.values(), strict=True)
        ]
    return Slot(
        inputs=inputs,
        sequences=batch.ids[chosen],
        sequence_tokens=batch.tokens[chosen],
        sequence_length_sq=batch.length_sq[chosen],
        items=items,
        replicas=replicas,
    )


def _chosen(members: Members, sequences: Ints) -> SlotItems:
    """Return the items of the chosen sequences."""
    counts = members.counts[sequences]
    return SlotItems(
        np.repeat(np.arange(len(sequences)), counts),
        members.grid[ranges(members.start[sequences], counts)],
    )


def by_owner(owner: Ints, grid: Ints, *, dp: int) -> list[Ints]:
    """Return the item numbers of each replica, sorted by grid (rows, columns) and then number."""
    return np.split(
        np.lexsort((grid[:, 1], grid[:, 0], owner)),
        np.cumsum(np.bincount(owner, minlength=dp))[:-1],
    )
