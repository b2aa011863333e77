"""What every benchmark shares: side-by-side timing, its two flags, and its tables."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median
from typing import Any

#: Rows of a table by its title; a row is a dict whose keys are the columns.
Tables = dict[str, list[dict[str, Any]]]


def alternate(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, list[float]]:
    """Seconds of every call in every round: A B C A B C ..., after one round that is not counted.

    The default clock counts the CPU seconds of this process, so that others on the machine disturb
    less.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for counted in [False] + [True] * rounds:
        for name, call in calls.items():
            start = clock()
            call()
            if counted:
                seconds[name].append(clock() - start)
    return seconds


def paired_ratio(over: list[float], under: list[float]) -> float:
    """Median over the rounds of over ÷ under."""
    return median(a / b for a, b in zip(over, under, strict=True))


def main(doc: str | None, measure: Callable[..., Tables], **numbers: str) -> None:
    """Command line of a benchmark: measure, then print its tables or, with --json, one document.

    `measure` takes whether the smallest form is wanted, and those whole numbers that are given, of
    which `numbers` says what they are.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small", action="store_true", help="smallest form: shows that it runs, measures little"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of tables")
    for name, told in numbers.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=told)
    options = parser.parse_args()
    given = {name: value for name in numbers if (value := getattr(options, name)) is not None}
    tables = measure(options.small, **given)
    if options.json:
        print(json.dumps(tables, indent=1))
    else:
        print("\n\n".join(table(title, rows) for title, rows in tables.items()))


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """A table as aligned text; also valid Markdown."""
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        [
            title,
            "",
            *(
                "| "
                + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                + " |"
                for line in lines
            ),
        ]
    )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)
