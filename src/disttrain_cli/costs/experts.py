"""Costs of expert parallelism, and the degrees that a unit may have.

An EP group divides the experts of its ranks' layers: each rank holds 1/EP of them, and so many more
ranks' rows arrive at each. Additional costs are counted here: dispatch and combine per mixture and
direction and one exchange of counts, with the copies around them, and the buffers of arrived rows.
A row travels once to each rank with experts that it chose; in a group of several nodes in two hops,
one after the other, once to each node over the network and then once to each rank inside it
(`models.experts`). What a pass takes whatever its rows is reduced by other ranks' experts: their
weights are not read there, nor their gradients summed. The host's wait for the counts is not
priced.

Where exchanges overlap (`ParallelShape.ep_overlap`), a rank's rows go in two halves. With x the
time of one half one way, hops and copies, and e that of the experts for one half, a pass takes

    x + max(x, e) + max(e, x) + x

for dispatch, experts and combine, instead of 4 x + 2 e: the first half's dispatch and the second
half's combine are exposed. A backward has e = d + w, gradients of rows and those of weights, which
are computed together, once all rows' gradients are on their way:

    x + max(x, d) + max(d + 2 w, max(x, d) + x)

e includes what halves cost: experts' weights are read twice and have
two gradients, which are added; an expert's rows fill tiles less; more kernels start; and GEMMs have
fewer multiprocessors while messages run. Which of x and e is longer is decided at a mean sequence.

Rows do not arrive evenly (`costs.routing`). All ranks of a group wait for the one with most rows in
every layer, so exchanges and experts take as long as on that rank, in expectation. Experts' time is
their share of a layer's by FLOPs. Memory is that of the fullest rank at a quantile: of the sum over
a stage's mixtures for saved activations, of the worst mixture for what a pass holds in addition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from disttrain_cli.costs import context, nccl, routing
from disttrain_cli.costs.context import NOTHING, VALUE_BYTES, by_rows
from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.hardware import moved_s
from disttrain_cli.costs.links import GIGABIT_BYTES, exchange_s, ring_bytes
from disttrain_cli.spec.layer_costs import Experts, LayerCost, LayerShard, Polynomial, combine
from disttrain_cli.spec.profile import LinkTimes, Profile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.stage_graph import Stage

#: Bytes of an expert's weight that travels with a row, and with its index.
WEIGHT_BYTES, ROUTE_BYTES = 4.0, 8.0
#: Bytes of a position that is saved to undo a copy.
POSITION_BYTES = 8.0
#: Bytes that adding to a weight's fp32 gradient sum moves besides: it is read and written.
SUM_BYTES = 8.0
# Of a pass whose rows go in halves; UNMEASURED.
#: Rows by which tiles of a grouped GEMM exceed an expert's rows: half a tile.
TILE_ROWS = 64
#: Further kernels' starts: about 40 of 1 µs.
HALF_S = 40e-6
#: Slowdown of GEMMs while messages run: channels take multiprocessors, of 132.
SLOWED = nccl.CONTEXT_CTAS / (132 - nccl.CONTEXT_CTAS)
#: Fewest stages over which the mixtures of a module are taken to be distributed.
STAGES = 8


def misfit(profile: Profile, modules: Iterable[str], shape: ParallelShape) -> str | None:
    """Return why a unit with these modules cannot have an EP degree; None if it can."""
    if shape.ep == 1:
        return None
    names = list(modules)
    counts = [
        (name, cost.experts.total)
        for name in names
        for cost in profile.modules[name].costs.values()
        if cost.experts is not None
    ]
    if not counts:
        return f"no layer of {', '.join(names)} has experts that ranks could divide"
    for name, count in counts:
        if count % shape.ep:
            return f"EP {shape.ep} must divide the {count} experts of {name}"
    return None


def of_others(profile: Profile, name: str, kind: str, shape: ParallelShape) -> tuple[float, float]:
    """Return the parameters of a layer in other ranks' experts, and those of them that train."""
    experts = profile.modules[name].costs[kind].experts
    if experts is None:
        return 0.0, 0.0
    share = 1.0 - 1.0 / shape.ep
    return experts.parameters * share, experts.trained * share


def own_trained(profile: Profile, name: str, kind: str, shape: ParallelShape) -> float:
    """Return the trained parameters of a rank's experts in a layer; 0 without an EP group."""
    experts = profile.modules[name].costs[kind].experts
    return 0.0 if experts is None or shape.ep == 1 else experts.trained / shape.ep


def local_shard(
    profile: Profile, name: str, kind: str, shape: ParallelShape, shard: LayerShard
) -> LayerShard:
    """Return a layer's shard without the time of weights in other ranks' experts.

    A pass reads weights, and a backward writes their gradients and adds them to fp32 sums, whatever
    its rows: bytes over the memory's bandwidth, and at most each time's base. Deferred weight
    gradients keep their share of the backward's base.
    """
    if shape.ep == 1:
        return shard
    held, trained = of_others(profile, name, kind, shape)
    share, value_bytes = 1.0 - 1.0 / shape.ep, VALUE_BYTES[profile.precision]
    summed_bytes = (2.0 * value_bytes + SUM_BYTES) * trained

    def without(time: Polynomial, moved_bytes: float) -> Polynomial:
        others_ms = 1e3 * moved_s(profile.device, profile.precision, moved_bytes)
        most_ms = share * max(0.0, time.base)
        return time.model_copy(update={"base": time.base - min(others_ms, most_ms)})

    backward = without(shard.backward_ms, value_bytes * held + summed_bytes)
    kept = backward.base / shard.backward_ms.base if shard.backward_ms.base else 1.0
    times = {
        "forward_ms": without(shard.forward_ms, value_bytes * held),
        "backward_ms": backward,
        "backward_input_ms": without(shard.backward_input_ms, value_bytes * held),
        "weight_ms": shard.weight_ms.model_copy(update={"base": kept * shard.weight_ms.base}),
    }
    return shard.model_copy(update=times)


def placed(profile: Profile, stage: Stage) -> ParallelShape:
    """Return a stage's shape with the nodes of its EP groups if these neither divide nor fill any.

    Of a unit that begins inside a node they may lie in more nodes, in shorter runs, than the search
    assumes; of a degree that does not divide a node, in fewer.
    """
    shape, node = stage.unit.shape, profile.links.gpus_per_node
    run = math.gcd(shape.ep, node or shape.ep)
    if not node or (run in (shape.ep, node) and stage.ranks[0] % run == 0):
        return shape
    return replace(shape, ep_nodes=stage.ep_nodes(node))


def exchanged_ms(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> tuple[Polynomial, Polynomial]:
    """Return the times that CP and EP groups add to a layer's forward and backward.

    They are those of their messages, which may cross nodes, and experts' on the rank of an EP group
    with most rows beyond the mean. By the work of a replica.
    """
    in_context = context.exchanged_ms(profile, name, cost, shape, does)
    if shape.ep == 1 or cost.experts is None:
        return in_context
    rows = sent_rows(profile, name, shape)
    load = routing.slowest(cost.experts, ep=shape.ep, rows=rows)
    counts_s = exchange_s(profile.links, 0.0, shape.ep, _per_node(profile, shape))
    forward, backward = _passes_ms(profile, name, cost, shape, does, load)
    forward = combine((1.0, forward), (1.0, Polynomial(base=1e3 * counts_s)))
    if does != "still":
        backward = combine((1.0, backward), (float(shape.recompute), forward))
    return (
        combine((1.0, in_context[0]), (1.0, forward)),
        combine((1.0, in_context[1]), (1.0, backward)),
    )


def load_ms(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> tuple[Polynomial, Polynomial]:
    """Return the increase of a layer's forward and backward per unit of its fullest rank's load.

    It is the mean one from equal loads to the expected load. By the work of a replica.
    """
    assert cost.experts is not None
    rows = sent_rows(profile, name, shape)
    # at equal loads the slope is that of a small excess
    more = max(0.01, routing.slowest(cost.experts, ep=shape.ep, rows=rows) - 1.0)
    even, loaded = (
        _passes_ms(profile, name, cost, shape, does, load) for load in (1.0, 1.0 + more)
    )
    forward, backward = (
        combine((1.0 / more, after), (-1.0 / more, before))
        for before, after in zip(even, loaded, strict=True)
    )
    if does == "still":
        return forward, NOTHING
    return forward, combine((1.0, backward), (float(shape.recompute), forward))


def _passes_ms(
    profile: Profile,
    name: str,
    cost: LayerCost,
    shape: ParallelShape,
    does: Backward,
    load: float,
) -> tuple[Polynomial, Polynomial]:
    """Return what dispatch and combine add to a layer's forward and backward at a load.

    The layer has the time of its experts at equal loads. Without the exchange of counts and without
    recomputation. By the work of a replica.
    """
    assert cost.experts is not None
    routed = _routed_rows(profile, name, cost.experts, shape, 1.0)
    latency_s = sum(link.all_gather_us * 1e-6 for link, _, _ in _hops(profile, shape, routed))
    way = Polynomial(base=1e3 * latency_s)
    computing = _computing_ms(profile, name, cost, shape, does)
    sent = _sent_ms(profile, name, cost.experts, shape, load)
    if not shape.ep_overlap:
        forward, backward = (
            combine((2.0, way), (1.0, each), (load - 1.0, experts))
            for each, experts in zip(sent, computing, strict=True)
        )
        return forward, NOTHING if does == "still" else backward
    mean = profile.modules[name].work_per_sequence
    tiles = TILE_ROWS * cost.experts.total / shape.ep
    tiles /= sent_rows(profile, name, shape) * cost.experts.chosen

    def at_mean(time: Polynomial) -> float:
        return time(mean)

    # products for gradients of weights and of rows have equal FLOPs
    share = 0.5 * cost.experts.trained / cost.experts.parameters * (does == "trained")
    rows_s, weights_s = _halved_s(profile, cost.experts, shape, does)
    found = []
    for each, experts, later, fixed_s in zip(
        sent, computing, (0.0, share), (0.0, weights_s), strict=True
    ):
        half = combine((0.25, each), (1.0, way))
        rows, weights = (
            combine(
                (load * part, experts),
                (1.0, Polynomial(base=1e3 * more_s + 2.0 * tiles * part * experts(mean))),
            )
            for part, more_s in ((0.5 - later / 2.0, rows_s), (later, fixed_s))
        )
        rows, weights = (
            combine((1.0, time), (SLOWED, min(time, half, key=at_mean))) for time in (rows, weights)
        )
        first = max(half, rows, key=at_mean)
        computed, sending = combine((1.0, rows), (1.0, weights)), combine((1.0, first), (1.0, half))
        last = max(computed, sending, key=at_mean)
        found.append(combine((1.0, half), (1.0, first), (1.0, last), (-1.0, experts)))
    forward, backward = found
    return forward, NOTHING if does == "still" else backward


def _halved_s(
    profile: Profile, experts: Experts, shape: ParallelShape, does: Backward
) -> tuple[float, float]:
    """Return the fixed times that halves add: to each half's rows, and to gradients of weights.

    Experts' weights are read once more. The gradient of them that one half has is written, and both
    are read and their sum written.
    """
    value_bytes = VALUE_BYTES[profile.precision]
    held, trained = (
        count / shape.ep * value_bytes for count in (experts.parameters, experts.trained)
    )
    reading_s, adding_s = (
        moved_s(profile.device, profile.precision, moved_bytes)
        for moved_bytes in (held, 4.0 * trained * (does == "trained"))
    )
    return (HALF_S + reading_s) / 2.0, adding_s


class RoutedRows(NamedTuple):
    """Rows that a rank takes in on their way to experts, per row of its own."""

    forwarded: float  # over the network, to be sent on inside the node; 0 with one hop
    arrived: float
    pairs: float  # of a row and a local expert


def _routed_rows(
    profile: Profile, name: str, experts: Experts, shape: ParallelShape, load: float
) -> RoutedRows:
    """Return the rows that pass a rank whose experts have this load, in its group's fullest node.

    Nodes are as full as expected, or equally full if the load is 1.
    """
    per_node = _per_node(profile, shape)
    nodes, node = shape.ep // per_node, 1.0
    between = 1 < nodes < shape.ep  # in two hops
    if between and load > 1.0:
        rows = sent_rows(profile, name, shape) * per_node
        node = routing.slowest(experts, ep=nodes, rows=rows)
    return RoutedRows(
        nodes * routing.reached(experts, node / nodes) if between else 0.0,
        shape.ep * routing.reached(experts, load / shape.ep),
        load * experts.chosen,
    )


def _sent_ms(
    profile: Profile, name: str, experts: Experts, shape: ParallelShape, load: float
) -> tuple[Polynomial, Polynomial]:
    """Return the times of a layer's rows in exchanges and copies, forward and backward.

    Without latencies, at the load of the fullest rank's experts. By the work of a replica.
    """
    routed = _routed_rows(profile, name, experts, shape, load)
    byte_s = sum(
        ring_bytes("all_to_all", rows, ranks) / (link.all_gather_gbps * GIGABIT_BYTES)
        for link, ranks, rows in _hops(profile, shape, routed)
    )
    # copies, each read and written: rows packed and laid out by rank for each hop, and by expert
    copied = 1.0 + 2.0 * routed.forwarded + routed.arrived + routed.pairs
    copied += shape.ep_overlap  # halves are joined
    byte_s += 2.0 * copied * moved_s(profile.device, profile.precision, 1.0)
    forward, backward = (
        by_rows(profile, name, 0.0, size * byte_s / shape.tp_cp_size)
        for size in _pass_bytes(profile, experts)
    )
    return forward, backward


def _pass_bytes(profile: Profile, experts: Experts) -> tuple[float, float]:
    """Return the bytes of a row on its way out and back, in a forward and in a backward."""
    both = 2.0 * _row_bytes(profile, experts)
    return both + ROUTE_BYTES * experts.chosen, both + WEIGHT_BYTES * experts.chosen


def _hops(
    profile: Profile, shape: ParallelShape, routed: RoutedRows
) -> list[tuple[LinkTimes, int, float]]:
    """Return the links and ranks of each hop of a row, and the rows that a rank takes in."""
    per_node = _per_node(profile, shape)
    between = profile.links.of(False), shape.ep // per_node, routed.forwarded or routed.arrived
    hops = [between, (profile.links.of(True), per_node, routed.arrived)]
    return [hop for hop in hops if hop[1] > 1]


def _per_node(profile: Profile, shape: ParallelShape) -> int:
    """Return the ranks of an EP group in each of its nodes."""
    if shape.ep_nodes:
        return shape.ep // shape.ep_nodes
    return math.gcd(shape.ep, profile.links.gpus_per_node or shape.ep)


def _computing_ms(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> tuple[Polynomial, Polynomial]:
    """Return the times of a rank's experts in a layer's forward and backward at equal loads.

    They are their shares of the layer's by FLOPs at the data's mean work, without fixed times. By
    the work of a replica.
    """
    assert cost.experts is not None
    shard, mean = cost.tp[str(shape.tp)], profile.modules[name].work_per_sequence
    rows = context.rows(profile, name, mean) * cost.experts.chosen / cost.experts.total
    held, trained = float(cost.experts.parameters), float(cost.experts.trained)
    passes = [(shard.forward_ms, cost.forward_flops, held)]
    if does == "trained":
        passes.append((shard.backward_ms, cost.backward_flops, held + trained))
    elif does == "passes":
        passes.append((shard.backward_input_ms, cost.backward_input_flops, held))
    times = [
        combine((min(1.0, 2.0 * rows * numbers / max(1.0, flops(mean))) / shape.cp, time))
        for time, flops, numbers in passes
    ]
    forward, backward = (each.model_copy(update={"base": 0.0}) for each in [*times, NOTHING][:2])
    return forward, backward


def sent_rows(profile: Profile, name: str, shape: ParallelShape) -> float:
    """Return the rows of a mean sequence on a rank: the fewest that a microbatch has."""
    mean = profile.modules[name].work_per_sequence
    return max(1.0, context.rows(profile, name, mean) / shape.tp_cp_size)


def kept_load(profile: Profile, name: str, cost: LayerCost, shape: ParallelShape) -> float:
    """Return the rows that the mixtures of a stage save on a group's fullest rank over their mean.

    It has an equal part of its module's mixtures, of `STAGES` stages at least: the search prices
    layers before it knows their stage, and fewer mixtures are less even.
    """
    assert cost.experts is not None
    stages = max(STAGES, shape.pp)
    return routing.fullest(
        cost.experts,
        ep=shape.ep,
        rows=sent_rows(profile, name, shape),
        layers=max(1, _mixtures(profile, name) // stages),
    )


def working_load(profile: Profile, name: str, cost: LayerCost, shape: ParallelShape) -> float:
    """Return the rows of the mixture with most rows on one rank over the mean, in a stage."""
    assert cost.experts is not None
    mixtures = max(1, -(-_mixtures(profile, name) // shape.pp))
    return routing.fullest(
        cost.experts,
        ep=shape.ep,
        rows=sent_rows(profile, name, shape),
        quantile=1.0 - (1.0 - routing.QUANTILE) / mixtures,
    )


def _mixtures(profile: Profile, name: str) -> int:
    """Return the number of a module's layers with experts."""
    module = profile.modules[name]
    return sum(module.costs[kind].experts is not None for kind in module.layers)


def exchanged_bytes(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> list[tuple[LinkTimes, float]]:
    """Return the bytes per local row that leave a rank in a layer's passes, by the links of hops.

    At equal loads.
    """
    if shape.ep == 1 or cost.experts is None:
        return []
    there, back = _pass_bytes(profile, cost.experts)
    passes = there * (1.0 + (shape.recompute and does != "still")) + back * (does != "still")
    routed = _routed_rows(profile, name, cost.experts, shape, 1.0)
    return [
        (link, passes * ring_bytes("all_to_all", rows, ranks))
        for link, ranks, rows in _hops(profile, shape, routed)
    ]


def kept_bytes(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> float:
    """Return the bytes per row of its TP group that a rank saves because of its EP group.

    They are the positions of rows in exchanges and among those of the experts, and what experts
    save for rows beyond the mean.
    """
    if shape.ep == 1 or cost.experts is None or does == "still":
        return 0.0
    load = kept_load(profile, name, cost, shape)
    routed = _routed_rows(profile, name, cost.experts, shape, load)
    positions = POSITION_BYTES * (sum(routed) + routed.pairs)
    saved = (load - 1.0) * cost.experts.chosen * _saved_bytes(cost.experts, does)
    return (positions + saved) / shape.tp


def held_bytes(
    profile: Profile,
    name: str,
    cost: LayerCost,
    shape: ParallelShape,
    does: Backward,
    transient: Polynomial,
) -> tuple[float, float]:
    """Return the bytes, fixed and per row of its TP group, that a rank holds in a pass under EP.

    They are in addition to `kept_bytes` and to `transient`, that of a layer with all experts. At
    its experts a rank holds what these do for the rows of the worst mixture, and a row's result;
    rows in exchanges are fewer. Of halves it holds what one needs, and in the backward of the other
    the operands of the first one's gradients of weights in place of what it had saved; in the end
    those of both halves and two gradients. The peak is there or elsewhere in the layer, at any
    number of sequences: fixed bytes, which may be negative, make it exact for one and for many.
    """
    if shape.ep == 1 or cost.experts is None:
        return 0.0, 0.0
    load = working_load(profile, name, cost, shape)
    more = (load - kept_load(profile, name, cost, shape)) * _saved_bytes(cost.experts, does)
    working = load * cost.experts.chosen * cost.experts.working_bytes
    mean = profile.modules[name].work_per_sequence
    rows = max(1.0, context.rows(profile, name, mean)) / shape.cp
    gradients = 0.0
    if shape.ep_overlap:
        working /= 2.0
        if does == "trained":
            pairs = load * cost.experts.chosen
            held = pairs * (cost.experts.deferred_bytes - _saved_bytes(cost.experts, does))
            working = max(working + max(0.0, held) / 2.0, held)
            weight_bytes = cost.experts.trained / shape.ep * VALUE_BYTES[profile.precision]
            gradients = max(0.0, 2.0 * weight_bytes - (working - held) / shape.tp * rows)
    here = (working + _row_bytes(profile, cost.experts)) / shape.tp
    slope = (transient(mean) - transient.base) / shape.cp / rows
    elsewhere = transient.base + (slope - here) * rows if here > slope else transient.base
    return (
        max(gradients, elsewhere) - transient.base,
        more * cost.experts.chosen / shape.tp + max(0.0, here - slope),
    )


def _saved_bytes(experts: Experts, does: Backward) -> float:
    """Return the bytes per arrived row that experts save from forward to backward."""
    if does == "still":
        return 0.0
    return experts.kept_bytes if does == "trained" else experts.frozen_kept_bytes


def _row_bytes(profile: Profile, experts: Experts) -> float:
    """Return the bytes of a row in an exchange, without its experts."""
    return experts.width * VALUE_BYTES[profile.precision]
