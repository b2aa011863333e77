"""Order of the slots of a pipeline: an exhaustive or local search by the simulator.

If there are few slots, all orders are simulated. The local search exchanges two slots, or moves one
to another position, while the simulated step gets shorter; from a local optimum it restarts
elsewhere, until its evaluations are used up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from math import factorial

import numpy as np

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.slots import Ints
from disttrain_cli.simulation.makespan import orders_s
from disttrain_cli.simulation.timeline import Pipeline

EVALUATIONS = 5_040  # all orders of up to 7 slots
MOVES_PER_ROUND = 600  # evaluated at most; the next round evaluates others
MANY = 256  # slots from which on there are fewer evaluations, so that a search takes no longer
LEAST_GAIN = 1e-6  # of a step's time
RESTART = 5  # purpose of `mix`, distinct from those of packing and sizes


def affordable(evaluations: int, slots: int) -> int:
    """Return the evaluations of `slots` slots that take the time of `evaluations` of `MANY`.

    It is at least one.
    """
    return max(1, evaluations * MANY // max(slots, MANY))


def search_order(
    pipeline: Pipeline,
    starts: Sequence[Ints],
    evaluations: int = EVALUATIONS,
    start_s: float | None = None,
) -> tuple[Ints, float]:
    """Return the best order found and its time in s; never worse than any of `starts`.

    Evaluates all orders, or about `evaluations`, fewer if there are many slots; ties go to the
    first.

    Args:
        start_s: time of the only start, if it is known.
    """
    slots = len(pipeline.forward_s)
    if factorial(min(slots, 20)) <= evaluations:
        return _fastest(pipeline, np.array([*starts, *permutations(range(slots))]))
    order, best_s = (
        _fastest(pipeline, np.array(starts)) if start_s is None else (starts[0], start_s)
    )
    start, start_s, left, number = order, best_s, affordable(evaluations, slots), 0
    while left > 0:
        for candidate, time_s, evaluated in _descent(pipeline, start, start_s):
            if time_s < best_s:
                order, best_s = candidate, time_s
            left -= evaluated
            if left <= 0:
                break
        else:  # there are evaluations left
            start = np.argsort(mix(RESTART, number, np.arange(slots)), kind="stable")
            start_s, number = float(orders_s(pipeline, start[None])[0]), number + 1
    return order, best_s


def _descent(pipeline: Pipeline, order: Ints, best_s: float) -> Iterator[tuple[Ints, float, int]]:
    """Yield (best order so far, its time, evaluations) for each round from an order and its time.

    The rounds end when no move shortens the step.
    """
    slots = len(order)
    turns = -(-3 * slots**2 // (2 * affordable(MOVES_PER_ROUND, slots)))
    number = idle = 0
    while idle < turns:
        candidates = order[_moves(slots, number % turns, turns)]
        candidate, time_s = _fastest(pipeline, candidates)
        idle += 1
        if time_s < best_s * (1 - LEAST_GAIN):
            order, best_s, idle = candidate, time_s, 0
        number += 1
        yield order, best_s, len(candidates)


def _fastest(pipeline: Pipeline, orders: Ints) -> tuple[Ints, float]:
    times_s = orders_s(pipeline, orders)
    chosen = int(times_s.argmin())
    return orders[chosen], float(times_s[chosen])


def _moves(slots: int, turn: int, turns: int) -> Ints:
    """Return the moves [moves, slots] of one turn: exchanges of two slots, other shifts of one."""
    kind, pair = np.divmod(np.arange(turn, 2 * slots**2, turns), slots**2)
    first, second = np.divmod(pair, slots)
    shifts = kind == 1
    real = np.where(shifts, abs(first - second) > 1, first < second)
    first, second, shifts = first[real], second[real], shifts[real]
    rows, positions = np.arange(len(first)), np.tile(np.arange(slots), (len(first), 1))
    after, between = first[:, None], second[:, None]
    moved = (
        positions
        + ((after <= positions) & (positions < between))
        - ((between < positions) & (positions <= after))
    )
    positions[shifts] = moved[shifts]
    positions[rows, second] = first
    positions[rows[~shifts], first[~shifts]] = second[~shifts]
    return positions
