"""Playing recorded steps again with delays removed: what a step would take if…

A step is a graph: every pass (forward or backward of one rank in one slot) starts after the previous pass of its
rank and after the passes it receives from:

    start = max(end of previous pass + handover, ends of sources) + transfer + load + gap

With every term as recorded this gives the recorded step back; the difference is reported as unexplained. Steps
share one graph, so a replay is one walk over its levels (passes that depend on earlier levels only) with all steps
side by side [passes, steps].
"""

from __future__ import annotations

import graphlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.database import Database
from disttrain_cli.analysis.recorded import chosen_steps

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Delays:
    """Seconds of every pass, [passes, steps]; `update_s` [steps] follows the last pass of a step."""

    compute: Floats
    transfer: Floats
    handover: Floats
    load: Floats
    gap: Floats
    update: Floats


@dataclass(frozen=True)
class Level:
    """Passes that depend on earlier levels only. Many are fed by the same ones, so each set is looked at once."""

    passes: slice
    fed: Ints  # those of them that have sources, counted from the level's first
    set_of: Ints  # the set of sources of each of these
    starts: Ints  # where each set begins
    sources: Ints  # the sets, one after the other


@dataclass(frozen=True)
class Graph:
    """Passes of a step, level by level: each follows what it depends on. With what was recorded."""

    steps: Ints
    rank: Ints
    slot: Ints
    backward: NDArray[np.bool_]
    unit: list[str]
    stage: Ints
    replica: Ints
    depth: Ints
    previous: Ints  # pass before it on its rank, -1 = none
    sources: list[Ints]
    levels: list[Level]
    predicted: Floats  # [passes, steps] seconds that the profile expects for the recorded work
    recorded: Delays
    window: Floats  # [steps]
    devices: dict[str, float]  # unit → devices for which one of its ranks stands

    def replay(self, delays: Delays) -> Floats:
        """Seconds of every step [steps] with these delays."""
        end = np.zeros((len(delays.compute) + 1, len(self.steps)))  # the last row: nothing before it
        after_sources = delays.transfer + delays.load + delays.gap + delays.compute
        for level in self.levels:
            ready = end[self.previous[level.passes]] + delays.handover[level.passes]
            if len(level.fed):
                latest = np.maximum.reduceat(end[level.sources], level.starts, axis=0)
                ready[level.fed] = np.maximum(ready[level.fed], latest[level.set_of])
            end[level.passes] = ready + after_sources[level.passes]
        return end.max(axis=0) + delays.update

    def without_delays(self) -> Delays:
        """As recorded, but typical transfers (the median of the unit and direction) and no waits for data or host."""
        recorded = self.recorded
        groups = self.groups("unit", "backward")
        still = np.zeros_like(recorded.load)
        return replace(
            recorded,
            transfer=_per_group(recorded.transfer, groups, np.median),
            handover=_per_group(recorded.handover, groups, np.median),
            load=still,
            gap=still,
            update=np.full_like(recorded.update, np.median(recorded.update)),
        )

    def groups(self, *columns: str) -> Ints:
        """A number per pass, equal where the columns are."""
        keys = [np.unique(np.asarray(getattr(self, column)), return_inverse=True)[1] for column in columns]
        return np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)


def group_mean(values: Floats, groups: Ints) -> Floats:
    """Each pass's mean over its group and all steps, [passes, steps]."""
    return _per_group(values, groups, np.mean)


def _per_group(values: Floats, groups: Ints, statistic: Any) -> Floats:
    out = np.empty_like(values)
    for group in np.unique(groups):
        out[groups == group] = statistic(values[groups == group])
    return out


def build_graph(database: Database) -> Graph | None:
    """The graph of the measured steps, or None when no step is whole enough; reasons go to the warnings."""
    columns = database.columns("passes", steps=chosen_steps(database))
    if not len(columns["step"]):
        return None
    windows = database.sql("SELECT step, window_s, (end_ns - compute_end_ns) / 1e9 AS update_s FROM windows")
    by_step = {int(row["step"]): row for row in windows}

    backward = np.asarray(columns["operation"] == "backward", dtype=bool)
    rank, slot = (np.asarray(columns[name], dtype=np.int64) for name in ("rank", "slot"))
    keys = (rank * (slot.max() + 2) + slot + 1) * 2 + backward
    _, first, passes = np.unique(keys, return_index=True, return_inverse=True)
    steps, step = np.unique(np.asarray(columns["step"], dtype=np.int64), return_inverse=True)

    def spread(name: str) -> Floats:
        out = np.full((len(first), len(steps)), np.nan)
        out[passes, step] = columns[name]
        return out

    start = spread("start_s")
    whole = ~np.isnan(start).any(axis=0)
    if not whole.any():
        database.warnings.append("no step holds every pass of every rank: steps cannot be replayed")
        return None
    table = {
        name: spread(name)[:, whole]
        for name in (
            "start_s",
            "duration_s",
            "predicted_s",
            "load_s",
            "received_s",
            "received_from_s",
            "handover_s",
            "gap_s",
        )
    }
    columns = {name: np.asarray(values)[first] for name, values in columns.items()}
    after = {row["before"]: row["after"] for row in database.sql("SELECT before, after FROM cuts")}
    order = _order(columns, backward[first], table, after)
    if order is None:
        database.warnings.append(
            "the recorded order of passes contradicts itself (clocks apart?): steps cannot be replayed"
        )
        return None
    place, previous, sources, levels = order
    columns = {name: values[place] for name, values in columns.items()}
    table = {name: values[place] for name, values in table.items()}
    end = table["start_s"] + table["duration_s"]
    transfer = np.zeros_like(end)
    for index, feeding in enumerate(sources):
        if len(feeding):
            ready = np.maximum(table["received_from_s"][index], end[feeding].max(axis=0))
            until = table["received_from_s"][index] + table["received_s"][index]
            transfer[index] = np.maximum(0.0, until - ready)
        else:
            transfer[index] = table["received_s"][index]
    kept = steps[whole]
    # Replicas that share a process of a rehearsal go on when the slowest of them has: no host holds them up.
    lockstep = database.job is not None and database.job.rehearsed is not None
    return Graph(
        steps=kept,
        rank=columns["rank"].astype(np.int64),
        slot=columns["slot"].astype(np.int64),
        backward=columns["operation"] == "backward",
        unit=[str(unit) for unit in columns["unit"]],
        stage=columns["stage"].astype(np.int64),
        replica=columns["replica"].astype(np.int64),
        depth=columns["depth"].astype(np.int64),
        previous=previous,
        sources=sources,
        levels=levels,
        predicted=table["predicted_s"],
        recorded=Delays(
            table["duration_s"],
            transfer,
            table["handover_s"],
            table["load_s"],
            np.zeros_like(end) if lockstep else table["gap_s"],
            np.array([by_step[int(s)]["update_s"] for s in kept]),
        ),
        window=np.array([by_step[int(s)]["window_s"] for s in kept]),
        devices={row["unit"]: row["devices_per_rank"]
                 for row in database.sql("SELECT unit, devices_per_rank FROM units")},
    )


def _order(
    columns: dict[str, Any], backward: NDArray[np.bool_], table: dict[str, Floats], after: dict[int, int]
) -> tuple[Ints, Ints, list[Ints], list[Level]] | None:
    """Order of the passes by level, and in that order the previous one on each rank, the sources and the levels.

    `after` says by depth which stage takes a stage's output. Passes of a neighbouring unit feed all replicas, unless
    the record contradicts: what ended after a pass had started did not feed it.
    """
    start, count = table["start_s"], len(backward)
    end = start + table["duration_s"]
    previous = np.full(count, -1, dtype=np.int64)
    by_rank = np.lexsort((end[:, 0], start[:, 0], columns["rank"]))
    for one, following in itertools.pairwise(by_rank):
        if columns["rank"][one] == columns["rank"][following]:
            previous[following] = one
    gathered: dict[tuple[bool, int, int], list[int]] = {}
    for index in range(count):
        gathered.setdefault(
            (bool(backward[index]), int(columns["slot"][index]), int(columns["depth"][index])), []
        ).append(index)
    at = {key: np.array(members, dtype=np.int64) for key, members in gathered.items()}
    before: dict[int, list[int]] = {}
    for depth, taker in after.items():
        before.setdefault(taker, []).append(depth)
    sources: list[Ints] = []
    for index in range(count):
        back, slot, depth = bool(backward[index]), int(columns["slot"][index]), int(columns["depth"][index])
        depths = ([after[depth]] if depth in after else []) if back else before.get(depth, [])
        near = np.concatenate([np.empty(0, np.int64), *(at[back, slot, d] for d in depths if (back, slot, d) in at)])
        if len(near) and columns["unit"][near[0]] == columns["unit"][index]:
            near = near[columns["replica"][near] == columns["replica"][index]]
        sources.append(near[(end[near] <= start[index] + 1e-9).all(axis=1)])
    sorter = graphlib.TopologicalSorter(
        {
            index: [*sources[index].tolist(), *([int(previous[index])] if previous[index] >= 0 else [])]
            for index in range(count)
        }
    )
    sizes: list[int] = []
    place = np.empty(0, dtype=np.int64)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return None
    while sorter.is_active():
        ready = sorter.get_ready()
        sorter.done(*ready)
        place = np.concatenate([place, np.array(ready, dtype=np.int64)])
        sizes.append(len(ready))
    number = np.empty(count, dtype=np.int64)
    number[place] = np.arange(count)
    moved = np.array([number[previous[i]] if previous[i] >= 0 else -1 for i in place], dtype=np.int64)
    fed_by = [number[sources[i]] for i in place]
    first = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    return place, moved, fed_by, [_level(slice(*ends), fed_by[slice(*ends)]) for ends in itertools.pairwise(first)]


def _level(passes: slice, sources: list[Ints]) -> Level:
    sets = {own.tobytes(): own for own in sources if len(own)}
    numbers = {name: number for number, name in enumerate(sets)}
    set_of = [numbers[own.tobytes()] for own in sources if len(own)]
    starts = np.cumsum([0, *(len(own) for own in sets.values())])[:-1]
    return Level(
        passes=passes, fed=np.flatnonzero([len(own) > 0 for own in sources]), set_of=np.array(set_of, dtype=np.int64),
        starts=starts, sources=np.concatenate([*sets.values(), np.empty(0, dtype=np.int64)]))
