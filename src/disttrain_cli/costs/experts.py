"""Costs of expert parallelism, and the degrees that a unit may have.

An EP group divides the experts of its ranks' layers: each rank holds 1/EP of them, and so many more
ranks' rows arrive at each. All routing is taken to be even, so that experts compute as long as
without a group. Additional costs are counted here: two exchanges per mixture and direction
(dispatch and combine) and one of counts, with the copies around them, and the buffers of arrived
rows. The host's wait for the counts is not priced.
"""

from __future__ import annotations

from collections.abc import Iterable

from disttrain_cli.costs import context
from disttrain_cli.costs.context import NOTHING, VALUE_BYTES, by_rows
from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.hardware import moved_s
from disttrain_cli.costs.links import exchange_s, ring_bytes
from disttrain_cli.spec.profile import Experts, LayerCost, Polynomial, Profile, combine
from disttrain_cli.spec.shape import ParallelShape

#: Copies of a row, each read and written, around an exchange: laid out by rank, and back.
COPIES = 2.0


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


def exchanged_ms(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> tuple[Polynomial, Polynomial]:
    """Return the times that messages of CP and EP groups add to a layer's forward and backward.

    By the work of a replica; the messages may cross nodes.
    """
    in_context = context.exchanged_ms(profile, name, cost, shape, does)
    if shape.ep == 1 or cost.experts is None:
        return in_context
    size = _row_bytes(profile, cost.experts) / shape.tp_cp_size
    node = profile.links.gpus_per_node
    latency_s, byte_s = (
        exchange_s(profile.links, each, shape.ep, min(shape.ep, node or shape.ep))
        for each in (0.0, 1.0)
    )
    moved = 2.0 * COPIES * moved_s(profile.device, profile.precision, size)
    row_s = 2.0 * size * (byte_s - latency_s) + moved
    once = by_rows(profile, name, 2.0 * latency_s, row_s)
    forward = combine((1.0, once), (1e3 * latency_s, Polynomial(base=1.0)))  # counts
    backward = (
        NOTHING if does == "still" else combine((1.0, once), (float(shape.recompute), forward))
    )
    return (
        combine((1.0, in_context[0]), (1.0, forward)),
        combine((1.0, in_context[1]), (1.0, backward)),
    )


def exchanged_bytes(
    profile: Profile, cost: LayerCost, shape: ParallelShape, does: Backward
) -> float:
    """Return the bytes per local row that leave a rank in a layer's forward and backward."""
    if shape.ep == 1 or cost.experts is None:
        return 0.0
    passes = 1.0 + context.backwards(shape, does)
    return passes * 2.0 * ring_bytes("all_to_all", _row_bytes(profile, cost.experts), shape.ep)


def kept_bytes(cost: LayerCost, shape: ParallelShape, does: Backward) -> float:
    """Return the bytes per row of its TP group that a rank saves because of its EP group.

    They are the positions of its rows among those sent, and the reverse.
    """
    if shape.ep == 1 or cost.experts is None or does == "still":
        return 0.0
    return 2.0 * 8.0 * cost.experts.chosen / shape.tp


def held_bytes(profile: Profile, cost: LayerCost, shape: ParallelShape) -> float:
    """Return the bytes per row of its TP group of arrived rows, and of results to be returned."""
    if shape.ep == 1 or cost.experts is None:
        return 0.0
    return 2.0 * _row_bytes(profile, cost.experts) / shape.tp


def _row_bytes(profile: Profile, experts: Experts) -> float:
    """Return the bytes of a token's rows in one exchange."""
    return experts.chosen * experts.width * VALUE_BYTES[profile.precision]
