"""Costs of modules whose items are distributed over a TP group (`models.replicated`).

Each rank's rows are sent to the equal runs in which the layers after the module have them, and
their gradients return; a generator's ranks sum the gradients of their common inputs.
"""

from __future__ import annotations

from itertools import accumulate

from disttrain_cli.costs.links import all_reduce_s, all_to_all_s, ring_bytes
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.profile import Profile


def dealt_ms(profile: Profile, name: str, back: bool, *, tp: int) -> tuple[Polynomial, Polynomial]:
    """Return the times of these messages in a module's forward and in its backward.

    By the work of the busiest of `tp` ranks; the backward is zero unless gradients flow `back`.
    """
    nothing, links = Polynomial(), profile.links
    work = profile.modules[name].work_per_sequence
    if not work.items:
        return nothing, nothing
    row_bytes, is_generator = _item_bytes(profile, name)
    price = all_reduce_s if is_generator else all_to_all_s
    size_bytes = row_bytes * (tp if is_generator else 1)
    latency_s, item_s = price(links, 0.0, tp), price(links, size_bytes, tp)
    sent = Polynomial(
        base=1e3 * latency_s, per_token=1e3 * (item_s - latency_s) * work.items / work.tokens
    )
    forward = nothing if is_generator else sent
    return forward, sent if back else nothing


def dealt_bytes(profile: Profile, name: str, unit: UnitPlan, back: bool) -> float:
    """Return the bytes over one rank's link for a mean sequence of its replica, both passes."""
    each, is_generator = _item_bytes(profile, name)
    whole = each * profile.modules[name].work_per_sequence.items
    if is_generator:
        return back * ring_bytes("all_reduce", whole, unit.tp)
    return (1 + back) * ring_bytes("all_to_all", whole / unit.tp, unit.tp)


def undealt(profile: Profile, unit: UnitPlan) -> str | None:
    """Return why the items of a unit's `module_tp` cannot be distributed; None if they can."""
    if unit.module_tp and (llm := profile.inputs.llm) not in unit.modules:
        return (
            f"the unit does not hold {llm}, whose TP other modules need not have; give it tp 1 and"
            f" dp {unit.tp * unit.dp} instead"
        )
    ends, first = list(accumulate(unit.layers_per_stage)), 0
    for name in unit.modules:
        stop = first + len(profile.modules[name].layers)
        if name in unit.module_tp and name == profile.inputs.llm:
            return f"{name} is the LLM, which tp divides; module_tp is of encoders and generators"
        if name in unit.module_tp and any(first < end < stop for end in ends):
            return (
                f"{name} has layers {first} to {stop - 1} of the unit, which must lie on one stage;"
                f" layers_per_stage: {', '.join(map(str, unit.layers_per_stage))}"
            )
        first = stop
    return None


def _item_bytes(profile: Profile, name: str) -> tuple[float, bool]:
    """Return the bytes of a mean item at the module's LLM end, and True for a generator."""
    is_generator = profile.modules[name].kind == "generator"
    sender = profile.modules[profile.inputs.llm if is_generator else name]
    items = profile.modules[name].work_per_sequence.items
    return sender.output_bytes_per_sequence / items, is_generator
