"""Bounded parsing of untrusted YAML to plain data, and the lines of its values.

The bounds also apply to the expansion of aliases.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

import yaml

MOST_NESTED = 64  # levels of lists and mappings, including expanded aliases
MOST_VALUES = 200_000  # scalars, lists and mappings, including expanded aliases


class _Loader(yaml.CSafeLoader):
    """YAML's safe loader in which duplicate keys are errors, and every error has its position."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int | float) and (base := _unusual_base(node.value)):
                raise ValueError(
                    f"{node.value} is {value} in YAML, which reads it in base {base}: write that,"
                    f" or '{node.value}' for a text"
                )
            return value
        # 2026-13-45 looks like a date and is none; a number of 5,000 digits
        except ValueError as error:
            raise yaml.constructor.ConstructorError(
                None, None, str(error), node.start_mark
            ) from None


def _unusual_base(number: str) -> int | None:
    """Return 60 for 1:30 and 8 for 0360, which most people and programs read otherwise."""
    if ":" in number:
        return 60
    return 8 if re.fullmatch(r"[-+]?0[0-7_]+", number) else None


def load_yaml(text: str) -> Any:
    """Return the plain data of one document.

    Raises:
        ValueError: the text is invalid; the message names the problem and its line.
    """
    try:
        _check_size(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise ValueError(re.sub(r'in "<[a-z ]+>", (line|position)', r"in \1", str(error))) from None


def lines_of(text: str, paths: Sequence[tuple[Any, ...]]) -> list[int | None]:
    """Return the line of each path, or of its innermost existing part.

    Paths are keys and indices from the top. None if nothing of the path exists, or the text is not
    YAML.
    """
    try:
        _check_size(text)
        top = yaml.compose(text, Loader=yaml.CSafeLoader)
    except (yaml.YAMLError, ValueError):
        return [None] * len(paths)
    return [_line_of(top, path) for path in paths]


def _line_of(node: yaml.Node | None, path: tuple[Any, ...]) -> int | None:
    line = None
    for part in path:
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            node = node.value[part]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode):
            matching = [(key, value) for key, value in node.value if key.value == str(part)]
            if not matching:
                # a choice of a union, which is no place in the file; or a key that is missing
                continue
            key, node = matching[0]
            line = key.start_mark.line + 1
    return line


def _check_size(text: str) -> None:
    """Raise ValueError for a document that would overflow the loader's stack or expand too far."""
    inside: list[_Part] = []  # from the outermost list or mapping to the innermost
    anchored: dict[str, _Part] = {}
    values = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        if isinstance(event, yaml.CollectionEndEvent):
            part = inside.pop()
        # the loader rejects unknown ones
        elif isinstance(event, yaml.AliasEvent) and event.anchor in anchored:
            part = anchored[event.anchor]
            if part in inside:
                _refuse(event, f"the alias *{event.anchor} is inside the value that it refers to")
            values += part.values
        elif isinstance(event, (yaml.ScalarEvent, yaml.CollectionStartEvent)):
            part = _Part(levels=int(isinstance(event, yaml.CollectionStartEvent)))
            values += 1
            if event.anchor is not None:
                anchored[event.anchor] = part
        else:
            continue
        if isinstance(event, yaml.ScalarEvent) and "\0" in event.value:
            _refuse(event, "a null character, which file names cannot contain")
        if values > MOST_VALUES:
            _refuse(event, f"more than {MOST_VALUES:,} values, counting those of aliases")
        if len(inside) + part.levels > MOST_NESTED:
            _refuse(event, f"nested more than {MOST_NESTED} levels deep")
        if isinstance(event, yaml.CollectionStartEvent):
            inside.append(part)
        elif inside:
            inside[-1].add(part)


class _Part:
    """Size of a value of a document: number of values, and levels of lists and mappings."""

    def __init__(self, levels: int) -> None:
        self.values, self.levels = 1, levels

    def add(self, inner: _Part) -> None:
        """Add one more value."""
        self.values += inner.values
        self.levels = max(self.levels, inner.levels + 1)


def _refuse(event: yaml.Event, why: str) -> NoReturn:
    raise ValueError(
        why + ("" if event.start_mark is None else f", in line {event.start_mark.line + 1}")
    )
