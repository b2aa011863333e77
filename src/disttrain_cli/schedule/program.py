"""Instructions of a stage in a training step, and in an evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from disttrain_cli.schedule.one_f_one_b import last_slots, passes
from disttrain_cli.spec.stage_graph import Stage
from disttrain_cli.spec.trace import BACKWARD, FORWARD

#: Operations at the end of a training step.
AT_END = ("wait", "reduce", "step")


class Instruction(NamedTuple):
    """Operation of a rank: one of `spec.trace.OPERATIONS`."""

    operation: str
    slot: int = -1  # -1: none
    chunk: int = 0  # index among the virtual stages of the rank


def program(stage: Stage, slots: int, sends_first: bool = False) -> Iterator[Instruction]:
    """Yield the instructions of a stage in a training step.

    Each stage receives when its neighbour sends, so that blocking messages end and messages of two
    stages pair by their order (NCCL): between a forward and a backward it receives the gradient
    first, because the next stage sends that before it asks for the activation. Only with fewer
    slots than stages to the end does that gradient depend on this activation.

    The weight gradients of all slots that remain after the last backward are one instruction, that
    of the first of these slots.

    Args:
        stage: neighbours, position and delay of weight gradients.
        slots: number of slots.
        sends_first: True to send the activation first, which takes less time where a send cannot
            block (gloo).
    """
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
    """Yield the instructions of a stage in an evaluation, which has forwards only.

    At most one slot is in flight to the next stage, so that a fast stage does not fill the memory
    of a slow one.
    """
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
