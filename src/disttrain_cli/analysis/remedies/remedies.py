"""What would help, and by how much: the recorded steps replayed with one thing changed that a user can change.

Each row changes one thing and leaves everything else as recorded, delays too: what it gains is what the job would
gain by this alone. Gains do not add up: of two causes on the same path, mending one uncovers the other. That is also
why they differ from `losses`, whose parts return one after another and sum to the whole.

What a replay can tell: how delays hide behind each other in the recorded order of passes. What it cannot:
- Uneven work is levelled wholly (`intra_microbatch`, `inter_microbatch`); an ordering cuts no sample, so it gets less.
- With other replicas the data would be ordered anew (`replicas`).
- A faster step needs its data sooner: where data are nearly late now, they may be late then.
- Where ranks share cores, passes would take other times: there nothing is said of other replicas or plans.
A row of basis `plan` is no replay: what it gains is the planner's, between two predictions (`replanning`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from disttrain_cli.analysis import next_commands
from disttrain_cli.analysis.losses import CROWDED, Explained, ratio
from disttrain_cli.analysis.own.database import Database
from disttrain_cli.analysis.remedies.reordering import reordered_s
from disttrain_cli.analysis.remedies.replanning import replan
from disttrain_cli.analysis.remedies.replicas import Record, moved, one_more, record_of, seconds_with
from disttrain_cli.analysis.replay import Delays, Graph, group_mean
from disttrain_cli.analysis.result import Remedy
from disttrain_cli.analysis.walk import Floats
from disttrain_cli.spec.plan import Layout


def remedies(database: Database, graph: Graph, why: Explained, moved_on: bool = False) -> list[Remedy]:
    """Single changes, those that gain most first.

    Args:
        why: `explain` of the graph's recorded passes.
        moved_on: the data are not those of the profile any more, so that nothing is planned with them.
    """
    recorded_s, measured_s = float(graph.replay(graph.recorded).mean()), float(graph.window.mean())
    record = record_of(database, graph)

    def row(cause: str, change: str, command: str, gain_s: float, gpus: int = 0,
            basis: Literal["replay", "plan"] = "replay", at_most: bool = False) -> Remedy:
        return Remedy(cause=cause, change=change, command=command, basis=basis, gpus=gpus, at_most=at_most,
                      step_s=measured_s - gain_s, gain_s=gain_s, gain_pct=100 * gain_s / measured_s)

    found = [row(cause, change, command, recorded_s - float(graph.replay(delays).mean()),
                 at_most=cause in ("intra_microbatch", "inter_microbatch"))
             for cause, change, command, delays in _repairs(database, graph, why)]
    reordered = None
    if database.job is not None and database.job.predicted.ordering == "none":
        reordered = reordered_s(graph)
    if reordered is not None:
        found.append(row("inter_microbatch", "the recorded slots in the order of train.ordering: paper",
                         next_commands.LEVEL, recorded_s - float(reordered.mean())))
    if record is not None:
        found += [row("unit", *layout) for layout in _layouts(record, why, recorded_s, measured_s,
                                                              next_commands.plan_again(database.paths), moved_on)]
    return sorted(found, key=lambda remedy: -remedy.gain_s)


def _layouts(record: Record, why: Explained, recorded_s: float, measured_s: float, again: str, moved_on: bool
             ) -> Iterator[tuple[str, str, float, int, Literal["replay", "plan"]]]:
    """(change, next command, gain, more devices, basis): one replica more of each unit, and the best of as many."""
    present = record.job.layout
    for layout, change in _one_more(record):
        yield (change, f"{again} --gpus {layout.gpus_used}", recorded_s - float(seconds_with(record, layout).mean()),
               layout.gpus_used - present.gpus_used, "replay")
    swaps = [(recorded_s - float(seconds_with(record, layout).mean()), change, layout)
             for layout, change in _moved(record)]
    gain_s, change, layout = max(swaps, key=lambda swap: swap[0], default=(0.0, "", present))
    if gain_s > 0:
        yield change, again, gain_s, layout.gpus_used - present.gpus_used, "replay"
    new = None if moved_on else replan(record, why)
    if new is not None and new.then_s < new.present_s:
        gain_s = (1 - new.then_s / new.present_s) * min(new.present_s, measured_s)
        yield (f"a plan by this run's times: {new.layout.describe()}, microbatches of {new.layout.microbatch_size}",
               again, gain_s, new.layout.gpus_used - present.gpus_used, "plan")


def _repairs(database: Database, graph: Graph, why: Explained) -> Iterator[tuple[str, str, str, Delays]]:
    """(cause, change, next command, delays) of everything that a new layout is not needed for."""
    recorded, usual, job = graph.recorded, graph.without_delays(), database.job
    ranks = graph.groups("rank", "backward")
    own = ratio(group_mean(recorded.compute, ranks), group_mean(why.worked, ranks))

    def computed(then: Floats, now: Floats) -> Delays:
        """Passes that take what `then` explains instead of what `now` does."""
        idle = why.worked <= 0  # replicas without work, which would get some
        return replace(recorded, compute=np.where(idle, then * own, recorded.compute * ratio(then, now)))

    ordered = "train.ordering: best"
    if job is not None and job.predicted.ordering == "best":
        ordered = "raise train.global_batch_size"
    yield ("intra_microbatch", f"equal work on the replicas of every slot, if data could be cut ({ordered})",
           next_commands.LEVEL, computed(why.mean * why.slot, why.worked))
    yield ("inter_microbatch", f"equal work in every slot, if data could be cut ({ordered})", next_commands.LEVEL,
           computed(why.uneven, why.worked))
    yield "stage", "stages of a unit that take equally long", next_commands.REMEASURE, computed(why.worked, why.staged)
    slow = _slowest_rank(graph, why)
    place = int(np.flatnonzero(graph.rank == slow)[0])
    yield ("worker", f"rank {slow} ({graph.unit[place]}, stage {graph.stage[place]}, replica {graph.replica[place]}) "
           "as fast as its peers", next_commands.slow_rank(slow),
           replace(recorded, compute=np.where((graph.rank == slow)[:, None], recorded.compute * ratio(
               why.staged, why.ranked), recorded.compute)))
    quick = np.minimum(recorded.transfer, usual.transfer)
    crowded = graph.crowded > CROWDED
    yield ("communication", "no transfer slower than usual", next_commands.SLOWEST_TRANSFERS,
           replace(recorded, transfer=recorded.transfer if crowded else quick,
                   handover=np.minimum(recorded.handover, usual.handover),
                   update=np.minimum(recorded.update, usual.update)))
    yield "data", "data always ready", next_commands.LEVEL, replace(recorded, load=usual.load)
    yield ("host", "no rank held up by its host", next_commands.HOST_GAPS,
           replace(recorded, gap=usual.gap, compute=why.ranked, transfer=quick if crowded else recorded.transfer))


def _slowest_rank(graph: Graph, why: Explained) -> int:
    took, expected = (np.bincount(graph.rank, values.sum(axis=1)) for values in (why.ranked, why.staged))
    return int(np.argmax(np.divide(took, expected, out=np.zeros_like(took), where=expected > 0)))


def _one_more(record: Record) -> Iterator[tuple[Layout, str]]:
    """Layouts with one replica more of a unit, and what that is in words."""
    for unit in record.job.layout.units:
        layout = one_more(record.job, unit.name)
        if layout is not None:
            more = layout.gpus_used - record.job.layout.gpus_used
            yield layout, f"{_changed(record, layout)} on {more} more device{'s' * (more > 1)}"


def _moved(record: Record) -> Iterator[tuple[Layout, str]]:
    """Layouts of as many devices, with some of one unit given to another."""
    for giver, taker in itertools.permutations([unit.name for unit in record.job.layout.units], 2):
        layout = moved(record.job, giver, taker)
        if layout is not None:
            yield layout, f"{_changed(record, layout)} on the same devices"


def _changed(record: Record, layout: Layout) -> str:
    return ", ".join(f"{before.name} DP {before.dp} → {after.dp}"
                     for before, after in zip(record.job.layout.units, layout.units, strict=True)
                     if before.dp != after.dp)
