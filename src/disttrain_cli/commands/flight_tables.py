"""Tables of flight-recorder dumps of a hanging job: the verdict, then groups and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from disttrain_cli.analysis.figures import agree, counted, name_ranks
from disttrain_cli.api import explain_hang
from disttrain_cli.console import Console

if TYPE_CHECKING:
    from disttrain_cli.analysis.flight.verdict import Dumped

MOST_ROWS = 16  # shown; --json has all


def are_dumps(paths: list[Path]) -> bool:
    """Return True if the paths hold dumps and no traces."""
    from disttrain_cli.analysis.formats import find_format

    return find_format(paths).format == "flight recorder"


def show_dumps(console: Console, paths: list[Path]) -> None:
    """Analyse dumps and print the result."""
    found = explain_hang(*paths)
    console.result(found.to_json(), found.verdict.sentence)
    _render(console, found)


def _render(console: Console, found: Dumped) -> None:
    for text in found.warnings:
        console.note(text)
    console.say(f"{found.verdict.sentence}.")
    console.say(found.verdict.next_step)
    if found.without_dump:
        console.say(
            f"No dump of {name_ranks(found.without_dump)}: what"
            f" {agree(len(found.without_dump), 'it', 'they')} did is unknown."
        )
    console.table(
        "First collective of each group that is not in order",
        ["group", "ranks", "operation", "number", "problem", "of ranks", "detail"],
        [
            [
                row.group,
                len(row.group_ranks),
                row.operation,
                row.sequence,
                row.problem,
                _listed(row.ranks),
                row.detail or "–",
            ]
            for row in found.collectives[:MOST_ROWS]
        ],
    )
    places = sorted(found.places, key=lambda place: (not place.waits, place.rank))
    console.table(
        "Where ranks are",
        ["rank", "waits", "operation", "group", "number", "state", "for ranks", "line"],
        [
            [
                place.rank,
                "yes" if place.waits else "no",
                place.operation or "–",
                place.group or "–",
                place.sequence,
                place.state or "–",
                _listed(place.waits_for) or "–",
                place.line or "–",
            ]
            for place in places[:MOST_ROWS]
        ],
    )
    for rows, what in ((found.collectives, "group"), (places, "rank")):
        if len(rows) > MOST_ROWS:
            console.say(f"and {counted(len(rows) - MOST_ROWS, f'more {what}')} (--json)")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
