"""Drawn routing of a step: rows that the ranks of EP groups send, and the time that they add.

Prices have the expected load of the fullest rank. A step that is rehearsed or simulated has a
routing drawn for every slot, stage and EP group (`costs.routing.drawn`), the same in both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.experts import load_ms, placed, sent_rows
from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.layout import CostedStage, replica_ms
from disttrain_cli.costs.routing import drawn, reached, slowest
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.layer_costs import LayerCost
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import BACKWARD, FORWARD

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def routed_rows(
    profile: Profile, stage: CostedStage, module: str, at: tuple[int, int, int], block: int
) -> Ints | None:
    """Return [L, R, R] rows that the ranks of an EP group send each other in L mixtures of a stage.

    None for a module without experts there, and without EP groups.

    Args:
        at: seed, step and slot.
        block: number of the EP group among those of a stage, counted by the neighbouring replicas
            that share one; of several inside one replica, one is drawn.
    """
    mixtures = [cost for _, cost, _ in _mixtures(profile, stage, module)]
    if stage.ep == 1 or not mixtures:
        return None
    experts, shape = mixtures[0].experts, stage.unit.shape
    assert experts is not None
    return drawn(
        experts,
        int(np.random.SeedSequence([*at, stage.number, block]).generate_state(1)[0]),
        ep=stage.ep,
        rows=round(sent_rows(profile, module, shape)),
        layers=len(mixtures),
    )


def dispatched_rows(
    profile: Profile,
    stage: CostedStage,
    module: str,
    at: tuple[int, int, int],
    block: int,
    nodes: int,
) -> tuple[Ints, Ints, Ints] | None:
    """Return what the ranks of an EP group send each other in the first mixture of `routed_rows`.

    They are [R, R] pairs of a row and an expert, [R, R] rows with experts on each rank, and [R, N]
    with experts in each of the group's nodes: those that are expected of so many pairs.
    """
    routed = routed_rows(profile, stage, module, at, block)
    if routed is None:
        return None
    _, cost, _ = next(_mixtures(profile, stage, module))
    experts, pairs_RR = cost.experts, routed[0]
    assert experts is not None
    pairs_RN = pairs_RR.reshape(stage.ep, nodes, -1).sum(axis=2)
    sent = [
        np.array(
            [
                [reached(experts, share) for share in shares]
                for shares in (pairs / pairs_RR.sum(axis=1, keepdims=True)).tolist()
            ]
        )
        for pairs in (pairs_RR, pairs_RN)
    ]
    rows = pairs_RR.sum() / stage.ep / experts.chosen
    rows_RR, rows_RN = (np.rint(rows * share).astype(np.int64) for share in sent)
    return pairs_RR, rows_RR, rows_RN


def added_s(
    profile: Profile,
    stage: CostedStage,
    loads: Mapping[str, Floats],
    seed: int,
    step: int,
    blocks: range,
) -> dict[str, tuple[Floats, Floats]]:
    """Return [n, replicas] seconds that drawn routing adds to forward and backward, by module.

    They are less than 0 where it is more even than expected. Modules without experts are left out.

    Args:
        loads: work of the replicas of these blocks by module, as in `pipeline_of`.
        blocks: numbers of the EP groups, as in `routed_rows`.
    """
    together, shape = stage.unit.replicas_together, placed(profile, stage)
    added: dict[str, tuple[Floats, Floats]] = {}
    for module in (cost.module for cost in stage.costs):
        mixtures = list(_mixtures(profile, stage, module))
        if stage.ep == 1 or not mixtures:
            continue
        (_, first, _), slots = mixtures[0], len(loads[module])
        assert first.experts is not None
        expected = slowest(first.experts, ep=stage.ep, rows=sent_rows(profile, module, shape))
        excess = np.empty((slots, len(blocks)))
        for slot in range(slots):
            for number, block in enumerate(blocks):
                rows = routed_rows(profile, stage, module, (seed, step, slot), block)
                assert rows is not None
                arrived = rows.sum(axis=1)
                fullest = arrived.max(axis=1) / arrived.mean(axis=1)
                excess[slot, number] = fullest.mean() - expected
        passes = [
            sum(
                np.array([one.base, one.per_item, one.per_token, one.per_length_sq])
                for one in of_pass
            )
            for of_pass in zip(
                *(load_ms(profile, module, cost, shape, does) for _, cost, does in mixtures),
                strict=True,
            )
        ]
        forward, backward = (
            replica_ms(np.asarray(each), loads[module], len(blocks) * together, together)
            * excess.repeat(together, axis=1)
            / 1e3
            for each in passes
        )
        added[module] = forward, backward
    return added


def with_routing(
    pipeline: Pipeline,
    profile: Profile,
    stages: Sequence[CostedStage],
    loads: Mapping[str, Floats],
    seed: int,
    step: int,
) -> Pipeline:
    """Return a step with its drawn routing.

    Args:
        loads: as in `pipeline_of`.
    """
    passes = [pipeline.forward_s.copy(), pipeline.backward_s.copy()]
    for number, stage in enumerate(stages):
        blocks = range(stage.unit.dp // stage.unit.replicas_together)
        for both in added_s(profile, stage, loads, seed, step, blocks).values():
            for times_s, more in zip(passes, both, strict=True):
                times_s[:, number, : stage.unit.dp] += more
    return dataclasses.replace(pipeline, forward_s=passes[FORWARD], backward_s=passes[BACKWARD])


def _mixtures(
    profile: Profile, stage: CostedStage, module: str
) -> Iterator[tuple[str, LayerCost, Backward]]:
    """Yield kind, costs and type of backward of a module's layers with experts on a stage."""
    for name, kind, does in stage.held:
        cost = profile.modules[name].costs[kind]
        if name == module and cost.experts is not None:
            yield kind, cost, does
