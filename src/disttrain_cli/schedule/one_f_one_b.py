"""1F1B of a stage, with unsplit or split backwards: ticks and order of its passes.

At each tick a stage executes one pass at most, and neighbours alternate: a slot's forward comes one
tick after that of the previous stage, its backward one tick after that of the next stage
(PipeDream-Flush, Narayanan et al. 2021, arXiv 2006.09503; DeepSpeed's TrainSchedule has the same
order). A split backward computes input gradients in its tick, and weight gradients some slots later
(zero bubble, Qi et al. 2024, arXiv 2401.10241): after the backward of that slot, before the next
pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from disttrain_cli.spec.stage_graph import Cut
from disttrain_cli.spec.trace import BACKWARD, FORWARD, WEIGHTS


def inputs(cuts: Sequence[Cut]) -> Mapping[tuple[int, int], list[tuple[int, int]]]:
    """Return the inputs of a slot's passes in it, by (index in `COMPUTE`, stage).

    They are (index of a cut, stage on its other side): forwards wait for all stages before them,
    backwards for all after them. Passes without inputs are missing.
    """
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, (sender, taker) in enumerate(cuts):
        found[FORWARD, taker].append((number, sender))
        found[BACKWARD, sender].append((number, taker))
    return dict(found)


def ticks(slots: int, to_end: int, first: int = 0) -> tuple[range, range]:
    """Return the ticks of a stage's forwards and of its backwards, by slot.

    Args:
        slots: number of slots of the step.
        to_end: stages from this one to the end of the pipeline, itself included.
        first: tick of its first forward: the number of stages before it.
    """
    back = first + 2 * to_end - 1
    return range(first, first + 2 * slots, 2), range(back, back + 2 * slots, 2)


def passes(slots: int, to_end: int, delay: int | None = None) -> list[tuple[int, int]]:
    """Return a stage's passes in order as (index in `COMPUTE`, slot).

    Weight gradients are deferred by `delay` slots; None: backwards are not split. Those that remain
    at the end are computed layer by layer, over all their slots: here, as in traces, each takes its
    own time, one after the other.
    """
    forwards, backwards = ticks(slots, to_end)
    turns = [(tick, FORWARD, slot) for slot, tick in enumerate(forwards)]
    turns += [(tick, BACKWARD, slot) for slot, tick in enumerate(backwards)]
    order: list[tuple[int, int]] = []
    for _, operation, slot in sorted(turns):
        order.append((operation, slot))
        if operation == BACKWARD:
            order += [(WEIGHTS, later) for later in weights_after(slot, slots, delay)]
    return order


def weights_after(slot: int, slots: int, delay: int | None) -> range:
    """Return the slots whose weight gradients follow the backward of a slot."""
    if delay is None:
        return range(0)
    if slot + 1 == slots:
        return last_slots(slots, delay)
    return range(max(0, slot - delay), max(0, slot - delay + 1))


def last_slots(slots: int, delay: int | None) -> range:
    """Return the slots whose weight gradients a stage computes in the step's last pass.

    They are those remaining after the last backward, or the last one alone for unsplit backwards
    (None).
    """
    return range(max(0, slots - 1 - (delay or 0)), slots)


def slots_in_flight(slots: int, to_end: int) -> int:
    """Return the most slots of a stage between their forwards and their backwards."""
    return min(slots, to_end)
