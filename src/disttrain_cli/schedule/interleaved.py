"""Interleaved 1F1B: devices hold several virtual stages each.

Stage s of a line is on device s mod PP, so a slot passes every device several times (Narayanan et
al. 2021, arXiv 2104.04473). Slots come in groups of PP: a device runs its first stage for all slots
of a group, then its second, and backwards in the reverse order of stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from disttrain_cli.schedule import one_f_one_b
from disttrain_cli.spec.trace import BACKWARD, FORWARD


class Pass(NamedTuple):
    """Forward or backward (index in `COMPUTE`) of a slot in one of all virtual stages."""

    operation: int
    stage: int
    slot: int


def passes(devices: int, chunks: int, slots: int, device: int) -> list[Pass]:
    """Return a device's passes in order: warm-up forwards, alternating passes, the other backwards.

    Args:
        devices: PP.
        chunks: stages per device; with one, the order is that of 1F1B.
        slots: a multiple of `devices` if there are several chunks.
        device: index in the line.
    """
    if chunks == 1:
        own = one_f_one_b.passes(slots, devices - device)
        return [Pass(operation, device, slot) for operation, slot in own]
    total = chunks * slots
    ahead = min(2 * (devices - 1 - device) + (chunks - 1) * devices, total)

    def turn(operation: int, number: int) -> Pass:
        group, index = divmod(number, devices * chunks)
        chunk, slot = divmod(index, devices)
        chunk = chunk if operation == FORWARD else chunks - 1 - chunk
        return Pass(operation, chunk * devices + device, group * devices + slot)

    order = [turn(FORWARD, number) for number in range(ahead)]
    for number in range(total):
        order += [turn(FORWARD, number + ahead)] if number + ahead < total else []
        order.append(turn(BACKWARD, number))
    return order


def awaited(one: Pass, stages: int) -> Pass | None:
    """Return the pass whose tensors another one waits for; None: it waits for data only."""
    if one.operation == FORWARD:
        return Pass(FORWARD, one.stage - 1, one.slot) if one.stage else None
    if one.stage + 1 == stages:
        return Pass(FORWARD, one.stage, one.slot)
    return Pass(BACKWARD, one.stage + 1, one.slot)


def turns(orders: Sequence[Sequence[Pass]], stages: int) -> dict[Pass, int]:
    """Return the turn of every pass: one more than that of the last pass that it waits for.

    It waits for the one before it on its device, and for `awaited`.

    Args:
        orders: passes of every device, in order.
        stages: number of virtual stages.
    """
    turn_of: dict[Pass, int] = {}
    done, last = [0] * len(orders), [-1] * len(orders)
    while any(count < len(own) for count, own in zip(done, orders, strict=True)):
        before = len(turn_of)
        for device, own in enumerate(orders):
            while done[device] < len(own):
                source = awaited(own[done[device]], stages)
                if source is not None and source not in turn_of:
                    break
                last[device] = 1 + max(last[device], turn_of[source] if source else -1)
                turn_of[own[done[device]]] = last[device]
                done[device] += 1
        assert len(turn_of) > before, "the schedule deadlocks"
    return turn_of
