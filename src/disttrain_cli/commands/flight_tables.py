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
    console.grid(
        "First collective of each group that is not in order",
        found.collectives[:MOST_ROWS],
        [
            ("group", lambda row: row.group),
            ("ranks", lambda row: len(row.group_ranks)),
            ("operation", lambda row: row.operation),
            ("number", lambda row: row.sequence),
            ("problem", lambda row: row.problem),
            ("of ranks", lambda row: _listed(row.ranks)),
            ("detail", lambda row: row.detail or "–"),
        ],
    )
    places = sorted(found.places, key=lambda place: (not place.waits, place.rank))
    console.grid(
        "Where ranks are",
        places[:MOST_ROWS],
        [
            ("rank", lambda place: place.rank),
            ("waits", lambda place: "yes" if place.waits else "no"),
            ("operation", lambda place: place.operation or "–"),
            ("group", lambda place: place.group or "–"),
            ("number", lambda place: place.sequence),
            ("state", lambda place: place.state or "–"),
            ("for ranks", lambda place: _listed(place.waits_for) or "–"),
            ("line", lambda place: place.line or "–"),
        ],
    )
    for rows, what in ((found.collectives, "group"), (places, "rank")):
        if len(rows) > MOST_ROWS:
            console.say(f"and {counted(len(rows) - MOST_ROWS, f'more {what}')} (--json)")


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + ", …" * (len(ranks) > 8)
