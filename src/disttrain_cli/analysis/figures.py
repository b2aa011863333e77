"""Figures, counts and ranks as sentences and tables show them."""

from __future__ import annotations

from collections.abc import Sequence

#: Ranks that a sentence names one by one.
MOST_RANKS = 8


def figure(value: float | None, digits: int = 3) -> str:
    """A number with the digits that matter and no exponent."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    text = f"{value:.{digits}g}"
    if abs(float(text)) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.2e}" if "e" in text else text


def seconds(value: float | None) -> str:
    """A duration in the unit that fits: s, ms or µs."""
    if value is None:
        return "–"
    size = float(f"{abs(value):.3g}")  # as it is shown: 999.9 µs are 1 ms
    for unit, least in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= least:
            return f"{figure(value / least)} {unit}"
    return "0"


def agree(count: int, one: str, several: str) -> str:
    """The form of a verb or noun that agrees with a count."""
    return one if count == 1 else several


def counted(count: int, noun: str) -> str:
    """A count and its noun: "1 step", "2 steps"."""
    return f"{count:,} {noun}{agree(count, '', 's')}"


def name_ranks(numbers: Sequence[int]) -> str:
    """Ranks by number: "rank 3", "ranks 1, 2 and 3"; the first `MOST_RANKS` of many."""
    names = [str(number) for number in numbers[:MOST_RANKS]]
    if len(numbers) > MOST_RANKS:
        names.append(f"{len(numbers) - MOST_RANKS} more")
    listed = " and ".join([*filter(None, [", ".join(names[:-1])]), *names[-1:]])
    return f"{agree(len(numbers), 'rank', 'ranks')} {listed}"
