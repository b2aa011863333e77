"""Sharded data parallelism: both streams by hand and by events, its limits, memory, and choice."""

import heapq
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from disttrain_cli.costs.layout import weight_rings
from disttrain_cli.costs.links import all_gather_s, all_reduce_s, reduce_scatter_s, ring_link
from disttrain_cli.costs.memory import GIB, WEIGHT_BYTES, layout_memory
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.predict import batches
from disttrain_cli.planning.sharded import Pass, Sharding, sharded, streams_s
from disttrain_cli.planning.units import Cluster
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile.train import Ordering
from tests.costs.test_experts import with_experts
from tests.planning import synthetic

ORDERINGS: tuple[Ordering, ...] = ("paper", "best")
BY_HAND = [
    # (passes as (compute, gather, reduce), seconds)
    ([(2.0, 1.0, 0.0)], 3.0),  # the first gather hides behind nothing
    ([(2.0, 1.0, 0.0), (2.0, 1.0, 0.0)], 5.0),  # the second one does
    ([(1.0, 1.0, 0.0), (1.0, 3.0, 0.0)], 5.0),  # or is as long as messages take
    ([(2.0, 1.0, 0.0), (3.0, 0.0, 4.0)], 10.0),  # the last reduction is exposed
    ([(2.0, 0.0, 1.0), (3.0, 0.0, 0.0)], 5.0),  # an earlier one is not
    # the gather for the third is issued as the second starts, behind the first one's reduction
    ([(1.0, 0.0, 5.0), (2.0, 0.0, 0.0), (1.0, 2.0, 0.0)], 9.0),
]


@pytest.mark.parametrize(("passes", "seconds"), BY_HAND)
def test_two_streams_by_hand(passes: list[tuple[float, float, float]], seconds: float) -> None:
    assert streams_s(Pass(*each) for each in passes) == seconds


def events_s(passes: list[Pass]) -> float:
    """The same by a queue of events: whatever is issued on a stream runs in the order of issue."""
    queue: list[tuple[float, int, str, int]] = []
    sequence = iter(range(10**6))
    ready, end, message_free, ready_at = 0, 0.0, 0.0, {}

    def push(when: float, what: str, index: int) -> None:
        heapq.heappush(queue, (when, next(sequence), what, index))

    def send(now: float, seconds: float) -> float:
        nonlocal message_free
        message_free = max(message_free, now) + seconds
        return message_free

    def gather(now: float, index: int) -> None:
        if index < len(passes):
            gather_s = passes[index].gather_s
            ready_at[index] = send(now, gather_s) if gather_s else now

    gather(0.0, 0)
    push(ready_at[0], "start", 0)
    while queue:
        now, _, what, ready = heapq.heappop(queue)
        end = max(end, now)
        if what == "start":
            gather(now, ready + 1)
            push(now + passes[ready].compute_s, "stop", ready)
        else:
            if passes[ready].reduce_s:
                end = max(end, send(now, passes[ready].reduce_s))
            if ready + 1 < len(passes):
                push(max(now, ready_at[ready + 1]), "start", ready + 1)
    return end


def test_two_streams_by_events() -> None:
    draw = random.Random(0)

    def some() -> float:
        return draw.choice([0.0, draw.random(), 5 * draw.random()])

    for _ in range(200):
        passes = [Pass(some(), some(), some()) for _ in range(draw.randint(1, 30))]
        assert streams_s(passes) == pytest.approx(events_s(passes))


def made(nodes: int = 2, **kinds: Any) -> tuple[Profile, Cluster]:
    """Two nodes of four devices, whose layers take as long as messages about."""
    run = synthetic.run_file(batch=32, gpus=4 * nodes, nodes=nodes)
    profile = synthetic.on_nodes(synthetic.tiny(run, kind="cuda"), 4)
    return profile, Cluster(4 * nodes, 4, 4.0, 1, 32, **kinds)


def slowest_s(one: Sharding, draws: Draws) -> float:
    """Forwards and backwards of all layers one after the other, each on its slowest rank."""
    loads, total = draws.loads(one.layout, 0), 0.0
    for name, module in one.profile.modules.items():
        for kind in module.layers:
            shard = module.costs[kind].tp["1"]
            times = [shard.forward_ms, shard.backward_ms, *[shard.forward_ms] * one.recomputes]
            for slot in loads[name]:
                rank_ms = [
                    sum(
                        part.base
                        + part.per_item * items
                        + part.per_token * tokens
                        + part.per_length_sq * length_sq
                        for part in times
                    )
                    for items, tokens, length_sq in slot.tolist()
                    if tokens
                ]
                total += max(rank_ms, default=0.0) / 1e3
    return total


def without_compute(profile: Profile) -> Profile:
    """The profile of layers that take no time."""
    copy = profile.model_copy(deep=True)
    for module in copy.modules.values():
        for cost in module.costs.values():
            nothing = {"forward_ms": Polynomial(), "backward_ms": Polynomial()}
            cost.tp["1"] = cost.tp["1"].model_copy(update=nothing)
    return copy


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("shards", [8, 4])
def test_limits(shards: int, recomputes: bool) -> None:
    profile, cluster = made()
    one = Sharding(profile, cluster, 8, shards, 2, recomputes)
    draws = Draws(profile, cluster)
    links = {"all_gather", "reduce_scatter", "all_reduce"}
    free = {f"{name}_gbps": 1e12 for name in links} | {f"{name}_us": 0.0 for name in links}
    between = profile.links.inter_node.model_copy(update=free)
    instant_links = profile.links.model_copy(update={**free, "inter_node": between})
    instant = replace(one, profile=profile.model_copy(update={"links": instant_links}))
    computed_s = slowest_s(one, draws)
    assert instant.step_s(draws, [0]) == pytest.approx(computed_s, rel=1e-6)

    layers = [
        module.costs[kind].tp["1"].parameters
        for module in profile.modules.values()
        for kind in module.layers
    ]
    inside = shards == 4
    link = profile.links if inside else ring_link(profile.links, 4)
    gather, scatter = (
        [function(link, 4.0 * count, shards) for count in layers]
        for function in (all_gather_s, reduce_scatter_s)
    )
    summed = (
        [all_reduce_s(ring_link(profile.links, 1), count, 2) for count in layers]
        if inside
        else [0.0]
    )
    slots = one.layout.microbatches
    sent_s = slots * (2 * sum(gather) - gather[-1] + sum(scatter)) + sum(summed)
    idle = replace(one, profile=without_compute(profile))
    assert idle.step_s(draws, [0]) == pytest.approx(sent_s)
    assert max(computed_s, sent_s) < one.step_s(draws, [0]) < computed_s + sent_s


def test_frozen_layers_have_no_backward_and_reduce_nothing() -> None:
    profile, cluster = made(trained=("llm", "projectors"))
    every = Sharding(profile, replace(cluster, trained=None), 8, 8, 1, False)
    some = Sharding(profile, cluster, 8, 8, 1, False)
    draws = Draws(profile, cluster)
    assert some.step_s(draws, [0]) < every.step_s(draws, [0])
    assert some.flops(draws, [0]) < every.flops(draws, [0])
    assert some.peak_gib() < every.peak_gib()


def test_memory() -> None:
    profile, cluster = made()
    profile = profile.model_copy(update={"precision": "bf16"})
    peaks = {
        (shards, recomputes): Sharding(profile, cluster, 8, shards, 2, recomputes).peak_gib()
        for shards in (8, 4)
        for recomputes in (False, True)
    }
    counts = np.array(
        [
            module.costs[kind].tp["1"].parameters
            for module in profile.modules.values()
            for kind in module.layers
        ]
    )
    assert peaks[4, False] - peaks[8, False] == pytest.approx(16 * counts.sum() / 8 / GIB)
    assert peaks[8, True] < peaks[8, False]
    one = Sharding(profile, cluster, 8, 8, 2, False)
    (replicated,) = layout_memory(profile, one.layout, 4.0)
    moving = peaks[8, False] - 16 * counts.sum() / 8 / GIB - replicated.moving_gib
    # two layers' weights in bf16, and the gradients of a third in fp32
    assert 2 * 2 * counts.min() / GIB < moving < (2 * 2 + 4) * counts.max() / GIB


def test_choice() -> None:
    profile, cluster = made(checkpointing="auto")
    draws = Draws(profile, cluster)
    best = sharded(profile, cluster, draws)
    assert best is not None and best.plan is None and best.gpus_used == 8
    assert best.sequences_per_s == pytest.approx(32 / best.iteration_s)
    assert best.layout.startswith(("FSDP over 8", "HSDP 2 × 4"))
    times = [
        Sharding(profile, cluster, 8, 8, size, choice).step_s(draws, range(8))
        for size in (1, 2, 4)
        for choice in (False, True)
    ]
    assert best.iteration_s <= min(times) * (1 + 1e-9)
    assert sharded(profile, replace(cluster, gpus=7), draws).gpus_used == 4
    assert sharded(profile, replace(cluster, gpus=33), draws) is None
    assert sharded(profile, replace(cluster, memory_gib=1e-4), draws) is None


def test_the_better_of_two_orderings() -> None:
    profile, cluster = made()
    draws = Draws(profile, cluster)
    paper, best = (sharded(profile, replace(cluster, ordering=name), draws) for name in ORDERINGS)
    assert paper is not None and best is not None and best.layout == paper.layout
    chosen = next(
        one
        for size in (1, 2, 4)
        for shards in (8, 4)
        if str(one := Sharding(profile, cluster, 8, shards, size, False)) == best.layout
    )
    numbers = batches(replace(cluster, ordering="best"))
    assert best.iteration_s == min(chosen.step_s(draws, numbers, name) for name in ORDERINGS)


def test_experts_are_sharded_over_those_with_the_same_and_the_rest_over_all() -> None:
    profile, cluster = made()
    profile = with_experts(profile)
    block, draws = profile.modules["llm"].costs["block"], Draws(profile, cluster)
    assert block.experts is not None
    weight = WEIGHT_BYTES[profile.precision]
    dense = (block.parameters - block.experts.parameters) * weight
    whole = Sharding(profile, cluster, 8, 8, 1, False)
    for ep in (2, 4, 8):
        one = replace(whole, ep=ep)
        rings = weight_rings(profile, one.stage, 4)
        gather_s = all_gather_s(rings.link, dense, 8) + all_gather_s(
            rings.experts_link, block.experts.parameters / ep * weight, 8 // ep
        )
        for layer, messages, before in zip(
            one.stage.held, one._messages_s, whole._messages_s, strict=True
        ):
            if layer[:2] == ("llm", "block"):
                assert messages[0] == pytest.approx(gather_s) and messages[0] < before[0]
                assert messages[1] < before[1]
            else:
                assert messages == before
        assert one.flops(draws, [0]) == pytest.approx(whole.flops(draws, [0]))
        computed = [
            sum(map(sum, each._computed_s("llm", "block", "trained", draws.loads(each.layout, 0))))
            for each in (whole, one)
        ]
        assert computed[1] > computed[0]  # rows are exchanged
    best = sharded(profile, replace(cluster, memory_gib=1e3), draws)
    assert best is not None
    times = [replace(whole, ep=ep).step_s(draws, range(8)) for ep in (1, 2, 4, 8)]
    assert best.iteration_s <= min(times) * (1 + 1e-9)
