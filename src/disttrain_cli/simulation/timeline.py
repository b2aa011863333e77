"""Input and output of a simulation: times per (slot, stage, replica), and the timeline.

Shape letters: n slots · S stages of the whole pipeline · R replicas of the widest unit. Entries of
replicas that a stage does not have are NaN in a timeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.schedule.one_f_one_b import last_slots
from disttrain_cli.spec.stage_graph import stages_to_end
from disttrain_cli.spec.trace import WEIGHTS

if TYPE_CHECKING:
    from disttrain_cli.costs.overlap import Hidden

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pipeline:
    """Work of one step; stages are numbered through all units, each before those that it feeds.

    Several stages may feed one, which then starts a slot when all of them have finished it; one may
    feed several, and starts a slot's backward when all of them have finished it.
    """

    replicas: NDArray[np.int64]  # [S] replicas of each stage
    entry: NDArray[np.bool_]  # [S] the stage is the first of its unit
    # stages on both sides of every cut, sender first (`spec.stage_graph.stage_cuts`)
    cuts: tuple[tuple[int, int], ...]
    forward_s: Floats  # [n, S, R]
    backward_s: Floats  # [n, S, R]
    transfer_s: Floats  # [cuts] time of one crossing, either way
    reduce_s: Floats  # [S] gradient reduction at the end of the step
    step_s: float = 0.0  # optimizer step, after every reduction
    # if messages overlap with passes, these replace `reduce_s` and `step_s`: reductions, which the
    # gradient norm and so the step's end wait for; optimizer steps and gathers, which then begin
    # the next step
    reducing: Hidden | None = None
    gathering: Hidden | None = None
    # ranks of a replica that stages take turns on, the s-th on the s mod devices-th (interleaved
    # 1F1B); `reduce_s` is then that of all stages of a rank. 0: every stage has its own
    devices: int = 0
    # [n, S, R] preparation of a slot's data; None: always ready (`feeding`)
    load_s: Floats | None = None
    prefetch: int = 1  # slots that are prepared ahead of the requested one
    # [n, S, R] weight gradients of split backwards, which `backward_s` then does not include, and
    # [S] the number of slots by which they are deferred; None: backwards are not split
    weight_s: Floats | None = None
    weight_delay: NDArray[np.int64] | None = None

    @property
    def present(self) -> NDArray[np.bool_]:
        """[S, R] True for replicas that exist."""
        return np.arange(self.forward_s.shape[2])[None, :] < self.replicas[:, None]

    @property
    def parts_s(self) -> list[Floats]:
        """[n, S, R] each: forwards, backwards and, if these are split, weight gradients."""
        parts = [self.forward_s, self.backward_s]
        return parts if self.weight_s is None else [*parts, self.weight_s]

    @property
    def computing_s(self) -> Floats:
        """[n, S, R] compute of a slot, all passes together."""
        return sum(self.parts_s[1:], self.parts_s[0])

    @property
    def lead_s(self) -> Floats:
        """[S, R] time before the first forward, for weights that the step before updated."""
        if self.gathering is None:
            return np.zeros(self.forward_s.shape[1:])
        return self.gathering.left_s(self.forward_s[0])

    @property
    def exposed_s(self) -> Floats:
        """[S, R] exposed reduction after every replica's last pass."""
        if self.reducing is None:
            whole_s = self.reduce_s.reshape(-1, *(1,) * (self.forward_s.ndim - 2))
            return np.broadcast_to(whole_s, self.forward_s.shape[1:])
        delays = np.zeros_like(self.replicas) if self.weight_delay is None else self.weight_delay
        last_s = [self.last_pass_s(stage, delay) for stage, delay in enumerate(delays.tolist())]
        return self.reducing.left_s(np.stack(last_s))

    def last_pass_s(self, stage: int, delay: int) -> Floats:
        """Return the passes [R, ...] that overlap with a stage's reductions.

        Args:
            stage: index of the stage.
            delay: number of slots by which its weight gradients are deferred.
        """
        assert self.reducing is not None
        operation = int(self.reducing.operation[stage])
        slots = last_slots(len(self.forward_s), delay if operation == WEIGHTS else None)
        # summed in the order of the slots, whatever their layout in memory
        return reduce(np.add, self.parts_s[operation][slots.start :, stage])

    @property
    def closing_s(self) -> float:
        """Seconds from the last reduction to the step's end."""
        return self.step_s if self.gathering is None else 0.0

    @property
    def to_end(self) -> NDArray[np.int64]:
        """[S] number of stages from each one to the end of its line, itself included."""
        return np.array(stages_to_end(self.cuts, len(self.replicas)))


@dataclass(frozen=True)
class Timeline:
    """Start and end of every forward and backward in s, [n, S, R], and derived figures."""

    forward_start: Floats
    forward_end: Floats
    backward_start: Floats
    backward_end: Floats
    iteration_s: float
    # [n, S, R] from the request of a slot's data to their arrival, if they are prepared
    load_wait_s: Floats | None = None
    # weight gradients of split backwards
    weight_start: Floats | None = None
    weight_end: Floats | None = None

    @property
    def busy_s(self) -> Floats:
        """[S, R] compute time of every rank; NaN for replicas that do not exist."""
        busy = self.forward_end - self.forward_start + self.backward_end - self.backward_start
        if self.weight_start is not None and self.weight_end is not None:
            busy += self.weight_end - self.weight_start
        return busy.sum(axis=0)
