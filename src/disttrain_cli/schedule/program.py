"""Instructions of a rank in a training step, and in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from disttrain_cli.schedule import interleaved
from disttrain_cli.schedule.one_f_one_b import last_slots, passes
from disttrain_cli.spec.stage_graph import Stage
from disttrain_cli.spec.trace import BACKWARD, COMPUTE, FORWARD

#: Operations at the end of a training step.
AT_END = ("wait", "reduce", "step")


class Instruction(NamedTuple):
    """Operation of a rank: one of `spec.trace.OPERATIONS`, or the posting of a receive."""

    operation: str
    slot: int = -1  # -1: none
    chunk: int = 0  # index among the stages of the rank


def program(stage: Stage, slots: int, sends_first: bool = False) -> Iterator[Instruction]:
    """Yield the instructions of a rank in a training step.

    Each stage receives when its neighbour sends, so that blocking messages end and messages of two
    stages pair by their order (NCCL): between a forward and a backward it receives the gradient
    first, because the next stage sends that before it asks for the activation. Only with fewer
    slots than stages to the end does that gradient depend on this activation.

    The weight gradients of all slots that remain after the last backward are one instruction, that
    of the first of these slots.

    With several stages per rank (`UnitPlan.chunks`) the order is that of `programs`.

    Args:
        stage: the rank's first: neighbours, position and delay of weight gradients.
        slots: number of slots.
        sends_first: True to send the activation first, which takes less time where a send cannot
            block (gloo).
    """
    if (unit := stage.unit).chunks > 1:
        yield from programs(unit.pp, unit.chunks, slots)[stage.index]
        return
    remaining = last_slots(slots, stage.weight_delay)
    unsent: list[Instruction] = []  # the activation of the forward before
    for operation, slot in passes(slots, stage.to_end, stage.weight_delay):
        if operation == FORWARD:
            yield from unsent
            yield from _forward(stage, slot)
            unsent = [Instruction("send_activation", slot)] if stage.after else []
        elif operation == BACKWARD:
            received = [Instruction("receive_gradient", slot)] if stage.after else []
            sends_before = sends_first or slots < stage.to_end
            yield from (*unsent, *received) if sends_before else (*received, *unsent)
            unsent = []
            yield Instruction("backward", slot)
            if stage.before:
                yield Instruction("send_gradient", slot)
        elif slot <= remaining.start:
            yield Instruction("weights", slot)
    yield from map(Instruction, AT_END)


def evaluation(stage: Stage, slots: int) -> Iterator[Instruction]:
    """Yield the instructions of a rank in an evaluation, which has forwards only.

    At most one slot is in flight to the next stage, so that a fast stage does not fill the memory
    of a slow one.
    """
    if (unit := stage.unit).chunks > 1:
        for one in programs(unit.pp, unit.chunks, slots, training=False)[stage.index]:
            if one.operation == "send_activation":
                yield Instruction("wait", one.slot, one.chunk)
            yield one
        return
    for slot in range(slots):
        yield from _forward(stage, slot)
        if stage.after:
            yield Instruction("wait", slot)
            yield Instruction("send_activation", slot)
    yield Instruction("wait")


def _forward(stage: Stage, slot: int) -> Iterator[Instruction]:
    if stage.before:
        yield Instruction("receive_activation", slot)
    yield Instruction("load", slot)
    yield Instruction("forward", slot)


@lru_cache(maxsize=4)
def programs(
    devices: int, chunks: int, slots: int, training: bool = True
) -> Sequence[Sequence[Instruction]]:
    """Return the instructions of every device in interleaved 1F1B, or in an evaluation.

    Both ends of a message place it after the turn of the pass that it comes from, gradients first:
    one order of all messages for all devices, so that none waits forever even if sends block. In
    training the receiver only posts it there (`post_*`), and waits for it right before the pass
    that needs it, which may be passes later. The first chunk's forward loads the inputs of a slot
    for all.
    """
    orders = [
        [
            one
            for one in interleaved.passes(devices, chunks, slots, device)
            if training or one.operation == FORWARD
        ]
        for device in range(devices)
    ]
    turn_of = interleaved.turns(orders, devices * chunks)
    events: list[list[tuple[tuple[int, ...], Instruction]]] = [[] for _ in range(devices)]

    def add(key: tuple[int, ...], operation: str, one: interleaved.Pass) -> None:
        chunk, device = divmod(one.stage, devices)
        events[device].append((key, Instruction(operation, one.slot, chunk)))

    for one, turn in turn_of.items():
        source = interleaved.awaited(one, devices * chunks)
        if source is not None and source.stage != one.stage:
            key = turn_of[source], 1, -one.operation, source.stage
            what = "activation" if one.operation == FORWARD else "gradient"
            add(key, f"send_{what}", source)
            if training:
                add(key, f"post_{what}", one)
            add((turn, 0, 0) if training else key, f"receive_{what}", one)
        if one.operation == FORWARD and one.stage < devices:
            add((turn, 0, 1), "load", one)
        add((turn, 0, 2), COMPUTE[one.operation], one)
    end = AT_END if training else AT_END[:1]
    return tuple((*(one for _, one in sorted(of)), *map(Instruction, end)) for of in events)
