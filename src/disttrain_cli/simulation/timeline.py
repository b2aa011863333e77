"""What a simulation takes and returns: times per (slot, stage, replica), and when everything
happened.

Shape letters: n slots · S stages of the whole pipeline · R replicas of the widest unit. Entries of
replicas that a stage does not have are NaN in a timeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.overlap import Hidden, last_slots
from disttrain_cli.spec.stage_graph import stages_to_end
from disttrain_cli.spec.trace import BACKWARD, FORWARD, WEIGHTS

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pipeline:
    """The work of one step: stages numbered through all units, each before those that take its
    output.

    Several stages may hand over to one, which then starts a slot when all of them have finished it;
    one may hand over to several, and starts a slot's backward when all of them have finished it.
    """

    replicas: NDArray[np.int64]  # [S] replicas of each stage
    entry: NDArray[np.bool_]  # [S] whether the stage is the first of its unit
    # stages on both sides of every cut, sender first (`spec.stage_graph.stage_cuts`)
    cuts: tuple[tuple[int, int], ...]
    forward_s: Floats  # [n, S, R]
    backward_s: Floats  # [n, S, R]
    transfer_s: Floats  # [S-1] time of one crossing of each cut, either way
    reduce_s: Floats  # [S] gradient reduction at the end of the step
    step_s: float = 0.0  # optimizer step, after every reduction
    # where messages run behind passes, instead of the two before: reductions, which the norm waits
    # for and with it the step's end; optimizer steps and gathers, which then begin the next step
    reducing: Hidden | None = None
    gathering: Hidden | None = None
    # [n, S, R] preparing a slot's data; None: they are always there (`feeding`)
    load_s: Floats | None = None
    prefetch: int = 1  # slots that are prepared ahead of the one that a replica asks for
    # [n, S, R] the weights' parts of backwards in two parts, which `backward_s` are without then,
    # and [S] how many slots later they are computed; None: all backwards are whole
    weight_s: Floats | None = None
    weight_delay: NDArray[np.int64] | None = None

    @property
    def present(self) -> NDArray[np.bool_]:
        """[S, R] which replicas exist."""
        return np.arange(self.forward_s.shape[2])[None, :] < self.replicas[:, None]

    @property
    def parts_s(self) -> list[Floats]:
        """[n, S, R] each: forwards, backwards and, where these have two parts, weights' parts."""
        parts = [self.forward_s, self.backward_s]
        return parts if self.weight_s is None else [*parts, self.weight_s]

    @property
    def computing_s(self) -> Floats:
        """[n, S, R] all parts of a slot together."""
        return sum(self.parts_s[1:], self.parts_s[0])

    @property
    def lead_s(self) -> Floats:
        """[S, R] before every replica's first forward, for the weights that the step before
        updated."""
        if self.gathering is None:
            return np.zeros(self.forward_s.shape[1:])
        return self.gathering.left_s(self.forward_s[0])

    @property
    def exposed_s(self) -> Floats:
        """[S, R] reduction after every replica's last pass."""
        if self.reducing is None:
            whole_s = self.reduce_s.reshape(-1, *(1,) * (self.forward_s.ndim - 2))
            return np.broadcast_to(whole_s, self.forward_s.shape[1:])
        delays = np.zeros_like(self.replicas) if self.weight_delay is None else self.weight_delay
        last_s = [self.last_pass_s(stage, delay) for stage, delay in enumerate(delays.tolist())]
        return self.reducing.left_s(np.stack(last_s))

    def last_pass_s(self, stage: int, delay: int) -> Floats:
        """[R, ...] the pass behind which a stage's reductions run, if its weights' parts came so
        many slots later."""
        assert self.reducing is not None
        operation = int(self.reducing.operation[stage])
        slots = last_slots(len(self.forward_s), delay if operation == WEIGHTS else None)
        # added in the order of the slots, whatever their layout in memory
        return reduce(np.add, self.parts_s[operation][slots.start :, stage])

    @property
    def closing_s(self) -> float:
        """From the last reduction to the step's end."""
        return self.step_s if self.gathering is None else 0.0

    @property
    def to_end(self) -> NDArray[np.int64]:
        """[S] stages from each one to the end of its line, itself included."""
        return np.array(stages_to_end(self.cuts, len(self.replicas)))

    def before(self, stage: int) -> list[int]:
        """Numbers of the cuts before a stage: over which it takes what others hand over."""
        return [cut for cut, (_, taker) in enumerate(self.cuts) if taker == stage]

    def after(self, stage: int) -> list[int]:
        """Numbers of the cuts after a stage."""
        return [cut for cut, (sender, _) in enumerate(self.cuts) if sender == stage]


@dataclass(frozen=True)
class Timeline:
    """Start and end of every forward and backward in s, [n, S, R], and what follows from them."""

    forward_start: Floats
    forward_end: Floats
    backward_start: Floats
    backward_end: Floats
    iteration_s: float
    # [n, S, R] from asking for a slot's data to having them, where they are prepared
    load_wait_s: Floats | None = None
    # of weights' parts, where backwards have two
    weight_start: Floats | None = None
    weight_end: Floats | None = None

    @property
    def busy_s(self) -> Floats:
        """[S, R] time that every rank computes; NaN for replicas that do not exist."""
        busy = self.forward_end - self.forward_start + self.backward_end - self.backward_start
        if self.weight_start is not None and self.weight_end is not None:
            busy += self.weight_end - self.weight_start
        return busy.sum(axis=0)

    @property
    def bubble_fraction(self) -> float:
        """Share of the ranks' time, over the whole iteration, in which they do not compute."""
        busy = self.busy_s
        ranks = int(np.isfinite(busy).sum())
        return (
            float(1.0 - np.nansum(busy) / (ranks * self.iteration_s)) if self.iteration_s else 0.0
        )


def operations(slots: int, to_end: int, delay: int | None = None) -> list[tuple[int, int]]:
    """Order of a stage's operations as (its place in `COMPUTE`, slot): DeepSpeed's TrainSchedule
    (1F1B).

    With `to_end` stages from it to the end, the backward of slot k comes after the forward of slot
    k + to_end - 1, or of the last slot. Weights' parts come `delay` slots later; None: backwards
    have one part. Those that are left at the end are computed layer by layer, over all their slots:
    here, as in traces, each has the time that it takes, one after the other.
    """
    ahead = to_end - 1
    order = [(FORWARD, slot) for slot in range(min(ahead, slots))]
    for slot in range(slots):
        if slot + ahead < slots:
            order.append((FORWARD, slot + ahead))
        order.append((BACKWARD, slot))
        order.extend((WEIGHTS, later) for later in weights_after(slot, slots, delay))
    return order


def weights_after(slot: int, slots: int, delay: int | None) -> range:
    """Slots whose weights' parts follow the backward of a slot."""
    if delay is None:
        return range(0)
    if slot + 1 == slots:
        return last_slots(slots, delay)
    return range(max(0, slot - delay), max(0, slot - delay + 1))
