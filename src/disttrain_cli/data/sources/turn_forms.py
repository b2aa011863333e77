"""Turns of a conversation in other formats than a list of mappings, from tables and some JSONs.

Supported are JSON in a string (a list of turns, or a mapping with `messages` or `conversations`), a
list of such strings, a mapping of lists (`Sequence` of a mapping in Hugging Face's datasets), and
pairs `{user, assistant}` (the Cauldron, FineVision).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: Keys of a record that contain its turns.
TURNS = ("conversations", "messages")
#: Keys of a record without turns; the first one that is not null is read.
TEXTS = ("text", "caption")
#: (speaker, text) of a turn.
SPOKEN = (("from", "value"), ("role", "content"))
#: Keys of a pair: a turn of both sides.
PAIR = ("user", "assistant")


def with_turns(record: Any) -> Any:
    """Return a record with its turns as a list of mappings.

    A text that consists of turns is a conversation; other keys of a mapping in a string replace
    those of the record. A record without turns, or with unreadable ones, is unchanged.
    """
    if not isinstance(record, dict):
        return record
    fields = [name for name in TURNS if record.get(name) is not None]
    fields = fields or [name for name in TEXTS if record.get(name) is not None][:1]
    for field in fields:
        if not _is_usual(record[field]):
            record = _unfolded(record, field)
    return record


def _unfolded(record: dict[str, Any], field: str) -> dict[str, Any]:
    """Return a record with the turns of one of its fields as a list of mappings."""
    given = parsed(record[field])
    others = {key: value for key, value in record.items() if key != field}
    if isinstance(given, Mapping) and any(given.get(name) is not None for name in TURNS):
        if field in TEXTS and not any(turns_in(given.get(name)) for name in TURNS):
            return record  # a text that is JSON of something else
        return dict(with_turns(others | dict(given)))
    turns = turns_in(given)
    return record if turns is None else others | {field if field in TURNS else TURNS[0]: turns}


def _is_usual(value: Any) -> bool:
    """Return True if a value is a list of turns, or a text that is not JSON."""
    if isinstance(value, list):
        return bool(value) and isinstance(value[0], dict) and PAIR[0] not in value[0]
    return isinstance(value, str) and value.lstrip()[:1] not in ("[", "{")


def turns_in(value: Any) -> list[Any] | None:
    """Return the turns in a value, None if it has none."""
    value = parsed(value)
    if isinstance(value, Mapping):
        value = _rows(value)
    if not isinstance(value, list) or not value:
        return None
    turns = list[Any]()
    for turn in map(parsed, value):
        if not isinstance(turn, Mapping):
            return None
        if all(turn.get(side) is not None for side in PAIR):
            turns += _of_pair(turn, turns)
        elif any(turn.get(who) is not None and what in turn for who, what in SPOKEN):
            turns.append(turn)
        else:
            return None
    return turns


def _of_pair(pair: Mapping[str, Any], before: list[Any]) -> list[dict[str, Any]]:
    """Return the turns of a pair: the user's and the assistant's.

    The assistant's turn has the pair's other keys. A system turn precedes them if the pair's system
    message differs from the last one.

    Args:
        before: the turns before the pair.
    """
    turns: list[dict[str, Any]] = [{"role": side, "content": pair[side]} for side in PAIR]
    values = {key: value for key, value in pair.items() if value is not None}
    turns[1] |= {key: values[key] for key in values.keys() - {"system", "role", "content", *PAIR}}
    systems = [turn["content"] for turn in before if turn.get("role") == "system"]
    if values.get("system") and systems[-1:] != [values["system"]]:
        turns.insert(0, {"role": "system", "content": values["system"]})
    return turns


def parsed(value: Any) -> Any:
    """Return the value of a JSON that may contain turns; other values unchanged."""
    if isinstance(value, str | bytes) and value.lstrip()[:1] in ("[", "{", b"[", b"{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _rows(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the turns of a mapping of lists, None if they are no turns."""
    lists = {key: of for key, of in columns.items() if isinstance(of, list)}
    known = any(set(names) <= lists.keys() for names in (*SPOKEN, PAIR))
    if not known or len({len(of) for of in lists.values()}) != 1:
        return None
    return [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
