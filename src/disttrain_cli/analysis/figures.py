"""Figures as they are shown to people."""

from __future__ import annotations


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
