"""1F1B over units of different DP on separate devices: one vectorised update per tick.

`schedule.one_f_one_b` has the ticks of all passes; parallel lines of stages end together. At every
tick a stage does one pass at most, and it waits for its own last one and for the one that its
neighbour did a tick before. All replicas of all stages are in one vector; a stage's forwards are at
ticks of one parity and its backwards at the others, so what each rank waits for depends on the
tick's parity only and is looked up beforehand. If several stages feed one, it waits for all of
them, and one that feeds several waits for the backwards of all of them (if lines after it are
shorter, their last stage has time to spare between a slot's two passes). Sends do not block the
sender. A slot enters a unit when all replicas of the unit before have finished it, because images
are distributed over replicas one by one. If the data of a slot have to be prepared, its forward
waits for them too (`feeding`). Weight gradients of split backwards delay only their own rank, which
computes them between a backward and its next operation (Qi et al. 2024, arXiv 2401.10241). Messages
overlapped with passes (`costs.overlap`) delay a rank's first forward, and the step's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.schedule.one_f_one_b import inputs, last_slots, ticks, weights_after
from disttrain_cli.simulation import interleaved
from disttrain_cli.simulation.feeding import Feed, feeds_of, load_waits_s
from disttrain_cli.simulation.timeline import Floats, Pipeline, Timeline
from disttrain_cli.spec.trace import BACKWARD, FORWARD

Ints = NDArray[np.int64]


def simulate(pipeline: Pipeline) -> Timeline:
    """Return the timeline of one training step, the first of a run.

    Time and memory are O(steps · replicas of all stages).
    """
    return simulate_steps([pipeline])[0]


def simulate_steps(pipelines: Sequence[Pipeline]) -> list[Timeline]:
    """Return timelines of consecutive steps, the first of them the run's first.

    Times count from the start of each step. All ranks begin a step together, when the one before is
    over; data prepared ahead of it are ready.
    """
    feeds, timelines = feeds_of(pipelines), []
    for pipeline in pipelines:
        timelines.append(_step(pipeline, feeds))
        for feed in feeds:
            feed.end_step(timelines[-1].iteration_s)
    return timelines


@dataclass(frozen=True)
class Program:
    """Pass of every rank at each tick; all stages' ranks are in one vector."""

    steps: int  # number of ticks
    first: Ints  # [S+1] first rank of every stage
    stage_of: Ints  # [ranks]
    ticks: list[tuple[range, range]]  # [S] of forwards and backwards, by slot
    hold_s: Floats  # [steps, S] transfer before a stage's pass; -inf: no pass
    # ranks, an additional stage that they wait for, transfer by tick
    joins: list[tuple[slice, int, Floats]]
    sources: list[Ints]  # for even and odd ticks, [ranks] index in the clock that they wait for
    awaited: list[int]  # stages whose latest replica others wait for

    def table(self, durations: Floats, is_forward: bool, spent: Floats) -> None:
        """Enter durations [n, S, R, ...] of forwards or of backwards in a table of all passes.

        Args:
            durations: seconds of the passes.
            is_forward: they are forwards.
            spent: [steps, ranks, ...] the table.
        """
        for stage in range(len(self.ticks)):
            replicas = self.first[stage + 1] - self.first[stage]
            spent[self.at(stage, is_forward)] = durations[:, stage, :replicas]

    def follow(self, pipeline: Pipeline, weight_s: Floats) -> Floats:
        """Return [steps, ranks, ...] the weight gradients after each tick's passes.

        Args:
            pipeline: its replicas and delays are used.
            weight_s: [n, S, R, ...] durations of the weight gradients.
        """
        spent = np.zeros((self.steps, len(self.stage_of), *weight_s.shape[3:]))
        for stage in range(len(self.ticks)):
            own_s = weight_s[:, stage, : pipeline.replicas[stage]]
            spent[self.at(stage, False)] = following(own_s, _delay(pipeline, stage))
        return spent

    def at(self, stage: int, is_forward: bool) -> tuple[slice, slice]:
        """Return the index of a stage's forwards or backwards in a table [steps, ranks]."""
        own = self.ticks[stage][0 if is_forward else 1]
        return _slice(own), slice(self.first[stage], self.first[stage + 1])


def following(weight_s: Floats, delay: int) -> Floats:
    """Return [n, R, ...] weight gradients after each slot's backward, from a stage's [n, R, ...].

    `schedule.one_f_one_b.weights_after` has their order.
    """
    last = last_slots(len(weight_s), delay)
    follow_s = np.zeros_like(weight_s)
    follow_s[delay:-1] = weight_s[: last.start]
    follow_s[-1] = weight_s[last.start :].sum(axis=0)
    return follow_s


def _delay(pipeline: Pipeline, stage: int) -> int:
    return 0 if pipeline.weight_delay is None else int(pipeline.weight_delay[stage])


def program_of(pipeline: Pipeline) -> Program:
    """Return the schedule of a pipeline without its durations."""
    slots, stages, _ = pipeline.forward_s.shape
    to_end = pipeline.to_end.tolist()
    ticks_of = [ticks(slots, left, max(to_end) - left) for left in to_end]
    steps = max(backwards.stop for _, backwards in ticks_of) - 1
    first = np.concatenate([[0], np.cumsum(pipeline.replicas)])
    stage_of = np.repeat(np.arange(stages), pipeline.replicas)
    hold_s = np.full((steps, stages), -np.inf)
    joins: list[tuple[slice, int, Floats]] = []
    received = inputs(pipeline.cuts)
    for stage, passes in enumerate(ticks_of):
        for operation, own in zip((FORWARD, BACKWARD), map(_slice, passes), strict=True):
            over = received.get((operation, stage), [])
            hold_s[own, stage] = pipeline.transfer_s[over[-1][0]] if over else 0.0
            for cut, other in over[:-1]:
                ranks_of = slice(first[stage], first[stage + 1])
                joins.append((ranks_of, other, np.full(steps, -np.inf)))
                joins[-1][2][own] = pipeline.transfer_s[cut]
    parity = np.array([forwards.start % 2 for forwards, _ in ticks_of])
    sources = _sources(pipeline, first[:-1], stage_of, parity)
    waits = np.concatenate(sources) - len(stage_of)
    awaited = {*waits[(waits >= 0) & (waits < stages)].tolist(), *(other for _, other, _ in joins)}
    return Program(steps, first, stage_of, ticks_of, hold_s, joins, sources, sorted(awaited))


def _step(pipeline: Pipeline, feeds: Sequence[Feed]) -> Timeline:
    """Simulate one step; the feeds continue from the one before."""
    for feed in feeds:
        feed.begin_step(pipeline)
    if pipeline.devices:
        return interleaved.simulate(pipeline, feeds)
    program = program_of(pipeline)
    first, stage_of = program.first, program.stage_of
    ranks, stages = len(stage_of), len(program.ticks)
    spent_s, starts = np.zeros((program.steps, ranks)), np.empty((program.steps, ranks))
    program.table(pipeline.forward_s, True, spent_s)
    program.table(pipeline.backward_s, False, spent_s)
    # end of every rank's last operation, the latest of every stage, and 0
    clock = np.zeros(ranks + stages + 1)
    arrived, latest = clock[:ranks], clock[ranks:-1]
    arrived[:] = pipeline.lead_s[pipeline.present]
    follow_s = None if pipeline.weight_s is None else program.follow(pipeline, pipeline.weight_s)
    free = arrived if follow_s is None else arrived.copy()  # when each rank can continue
    held = np.empty(ranks)
    fed = [
        (feed, program.ticks[feed.stage][0], slice(first[feed.stage], first[feed.stage + 1]))
        for feed in feeds
    ]
    for step in range(program.steps):
        start = starts[step]
        clock.take(program.sources[step % 2], out=start, mode="clip")
        program.hold_s[step].take(stage_of, out=held, mode="clip")
        start += held
        for ranks_of, other, transfer_s in program.joins:
            np.maximum(start[ranks_of], latest[other] + transfer_s[step], out=start[ranks_of])
        np.maximum(start, free, out=start)
        for feed, forwards, ranks_of in fed:
            if step in forwards:
                start[ranks_of] = feed.fetch(forwards.index(step), start[ranks_of])
        np.add(start, spent_s[step], out=arrived)
        np.maximum.reduceat(arrived, first[:-1], out=latest)
        if follow_s is not None:
            np.add(arrived, follow_s[step], out=free)
    ends = spent_s
    ends += starts
    # [start or end, n, S, R]
    forward, backward = (np.full((2, *pipeline.forward_s.shape), np.nan) for _ in range(2))
    for stage, replicas in enumerate(pipeline.replicas.tolist()):
        for is_forward, tables in ((True, forward), (False, backward)):
            for table, values in zip(tables, (starts, ends), strict=True):
                table[:, stage, :replicas] = values[program.at(stage, is_forward)]
    return Timeline(
        forward[0],
        forward[1],
        backward[0],
        backward[1],
        float((free + pipeline.exposed_s[pipeline.present]).max()) + pipeline.closing_s,
        None if pipeline.load_s is None else load_waits_s(pipeline, feeds),
        *weight_times(pipeline, backward[1]),
    )


def weight_times(
    pipeline: Pipeline, backward_end: Floats
) -> tuple[Floats, Floats] | tuple[None, None]:
    """Return start and end of all weight gradients, [n, S, R], from the ends of the backwards."""
    if pipeline.weight_s is None:
        return None, None
    slots = len(backward_end)
    starts = np.empty_like(backward_end)
    for stage in range(backward_end.shape[1]):
        for slot in range(slots):
            begin_s = backward_end[slot, stage]
            for later in weights_after(slot, slots, _delay(pipeline, stage)):
                starts[later, stage] = begin_s
                begin_s = begin_s + pipeline.weight_s[later, stage]
    return starts, starts + pipeline.weight_s


def _slice(steps: range) -> slice:
    return slice(steps.start, steps.stop, steps.step)


def _sources(pipeline: Pipeline, first: Ints, stage_of: Ints, parity: Ints) -> list[Ints]:
    """Return, for even and odd ticks, [ranks] the index in the clock that each pass waits for.

    A forward waits for the stage before, a backward for the one after (the last of several): for
    the same replica, or at the border of two units for the latest one.

    Args:
        parity: [S] of the ticks of a stage's forwards; its backwards are at the others.
    """
    stages, ranks = len(pipeline.replicas), len(stage_of)
    replica = np.arange(ranks) - first[stage_of]
    last_before, last_after = np.full((2, stages), -1)
    for sender, taker in pipeline.cuts:  # in ascending order
        last_before[taker], last_after[sender] = sender, taker
    waits: list[Ints] = []
    for neighbour, border in (
        (last_before, pipeline.entry),
        (last_after, pipeline.entry[last_after]),
    ):
        inside = neighbour >= 0
        source = np.maximum(neighbour, 0)
        whole = (ranks + source)[stage_of]
        one = first[source][stage_of] + np.where(border[stage_of], 0, replica)
        several = border & (pipeline.replicas[source] > 1)
        waits.append(
            np.where(inside[stage_of], np.where(several[stage_of], whole, one), ranks + stages)
        )
    forward, backward = waits
    return [np.where(parity[stage_of] == now, forward, backward) for now in (0, 1)]
