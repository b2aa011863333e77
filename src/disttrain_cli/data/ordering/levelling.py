"""Levelling over replicas, longest processing time first: the intra-microbatch reordering of the
paper."""

from __future__ import annotations

import heapq

import numpy as np

from disttrain_cli.data.slots import Ints, ReplicaItems, Slot

NARROW = 64  # replicas, up to which the least loaded one of every slot is looked for at once


def level(costs: Ints, replicas: int, count: int | None = None) -> list[Ints]:
    """Positions of `costs` for each replica, in the order they were given out (largest first).

    The largest item left goes to the replica with the least load (ties: the lower number); with
    `count`, only to replicas that have fewer than that many items. Without `count` no load exceeds
    (Σ costs) / replicas + (1 - 1 / replicas) · max cost (Graham 1969). O(N log N).
    """
    positions, owner = _give_out(costs, replicas, count)
    grouped = positions[np.argsort(owner, kind="stable")]
    return np.split(grouped, np.cumsum(np.bincount(owner, minlength=replicas))[:-1])


def owners(costs: Ints, replicas: int) -> Ints:
    """[N] the replica that `level` gives each item to."""
    positions, owner = _give_out(costs, replicas, None)
    of_item = np.empty_like(owner)
    of_item[positions] = owner
    return of_item


def dealt(slot: Slot, module: str, items: ReplicaItems, ranks: int) -> list[ReplicaItems]:
    """A replica's items dealt out over so many TP ranks (`UnitPlan.module_tp`), by rank."""
    if ranks == 1:
        return [items]
    head = slot.inputs.head(module)
    assert head is not None
    numbers = items[head.item]
    owner = owners(head.size(slot.items[head.item].area[numbers]), ranks)
    return [{**items, head.item: numbers[owner == rank]} for rank in range(ranks)]


def deal(shares: Ints) -> Ints:
    """[n, replicas] the replica that gets each share of a slot, from the amounts of the shares [n,
    replicas].

    Slot by slot, the largest share goes to the replica that has had the least so far (ties: the
    lower number), so that images which cannot be cut do not load the same replicas again and again.
    """
    taker = np.empty_like(shares)
    so_far = np.zeros_like(shares[0])
    for slot, share in enumerate(shares):
        taker[slot, np.argsort(-share, kind="stable")] = np.argsort(so_far, kind="stable")
        so_far[taker[slot]] += share
    return taker


def image_owners(patches: Ints, counts: Ints, replicas: int, carry: bool) -> Ints:
    """[images] the replica that works on each image, levelled inside every slot.

    Args:
        patches: of the images, slot after slot.
        counts: [n] images of every slot.
        carry: level the slots' shares over the step too (`deal`).
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
    """`owners` of every slot's images, those of all slots given out at once: many slots of few
    images take a hundredth of the time."""
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
    """[n, replicas] how many of a slot's equal items every replica gets; with `carry`, what is left
    over goes round."""
    shares = even_shares(counts, replicas)
    if carry:
        np.put_along_axis(shares, deal(shares), shares.copy(), axis=1)
    return shares


def even_shares(count: Ints | int, replicas: int) -> Ints:
    """[..., replicas] how many of `count` equal items each replica gets: the first ones take what
    is left over."""
    return (np.asarray(count, dtype=np.int64)[..., None] + np.arange(replicas)[::-1]) // replicas


def _give_out(costs: Ints, replicas: int, count: int | None) -> tuple[Ints, Ints]:
    """Positions in the order they are given out, and the replica that gets each."""
    assert count is None or count * replicas == len(costs)
    positions = np.argsort(-costs, kind="stable")
    heap = list(range(replicas))  # load · replicas + replica: one number orders by both
    adds = (costs[positions] * replicas).tolist()
    if count is None:
        if len(adds) >= replicas and adds[replicas - 1] > 0:  # the first ones go round
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
