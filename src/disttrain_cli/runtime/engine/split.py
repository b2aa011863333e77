"""1F1B with a split backward: weight gradients (W) some slots after input gradients (B).

As in zero-bubble schedules (arXiv 2401.10241). Messages are those of 1F1B, in its order: deferred
weight gradients are computed once the input gradient of the previous slot has been sent, and before
waiting for the next activation.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule


class WeightPass(schedule.BufferOpInstruction):
    """Instruction to compute the deferred weight gradients of an earlier slot's backward.

    The last one of a step computes those of all later slots, too.
    """


class SplitSchedule(schedule.TrainSchedule):
    """Schedule of a stage that defers weight gradients by `delay` slots.

    Those that remain after the last backward are computed together (`costs.overlap.last_slots`).
    """

    def __init__(self, delay: int, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._delay = delay

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """Yield the instructions of every step of the schedule."""
        backwards = weights = 0
        for commands in super().steps():
            if weights < backwards - self._delay and backwards < self.micro_batches:
                sent = any(type(command) is schedule.SendGrad for command in commands[:1])
                commands.insert(int(sent), WeightPass(weights))
                weights += 1
            backwards += any(type(command) is schedule.BackwardPass for command in commands)
            ends = [type(command) is schedule.ReduceTiedGrads for command in commands]
            if any(ends):
                commands.insert(ends.index(True), WeightPass(weights))
            yield commands
