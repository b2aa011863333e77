"""Formats of figures, counts and ranks in sentences and tables."""

from __future__ import annotations

from collections.abc import Sequence

#: Most ranks that a sentence names individually.
MOST_RANKS = 8


def figure(value: float | None, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, without an exponent unless it is tiny."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    if abs(float(text)) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.2e}" if "e" in text else text


def seconds(value: float | None) -> str:
    """Format a duration in the unit that fits: s, ms or µs."""
    if value is None:
        return "–"
    size = float(f"{abs(value):.3g}")  # rounded as shown: 999.9 µs are 1 ms
    for unit, least in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= least:
            return f"{figure(value / least)} {unit}"
    return "0"


def agree(count: int, one: str, several: str) -> str:
    """Return the form of a verb or noun that agrees with a count."""
    return one if count == 1 else several


def counted(count: int, noun: str) -> str:
    """Format a count and its noun: "1 step", "2 steps"."""
    return f"{count:,} {noun}{agree(count, '', 's')}"


def name_ranks(numbers: Sequence[int]) -> str:
    """Format ranks by number: "rank 3", "ranks 1, 2 and 3"; the first `MOST_RANKS` of many."""
    names = [str(number) for number in numbers[:MOST_RANKS]]
    if len(numbers) > MOST_RANKS:
        names.append(f"{len(numbers) - MOST_RANKS} more")
    listed = " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])
    return f"{agree(len(numbers), 'rank', 'ranks')} {listed}"
