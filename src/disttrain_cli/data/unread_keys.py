"""Keys and columns of records that no reader reads: counts, for a bounded number of names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

MOST_NAMES = 20  # keys may depend on the data: a record must not fill the index with them
OTHERS = "other keys"


def merged(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums by name: of the most frequent names, and of all others together."""
    total = sum(map(Counter, counts), Counter[str]())
    others = total.pop(OTHERS, 0)
    ranked = sorted(total.items(), key=lambda one: (-one[1], one[0]))
    others += sum(count for _, count in ranked[MOST_NAMES:])
    return dict(ranked[:MOST_NAMES]) | ({OTHERS: others} if others else {})


def described(of_sources: list[dict[str, int]]) -> list[str]:
    """Return a line for each source that has such keys."""
    lines = []
    for number, counts in enumerate(of_sources):
        of_source = f" in data.sources[{number}]" if len(of_sources) > 1 else ""
        first, *others = [f"{name} in {count:,}" for name, count in counts.items()] or [""]
        if first:
            lines.append(f"ignored{of_source}: {', '.join([f'{first} records', *others])}")
    return lines
