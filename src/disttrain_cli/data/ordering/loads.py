"""Work of every replica in every slot of a step, for the planner's simulation.

It is computed from sizes and positions alone, equal to `Slot.work` for the slots of `order_step`,
without building them.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.ordering.levelling import dealt, image_owners, item_shares
from disttrain_cli.data.sizes import ItemAreas, Sizes
from disttrain_cli.data.slots import Assignment, Ints, StepOrder, columns
from disttrain_cli.spec.heads import Head
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan

Floats = NDArray[np.float64]


def replica_loads(
    sizes: Sizes, inputs: ModelInputs, layout: Layout, assignment: Assignment
) -> dict[str, Floats]:
    """Return the work of every replica, by module name: [n slots, DP of its unit, 3].

    The columns are those of `Work`: items, tokens, Σ length². For a module whose items are divided
    over a TP group, the work is that of every rank, replica by replica: [n slots, DP · TP, 3].
    Modules in the LLM's unit process the sequences of their replica; others get the slot's items
    balanced one by one, or evenly if all are alike.
    """
    return {
        module: module_loads(
            sizes,
            inputs,
            module,
            assignment,
            unit.dealt_over(module),
            dp=None if inputs.llm in unit.modules else unit.dp,
        )
        for unit in layout.units
        for module in unit.modules
    }


def module_loads(
    sizes: Sizes,
    inputs: ModelInputs,
    module: str,
    assignment: Assignment,
    ranks: int = 1,
    *,
    dp: int | None,
) -> Floats:
    """Return the work [n slots, DP, 3] of one module.

    Args:
        dp: replicas of the module's unit; None: it is in the LLM's unit.
        ranks: ranks of each replica over which the module's items are divided (`levelling.dealt`).
    """
    positions, carry = assignment.positions, assignment.carry
    if ranks > 1:
        head, (slots, replicas, m) = inputs.head(module), positions.shape
        assert head is not None and dp is None
        each = positions.reshape(slots * replicas, 1, m)
        loads = _levelled(head, sizes.items[head.item], each, ranks, carry=False)
        return loads.reshape(slots, replicas * ranks, 3)
    if dp is None:
        return np.asarray(sizes.work_of(inputs, module)[positions].sum(axis=2))
    head = inputs.head(module)
    assert head is not None
    split = _even if head.alike else _levelled
    return split(head, sizes.items[head.item], positions, dp, carry)


def order_loads(order: StepOrder, layout: Layout) -> dict[str, Floats]:
    """Return the work of every replica, as `replica_loads`, from the order of a step."""
    return {
        module: loads
        for unit in layout.units
        for module, loads in unit_loads(
            order, unit, range(len(order.slots[0].replicas[unit.name])), unit.modules
        ).items()
    }


def unit_loads(
    order: StepOrder, unit: UnitPlan, replicas: Iterable[int], modules: Iterable[str]
) -> dict[str, Floats]:
    """Return the work [n slots, replicas, 3] of some modules of a unit, on some of its replicas.

    It is that of every rank if items are divided over a TP group.
    """
    replicas = list(replicas)
    return {
        module: np.array(
            [
                [
                    slot.work(module, own)
                    for replica in replicas
                    for own in dealt(
                        slot, module, slot.replicas[unit.name][replica], unit.dealt_over(module)
                    )
                ]
                for slot in order.slots
            ]
        )
        for module in modules
    }


def _even(head: Head, items: ItemAreas, positions: Ints, replicas: int, carry: bool) -> Floats:
    """Return the work [n, DP, 3] of every replica of a separate unit; all items are alike."""
    shares = item_shares(items.counts[positions].sum(axis=(1, 2)), replicas, carry)
    return np.asarray(shares[..., None] * np.array(head.work(1)))


def _levelled(head: Head, items: ItemAreas, positions: Ints, replicas: int, carry: bool) -> Floats:
    """Return the work [n, DP, 3] of every replica of a separate unit, balanced item by item."""
    slots = len(positions)
    counts = items.counts[positions].sum(axis=(1, 2))
    size = head.size(items.take(positions.reshape(-1)).area)
    owner = np.repeat(np.arange(slots) * replicas, counts)
    owner += image_owners(size, counts, replicas, carry)
    work = [np.bincount(owner, column, slots * replicas) for column in columns(size).T]
    return np.stack([column.reshape(slots, replicas) for column in work], axis=2)
