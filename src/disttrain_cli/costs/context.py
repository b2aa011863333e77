"""Costs of context parallelism, and the degrees that a unit may have.

A CP group divides the work of a replica evenly: each of its C ranks has 1/C of the rows (an LLM's
tokens, an encoder's patches), and in attention either 1/C of the heads (`models.ulysses`), whatever
the documents and images, or its local rows, balanced by their work (`models.levelling`). So a
rank's time and memory are those of a C-th of the work. Additional costs are counted here:

- when rows are exchanged for heads, two exchanges per attention and direction with the copies
  around them, attention's output by heads in addition to the same by rows, keys and values that
  several ranks hold alike;
- when keys and values are gathered, these messages with the copies around them, all rows of them,
  attention's output per run in addition to its concatenation, and the busiest rank's additional
  work;
- the encoder rows that the ranks of an LLM gather.

If queries, keys and values are views of one tensor, a group saves less: no rank has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from disttrain_cli.costs.hardware import moved_s
from disttrain_cli.costs.links import (
    COLLECTIVES,
    all_gather_s,
    exchange_s,
    ring_bytes,
    ring_link,
)
from disttrain_cli.spec.layer_costs import Heads, LayerCost, Polynomial, combine
from disttrain_cli.spec.profile import LinkTimes, Profile
from disttrain_cli.spec.shape import ParallelShape
from disttrain_cli.spec.work import Work

if TYPE_CHECKING:
    from disttrain_cli.costs.freezing import Backward

#: Bytes of an exchanged element.
VALUE_BYTES = {"bf16": 2.0, "fp32": 4.0}
#: Excess attention of a group's busiest rank over the mean with balanced tokens: 1.011 to 1.021 of
#: the mean for CP 2 to 16 on long documents (`python -m benchmarks.context`).
UNEVEN = 0.02
NOTHING = Polynomial()


def misfit(profile: Profile, modules: Sequence[str], shape: ParallelShape) -> str | None:
    """Return why a unit with these modules cannot have a CP degree; None if it can."""
    inputs, tp, cp = profile.inputs, shape.tp, shape.cp
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
                f"{name} has no attention whose rows ranks could share: not in all of its layers"
                " do rows depend on others by heads of one width alone (recurrent mixers and latent"
                " keys need all rows of a sample, as do keys and values of earlier layers)"
            )
        for heads in known:
            query, key = heads.query // tp, heads.key // tp
            exchanges = query % cp == 0 and key and (key % cp == 0 or cp % key == 0)
            if not key or not (exchanges or _gathers(shape)):
                each = f" on each of {tp} TP ranks" if tp > 1 else ""
                return (
                    f"CP {cp} must divide the {query} heads{each} of {name}, and divide or be"
                    f" divided by the {key} of keys and values"
                )
    return None


def most_cp(profile: Profile, modules: Sequence[str]) -> int:
    """Return the largest CP degree that the modules' heads allow: every rank has at least one."""
    costs = (cost for name in modules for cost in profile.modules[name].costs.values())
    return min((cost.heads.query for cost in costs if cost.heads), default=1)


def fits_nodes(shape: ParallelShape, gpus_per_node: int) -> bool:
    """Return True if a replica's TP × CP ranks divide a node evenly.

    They may also fill whole nodes with TP groups inside each.
    """
    ranks = shape.tp_cp_size
    return gpus_per_node % ranks == 0 or (
        ranks % gpus_per_node == 0 and gpus_per_node % shape.tp == 0
    )


def exchanged_ms(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> tuple[Polynomial, Polynomial]:
    """Return the times that CP messages and their copies add to a layer's forward and backward.

    By the work of a replica; the messages may cross nodes.
    """
    if shape.cp == 1:
        return NOTHING, NOTHING
    attention = _gathered_ms if _gathers(shape) else _attention_ms
    forward, gradient = (
        combine(*((1.0, part) for part in (sent, _gathering_ms(profile, cost, shape))))
        for sent in attention(profile, name, cost, shape)
    )
    if does == "still":
        return forward, NOTHING
    return forward, combine((1.0, gradient), (float(shape.recompute), forward))


def _attention_ms(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape
) -> tuple[Polynomial, Polynomial]:
    """Return the times of a pass's two exchanges of an attention and the copies around them.

    The first is that of the forward, the second that of the gradients.
    """
    if (heads := cost.heads) is None:
        return NOTHING, NOTHING
    own_bytes, moved_bytes = (
        of_row(profile, heads, shape) / shape.cp for of_row in (_row_bytes, _moved_bytes)
    )
    latency_s = messages_s(profile, shape, 0.0)
    byte_s = messages_s(profile, shape, 1.0) - latency_s
    once = by_rows(
        profile,
        name,
        2.0 * latency_s,
        own_bytes * byte_s + moved_s(profile.device, profile.precision, moved_bytes),
    )
    return once, once


def _gathered_ms(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape
) -> tuple[Polynomial, Polynomial]:
    """Return the times of gathering keys and values, and of scattering their gradients.

    They include the copies around them and the busiest rank's attention beyond its share.
    """
    if (heads := cost.heads) is None:
        return NOTHING, NOTHING
    query, key = _widths(profile, heads, shape)
    link, times = _link(profile, shape), cost.tp[str(shape.tp)]
    levelled = name == profile.inputs.llm  # others' rows are not reordered
    # concatenation, and reordering of rows; concatenation of attention's outputs per run
    forward_bytes = 4.0 * key / shape.cp + levelled * (4.0 * key + 2.0 * query / shape.cp)
    # a tensor of zeros, to which the runs' gradients are added, as large as all rows; reordering by
    # rank, and splitting one tensor into two
    backward_bytes = 2.0 * key + 6.0 * key + levelled * 4.0 * key + 4.0 * key / shape.cp
    passes = []
    for operation, moved_bytes, attended in (
        ("all_gather", forward_bytes, times.forward_ms),
        ("reduce_scatter", backward_bytes, times.backward_ms),
    ):
        latency_s, byte_s = (COLLECTIVES[operation](link, size, shape.cp) for size in (0.0, 1.0))
        row_s = 2.0 * key * (byte_s - latency_s) + moved_s(
            profile.device, profile.precision, moved_bytes
        )
        more = Polynomial(per_length_sq=levelled * UNEVEN * attended.per_length_sq / shape.cp)
        passes.append(combine((1.0, by_rows(profile, name, latency_s, row_s)), (1.0, more)))
    return passes[0], passes[1]


def by_rows(profile: Profile, name: str, latency_s: float, row_s: float) -> Polynomial:
    """Return a time in ms by the work of a replica, from a latency and a time per row."""
    each = _rows_of(profile, name)
    return Polynomial(
        base=1e3 * latency_s,
        per_item=1e3 * row_s * each.items,
        per_token=1e3 * row_s * each.tokens,
    )


def _link(profile: Profile, shape: ParallelShape) -> LinkTimes:
    """Return the links of rings through the ranks of a CP group."""
    per_node = ranks_per_node(profile, shape)
    return profile.links if per_node == shape.cp else ring_link(profile.links, per_node)


def _gathering_ms(profile: Profile, cost: LayerCost, shape: ParallelShape) -> Polynomial:
    """Return the time of gathering encoder outputs, or of scattering their gradient.

    Each TP rank gathers its part of them.
    """
    if cost.gathered_bytes == NOTHING:
        return NOTHING
    link = _link(profile, shape)
    latency_s, byte_s = (all_gather_s(link, size, shape.cp) for size in (0.0, 1.0))
    return combine(
        (1e3 * latency_s, Polynomial(base=1.0)),
        (1e3 * (byte_s - latency_s) / shape.tp, cost.gathered_bytes),
    )


def exchanged_bytes(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> float:
    """Return the bytes per local row that leave a rank in a layer's forward and backward.

    Averaged over the data's mean work.
    """
    if shape.cp == 1:
        return 0.0
    passes, mean = 1.0 + backwards(shape, does), profile.modules[name].work_per_sequence
    gathered = cost.gathered_bytes(mean) / shape.tp * shape.cp / max(1.0, rows(profile, name, mean))
    return passes * (
        ring_bytes("all_gather", gathered, shape.cp) + _sent_bytes(profile, cost.heads, shape)
    )


def _sent_bytes(profile: Profile, heads: Heads | None, shape: ParallelShape) -> float:
    """Return the bytes per local row that leave a rank for one pass of an attention."""
    if heads is None:
        return 0.0
    if not _gathers(shape):
        return ring_bytes("all_to_all", _row_bytes(profile, heads, shape), shape.cp)
    _, key = _widths(profile, heads, shape)
    return ring_bytes("all_gather", 2.0 * key * shape.cp, shape.cp)


def messages_s(profile: Profile, shape: ParallelShape, size_bytes: float) -> float:
    """Return the time of one message of a CP group's attention.

    `size_bytes` are those on every rank for exchanges, or of all rows for gathers.
    """
    if _gathers(shape):
        return all_gather_s(_link(profile, shape), size_bytes, shape.cp)
    return exchange_s(profile.links, size_bytes, shape.cp, ranks_per_node(profile, shape))


def kept_bytes(
    profile: Profile, name: str, cost: LayerCost, shape: ParallelShape, does: Backward
) -> float:
    """Return the bytes per local row that a rank saves for a layer in addition to its share.

    Its share is that of an unsharded layer's saved bytes.
    """
    if shape.cp == 1 or cost.heads is None or does == "still":
        return 0.0
    query, key = _widths(profile, cost.heads, shape)
    # attention's output by heads, or per run
    again = does == "trained" and not cost.frozen_projection
    if _gathers(shape):
        again &= name == profile.inputs.llm
    others = shape.cp if _gathers(shape) else _again(cost.heads, shape)  # ranks with the same keys
    return query * again + 2.0 * key * (others - 1) - (query + key) * cost.fused_heads


def held_bytes(profile: Profile, cost: LayerCost, shape: ParallelShape, does: Backward) -> float:
    """Return the bytes per local row of all keys' and values' gradients in attention's backward.

    They are their sums, and the addends or the same in the ranks' order.
    """
    if not _gathers(shape) or cost.heads is None or does == "still":
        return 0.0
    _, key = _widths(profile, cost.heads, shape)
    return 2.0 * 2.0 * key * shape.cp


def ranks_per_node(profile: Profile, shape: ParallelShape) -> int:
    """Return the ranks of a unit's CP group in each node."""
    node = profile.links.gpus_per_node
    return shape.cp if node is None else min(shape.cp, node // shape.tp)


def rows(profile: Profile, name: str, work: Work) -> float:
    """Return the rows of a module for this work."""
    each = _rows_of(profile, name)
    return each.items * work.items + each.tokens * work.tokens


def _rows_of(profile: Profile, name: str) -> Work:
    """Return the rows per item and per token of a module's work.

    For an LLM all tokens of its sequences, including padding; for an encoder without class tokens.
    """
    llm = name == profile.inputs.llm
    return Work(items=profile.inputs.sequence_length) if llm else Work(tokens=1.0)


def _row_bytes(profile: Profile, heads: Heads, shape: ParallelShape) -> float:
    """Return the bytes per local row of a rank's two exchanges, before and after attention."""
    query, key = _widths(profile, heads, shape)
    return 2.0 * query + 2.0 * key * _again(heads, shape)


def _moved_bytes(profile: Profile, heads: Heads, shape: ParallelShape) -> float:
    """Return the bytes per local row that copies around a rank's two exchanges read and write.

    Queries, keys and values are concatenated and laid out by rank; attention's result is laid out
    by row again (`models.ulysses`).
    """
    query, key = _widths(profile, heads, shape)
    together = query + 2.0 * key * _again(heads, shape)
    return 2.0 * (2.0 * together + query)


def _widths(profile: Profile, heads: Heads, shape: ParallelShape) -> tuple[float, float]:
    """Return the bytes of a row's queries and of its keys on a rank."""
    number_bytes = VALUE_BYTES[profile.precision] * heads.width
    return heads.query // shape.tp * number_bytes, heads.key // shape.tp * number_bytes


def _again(heads: Heads, shape: ParallelShape) -> int:
    """Return the number of ranks that hold the same heads of keys and values."""
    return max(1, shape.cp // (heads.key // shape.tp))


def backwards(shape: ParallelShape, does: Backward) -> float:
    """Return the passes of a backward with messages; gradients send as much as the forward."""
    return 0.0 if does == "still" else 2.0 if shape.recompute else 1.0


def _gathers(shape: ParallelShape) -> bool:
    return shape.cp_comm_type == "all_gather"
