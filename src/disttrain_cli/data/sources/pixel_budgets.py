"""Sizes that a content part states of its image, by the keys of qwen-vl-utils, beside the image or
inside its `image_url`. A key that is null is not there: tables give every part the keys of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from disttrain_cli.data.sources.samples import printable
from disttrain_cli.spec.image_processor import PixelBudget

KEYS = frozenset(PixelBudget._fields)
MOST = 2**53  # numbers up to it are whole in double precision


def budget_of(part: Mapping[str, Any], where: str) -> PixelBudget | None:
    """Return what a part states, if it states anything.

    Raises:
        ValueError: a value is no number of pixels.
    """
    nested = (part.get(name) for name in ("image", "image_url"))
    given = {
        key: _pixels(mapping[key], key, where)
        for mapping in (part, *(one for one in nested if isinstance(one, Mapping)))
        for key in KEYS & mapping.keys()
        if mapping[key] is not None
    }
    return PixelBudget(**given) if given else None


def _pixels(value: Any, key: str, where: str) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    # columns of a table with nulls in them are often floats
    if not number or not 1 <= value <= MOST or value % 1:
        shown = printable(repr(value), 40)
        raise ValueError(f"{where} has an image with `{key}` {shown}: a whole number from 1 on")
    return int(value)
