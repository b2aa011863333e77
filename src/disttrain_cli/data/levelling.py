"""Levelling over replicas, longest processing time first: the intra-microbatch reordering of the paper."""

from __future__ import annotations

import heapq

import numpy as np

from disttrain_cli.data.slots import Ints


def level(costs: Ints, replicas: int, count: int | None = None) -> list[Ints]:
    """Positions of `costs` for each replica, in the order they were given out (largest first).

    The largest item left goes to the replica with the least load (ties: the lower number); with `count`, only
    to replicas that have fewer than that many items. Without `count` no load exceeds
    (Σ costs) / replicas + (1 - 1 / replicas) · max cost (Graham 1969). O(N log N).
    """
    assert count is None or count * replicas == len(costs)
    groups: list[list[int]] = [[] for _ in range(replicas)]
    heap = [(0, replica) for replica in range(replicas)]
    for place in np.argsort(-costs, kind="stable").tolist():
        load, replica = heapq.heappop(heap)
        groups[replica].append(place)
        if count is None or len(groups[replica]) < count:
            heapq.heappush(heap, (load + int(costs[place]), replica))
    return [np.array(group, dtype=np.int64) for group in groups]
