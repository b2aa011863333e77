"""Pixel budgets of images in content parts, by the keys of qwen-vl-utils.

The keys are in the part or inside its `image_url`. A null key counts as absent: tables give every
part the keys of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disttrain_cli.data.sources.samples import printable
from disttrain_cli.spec.image_processor import PixelBudget

KEYS = frozenset(PixelBudget._fields)
MOST = 2**53  # integers up to it are exact in double precision


def budget_of(part: Mapping[str, Any], where: str) -> PixelBudget | None:
    """Return the pixel budget of a part, if it has one.

    Raises:
        ValueError: a value is no number of pixels.
    """
    nested = (part.get(name) for name in ("image", "image_url"))
    bounds = {
        key: _pixels(mapping[key], key, where)
        for mapping in (part, *(one for one in nested if isinstance(one, Mapping)))
        for key in KEYS & mapping.keys()
        if mapping[key] is not None
    }
    return PixelBudget(**bounds) if bounds else None


def _pixels(value: Any, key: str, where: str) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # columns of a table with nulls are often floats
    if not number or not 1 <= value <= MOST or value % 1:
        shown = printable(repr(value), 40)
        raise ValueError(f"{where} has an image with `{key}` {shown}: a whole number from 1 on")
    return int(value)
