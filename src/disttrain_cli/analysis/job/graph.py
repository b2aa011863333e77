"""Graph of a job's recorded steps: which pass waited for which, and for how long."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.analysis.graph import Delays, Graph
from disttrain_cli.analysis.job.costing import shares_cores
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.recorded import chosen_steps
from disttrain_cli.analysis.walk import Feeds, Floats, Ints, Walk, walk_of
from disttrain_cli.costs.layout import CostedStage, by_device, optimizer_s, reduce_s, transfers_s
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.schedule.one_f_one_b import inputs
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.stage_graph import cuts_of
from disttrain_cli.spec.trace import COMPUTE, Job

#: Columns of the messages that a pass received and sent.
_MESSAGES = ("received_bytes", "received_peer", "sent_bytes", "sent_peer")


def build_graph(database: Database) -> Graph | None:
    """Return the graph of the measured steps; None, with warnings, if none is complete."""
    columns = database.columns("passes", steps=chosen_steps(database))
    if not len(columns["step"]):
        return None
    windows = database.sql(
        "SELECT step, window_s, (end_ns - compute_end_ns) / 1e9 AS update_s FROM windows"
    )
    by_step = {int(row["step"]): row for row in windows}

    columns["operation"] = np.argmax(
        columns["operation"][:, None] == np.array(COMPUTE)[None, :], axis=1
    )
    rank, slot, depth = (
        np.asarray(columns[name], dtype=np.int64) for name in ("rank", "slot", "depth")
    )
    keys = (rank * (depth.max() + 1) + depth) * (slot.max() + 2) + slot + 1
    keys = keys * len(COMPUTE) + columns["operation"]
    _, first, passes = np.unique(keys, return_index=True, return_inverse=True)
    steps, step = np.unique(np.asarray(columns["step"], dtype=np.int64), return_inverse=True)

    def spread(name: str) -> Floats:
        out = np.full((len(first), len(steps)), np.nan)
        out[passes, step] = np.ma.filled(np.ma.asarray(columns[name], dtype=float), np.nan)
        return out

    start = spread("start_s")
    complete = ~np.isnan(start).any(axis=0)
    if not complete.any():
        database.warnings.append(
            "no step contains every pass of every rank: steps cannot be replayed"
        )
        return None
    table = {
        name: spread(name)[:, complete]
        for name in (
            "start_s",
            "duration_s",
            "predicted_s",
            "load_s",
            "received_s",
            "received_from_s",
            "late_s",
            "exchange_s",
            "handover_s",
            "gap_s",
            *_MESSAGES,
        )
    }
    columns = {name: np.asarray(values)[first] for name, values in columns.items()}
    cuts = [(row["before"], row["after"]) for row in database.sql("SELECT before, after FROM cuts")]
    walk = _walk(columns, table, cuts)
    if walk is None:
        database.warnings.append(
            "the recorded order of passes is contradictory (clocks not synchronised?): steps"
            " cannot be replayed"
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
    late = np.minimum(table["late_s"], transfer)
    unheard, lost = _unheard(database.stages, columns, table["received_peer"])
    kept = steps[complete]
    window = np.array([by_step[int(s)]["window_s"] for s in kept])
    # Replicas that share a process of a rehearsal continue when the slowest of them has finished:
    # the gaps are not due to the host.
    rehearsed = None if database.job is None else database.job.rehearsed
    replicas = len(np.unique(np.stack([columns["depth"], columns["replica"]]), axis=1).T)
    lockstep = rehearsed is not None and rehearsed.processes < replicas
    return Graph(
        walk=walk,
        steps=kept,
        rank=columns["rank"].astype(np.int64),
        slot=columns["slot"].astype(np.int64),
        operation=columns["operation"],
        unit=[str(unit) for unit in columns["unit"]],
        stage=columns["stage"].astype(np.int64),
        replica=columns["replica"].astype(np.int64),
        depth=columns["depth"].astype(np.int64),
        predicted=table["predicted_s"],
        recorded=Delays(
            table["duration_s"],
            transfer - late,
            table["handover_s"],
            table["load_s"],
            late if lockstep else late + table["gap_s"],
            np.array([by_step[int(s)]["update_s"] for s in kept]),
        ),
        window=window,
        late=late,
        exchanged=table["exchange_s"],
        waiting=columns["replica"].astype(np.int64) // _together(database.job, columns["unit"]),
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
                columns["operation"],
                columns["depth"],
            )
        ),
        expected_update_s=(
            np.inf
            if database.job is None or not database.stages or shares_cores(database.job)
            else update_s(database.job, database.job.layout, database.stages)
        ),
        unheard=unheard,
        lost=lost,
        crowded=_crowded(database.job, table["duration_s"], window),
    )


def _together(job: Job | None, units: NDArray[Any]) -> Ints:
    """Return the neighbouring replicas that wait for each other, by the unit of each pass."""
    spans = {} if job is None else {one.name: one.replicas_together for one in job.layout.units}
    return np.array([spans.get(str(unit), 1) for unit in units], dtype=np.int64)


def _unheard(
    stages: list[CostedStage], columns: dict[str, Any], received_peer: Floats
) -> tuple[Ints, list[list[tuple[str, int, int]]]]:
    """Return `Graph.unheard` and `Graph.lost`; within a unit only the same replica sends.

    Args:
        stages: stages of the layout; empty if unknown.
        columns: one entry per pass.
        received_peer: [passes, steps] the rank that sent, if it was recorded.
    """
    depth, replica = (columns[name].astype(int) for name in ("depth", "replica"))
    there = set(zip(depth.tolist(), replica.tolist(), strict=True))
    recorded = np.isin(received_peer, columns["rank"]).any(axis=1)
    groups: dict[tuple[tuple[str, int, int], ...], int] = {}
    unheard = np.full(len(depth), -1, dtype=np.int64)
    received = inputs(cuts_of(stages))
    for index in np.flatnonzero(~recorded).tolist() if stages else ():
        stage = stages[depth[index]]
        lost = tuple(
            (stages[number].unit.name, stages[number].index, copy)
            for _, number in received.get((int(columns["operation"][index]), depth[index]), ())
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
    """Return the seconds that the profile predicts for the end of a step.

    That is the longest reduction, then the longest optimizer step; if reductions overlap with
    passes, only their exposed rest.
    """
    if layout.overlap:
        reducing, _ = hidden(job.profile, layout, stages, job.gpus_per_node)
        return float(reducing.mean_left_s.max())
    devices = by_device(stages)
    return max(
        reduce_s(job.profile, layout, device, job.gpus_per_node) for device in devices
    ) + max(optimizer_s(job.profile, layout, device, job.gpus_per_node) for device in devices)


def expected_transfers(
    job: Job, layout: Layout, stages: list[CostedStage], operation: Ints, depth: Ints
) -> Floats:
    """Return the seconds that the profile predicts for the transfer before each pass.

    They are for mean data, and infinite where the profile has none.

    Args:
        job: the recorded job.
        layout: the job's, or another one with `stages`.
        stages: stages of `layout`.
        operation, depth: one entry per pass.
    """
    transfer_s = np.full(len(operation), np.inf)
    if shares_cores(job):
        return transfer_s
    seconds = transfers_s(job.profile, layout, stages, job.gpus_per_node)
    for (way, index), own in inputs(cuts_of(stages)).items():
        transfer_s[(operation == way) & (depth == index)] = max(seconds[cut] for cut, _ in own)
    return transfer_s


def _crowded(job: Job | None, compute: Floats, window: Floats) -> float:
    """Return compute ÷ time of the cores that all ranks share; 0 if every rank has a device."""
    if job is None or not shares_cores(job):
        return 0.0
    return float(compute.sum() / (window.sum() * max(1, job.profile.device.cores)))


def _messages(
    columns: dict[str, Any], table: dict[str, Floats]
) -> Callable[[Ints, int], NDArray[np.bool_]]:
    """Return a function of passes [n] and a pass: True if they can have fed it, [n, steps].

    It uses what their ranks recorded of messages between units.
    """
    home = (
        columns["depth"].astype(np.int64) * (1 + int(columns["replica"].max())) + columns["replica"]
    )
    ranks, first = np.unique(columns["rank"], return_index=True)

    def known(side: str) -> tuple[NDArray[np.bool_], Floats]:
        """Return which passes had no message, and the replica of the only peer of the others.

        The replica is NaN for passes with several peers.
        """
        size, peer = table[f"{side}_bytes"], table[f"{side}_peer"]
        # perhaps only the first rank of a TP group was recorded
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
    columns: dict[str, Any], table: dict[str, Floats], cuts: list[tuple[int, int]]
) -> Walk | None:
    """Build the graph of how passes wait for each other.

    `cuts` are the depths on both sides of every cut. Passes of a neighbouring unit feed all
    replicas, unless the record of a step contradicts: a pass that ended after another one had
    started did not feed it, nor did one that sent nothing or sent to another replica.
    """
    met = _messages(columns, table)
    start, count = table["start_s"], len(columns["operation"])
    end = start + table["duration_s"]
    previous = np.full(count, -1, dtype=np.int64)
    by_rank = np.lexsort((end[:, 0], start[:, 0], columns["rank"]))
    for one, following in itertools.pairwise(by_rank):
        if columns["rank"][one] == columns["rank"][following]:
            previous[following] = one

    def key(index: int) -> tuple[int, int, int]:
        return (
            int(columns["operation"][index]),
            int(columns["slot"][index]),
            int(columns["depth"][index]),
        )

    gathered: dict[tuple[int, int, int], list[int]] = {}
    for index in range(count):
        gathered.setdefault(key(index), []).append(index)
    at = {key: np.array(members, dtype=np.int64) for key, members in gathered.items()}
    received = inputs(cuts)
    sources: list[Ints] = []
    feeds: list[Feeds] = []
    for index in range(count):
        operation, slot, depth = key(index)
        feeding = [(operation, slot, other) for _, other in received.get((operation, depth), ())]
        near = np.concatenate(
            [np.empty(0, np.int64), *(at[pass_] for pass_ in feeding if pass_ in at)]
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
    # If the order of passes changes from step to step, only the sources that feed in all steps can
    # be walked.
    return walk_of(previous, sources, feeds) or walk_of(
        previous, [nodes[kept] for nodes, kept in zip(sources, always, strict=True)]
    )
