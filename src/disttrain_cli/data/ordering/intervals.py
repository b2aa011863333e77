"""Order of the microbatches in a 1F1B pipeline (the inter-microbatch reordering of the paper).

Between two backwards, the first stage waits for an interval that a forward can fill. The smallest
microbatch goes first (short warm-up), the p - 1 smallest of the rest go last (short cool-down), and
every other position gets the microbatch whose forward fits its interval best. Intervals come from a
1F1B schedule that is extended by one microbatch at a time, so that l microbatches over p stages
take O(l * (l + p)).
"""

from __future__ import annotations

import numpy as np

from disttrain_cli.data.slots import Ints

TAKEN = 2**62  # larger than the distance of any time to any interval


def interval_order(costs: Ints) -> Ints:
    """Return positions of the microbatches in execution order.

    `costs` [l, p]: integer time (forward and backward together) of each microbatch on each stage; a
    third of it is assumed for the forward.
    """
    total, stages = costs.sum(axis=1), costs.shape[1]
    thirds = costs // 3
    forward, backward = thirds.tolist(), (costs - thirds).tolist()
    ascending = np.argsort(total, kind="stable").tolist()
    rear = ascending[1:stages]
    left = np.array(ascending[1 + len(rear) :], dtype=np.int64)
    forward_left = thirds[left, 0]  # TAKEN for microbatches already placed
    order = [ascending[0]]
    clock = _Clock(stages)
    clock.run(forward[order[0]], backward[order[0]])
    # While the first microbatch travels down and back, stages - 1 forwards share one interval.
    first_interval = int(costs[order[0], 1:].sum())
    for _ in range(len(left)):
        if len(order) < stages:
            filled = sum(forward[number][0] for number in order[1:])
            target = max(0, first_interval - filled) // (stages - len(order))
        else:
            target = clock.interval()
        index = int(np.abs(forward_left - target).argmin())
        forward_left[index] = TAKEN
        best = int(left[index])
        order.append(best)
        clock.run(forward[best], backward[best])
    return np.array(order + rear[::-1], dtype=np.int64)


class _Clock:
    """End times of the stages of a 1F1B pipeline after the microbatches so far."""

    def __init__(self, stages: int) -> None:
        self._free = [0] * stages
        # end of the latest backward on each stage
        self._returned: list[int | None] = [None] * stages
        self._backward: list[list[int]] = []

    def interval(self) -> int:
        """Return the first stage's wait for its next backward if it ran no forward."""
        if len(self._free) == 1:
            return 0
        arrival = self._returned[1]
        return 0 if arrival is None else max(0, arrival - self._free[0])

    def run(self, forward: list[int], backward: list[int]) -> None:
        """Add a microbatch: its forward on every stage, then the backward that follows in 1F1B."""
        number, last = len(self._backward), len(self._free) - 1
        self._backward.append(backward)
        arrived = 0
        for stage, time in enumerate(forward):
            arrived = self._free[stage] = max(arrived, self._free[stage]) + time
        before = list(self._returned)
        for stage in range(last, -1, -1):
            back = number - (last - stage)
            if back < 0:
                break
            arrival = before[stage + 1] if stage < last else 0
            assert arrival is not None
            end = max(arrival, self._free[stage]) + self._backward[back][stage]
            self._returned[stage] = self._free[stage] = end
