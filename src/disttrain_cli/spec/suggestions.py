"""Suggestions for misspelt keys and values, also by other tools' names.

The latter are in `templates/other_tools.yaml`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

CLOSE = 0.7  # difflib's ratio; 0.6, its default, matches `adamw` to `data`
ELSEWHERE = 3  # most paths of a key that are listed


def closest(given: str, allowed: Collection[str]) -> str:
    """Return `; did you mean X?`, or an empty text if none of `allowed` is close."""
    matches = difflib.get_close_matches(given, allowed, 1, CLOSE)
    return f"; did you mean {matches[0]}?" if matches else ""


def listed(given: str, allowed: Sequence[str]) -> str:
    """Return all allowed names, and the closest one to `given`."""
    return ", ".join(allowed) + closest(given, allowed)


def meant_key(kind: type[BaseModel], location: tuple[Any, ...], allowed: Collection[str]) -> str:
    """Return a suggestion for a key unknown at `location` of `kind`, where `allowed` exist."""
    given = str(location[-1])
    paths = list(_paths(kind))
    ours = _other_tools()["keys"].get(_plain(given), "")
    if re.split(r"[ ,;]", ours)[0] in (*paths, "chosen"):
        return f"; here it is {ours}"
    if near := closest(given, allowed):
        return near
    places = [path for path in paths if path.rpartition(".")[2] == given]
    return f"; it is {' or '.join(places)}" if 0 < len(places) <= ELSEWHERE else ""


def meant_value(given: Any, allowed: Collection[str] = ()) -> str:
    """Return a suggestion for a value; `allowed` is empty if values are not a list of texts."""
    if isinstance(given, str) and (ours := _other_tools()["values"].get(_plain(given))):
        return f"; here it is {ours}" if not allowed or ours in allowed else ""
    return closest(given, allowed) if isinstance(given, str) else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").lstrip("_")


@cache
def _other_tools() -> dict[str, dict[str, str]]:
    text = (files("disttrain_cli") / "templates" / "other_tools.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


@cache
def _paths(kind: type[BaseModel]) -> tuple[str, ...]:
    return tuple(field_paths(kind))


def field_paths(kind: type[BaseModel]) -> Iterator[str]:
    """Yield dotted paths of all fields and sections; NAME and [] stand for keys and indices."""
    for name, field in kind.model_fields.items():
        yield name
        inner, step = section(field.annotation)
        if inner is not None:
            yield from (f"{name}{step}.{path}" for path in field_paths(inner))


def section(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """Return the model that a field holds, if any, and its path's suffix: "", "[]" or ".NAME"."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one, {list: "[]", dict: ".NAME"}.get(get_origin(annotation), "")
    return None, ""
