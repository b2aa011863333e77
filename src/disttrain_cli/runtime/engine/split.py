"""1F1B with backwards in two parts: weights' parts some slots after the inputs' (arXiv 2401.10241).

Messages are those of 1F1B, in its order: a weights' part is computed once the gradient of the slot
before it has left, and before the next activation is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule


class WeightPass(schedule.BufferOpInstruction):
    """Compute the gradients of the weights that the backward of an earlier slot put aside; the last
    one of a step also those of all later slots."""


class SplitSchedule(schedule.TrainSchedule):
    """A stage whose weights' parts come `delay` slots after their inputs' parts, those that are
    left after the last backward together (`costs.overlap.last_slots`)."""

    def __init__(self, delay: int, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._delay = delay

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """Commands of every step of the schedule."""
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
