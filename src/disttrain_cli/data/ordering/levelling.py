"""Load balancing over replicas, longest processing time first.

It is the intra-microbatch reordering of the paper.
"""

from __future__ import annotations

import heapq

import numpy as np

from disttrain_cli.data.slots import Ints, ReplicaItems, Slot

NARROW = 64  # up to this many replicas, the least loaded one is searched in all slots at once


def level(costs: Ints, replicas: int, count: int | None = None) -> list[Ints]:
    """Return positions of `costs` for each replica, in the order of assignment (largest first).

    The largest remaining item goes to the replica with the least load (ties: the lower number);
    with `count`, only to replicas that have fewer than that many items. Without `count` no load
    exceeds (Σ costs) / replicas + (1 - 1 / replicas) · max cost (Graham 1969). O(N log N).
    """
    positions, owner = _give_out(costs, replicas, count)
    grouped = positions[np.argsort(owner, kind="stable")]
    return np.split(grouped, np.cumsum(np.bincount(owner, minlength=replicas))[:-1])


def owners(costs: Ints, replicas: int) -> Ints:
    """Return the replica [N] to which `level` assigns each item."""
    positions, owner = _give_out(costs, replicas, None)
    of_item = np.empty_like(owner)
    of_item[positions] = owner
    return of_item


def dealt(slot: Slot, module: str, items: ReplicaItems, ranks: int) -> list[ReplicaItems]:
    """Divide a replica's items over `ranks` TP ranks (`UnitPlan.module_tp`), by rank."""
    if ranks == 1:
        return [items]
    head = slot.inputs.head(module)
    assert head is not None
    numbers = items[head.item]
    owner = owners(head.size(slot.items[head.item].area[numbers]), ranks)
    return [{**items, head.item: numbers[owner == rank]} for rank in range(ranks)]


def deal(shares: Ints) -> Ints:
    """Return the replica [n, replicas] that gets each share of a slot.

    Slot by slot, the largest share goes to the replica with the least so far (ties: the lower
    number), so that indivisible images do not load the same replicas again and again.

    Args:
        shares: [n, replicas] sizes of the shares.
    """
    taker = np.empty_like(shares)
    so_far = np.zeros_like(shares[0])
    for slot, share in enumerate(shares):
        taker[slot, np.argsort(-share, kind="stable")] = np.argsort(so_far, kind="stable")
        so_far[taker[slot]] += share
    return taker


def image_owners(patches: Ints, counts: Ints, replicas: int, carry: bool) -> Ints:
    """Return the replica [images] that processes each image, balanced inside every slot.

    Args:
        patches: of the images, slot after slot.
        counts: [n] images of every slot.
        carry: balance the slots' shares over the step, too (`deal`).
    """
    if replicas <= NARROW and counts.max(initial=0) < len(counts):
        owner = _side_by_side(patches, counts, replicas)
    else:
        shares_of = np.split(patches, np.cumsum(counts)[:-1])
        owner = np.concatenate([owners(share, replicas) for share in shares_of])
    if not carry:
        return owner
    slot = np.repeat(np.arange(len(counts)), counts)
    shares = np.bincount(slot * replicas + owner, patches, len(counts) * replicas).astype(np.int64)
    return deal(shares.reshape(-1, replicas))[slot, owner]


def _side_by_side(patches: Ints, counts: Ints, replicas: int) -> Ints:
    """Return `owners` of every slot's images, computed for all slots at once.

    For many slots of few images, this takes a hundredth of the time.
    """
    slot = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((-patches, slot))
    place = np.arange(len(patches)) - np.repeat(np.cumsum(counts) - counts, counts)
    load, owner = np.zeros((len(counts), replicas), np.int64), np.empty(len(patches), np.int64)
    turns = np.split(order[np.argsort(place, kind="stable")], np.cumsum(np.bincount(place))[:-1])
    for images in turns:
        slots = slot[images]
        owner[images] = takers = load[slots].argmin(axis=1)
        load[slots, takers] += patches[images]
    return owner


def item_shares(counts: Ints, replicas: int, carry: bool) -> Ints:
    """Return the number [n, replicas] of a slot's equal items for every replica.

    With `carry`, replicas get the remainders in turn.
    """
    shares = even_shares(counts, replicas)
    if carry:
        np.put_along_axis(shares, deal(shares), shares.copy(), axis=1)
    return shares


def even_shares(count: Ints | int, replicas: int) -> Ints:
    """Return the number [..., replicas] of `count` equal items for each replica.

    The first replicas get the remainder.
    """
    return (np.asarray(count, dtype=np.int64)[..., None] + np.arange(replicas)[::-1]) // replicas


def _give_out(costs: Ints, replicas: int, count: int | None) -> tuple[Ints, Ints]:
    """Return positions in the order of assignment, and the replica of each."""
    assert count is None or count * replicas == len(costs)
    positions = np.argsort(-costs, kind="stable")
    heap = list(range(replicas))  # load · replicas + replica: one number sorts by both
    adds = (costs[positions] * replicas).tolist()
    if count is None:
        if len(adds) >= replicas and adds[replicas - 1] > 0:  # the first go to one replica each
            heap = [load + cost for load, cost in zip(heap, adds[:replicas], strict=True)]
            heapq.heapify(heap)
            taken = list(range(replicas))
            taken += [heapq.heapreplace(heap, heap[0] + cost) for cost in adds[replicas:]]
        else:
            taken = [heapq.heapreplace(heap, heap[0] + cost) for cost in adds]
        return positions, np.array(taken, dtype=np.int64) % replicas
    left, owner = [count] * replicas, []
    for cost in adds:
        replica = heap[0] % replicas
        owner.append(replica)
        left[replica] -= 1
        if left[replica]:
            heapq.heapreplace(heap, heap[0] + cost)
        else:
            heapq.heappop(heap)
    return positions, np.array(owner, dtype=np.int64)
