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
    places, owner = _give_out(costs, replicas, count)
    grouped = places[np.argsort(owner, kind="stable")]
    return np.split(grouped, np.cumsum(np.bincount(owner, minlength=replicas))[:-1])


def owners(costs: Ints, replicas: int) -> Ints:
    """[N] the replica that `level` gives each item to."""
    places, owner = _give_out(costs, replicas, None)
    of_item = np.empty_like(owner)
    of_item[places] = owner
    return of_item


def even_shares(count: Ints | int, replicas: int) -> Ints:
    """[..., replicas] how many of `count` equal items each replica gets: the first ones take what is left over."""
    return (np.asarray(count, dtype=np.int64)[..., None] + np.arange(replicas)[::-1]) // replicas


def _give_out(costs: Ints, replicas: int, count: int | None) -> tuple[Ints, Ints]:
    """Positions in the order they are given out, and the replica that gets each."""
    assert count is None or count * replicas == len(costs)
    places = np.argsort(-costs, kind="stable")
    left = [count if count is not None else len(costs)] * replicas
    heap = list(range(replicas))  # load · replicas + replica: one number orders by both
    owner = []
    for cost in (costs[places] * replicas).tolist():
        replica = heap[0] % replicas
        owner.append(replica)
        left[replica] -= 1
        if left[replica]:
            heapq.heapreplace(heap, heap[0] + cost)
        else:
            heapq.heappop(heap)
    return places, np.array(owner, dtype=np.int64)
