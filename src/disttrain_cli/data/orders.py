"""The orders of a run's steps: functions of the index, the layout, the profile, the seed and the step.

The same on every rank and preprocessing worker.
"""

from __future__ import annotations

from disttrain_cli.data.index import Index
from disttrain_cli.data.ordering import count_costs, order_step
from disttrain_cli.data.packing import Packing, SequenceStream
from disttrain_cli.data.sizes import sizes_of
from disttrain_cli.data.slots import StepOrder
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile

KEPT = 3  # the newest step and those before it, whose last slots may still be in preparation


class Orders:
    """Orders step by step; the last few are remembered. One thread at a time may ask."""

    def __init__(self, run: RunFile, layout: Layout, index: Index, profile: Profile | None = None) -> None:
        self._run, self._profile = run, profile
        self.layout, self.index = layout, index
        self._stream = SequenceStream(index, run.train.seed)
        self._steps: dict[int, tuple[StepOrder, Packing]] = {}

    def of(self, step: int) -> tuple[StepOrder, Packing]:
        """What every replica of every unit does in a step, and the global batch, in the order of the stream."""
        if step not in self._steps:
            size = self.layout.global_batch_size
            batch = self._stream.batch(step * size, size)
            order = order_step(batch, self.layout, step, self._run.train.ordering,
                               count_costs(sizes_of(batch), self.index.inputs))
            self._steps = {number: kept for number, kept in self._steps.items() if number > step - KEPT}
            self._steps[step] = (order, batch)
        return self._steps[step]
