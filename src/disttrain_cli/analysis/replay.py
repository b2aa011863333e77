"""Playing recorded steps again with delays removed: what a step would take if…

A step is a graph: every pass (forward or backward of one rank in one slot) starts after the previous pass of its
rank and after the passes it receives from:

    start = max(end of previous pass + handover, ends of sources) + transfer + load + gap

With every term as recorded this gives the recorded step back; the difference is reported as unexplained. Steps
share one graph, so a replay is one walk over the passes with all steps side by side [passes, steps].
"""

from __future__ import annotations

import graphlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.database import Database

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
#: Steps that are replayed, spread evenly over the measured ones.
MOST_STEPS = 32


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
class Graph:
    """Passes of a step in an order in which each follows what it depends on, with what was recorded."""

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
    predicted: Floats  # [passes, steps] seconds that the profile expects for the recorded work
    recorded: Delays
    window: Floats  # [steps]

    def replay(self, delays: Delays) -> Floats:
        """Seconds of every step [steps] with these delays."""
        end = np.zeros_like(delays.compute)
        nothing = np.zeros(len(self.steps))
        after_sources = delays.transfer + delays.load + delays.gap + delays.compute
        for index, sources in enumerate(self.sources):
            before = self.previous[index]
            ready = end[before] + delays.handover[index] if before >= 0 else nothing + delays.handover[index]
            if len(sources):
                ready = np.maximum(ready, end[sources].max(axis=0))
            end[index] = ready + after_sources[index]
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
    measured = [
        int(row["step"]) for row in database.sql("SELECT step FROM windows WHERE measured ORDER BY step")
    ]
    if len(measured) > MOST_STEPS:
        measured = [measured[i] for i in np.linspace(0, len(measured) - 1, MOST_STEPS).astype(int)]
    columns = database.columns("passes", steps=measured)
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
    order = _order(columns, backward[first], table)
    if order is None:
        database.warnings.append(
            "the recorded order of passes contradicts itself (clocks apart?): steps cannot be replayed"
        )
        return None
    place, previous, sources = order
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
        predicted=table["predicted_s"],
        recorded=Delays(
            table["duration_s"],
            transfer,
            table["handover_s"],
            table["load_s"],
            table["gap_s"],
            np.array([by_step[int(s)]["update_s"] for s in kept]),
        ),
        window=np.array([by_step[int(s)]["window_s"] for s in kept]),
    )


def _order(
    columns: dict[str, Any], backward: NDArray[np.bool_], table: dict[str, Floats]
) -> tuple[Ints, Ints, list[Ints]] | None:
    """Topological order of the passes, the previous one on each rank, and the sources, in that order.

    Passes of a neighbouring unit feed all replicas, unless the record contradicts: what ended after a pass had
    started did not feed it.
    """
    start, count = table["start_s"], len(backward)
    end = start + table["duration_s"]
    previous = np.full(count, -1, dtype=np.int64)
    by_rank = np.lexsort((start[:, 0], columns["rank"]))
    for before, after in itertools.pairwise(by_rank):
        if columns["rank"][before] == columns["rank"][after]:
            previous[after] = before
    at: dict[tuple[bool, int, int], list[int]] = {}
    for index in range(count):
        at.setdefault(
            (bool(backward[index]), int(columns["slot"][index]), int(columns["depth"][index])), []
        ).append(index)
    sources: list[Ints] = []
    for index in range(count):
        back = bool(backward[index])
        near = at.get(
            (back, int(columns["slot"][index]), int(columns["depth"][index]) + (1 if back else -1)), []
        )
        feeding = [
            other
            for other in near
            if columns["unit"][other] != columns["unit"][index]
            or columns["replica"][other] == columns["replica"][index]
        ]
        sources.append(
            np.array([other for other in feeding if (end[other] <= start[index] + 1e-9).all()], dtype=np.int64)
        )
    sorter = graphlib.TopologicalSorter(
        {
            index: [*sources[index].tolist(), *([int(previous[index])] if previous[index] >= 0 else [])]
            for index in range(count)
        }
    )
    try:
        place = np.array(list(sorter.static_order()), dtype=np.int64)
    except graphlib.CycleError:
        return None
    number = np.empty(count, dtype=np.int64)
    number[place] = np.arange(count)
    moved = np.array([number[previous[i]] if previous[i] >= 0 else -1 for i in place], dtype=np.int64)
    return place, moved, [number[sources[i]] for i in place]
