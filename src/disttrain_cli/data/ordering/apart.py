"""Orders for a unit with all modules, whose replicas synchronise only at the gradient reduction.

So every replica has a separate order, and a step takes as long as the slowest replica. A search
over orders makes the slowest replica faster; when it finds no improvement, that replica exchanges a
microbatch with one of the fastest, as long as the step's busiest stage stays balanced.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from disttrain_cli.data.ordering.intervals import interval_order
from disttrain_cli.data.ordering.sequencing import MOVES_PER_ROUND, affordable, search_order
from disttrain_cli.data.slots import Ints
from disttrain_cli.simulation.makespan import iterations_s, of_replica
from disttrain_cli.simulation.timeline import Floats, Pipeline

EVALUATIONS = 120_000  # simulations of one replica's step, about, at most; fewer with many slots
PARTNERS = 2  # number of fastest replicas with which an exchange is tried
PAIRS = 1024  # of microbatches tried with each partner, at most
LEAST_GAIN = 1e-4  # of a step's time, for an exchange
# limit of a replica's work on a stage after an exchange, relative to the mean of the busiest stage
LEVEL = 1.005


def order_apart(pipeline: Pipeline, positions: Ints) -> Ints:
    """Return positions [n, DP, M] with each replica's microbatches in the best order found.

    Some microbatches are exchanged between replicas.
    """
    slots, replicas, _ = positions.shape
    base = of_replica(pipeline, 0)
    # [R, n, parts, S]
    times = np.stack(pipeline.parts_s).transpose(3, 1, 0, 2).copy()
    orders, times_s = _starts(base, times)
    # origin of each microbatch: replica and slot
    who, which = np.divmod(np.arange(replicas * slots).reshape(replicas, slots), slots)
    settled = np.zeros(replicas, dtype=bool)  # True if a search over orders found no improvement
    left, pairs = affordable(EVALUATIONS, slots), affordable(PAIRS, slots)
    while left > 0:
        slowest = int(times_s.argmax())
        if not settled[slowest]:
            left -= affordable(MOVES_PER_ROUND, slots)
            searched, time_s = search_order(
                _with(base, times[slowest]), [orders[slowest]], 1, float(times_s[slowest])
            )
            settled[slowest] = time_s >= times_s[slowest]
            orders[slowest], times_s[slowest] = searched, time_s
            continue
        left -= 2 * PARTNERS * min(pairs, slots**2)
        exchange = _exchange(base, times, orders, times_s, slowest, pairs)
        if exchange is None:
            break
        mine, partner, theirs = exchange
        for table in (times, who, which):
            table[[slowest, partner], [mine, theirs]] = table[[partner, slowest], [theirs, mine]]
        for replica in (slowest, partner):
            times_s[replica] = float(_times_s(base, times[replica][orders[replica]])[0])
            settled[replica] = False
    return np.stack(
        [
            positions[which[replica, order], who[replica, order]]
            for replica, order in enumerate(orders)
        ],
        axis=1,
    )


def _starts(base: Pipeline, times: Floats) -> tuple[Ints, Floats]:
    """Return by replica the faster of the existing order and the paper's [R, n], and its time [R].

    Args:
        times: [R, n, parts, S] durations of the replicas' microbatches.
    """
    every = np.arange(len(times))
    costs = np.rint(1e9 * times.sum(axis=2)).astype(np.int64)
    starts = np.stack([[np.arange(times.shape[1]), interval_order(of_one)] for of_one in costs])
    times_s = _times_s(base, times[every[:, None, None], starts]).reshape(-1, 2)
    fastest = times_s.argmin(axis=1)
    return starts[every, fastest], times_s[every, fastest]


def _exchange(
    base: Pipeline, times: Floats, orders: Ints, times_s: Floats, slowest: int, pairs: int
) -> tuple[int, int, int] | None:
    """Return the exchange after which the slower of both replicas is fastest; None: no gain.

    Returns:
        (microbatch of the slowest replica, partner, the partner's microbatch).
    """
    slots, loads = orders.shape[1], times.sum(axis=(1, 2))  # [R, S]
    most = max(LEVEL * float(loads.mean(axis=0).max()), float(loads.max()))
    best: tuple[float, int, int, int] | None = None
    mine, theirs = np.divmod(np.arange(0, slots**2, -(-(slots**2) // pairs)), slots)
    for partner in np.argsort(times_s, kind="stable")[:PARTNERS].tolist():
        if partner == slowest:
            continue
        both = np.maximum(
            _replaced_s(base, times[slowest], orders[slowest], mine, times[partner][theirs]),
            _replaced_s(base, times[partner], orders[partner], theirs, times[slowest][mine]),
        )
        gained = (times[partner][theirs] - times[slowest][mine]).sum(axis=1)
        level = np.maximum(loads[slowest] + gained, loads[partner] - gained).max(axis=1) <= most
        both = np.where(level, both, np.inf)
        chosen = int(both.argmin())
        if best is None or both[chosen] < best[0]:
            best = (float(both[chosen]), int(mine[chosen]), partner, int(theirs[chosen]))
    if best is None or best[0] > times_s[slowest] * (1 - LEAST_GAIN):
        return None
    return best[1:]


def _replaced_s(base: Pipeline, times: Floats, order: Ints, away: Ints, others: Floats) -> Floats:
    """Return the times [K] of a replica's order [n] with one microbatch replaced.

    Microbatch away[k] is replaced by one with the durations others[k] [parts, S].
    """
    cases = np.repeat(times[None], len(away), axis=0)  # [K, n, parts, S]
    cases[np.arange(len(away)), away] = others
    return _times_s(base, cases[:, order])


def _times_s(base: Pipeline, times: Floats) -> Floats:
    """Return the times [K] of one replica whose microbatches have durations [..., n, parts, S]."""
    # [n, S, parts, 1, K]
    cases = times.reshape(-1, *times.shape[-3:]).transpose(1, 3, 2, 0)[:, :, :, None]
    return iterations_s(base, *(cases[:, :, part] for part in range(cases.shape[2])))


def _with(base: Pipeline, times: Floats) -> Pipeline:
    """Return one replica's pipeline with the durations [n, parts, S]."""
    names = ("forward_s", "backward_s", "weight_s")
    parts = np.moveaxis(times[..., None], 1, 0)  # [parts, n, S, 1]
    return dataclasses.replace(base, **dict(zip(names, parts, strict=False)))
