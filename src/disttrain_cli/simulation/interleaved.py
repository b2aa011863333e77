"""Interleaved 1F1B on separate devices: one vectorised update per turn of all devices' passes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.schedule.interleaved import Pass, awaited, passes, turns
from disttrain_cli.simulation.feeding import Feed, load_waits_s
from disttrain_cli.simulation.timeline import Floats, Pipeline, Timeline
from disttrain_cli.spec.trace import BACKWARD, FORWARD

Ints = NDArray[np.int64]


def simulate(pipeline: Pipeline, feeds: Sequence[Feed] = ()) -> Timeline:
    """Return the timeline of a step whose stages take turns on `Pipeline.devices`.

    The first forward of a slot on a device waits for its data (`feeds`, by the first stage there).
    """
    assert pipeline.weight_s is None
    slots, count, replicas = pipeline.forward_s.shape
    devices = pipeline.devices
    program = _program(devices, count, slots)
    leads = _leads_s(pipeline, devices)
    # by index in the program; nothing waits for the last row
    times_s = np.stack([pipeline.forward_s, pipeline.backward_s]).transpose(0, 2, 1, 3)
    times_s = times_s.reshape(-1, replicas)[program.numbers]
    least_s = np.zeros_like(times_s)
    least_s[program.places[FORWARD, :, 0]] = leads
    hold_s = np.append(pipeline.transfer_s, 0.0)[program.cuts][:, None]
    fetches = {
        int(number): (feed, slot)
        for feed in feeds
        for slot, number in enumerate(program.places[FORWARD, feed.stage])
    }
    starts_s = np.empty_like(times_s)
    ends_s, free = np.zeros((len(times_s) + 1, replicas)), np.zeros((devices, replicas))
    for begin, stop in pairwise(program.turns):
        turn, at = slice(begin, stop), program.devices[begin:stop]
        ready = ends_s.take(program.sources[turn], axis=0)
        ready += hold_s[turn]
        np.maximum(ready, least_s[turn], out=ready)
        np.maximum(ready, free.take(at, axis=0), out=ready)
        for number in range(begin, stop) if fetches else ():
            if number in fetches:
                feed, slot = fetches[number]
                ready[number - begin] = feed.fetch(slot, ready[number - begin])
        starts_s[turn] = ready
        ready += times_s[turn]
        free[at] = ends_s[turn] = ready
    starts, ends = (table[program.places].swapaxes(1, 2) for table in (starts_s, ends_s))
    return Timeline(
        starts[FORWARD],
        ends[FORWARD],
        starts[BACKWARD],
        ends[BACKWARD],
        _reduced_s(pipeline, program, free, ends_s) + pipeline.closing_s,
        None if pipeline.load_s is None else load_waits_s(pipeline, feeds),
    )


def _reduced_s(pipeline: Pipeline, program: _Program, free: Floats, ends_s: Floats) -> float:
    """Return the end of the last reduction.

    Args:
        free: [devices, R] end of each device's last pass.
        ends_s: of all passes, by index in the program.
    """
    devices, count = len(free), len(pipeline.replicas)
    if pipeline.reducing is None:
        return float((free + pipeline.reduce_s[:devices, None]).max())
    left_s = pipeline.reducing.left_s(pipeline.backward_s[-1])
    sent_s = pipeline.reducing.until_s.max(axis=0)
    sent = np.zeros_like(free)  # end of each chunk's messages, queued after those of later chunks
    for chunk in reversed(range(count)):
        device, end_s = chunk % devices, ends_s[program.places[BACKWARD, chunk, -1]]
        sent[device] = np.maximum(sent[device] + sent_s[chunk], end_s + left_s[chunk])
    return float(sent.max())


class _Program(NamedTuple):
    """All passes of a step in turns without dependencies inside a turn.

    Numbers are indices in a table [2, chunks of the model, slots].
    """

    numbers: Ints
    devices: Ints
    sources: Ints  # program index of each dependency; the number of all if there is none
    cuts: Ints  # cut crossed by the dependency; -1: none
    turns: list[int]  # first index of each turn, and the number of all
    places: Ints  # [2, chunks of the model, slots]


@lru_cache(maxsize=1)
def _program(devices: int, count: int, slots: int) -> _Program:
    every = 2 * count * slots

    def number_of(one: Pass | None) -> int:
        return every if one is None else (one.operation * count + one.stage) * slots + one.slot

    orders = [passes(devices, count // devices, slots, device) for device in range(devices)]
    rows: list[tuple[int, int, int, int, int]] = []  # turn, number, device, number of source, cut
    for one, turn in turns(orders, count).items():
        source = awaited(one, count)
        same = source is None or source.stage == one.stage
        cut = -1 if same or source is None else min(source.stage, one.stage)
        rows.append((turn, number_of(one), one.stage % devices, number_of(source), cut))
    turn_of, numbers, of, sources, cuts = np.array(sorted(rows)).T
    places = np.empty(every + 1, np.int64)
    places[np.append(numbers, every)] = np.arange(every + 1)
    begins = np.flatnonzero(np.diff(turn_of, prepend=-1, append=turn_of[-1] + 1)).tolist()
    shape = 2, count, slots
    return _Program(numbers, of, places[sources], cuts, begins, places[:-1].reshape(shape))


def _leads_s(pipeline: Pipeline, devices: int) -> Floats:
    """Return [chunks of the model, R] the earliest start of each chunk's first forward.

    A device gathers one chunk's weights after the other's.
    """
    leads = pipeline.lead_s.copy()
    if pipeline.gathering is not None:
        sent_s = pipeline.gathering.until_s.max(axis=0)
        for chunk in range(devices, len(leads)):
            leads[chunk] += sent_s[chunk % devices : chunk : devices].sum()
    return leads
