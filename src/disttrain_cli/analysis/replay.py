"""Playing recorded steps again with delays removed: what a step would take if…

A step is a graph: every pass (forward or backward of one rank in one slot) starts after the
previous pass of its rank and after the passes it receives from:

    start = max(end of previous pass + handover, ends of sources) + transfer + load + gap

With every term as recorded this gives the recorded step back; the difference is reported as
unexplained. Steps share one graph, so a replay is one walk over it (`walk`) with all steps side by
side [passes, steps].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.own.costing import shares_cores
from disttrain_cli.analysis.own.database import Database
from disttrain_cli.analysis.own.recorded import chosen_steps
from disttrain_cli.analysis.walk import Feeds, Floats, Ints, Walk, walk_of
from disttrain_cli.costs.layout import CostedStage, optimizer_s, reduce_s, transfers_s
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.stage_graph import cuts_of
from disttrain_cli.spec.trace import Job

#: Of every pass, what came before it and what went on.
_MESSAGES = ("received_bytes", "received_peer", "sent_bytes", "sent_peer")


@dataclass(frozen=True)
class Delays:
    """Seconds of every pass, [passes, steps]; `update_s` [steps] follows the last pass of a
    step."""

    compute: Floats
    transfer: Floats
    handover: Floats
    load: Floats
    gap: Floats
    update: Floats


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a step: where and for which slot each is done."""

    rank: Ints
    slot: Ints
    backward: NDArray[np.bool_]
    unit: list[str]
    stage: Ints
    replica: Ints
    depth: Ints

    def groups(self, *columns: str) -> Ints:
        """A number per pass, equal where the columns are."""
        keys = [
            np.unique(np.asarray(getattr(self, column)), return_inverse=True)[1]
            for column in columns
        ]
        return (
            np.unique(np.stack(keys), axis=1, return_inverse=True)[1].reshape(-1).astype(np.int64)
        )


@dataclass(frozen=True)
class Graph(Passes):
    """Passes of a step in the order of `walk`, with what was recorded of them."""

    walk: Walk
    steps: Ints
    predicted: Floats  # [passes, steps] seconds that the profile expects for the recorded work
    recorded: Delays
    window: Floats  # [steps]
    devices: dict[str, float]  # unit → devices for which one of its ranks stands
    # [passes] seconds that the profile expects a transfer to take; infinite where it does not say
    expected: Floats
    # that it expects of reduction and optimizer after the last pass; infinite likewise
    expected_update_s: float
    # [passes] group of ranks without a trace (`lost`) that may have sent what a pass waits for; -1:
    # none
    unheard: Ints
    lost: list[list[tuple[str, int, int]]]  # unit, stage and replica of the ranks of each group
    crowded: float  # compute of all ranks ÷ (window × cores) where they share cores, else 0

    def replay(self, delays: Delays) -> Floats:
        """Seconds of every step [steps] with these delays."""
        after_sources = delays.transfer + delays.load + delays.gap + delays.compute
        return self.walk.ends(after_sources, delays.handover).max(axis=0) + delays.update

    def without_delays(self) -> Delays:
        """As recorded, but transfers as they should be, and no waits for data or host.

        A transfer takes the median of its unit and direction, or what the profile expects of its
        link, if that is less; so does the end of the step.
        """
        recorded = self.recorded
        groups = self.groups("unit", "backward")
        still = np.zeros_like(recorded.load)
        return replace(
            recorded,
            transfer=np.minimum(
                _per_group(recorded.transfer, groups, np.median), self.expected[:, None]
            ),
            handover=_per_group(recorded.handover, groups, np.median),
            load=still,
            gap=still,
            update=np.full_like(
                recorded.update, min(np.median(recorded.update), self.expected_update_s)
            ),
        )

    def cuts(self) -> dict[tuple[str, int], list[int]]:
        """Passes by the cut that they receive over, named by the stage before it; those that
        receive nothing by theirs.
        """
        cuts: dict[tuple[str, int], list[int]] = {}
        for index, feeding in enumerate(self.walk.sources):
            before = int(feeding[0]) if len(feeding) and not self.backward[index] else index
            cuts.setdefault((self.unit[before], int(self.stage[before])), []).append(index)
        return cuts

    def links(self, values: Floats) -> dict[tuple[str, int], float]:
        """Sums per step by the cut that the passes received over."""
        fed = np.array([len(feeding) > 0 for feeding in self.walk.sources])
        sums = values.mean(axis=1) * fed
        return {
            cut: float(sums[nodes].sum()) for cut, nodes in self.cuts().items() if fed[nodes].any()
        }


def group_mean(values: Floats, groups: Ints) -> Floats:
    """Each pass's mean over its group and all steps, [passes, steps]."""
    sums, sizes = np.bincount(groups, values.sum(axis=1)), np.bincount(groups) * values.shape[1]
    return np.repeat((sums / np.maximum(1, sizes))[groups, None], values.shape[1], axis=1)


def _per_group(values: Floats, groups: Ints, statistic: Any) -> Floats:
    out = np.empty_like(values)
    for group in np.unique(groups):
        out[groups == group] = statistic(values[groups == group])
    return out


def build_graph(database: Database) -> Graph | None:
    """The graph of the measured steps, or None when no step is whole enough; reasons go to the
    warnings."""
    columns = database.columns("passes", steps=chosen_steps(database))
    if not len(columns["step"]):
        return None
    windows = database.sql(
        "SELECT step, window_s, (end_ns - compute_end_ns) / 1e9 AS update_s FROM windows"
    )
    by_step = {int(row["step"]): row for row in windows}

    backward = np.asarray(columns["operation"] == "backward", dtype=bool)
    rank, slot = (np.asarray(columns[name], dtype=np.int64) for name in ("rank", "slot"))
    keys = (rank * (slot.max() + 2) + slot + 1) * 2 + backward
    _, first, passes = np.unique(keys, return_index=True, return_inverse=True)
    steps, step = np.unique(np.asarray(columns["step"], dtype=np.int64), return_inverse=True)

    def spread(name: str) -> Floats:
        out = np.full((len(first), len(steps)), np.nan)
        out[passes, step] = np.ma.filled(np.ma.asarray(columns[name], dtype=float), np.nan)
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
            *_MESSAGES,
        )
    }
    columns = {name: np.asarray(values)[first] for name, values in columns.items()}
    cuts = [(row["before"], row["after"]) for row in database.sql("SELECT before, after FROM cuts")]
    walk = _walk(columns, backward[first], table, cuts)
    if walk is None:
        database.warnings.append(
            "the recorded order of passes contradicts itself (clocks apart?): steps cannot be"
            " replayed"
        )
        return None
    columns = {name: values[walk.node] for name, values in columns.items()}
    table = {name: values[walk.node] for name, values in table.items()}
    end = table["start_s"] + table["duration_s"]
    transfer = np.zeros_like(end)
    for index, feeding in enumerate(walk.sources):
        if len(feeding):
            sent = (
                np.where(walk.feeds[index], end[feeding], -np.inf) if walk.feeds else end[feeding]
            )
            ready = np.maximum(table["received_from_s"][index], sent.max(axis=0))
            until = table["received_from_s"][index] + table["received_s"][index]
            transfer[index] = np.maximum(0.0, until - ready)
        else:
            transfer[index] = table["received_s"][index]
    unheard, lost = _unheard(
        database.stages, columns, columns["operation"] == "backward", table["received_peer"]
    )
    kept = steps[whole]
    window = np.array([by_step[int(s)]["window_s"] for s in kept])
    # Replicas that share a process of a rehearsal go on when the slowest of them has: no host holds
    # them up.
    rehearsed = None if database.job is None else database.job.rehearsed
    lockstep = rehearsed is not None and rehearsed.processes < len(np.unique(rank))
    return Graph(
        walk=walk,
        steps=kept,
        rank=columns["rank"].astype(np.int64),
        slot=columns["slot"].astype(np.int64),
        backward=columns["operation"] == "backward",
        unit=[str(unit) for unit in columns["unit"]],
        stage=columns["stage"].astype(np.int64),
        replica=columns["replica"].astype(np.int64),
        depth=columns["depth"].astype(np.int64),
        predicted=table["predicted_s"],
        recorded=Delays(
            table["duration_s"],
            transfer,
            table["handover_s"],
            table["load_s"],
            np.zeros_like(end) if lockstep else table["gap_s"],
            np.array([by_step[int(s)]["update_s"] for s in kept]),
        ),
        window=window,
        devices={
            row["unit"]: row["devices_per_rank"]
            for row in database.sql("SELECT unit, devices_per_rank FROM units")
        },
        expected=(
            np.full(len(end), np.inf)
            if database.job is None or not database.stages
            else expected_transfers(
                database.job,
                database.job.layout,
                database.stages,
                columns["operation"] == "backward",
                columns["depth"],
            )
        ),
        expected_update_s=_expected_update_s(database.job, database.stages),
        unheard=unheard,
        lost=lost,
        crowded=_crowded(database.job, table["duration_s"], window),
    )


def _unheard(
    stages: list[CostedStage],
    columns: dict[str, Any],
    backward: NDArray[np.bool_],
    received_peer: Floats,
) -> tuple[Ints, list[list[tuple[str, int, int]]]]:
    """`Graph.unheard` and `Graph.lost`; of stages of one unit only the same replica sends.

    Args:
        received_peer: [passes, steps] the rank that sent, where a record names it.
    """
    depth, replica = (columns[name].astype(int) for name in ("depth", "replica"))
    there = set(zip(depth.tolist(), replica.tolist(), strict=True))
    told = np.isin(received_peer, columns["rank"]).any(axis=1)
    groups: dict[tuple[tuple[str, int, int], ...], int] = {}
    unheard = np.full(len(depth), -1, dtype=np.int64)
    for index in np.flatnonzero(~told).tolist() if stages else ():
        stage = stages[depth[index]]
        senders = stage.after if backward[index] else stage.before
        lost = tuple(
            (stages[number].unit.name, stages[number].index, copy)
            for number in senders
            for copy in (
                [int(replica[index])]
                if stages[number].unit.name == stage.unit.name
                else range(stages[number].unit.dp)
            )
            if (number, copy) not in there
        )
        if lost:
            unheard[index] = groups.setdefault(lost, len(groups))
    return unheard, [list(lost) for lost in groups]


def update_s(job: Job, layout: Layout, stages: list[CostedStage]) -> float:
    """What the profile expects of the end of a step: the longest reduction, then the longest
    optimizer step."""
    return max(reduce_s(job.profile, stage, job.gpus_per_node) for stage in stages) + max(
        optimizer_s(job.profile, layout, stage, job.gpus_per_node) for stage in stages
    )


def _expected_update_s(job: Job | None, stages: list[CostedStage]) -> float:
    return (
        np.inf
        if job is None or not stages or shares_cores(job)
        else update_s(job, job.layout, stages)
    )


def expected_transfers(
    job: Job, layout: Layout, stages: list[CostedStage], backward: NDArray[np.bool_], depth: Ints
) -> Floats:
    """Seconds that the profile expects of the transfer before each pass, of mean data; infinite
    where it has none.

    Args:
        layout: the job's, or another one with `stages`.
    """
    transfer_s = np.full(len(backward), np.inf)
    if shares_cores(job):
        return transfer_s
    cuts = cuts_of(stages)
    seconds = transfers_s(job.profile, layout, stages, job.gpus_per_node)
    for back in (False, True):
        for index in range(len(stages)):
            times_s = [
                second
                for cut, second in zip(cuts, seconds, strict=True)
                if cut[0 if back else 1] == index
            ]
            if times_s:
                transfer_s[(backward == back) & (depth == index)] = max(times_s)
    return transfer_s


def _crowded(job: Job | None, compute: Floats, window: Floats) -> float:
    """By how much the passes keep busy the cores that all ranks share; 0 where every rank has a
    device."""
    if job is None or not shares_cores(job):
        return 0.0
    return float(compute.sum() / (window.sum() * max(1, job.profile.device.cores)))


def _messages(
    columns: dict[str, Any], table: dict[str, Floats]
) -> Callable[[Ints, int], NDArray[np.bool_]]:
    """Whether passes [n] can have fed a pass, [n, steps], by what their ranks recorded of messages
    between units."""
    home = (
        columns["depth"].astype(np.int64) * (1 + int(columns["replica"].max())) + columns["replica"]
    )
    ranks, first = np.unique(columns["rank"], return_index=True)

    def known(side: str) -> tuple[NDArray[np.bool_], Floats]:
        """Which passes had no message, and the home of the one peer of those that had one only
        (else NaN)."""
        size, peer = table[f"{side}_bytes"], table[f"{side}_peer"]
        # of a TP group perhaps only the first rank was recorded
        position = np.searchsorted(ranks, np.nan_to_num(peer, nan=-1.0), side="right") - 1
        return (size == 0) & bool((size > 0).any()), np.where(
            peer >= 0, home[first[position]], np.nan
        )

    (silent, to), (unfed, source) = known("sent"), known("received")

    def met(near: Ints, index: int) -> NDArray[np.bool_]:
        elsewhere = (to[near] != home[index]) & ~np.isnan(to[near])
        from_another = (source[index] != home[near][:, None]) & ~np.isnan(source[index])
        return ~(silent[near] | elsewhere | unfed[index] | from_another)

    return met


def _walk(
    columns: dict[str, Any],
    backward: NDArray[np.bool_],
    table: dict[str, Floats],
    cuts: list[tuple[int, int]],
) -> Walk | None:
    """How the passes wait for each other.

    `cuts` are the depths on both sides of every cut. Passes of a neighbouring unit feed all
    replicas, unless the record of a step contradicts: what ended after a pass had started did not
    feed it, nor did what sent nothing or to another one.
    """
    met = _messages(columns, table)
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
    # by direction and depth, the depths that feed it
    near_by: dict[tuple[bool, int], list[int]] = {}
    for before, after in cuts:
        near_by.setdefault((False, after), []).append(before)
        near_by.setdefault((True, before), []).append(after)
    sources: list[Ints] = []
    feeds: list[Feeds] = []
    for index in range(count):
        back, slot, depth = (
            bool(backward[index]),
            int(columns["slot"][index]),
            int(columns["depth"][index]),
        )
        depths = near_by.get((back, depth), [])
        near = np.concatenate(
            [np.empty(0, np.int64), *(at[back, slot, d] for d in depths if (back, slot, d) in at)]
        )
        if len(near) and columns["unit"][near[0]] == columns["unit"][index]:
            near = near[columns["replica"][near] == columns["replica"][index]]
        fed = end[near] <= start[index] + 1e-9
        if len(near) and columns["unit"][near[0]] != columns["unit"][index]:
            fed &= met(near, index)
        sometimes = fed.any(axis=1)
        sources.append(near[sometimes])
        feeds.append(fed[sometimes])
    always = [feed.all(axis=1) for feed in feeds]
    # Where the order of passes changes from step to step, only what fed in all of them can be
    # walked.
    return walk_of(previous, sources, feeds) or walk_of(
        previous, [nodes[kept] for nodes, kept in zip(sources, always, strict=True)]
    )
