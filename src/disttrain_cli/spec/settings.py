"""`--set KEY=VALUE`: changes of a run file's content in memory, and differences of contents."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

from disttrain_cli.calls import argument
from disttrain_cli.errors import UsageError
from disttrain_cli.spec.yaml_text import load_yaml


def with_settings(value: Any, settings: Sequence[str]) -> tuple[Any, list[tuple[str, ...]]]:
    """Apply every setting in order; return the content and the paths that were set.

    A KEY is a dotted path, indices of lists included (`data.sources.0.weight`); missing sections
    are added. A VALUE is YAML. If a section was added for a setting, its path is the section's.

    Raises:
        UsageError: a setting is not of this form, or its path leads into a value without fields.
    """
    changed = []
    value = copy.deepcopy(value) if settings else value  # YAML aliases share objects
    for setting in settings:
        key, equals, text = setting.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if not (equals and all(path)):
            _refuse(setting, "allowed: KEY=VALUE, such as train.optimizer.lr=1e-4")
        try:
            new = load_yaml(text)
        except ValueError as error:
            _refuse(setting, f"the value is not valid YAML: {error}")
        before, value = value, _replaced(value, path, new, setting)
        changed.append(path[: _there(before, path) + 1])
    return value, changed


def _there(value: Any, path: tuple[str, ...]) -> int:
    """Return how many parts of a path, which could be set, exist."""
    for number, part in enumerate(path):
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list):
            value = value[int(part)]
        if value is None:
            return number
    return len(path)


def _replaced(value: Any, path: tuple[str, ...], new: Any, setting: str) -> Any:
    """Return `value` with `new` at `path`."""
    if not path:
        return new
    part, rest = path[0], path[1:]
    if isinstance(value, list):
        if not (part.isascii() and part.isdigit() and int(part) < len(value)):
            _refuse(setting, f"{part!r} is no index of a list of {len(value)}, which begins at 0")
        index = int(part)
        return [*value[:index], _replaced(value[index], rest, new, setting), *value[index + 1 :]]
    if value is not None and not isinstance(value, dict):
        _refuse(setting, f"{part!r} is inside {value!r}, which has no fields")
    section = value or {}
    return {**section, part: _replaced(section.get(part), rest, new, setting)}


def differences(before: Any, now: Any, key: str = "") -> list[tuple[str, Any, Any]]:
    """Return (KEY, value before, value now) of every field that differs between two contents.

    The value is None where a content has no such field.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        parts = [(name, before.get(name), now.get(name)) for name in {**before, **now}]
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = [(str(number), *pair) for number, pair in enumerate(zip(before, now, strict=True))]
    else:
        return [] if before == now else [(key, before, now)]
    return [
        found
        for name, old, new in parts
        for found in differences(old, new, f"{key}.{name}" if key else name)
    ]


def _refuse(setting: str, why: str) -> NoReturn:
    raise UsageError(f"Cannot apply {argument('settings', setting)}", why, "See docs/runfile.md.")
