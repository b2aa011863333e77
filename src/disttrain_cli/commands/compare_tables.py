"""Tables that compare two runs: figures of their analyses, then times of a step.

Times are shown where they differ by more than the noise of steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.analysis.figures import agree, counted
from disttrain_cli.commands.analyze_tables import change
from disttrain_cli.commands.device_tables import figure
from disttrain_cli.console import Console

if TYPE_CHECKING:
    from disttrain_cli.analysis.compare import Change, TimeChange, Times

MOST_ROWS, MOST_NAME = 20, 60  # --json has all


def show_comparison(
    console: Console, before: Path, changes: list[Change], times: Times | None
) -> None:
    """Print the comparison; nothing if nothing was compared."""
    console.table(
        f"Against {before}",
        ["figure", "before", "after", "change"],
        [
            [row.what, figure(row.before), figure(row.after), change(row.change_pct)]
            for row in changes
        ],
    )
    if times is None:
        return
    both = [row for row in times.rows if row.difference_s is not None]
    # the step and kinds always; other rows if significant, or, untested, if they differ at all
    tested = any(row.significant is not None for row in both)
    shown = [
        row
        for row in both
        if row.measure in ("step", "kind") or row.significant or (not tested and row.difference_s)
    ]
    console.table(
        f"Compared with {before}, ms per step and rank",
        ["what", "name", "before", "after", "difference", "95 % interval", "p", "beyond noise"],
        [_cells(row) for row in shown[:MOST_ROWS]],
    )
    if len(shown) > MOST_ROWS:
        console.say(f"and {counted(len(shown) - MOST_ROWS, 'more row')} (--json)")
    quiet = len(both) - len(shown)
    steps = f"Steps: {times.steps[0]} before, {times.steps[1]} after"
    if tested:
        differ = agree(quiet, "differs", "differ")
        console.say(f"{counted(quiet, 'more row')} {differ} within the noise. {steps}.")
        console.say(f"Test: {times.test}.")
    else:
        console.say(f"{steps}: too few to separate a difference from the noise of steps.")
    single = len(times.rows) - len(both)
    if single:
        console.say(
            f"{counted(single, 'row')} {agree(single, 'is', 'are')} in the traces of one run only,"
            " under this name (--json)."
        )


def _cells(row: TimeChange) -> list[object]:
    interval = (
        "–"
        if row.low_s is None or row.high_s is None
        else f"{1e3 * row.low_s:+.3g} to {1e3 * row.high_s:+.3g}"
    )
    name = row.name if len(row.name) <= MOST_NAME else f"{row.name[: MOST_NAME - 1]}…"
    return [
        row.measure,
        name,
        _ms(row.before_s),
        _ms(row.after_s),
        _ms(row.difference_s),
        interval,
        "–" if row.p is None else f"{row.p:.2g}",
        {None: "–", True: "yes", False: "no"}[row.significant],
    ]


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else figure(1e3 * seconds)
