"""Context parallelism in numbers: which degrees a unit may have, and what it costs.

A CP group divides the work of a replica evenly: each of its C ranks has 1/C of the tokens, and in
attention 1/C of the heads (`models.ulysses`), whatever the documents. So a rank's time and memory
are those of a C-th of the work. What comes on top is counted here: two exchanges per attention and
direction with the copies around them, what attention made by heads beside the same by tokens, and
keys and values that several ranks have alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from disttrain_cli.costs.freezing import Backward
from disttrain_cli.costs.hardware import moved_s
from disttrain_cli.costs.links import all_to_all_s, ring_bytes
from disttrain_cli.spec.plan import UnitPlan, UnitShape
from disttrain_cli.spec.profile import Heads, LayerCost, Polynomial, Profile, combine

#: Of a number that is exchanged.
VALUE_BYTES = {"bf16": 2.0, "fp32": 4.0}


def misfit(profile: Profile, modules: Sequence[str], tp: int, cp: int) -> str | None:
    """Why a unit with these modules cannot have a CP degree; None where it can."""
    inputs = profile.inputs
    if cp == 1:
        return None
    if others := [name for name in modules if name != inputs.llm]:
        return f"it holds {', '.join(others)}; CP groups share the tokens of the LLM alone"
    if inputs.sequence_length % (tp * cp):
        return (
            f"TP × CP = {tp} × {cp} = {tp * cp} must divide the sequence length,"
            f" {inputs.sequence_length}"
        )
    known = [cost.heads for cost in profile.modules[inputs.llm].costs.values() if cost.heads]
    if not known:
        return "the profile, made before there was CP, does not know of heads: disttrain profile"
    for heads in known:
        query, key = heads.query // tp, heads.key // tp
        if query % cp or (key % cp and cp % key):
            each = f" on each of {tp} TP ranks" if tp > 1 else ""
            return (
                f"CP {cp} must divide the {query} heads{each}, and divide or be divided by the"
                + (f" {key} of keys and values")
            )
    return None


def exchanged_ms(
    profile: Profile, cost: LayerCost, unit: UnitPlan | UnitShape, does: Backward
) -> tuple[Polynomial, Polynomial]:
    """Times that exchanges, inside a node, and the copies around them add to a layer's forward and
    to its backward, by the work of a replica."""
    if unit.cp == 1 or cost.heads is None:
        return Polynomial(), Polynomial()
    own_tokens = profile.inputs.sequence_length / unit.cp
    latency_s = all_to_all_s(profile.links, 0.0, unit.cp)
    bytes_s = all_to_all_s(
        profile.links, own_tokens * _row_bytes(profile, cost.heads, unit), unit.cp
    )
    copied_s = moved_s(
        profile.device, profile.precision, own_tokens * _moved_bytes(profile, cost.heads, unit)
    )
    once = Polynomial(base=2e3 * latency_s, per_item=1e3 * (bytes_s - latency_s + copied_s))
    return once, combine((_backwards(unit, does), once))


def exchanged_bytes(
    profile: Profile, cost: LayerCost, unit: UnitPlan | UnitShape, does: Backward
) -> float:
    """Bytes per own token that leave a rank in a layer's forward and backward."""
    if unit.cp == 1 or cost.heads is None:
        return 0.0
    passes = 1.0 + _backwards(unit, does)
    return passes * ring_bytes("all_to_all", _row_bytes(profile, cost.heads, unit), unit.cp)


def kept_bytes(
    profile: Profile, cost: LayerCost, unit: UnitPlan | UnitShape, does: Backward
) -> float:
    """Bytes per own token that a rank keeps of a layer beyond its share of what it would keep
    alone."""
    if unit.cp == 1 or cost.heads is None or does == "still":
        return 0.0
    query, key = _widths(profile, cost.heads, unit)
    return query * (does == "trained") + 2.0 * key * (_again(cost.heads, unit) - 1)


def _row_bytes(profile: Profile, heads: Heads, unit: UnitPlan | UnitShape) -> float:
    """Bytes per own token of a rank's two exchanges, before and after attention."""
    query, key = _widths(profile, heads, unit)
    return 2.0 * query + 2.0 * key * _again(heads, unit)


def _moved_bytes(profile: Profile, heads: Heads, unit: UnitPlan | UnitShape) -> float:
    """Bytes per own token that copies around a rank's two exchanges read and write: queries, keys
    and values are put together, and laid out by rank; attention's result goes back by token
    (`models.ulysses`)."""
    query, key = _widths(profile, heads, unit)
    together = query + 2.0 * key * _again(heads, unit)
    return 2.0 * (2.0 * together + query)


def _widths(profile: Profile, heads: Heads, unit: UnitPlan | UnitShape) -> tuple[float, float]:
    """Bytes of a token's queries and of its keys on a rank."""
    number_bytes = VALUE_BYTES[profile.precision] * heads.width
    return heads.query // unit.tp * number_bytes, heads.key // unit.tp * number_bytes


def _again(heads: Heads, unit: UnitPlan | UnitShape) -> int:
    """Ranks that have the same heads of keys and values."""
    return max(1, unit.cp // (heads.key // unit.tp))


def _backwards(unit: UnitPlan | UnitShape, does: Backward) -> float:
    """Passes of a backward with exchanges."""
    return 0.0 if does == "still" else 2.0 if unit.checkpointing else 1.0
