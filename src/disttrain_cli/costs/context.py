"""Context parallelism in numbers: which degrees a unit may have, and what it costs.

A CP group divides the work of a replica evenly: each of its C ranks has 1/C of the rows (an LLM's
tokens, an encoder's patches), and in attention either 1/C of the heads (`models.ulysses`), whatever
the documents and images, or its own rows, levelled by their work (`models.levelling`). So a rank's
time and memory are those of a C-th of the work. What comes on top is counted here:

- of rows for heads, two exchanges per attention and direction with the copies around them, what
  attention made by heads beside the same by rows, keys and values that several ranks have alike;
- of gathered keys and values, these messages with the copies around them, all rows of them, what
  attention made run by run beside all of it, and what the busiest rank has more to do;
- the rows of encoders that the ranks of an LLM gather.

Where queries, keys and values are views of one tensor, a group keeps less: no rank has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from disttrain_cli.calls import call
from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.hardware import moved_s
from disttrain_cli.costs.links import (
    COLLECTIVES,
    all_gather_s,
    exchange_s,
    ring_bytes,
    ring_link,
)
from disttrain_cli.spec.plan import UnitPlan, UnitShape
from disttrain_cli.spec.profile import (
    Heads,
    LayerCost,
    LinkTimes,
    Polynomial,
    Profile,
    combine,
)
from disttrain_cli.spec.work import Work

#: Of a number that is exchanged.
VALUE_BYTES = {"bf16": 2.0, "fp32": 4.0}
#: What the busiest rank of a group has more to attend to than the mean where tokens are levelled:
#: 1.011 to 1.021 of the mean for CP 2 to 16 on long documents (`python -m benchmarks.context`).
UNEVEN = 0.02
NOTHING = Polynomial()


def misfit(
    profile: Profile, modules: Sequence[str], tp: int, cp: int, gathers: bool = False
) -> str | None:
    """Why a unit with these modules cannot have a CP degree; None where it can."""
    inputs = profile.inputs
    if cp == 1:
        return None
    if others := [name for name in modules if inputs.item(name) == "target"]:
        return f"it holds {', '.join(others)}; CP groups share no rows of images to generate"
    if inputs.llm in modules and inputs.sequence_length % (tp * cp):
        return (
            f"TP × CP = {tp} × {cp} = {tp * cp} must divide the sequence length,"
            f" {inputs.sequence_length}"
        )
    for name in modules:
        known = [cost.heads for cost in profile.modules[name].costs.values() if cost.heads]
        if not known:
            return (
                f"the profile, made before {name} could share its rows, does not know of its heads:"
                f" {call('profile')}"
            )
        for heads in known:
            query, key = heads.query // tp, heads.key // tp
            if not key or not (gathers or (query % cp == 0 and (key % cp == 0 or cp % key == 0))):
                each = f" on each of {tp} TP ranks" if tp > 1 else ""
                return (
                    f"CP {cp} must divide the {query} heads{each} of {name}, and divide or be"
                    f" divided by the {key} of keys and values"
                )
    return None


def most_cp(profile: Profile, modules: Sequence[str]) -> int:
    """The largest CP degree that heads of the modules allow: no rank is without one."""
    costs = (cost for name in modules for cost in profile.modules[name].costs.values())
    return min((cost.heads.query for cost in costs if cost.heads), default=1)


def fits_nodes(tp: int, cp: int, gpus_per_node: int) -> bool:
    """Whether the TP × CP ranks of a replica are an even part of a node, or whole nodes with TP
    groups inside each."""
    width = tp * cp
    return gpus_per_node % width == 0 or (width % gpus_per_node == 0 and gpus_per_node % tp == 0)


def exchanged_ms(
    profile: Profile, name: str, cost: LayerCost, unit: UnitPlan | UnitShape, does: Backward
) -> tuple[Polynomial, Polynomial]:
    """Times that exchanges, inside a node or between some, and the copies around them add to a
    layer of a module in its forward and in its backward, by the work of a replica."""
    if unit.cp == 1:
        return NOTHING, NOTHING
    attention = _gathered_ms if unit.gathers else _attention_ms
    forward, gradient = (
        combine(*((1.0, part) for part in (sent, _gathering_ms(profile, cost, unit))))
        for sent in attention(profile, name, cost, unit)
    )
    if does == "still":
        return forward, NOTHING
    return forward, combine((1.0, gradient), (float(unit.checkpointing), forward))


def _attention_ms(
    profile: Profile, name: str, cost: LayerCost, unit: UnitPlan | UnitShape
) -> tuple[Polynomial, Polynomial]:
    """Times of a pass's two exchanges of an attention and the copies around them: of the forward,
    and of the gradients' way."""
    if (heads := cost.heads) is None:
        return NOTHING, NOTHING
    own_bytes, moved_bytes = (
        of_row(profile, heads, unit) / unit.cp for of_row in (_row_bytes, _moved_bytes)
    )
    latency_s = messages_s(profile, unit, 0.0)
    byte_s = messages_s(profile, unit, 1.0) - latency_s
    once = _by_rows(
        profile,
        name,
        2.0 * latency_s,
        own_bytes * byte_s + moved_s(profile.device, profile.precision, moved_bytes),
    )
    return once, once


def _gathered_ms(
    profile: Profile, name: str, cost: LayerCost, unit: UnitPlan | UnitShape
) -> tuple[Polynomial, Polynomial]:
    """Times in which keys and values are gathered, or their gradients scattered, with the copies
    around that and what the busiest rank attends to beyond its share."""
    if (heads := cost.heads) is None:
        return NOTHING, NOTHING
    query, key = _widths(profile, heads, unit)
    link, times = _link(profile, unit), cost.tp[str(unit.tp)]
    levelled = name == profile.inputs.llm  # others' rows stay in their order
    # put together, and put into the order of rows; what attention made, run by run, put together
    forward_bytes = 4.0 * key / unit.cp + levelled * (4.0 * key + 2.0 * query / unit.cp)
    # a tensor of zeros, to which gradients of what runs see are added, as much as all rows; the
    # order of ranks again, and two tensors of one
    backward_bytes = 2.0 * key + 6.0 * key + levelled * 4.0 * key + 4.0 * key / unit.cp
    passes = []
    for operation, moved_bytes, attended in (
        ("all_gather", forward_bytes, times.forward_ms),
        ("reduce_scatter", backward_bytes, times.backward_ms),
    ):
        latency_s, byte_s = (COLLECTIVES[operation](link, size, unit.cp) for size in (0.0, 1.0))
        row_s = 2.0 * key * (byte_s - latency_s) + moved_s(
            profile.device, profile.precision, moved_bytes
        )
        more = Polynomial(per_length_sq=levelled * UNEVEN * attended.per_length_sq / unit.cp)
        passes.append(combine((1.0, _by_rows(profile, name, latency_s, row_s)), (1.0, more)))
    return passes[0], passes[1]


def _by_rows(profile: Profile, name: str, latency_s: float, row_s: float) -> Polynomial:
    """A time in ms by the work of a replica, of so much for each of its rows."""
    each = _rows_of(profile, name)
    return Polynomial(
        base=1e3 * latency_s,
        per_item=1e3 * row_s * each.items,
        per_token=1e3 * row_s * each.tokens,
    )


def _link(profile: Profile, unit: UnitPlan | UnitShape) -> LinkTimes:
    """What rings through the ranks of a CP group have."""
    per_node = ranks_per_node(profile, unit)
    return profile.links if per_node == unit.cp else ring_link(profile.links, per_node)


def _gathering_ms(profile: Profile, cost: LayerCost, unit: UnitPlan | UnitShape) -> Polynomial:
    """Time in which ranks gather what encoders left, or scatter its gradient, each TP rank's part
    of it."""
    if cost.gathered_bytes == NOTHING:
        return NOTHING
    link = _link(profile, unit)
    latency_s, byte_s = (all_gather_s(link, size, unit.cp) for size in (0.0, 1.0))
    return combine(
        (1e3 * latency_s, Polynomial(base=1.0)),
        (1e3 * (byte_s - latency_s) / unit.tp, cost.gathered_bytes),
    )


def exchanged_bytes(
    profile: Profile, name: str, cost: LayerCost, unit: UnitPlan | UnitShape, does: Backward
) -> float:
    """Bytes per own row that leave a rank in a layer's forward and backward, over the data's mean
    work."""
    if unit.cp == 1:
        return 0.0
    passes, mean = 1.0 + _backwards(unit, does), profile.modules[name].work_per_sequence
    gathered = cost.gathered_bytes(mean) / unit.tp * unit.cp / max(1.0, rows(profile, name, mean))
    return passes * (
        ring_bytes("all_gather", gathered, unit.cp) + _sent_bytes(profile, cost.heads, unit)
    )


def _sent_bytes(profile: Profile, heads: Heads | None, unit: UnitPlan | UnitShape) -> float:
    """Bytes per own row that leave a rank for one pass of an attention."""
    if heads is None:
        return 0.0
    if not unit.gathers:
        return ring_bytes("all_to_all", _row_bytes(profile, heads, unit), unit.cp)
    _, key = _widths(profile, heads, unit)
    return ring_bytes("all_gather", 2.0 * key * unit.cp, unit.cp)


def messages_s(profile: Profile, unit: UnitPlan | UnitShape, size_bytes: float) -> float:
    """Time of one message of a CP group's attention, of so many bytes: on every rank of exchanges,
    or of all rows on each."""
    if unit.gathers:
        return all_gather_s(_link(profile, unit), size_bytes, unit.cp)
    return exchange_s(profile.links, size_bytes, unit.cp, ranks_per_node(profile, unit))


def kept_bytes(
    profile: Profile, name: str, cost: LayerCost, unit: UnitPlan | UnitShape, does: Backward
) -> float:
    """Bytes per own row that a rank keeps of a layer beyond its share of what it would keep
    alone."""
    if unit.cp == 1 or cost.heads is None or does == "still":
        return 0.0
    query, key = _widths(profile, cost.heads, unit)
    # attention made it by heads, or run by run
    again = does == "trained" and not cost.frozen_projection
    if unit.gathers:
        again &= name == profile.inputs.llm
    others = unit.cp if unit.gathers else _again(cost.heads, unit)  # that have the same keys
    return query * again + 2.0 * key * (others - 1) - (query + key) * cost.fused_heads


def held_bytes(
    profile: Profile, cost: LayerCost, unit: UnitPlan | UnitShape, does: Backward
) -> float:
    """Bytes per own row that a rank holds of gradients of all keys and values in an attention's
    backward: their sums, and what is added or as the ranks' order has them."""
    if not unit.gathers or cost.heads is None or does == "still":
        return 0.0
    _, key = _widths(profile, cost.heads, unit)
    return 2.0 * 2.0 * key * unit.cp


def ranks_per_node(profile: Profile, unit: UnitPlan | UnitShape) -> int:
    """Of a CP group of a unit, the ranks in each node."""
    node = profile.links.gpus_per_node
    return unit.cp if node is None else min(unit.cp, node // unit.tp)


def rows(profile: Profile, name: str, work: Work) -> float:
    """Rows of so much work of a module."""
    each = _rows_of(profile, name)
    return each.items * work.items + each.tokens * work.tokens


def _rows_of(profile: Profile, name: str) -> Work:
    """Rows per item and per token of a module's work: of an LLM all tokens of its sequences, padded
    ones too; of an encoder without class tokens."""
    llm = name == profile.inputs.llm
    return Work(items=profile.inputs.sequence_length) if llm else Work(tokens=1.0)


def _row_bytes(profile: Profile, heads: Heads, unit: UnitPlan | UnitShape) -> float:
    """Bytes per own row of a rank's two exchanges, before and after attention."""
    query, key = _widths(profile, heads, unit)
    return 2.0 * query + 2.0 * key * _again(heads, unit)


def _moved_bytes(profile: Profile, heads: Heads, unit: UnitPlan | UnitShape) -> float:
    """Bytes per own row that copies around a rank's two exchanges read and write: queries, keys and
    values are put together, and laid out by rank; attention's result goes back by row
    (`models.ulysses`)."""
    query, key = _widths(profile, heads, unit)
    together = query + 2.0 * key * _again(heads, unit)
    return 2.0 * (2.0 * together + query)


def _widths(profile: Profile, heads: Heads, unit: UnitPlan | UnitShape) -> tuple[float, float]:
    """Bytes of a row's queries and of its keys on a rank."""
    number_bytes = VALUE_BYTES[profile.precision] * heads.width
    return heads.query // unit.tp * number_bytes, heads.key // unit.tp * number_bytes


def _again(heads: Heads, unit: UnitPlan | UnitShape) -> int:
    """Ranks that have the same heads of keys and values."""
    return max(1, unit.cp // (heads.key // unit.tp))


def _backwards(unit: UnitPlan | UnitShape, does: Backward) -> float:
    """Passes of a backward with messages; a gradient's way sends as much as the forward."""
    return 0.0 if does == "still" else 2.0 if unit.checkpointing else 1.0
