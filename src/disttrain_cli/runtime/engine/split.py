"""1F1B with backwards in two parts: weights' parts some slots after the inputs' (arXiv 2401.10241).

Messages are those of 1F1B, in its order: a weights' part is computed once the gradient of the slot
before it has left, and before the next activation is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe import schedule


class WeightPass(schedule.BufferOpInstruction):
    """Compute the gradients of the weights that the backward of an earlier slot put aside."""


class SplitSchedule(schedule.TrainSchedule):
    """A stage whose weights' parts come `delay` slots after their inputs' parts, the last ones at
    the end."""

    def __init__(self, delay: int, micro_batches: int, stages: int, stage_id: int) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self._delay = delay

    def steps(self) -> Iterator[list[schedule.PipeInstruction]]:
        """Commands of every step of the schedule."""
        backwards = weights = 0
        for commands in super().steps():
            if backwards - self._delay > weights:
                sent = any(type(command) is schedule.SendGrad for command in commands[:1])
                commands.insert(int(sent), WeightPass(weights))
                weights += 1
            backwards += any(type(command) is schedule.BackwardPass for command in commands)
            ends = [type(command) is schedule.ReduceTiedGrads for command in commands]
            if any(ends):
                rest = [WeightPass(slot) for slot in range(weights, self.micro_batches)]
                commands[ends.index(True) : ends.index(True)] = rest
            yield commands
