"""Reading and fingerprinting of artefacts: errors name the field's path."""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import stat
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from disttrain_cli.calls import argument
from disttrain_cli.errors import SpecError, UsageError
from disttrain_cli.spec.suggestions import meant_key, meant_value, section
from disttrain_cli.spec.yaml_text import lines_of, load_yaml


class Strict(BaseModel):
    """Base of every artefact: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


YAML_MIB, JSON_MIB = 16, 256  # largest file
PIPE_WAIT_S = 20  # for its first byte
UNION = ("constrained-", "literal[", "dict[", "list[", "function-", "[key]")
VALUES = ("literal_error", "value_error")  # may be another tool's name for a value
CORRECT = "Correct {path} and run the command again."

ArtefactT = TypeVar("ArtefactT", bound=BaseModel)


#: Context of a dump without places on this machine, which say nothing about the content.
IDENTITY = "identity"


def identity(value: BaseModel) -> Any:
    """Return what a model's fingerprint is of: its JSON, wherever its files lie."""
    return value.model_dump(mode="json", context=IDENTITY)


def fingerprint(value: Any) -> str:
    """Return 16 hex digits of the SHA-256 of `value` (a model or plain data) as canonical JSON."""
    plain = identity(value) if isinstance(value, BaseModel) else value
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _read_text(path: Path, what: str, next_step: str, most_mib: int) -> str:
    """Return the text of a file that a user names, which may be anything; raise SpecError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if (
                stat.S_ISFIFO(os.fstat(file.fileno()).st_mode)
                and not select.select([file], [], [], PIPE_WAIT_S)[0]
            ):
                raise TimeoutError(f"nothing was written into this pipe for {PIPE_WAIT_S} s")
            os.set_blocking(file.fileno(), True)
            data = file.read((most_mib << 20) + 1)
        if len(data) > most_mib << 20:
            raise ValueError(f"larger than {most_mib} MiB, more than any {what}")
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        raise SpecError(f"There is no {what} at {path}", next_step=next_step) from None
    except (OSError, ValueError) as error:  # includes UnicodeDecodeError
        raise SpecError(f"Cannot read the {what} {path}", str(error), next_step) from None


def parse_yaml(path: Path, what: str, next_step: str) -> Any:
    """Read YAML (or JSON, its subset) safely.

    Raises:
        SpecError: the file is missing, unreadable, too large or not YAML.
    """
    text = _read_text(path, what, next_step, YAML_MIB)
    try:
        return load_yaml(text)
    except ValueError as error:
        raise SpecError(
            f"The {what} {path} is not valid YAML", str(error), CORRECT.format(path=path)
        ) from None


def parse_json(path: Path, what: str, next_step: str) -> Any:
    """Read JSON; raise SpecError if it is missing, too large or malformed."""
    try:
        return json.loads(_read_text(path, what, next_step, JSON_MIB))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"Cannot read the {what} {path}", str(error), next_step) from None


def validate(
    kind: type[ArtefactT],
    value: Any,
    path: Path,
    what: str,
    next_step: str = "",
    changed: Sequence[tuple[str, ...]] = (),
) -> ArtefactT:
    """Check plain data against `kind`; errors name line, path, the value and what is allowed.

    Args:
        changed: fields that `--set` changed; errors in them are not attributed to the file.

    Raises:
        SpecError: a field is wrong.
        UsageError: all wrong fields were set by `--set`.
    """
    next_step = next_step or CORRECT.format(path=path)
    if not isinstance(value, dict):
        raise SpecError(
            f"The {what} {path} must be a mapping", f"given: {type(value).__name__}", next_step
        )
    problems: list[dict[str, Any]]
    try:
        read = kind.model_validate(value)
        problems = [
            {"loc": loc, "type": "value_error", "msg": "should be a number", "input": given}
            for loc, given in _truths(value)
            if isinstance(_at(read, loc), int | float) and not isinstance(_at(read, loc), bool)
        ]
        if not problems:
            return read
    except ValidationError as error:
        problems = [dict(problem) for problem in error.errors()]
    count, problems = len(problems), problems[:8]
    text = _read_text(path, what, next_step, JSON_MIB) if path.is_file() else ""
    was_set = f"{argument('settings')} "
    where = [
        was_set if _is_set(problem["loc"], changed) else f"line {line}, " if line else ""
        for problem, line in zip(
            problems, lines_of(text, [problem["loc"] for problem in problems]), strict=True
        )
    ]
    wrong = UsageError if all(one == was_set for one in where) else SpecError
    raise wrong(
        f"The {what} {path} has {count} wrong field(s)",
        "\n".join(
            f"  {at}{_explain(problem, kind)}" for at, problem in zip(where, problems, strict=True)
        ),
        next_step
        if wrong is SpecError
        else f"Correct {argument('settings')} and run the command again.",
    ) from None


def _truths(value: Any, *place: Any) -> Iterator[tuple[tuple[Any, ...], bool]]:
    """Yield the paths of booleans in plain data; pydantic converts them to 1 and 0."""
    if isinstance(value, bool):
        yield place, value
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, bool | dict | list):
                yield from _truths(inner, *place, key)


def _at(read: Any, location: tuple[Any, ...]) -> Any:
    """Return the value at a path of a model; None if it was parsed into something else."""
    for part in location:
        if isinstance(read, BaseModel):
            read = getattr(read, str(part), None)
        else:
            try:
                read = read[part]
            except (TypeError, LookupError):
                return None
    return read


def _is_set(location: tuple[Any, ...], changed: Sequence[tuple[str, ...]]) -> bool:
    """Return True if a field that was set contains `location`, or lies in it."""
    place = tuple(str(part) for part in location)
    return any(place[: len(path)] == path[: len(place)] for path in changed)


def _explain(problem: dict[str, Any], kind: type[BaseModel]) -> str:
    parts = [
        str(part)
        for part in problem["loc"]
        if part not in ("str", "int", "float") and not str(part).startswith(UNION)
    ]
    # without the choices of a union, which are not in the file
    where = ".".join(parts) or "(top level)"
    if problem["type"] == "extra_forbidden":
        allowed = _fields_at(kind, problem["loc"][:-1])
        meant = meant_key(kind, problem["loc"], allowed)
        named = f"; allowed here: {', '.join(allowed)}" if allowed else ""
        return f"{where}: unknown key{meant or named}"
    given = problem.get("input")
    shown = (
        "" if isinstance(given, dict) or problem["type"] == "missing" else f" (given: {given!r})"
    )
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "model_type":  # pydantic's message names the class
        fields = _fields_at(kind, problem["loc"])
        message = f"should be a mapping; allowed in it: {', '.join(fields)}"
    if problem["type"] == "string_type" and isinstance(given, bool | int | float | date):
        message += f"; in YAML this is of type {type(given).__name__} unless it stands in quotes"
    expected = re.findall(r"'([^']*)'", problem.get("ctx", {}).get("expected", ""))
    meant = meant_value(given, expected) if problem["type"] in VALUES else ""
    return f"{where}: {message[0].lower()}{message[1:]}{shown}{meant}"


def _fields_at(kind: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Return the fields allowed at `location` inside `kind`; empty if that is not a plain model."""
    current: type[BaseModel] | None = kind
    parts = iter(location)
    for part in parts:
        if current is None or part not in current.model_fields:
            return []
        current, step = section(current.model_fields[part].annotation)
        if step:
            next(parts, None)  # skip the index in the list, or the name in the mapping
    return [] if current is None else sorted(current.model_fields)
