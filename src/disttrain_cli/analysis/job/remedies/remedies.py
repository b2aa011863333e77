"""Remedies and their savings: recorded steps replayed with one change that a user can make.

Each row changes one thing and leaves everything else as recorded, delays too: its saving is that of
this change alone. Savings do not add up: of two causes on the same path, fixing one exposes the
other. That is also why they differ from `losses`, whose parts return one after another and sum to
the whole.

A replay shows how delays hide behind each other in the recorded order of passes. Its limits:
- Uneven work is levelled completely (`intra_microbatch`, `inter_microbatch`); an ordering cuts no
  sample, so it saves less.
- With other replicas the data would be ordered differently (`replicas`).
- A faster step needs its data sooner: data that are just in time now may be late then.
- If ranks share cores, passes would take other times: there are then no remedies of other replicas
  or plans. A row of basis `plan` is no replay: its saving is the planner's, between two predictions
  (`replanning`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from disttrain_cli.analysis import next_commands
from disttrain_cli.analysis.causes import SMALLEST_SHARE, Finding, Suspect, mend
from disttrain_cli.analysis.graph import Graph
from disttrain_cli.analysis.job.database import Database
from disttrain_cli.analysis.job.remedies.reordering import reordered_s
from disttrain_cli.analysis.job.remedies.replanning import replan
from disttrain_cli.analysis.job.remedies.replicas import (
    Record,
    moved,
    one_more,
    record_of,
    seconds_with,
)
from disttrain_cli.analysis.job.remedies.suspects import is_update, replayed, state_of
from disttrain_cli.analysis.losses import Explained, Losses
from disttrain_cli.analysis.result.verdicts import Place, Remedy
from disttrain_cli.analysis.walk import Floats
from disttrain_cli.spec.plan import Layout

#: `other_layouts`, or a function that returns its cached results.
Layouts = Callable[[Database, Graph, Explained, bool], list[Remedy]]


def remedies(
    database: Database,
    graph: Graph,
    suspects: Sequence[Suspect],
    layouts: Sequence[Remedy],
    uneven: Sequence[Finding] = (),
) -> list[Remedy]:
    """Return single changes, those that save most first.

    Args:
        database: open traces.
        graph: recorded steps.
        suspects: `own_suspects` of the graph.
        layouts: `other_layouts` of the graph.
        uneven: uneven data, as far as the ordering `best` regains it.
    """
    recorded = state_of(graph.recorded)
    recorded_s, measured_s = float(replayed(graph, recorded).mean()), float(graph.window.mean())
    offers = [
        _row(
            measured_s,
            cause,
            change,
            command,
            recorded_s - float(replayed(graph, mend(recorded, mended)).mean()),
            at_most=cause in ("intra_microbatch", "inter_microbatch"),
        )
        for cause, change, command, mended in _repairs(database, suspects)
    ]
    if database.job is not None and database.job.predicted.ordering == "none":
        reordered = reordered_s(graph)
        if reordered is not None:
            change = "the recorded slots in the order of train.ordering: paper"
            offers.append(
                _row(
                    measured_s,
                    "inter_microbatch",
                    change,
                    next_commands.LEVEL,
                    recorded_s - float(reordered.mean()),
                )
            )
    if uneven:
        offers.append(
            _row(
                measured_s,
                uneven[0].cause,
                "train.ordering: best, for data like those profiled",
                next_commands.LEVEL,
                sum(float(one.gain_s.mean()) for one in uneven),
                basis="plan",
            )
        )
    return sorted([*offers, *layouts], key=lambda remedy: -remedy.gain_s)


def other_layouts(
    database: Database, graph: Graph, why: Explained, moved_on: bool = False
) -> list[Remedy]:
    """Return other partitions of the devices, or one device more; empty if the traces cannot tell.

    Args:
        database: open traces.
        graph: recorded steps.
        why: `explain` of the graph's recorded passes.
        moved_on: the data differ from those of the profile, so no plan is made with it.
    """
    record, measured_s = record_of(database, graph), float(graph.window.mean())
    if record is None:
        return []
    again = next_commands.plan_again(database.paths)
    recorded_s = float(graph.replay(graph.recorded).mean())
    return [
        _row(measured_s, "unit", *layout)
        for layout in _layouts(
            record, why, recorded_s, min(measured_s, recorded_s), again, moved_on
        )
    ]


def with_layouts(
    findings: list[Finding],
    layouts: Sequence[Remedy],
    losses: Losses,
    gain_s: Callable[[list[Suspect]], Floats],
    splits: Sequence[Suspect],
) -> list[Finding]:
    """Add the fault of the layout to the findings, if another layout saves once they are fixed.

    The fault is first the partition of layers over stages, then that of the devices over units.
    What the other layout saves beyond even stages and ideally shared devices (by another TP size,
    say) is the fault of neither.

    Args:
        findings: causes that slow the steps.
        layouts: `other_layouts` of the steps without the findings.
        losses: losses of the recorded steps.
        gain_s: returns the saving of fixing suspects in these steps.
        splits: the stages of units, as the plan partitions them.
    """
    best = max(
        (one for one in layouts if one.gpus <= 0 and one.worth),
        key=lambda one: one.gain_s,
        default=None,
    )
    if best is None:
        return findings
    left_s, named = losses.measured * best.gain_pct / 100, list[Finding]()
    for cause, place, most_s in [
        *(("stage", one.place, gain_s([one])) for one in splits),
        ("unit", Place(), losses.lost["unit"]),
    ]:
        own_s = np.minimum(left_s, most_s)
        if own_s.mean() >= SMALLEST_SHARE * losses.measured.mean():
            named.append(Finding(cause, [place], own_s, own_s))
            left_s = left_s - own_s
    largest = findings[0].gain_s.mean() if findings else 0.0
    return [
        *(one for one in named if one.gain_s.mean() >= largest),
        *findings,
        *(one for one in named if one.gain_s.mean() < largest),
    ]


def _row(
    measured_s: float,
    cause: str,
    change: str,
    command: str,
    gain_s: float,
    gpus: int = 0,
    basis: Literal["replay", "plan"] = "replay",
    at_most: bool = False,
) -> Remedy:
    return Remedy(
        cause=cause,
        change=change,
        command=command,
        basis=basis,
        gpus=gpus,
        at_most=at_most,
        step_s=measured_s - gain_s,
        gain_s=gain_s,
        gain_pct=100 * gain_s / measured_s,
    )


def _layouts(
    record: Record, why: Explained, recorded_s: float, measured_s: float, again: str, moved_on: bool
) -> Iterator[tuple[str, str, float, int, Literal["replay", "plan"]]]:
    """Yield (change, next command, saving, more devices, basis) of other layouts.

    They are one replica more of each unit, the best of those with as many devices, and a new plan.
    """
    present = record.job.layout
    for layout, change in _one_more(record):
        yield (
            change,
            f"{again} --gpus {layout.gpus_used}",
            recorded_s - float(seconds_with(record, layout).mean()),
            layout.gpus_used - present.gpus_used,
            "replay",
        )
    swaps = [
        (recorded_s - float(seconds_with(record, layout).mean()), change, layout)
        for layout, change in _moved(record)
    ]
    gain_s, change, layout = max(swaps, key=lambda swap: swap[0], default=(0.0, "", present))
    if gain_s > 0:
        yield change, again, gain_s, layout.gpus_used - present.gpus_used, "replay"
    new = None if moved_on else replan(record, why)
    if new is not None and new.then_s < new.present_s:
        gain_s = (1 - new.then_s / new.present_s) * min(new.present_s, measured_s)
        yield (
            (
                f"a plan from this run's times: {new.layout.describe()}, microbatches of"
                f" {new.layout.microbatch_size}"
            ),
            again,
            gain_s,
            new.layout.gpus_used - present.gpus_used,
            "plan",
        )


def _repairs(
    database: Database, suspects: Sequence[Suspect]
) -> Iterator[tuple[str, str, str, list[Suspect]]]:
    """Yield (cause, change, next command, fixed suspects) of all changes without a new layout."""
    job = database.job
    ordered = "train.ordering: best"
    if job is not None and job.predicted.ordering == "best":
        ordered = "raise train.global_batch_size"
    changes = {
        "intra_microbatch": (
            f"equal work on the replicas of every slot, if samples could be split ({ordered})",
            next_commands.LEVEL,
        ),
        "inter_microbatch": (
            f"equal work in every slot, if samples could be split ({ordered})",
            next_commands.LEVEL,
        ),
        "stage": ("stages of a unit that take equally long", next_commands.REMEASURE),
        "communication": ("no transfer slower than usual", next_commands.SLOWEST_LINKS),
        "data": ("data always ready", next_commands.LEVEL),
        "host": ("no rank delayed by its host", next_commands.HOST_GAPS),
    }
    for cause, (change, command) in changes.items():
        alike = [
            one
            for one in suspects
            if one.cause == cause
            and not (cause == "stage" and one.place.stage is not None)
            and not is_update(one)
        ]
        if alike:
            yield cause, change, command, alike
    for one in suspects:
        if is_update(one):
            yield (
                one.cause,
                "the end of every step as fast as the profile predicts, and no longer than usual",
                next_commands.SLOWEST_TRANSFERS,
                [one],
            )
        rank, place = one.place.rank, one.place
        if one.cause == "stage" and place.stage is not None:
            yield (
                "stage",
                f"stage {place.stage} of {place.unit} as fast for its work as its other stages",
                next_commands.REMEASURE,
                [one],
            )
        if one.cause == "worker" and rank is not None:
            yield (
                "worker",
                f"rank {rank} ({place.named}) as fast as its peers",
                next_commands.slow_rank(rank),
                [one],
            )


def _one_more(record: Record) -> Iterator[tuple[Layout, str]]:
    """Yield layouts with one replica more of a unit, and their descriptions."""
    for unit in record.job.layout.units:
        layout = one_more(record.job, unit.name)
        if layout is not None:
            more = layout.gpus_used - record.job.layout.gpus_used
            yield layout, f"{_changed(record, layout)} on {more} more device{'s' * (more > 1)}"


def _moved(record: Record) -> Iterator[tuple[Layout, str]]:
    """Yield layouts of as many devices, with some moved from one unit to another."""
    for giver, taker in itertools.permutations([unit.name for unit in record.job.layout.units], 2):
        layout = moved(record.job, giver, taker)
        if layout is not None:
            yield layout, f"{_changed(record, layout)} on the same devices"


def _changed(record: Record, layout: Layout) -> str:
    return ", ".join(
        f"{before.name} DP {before.dp} → {after.dp}"
        for before, after in zip(record.job.layout.units, layout.units, strict=True)
        if before.dp != after.dp
    )
