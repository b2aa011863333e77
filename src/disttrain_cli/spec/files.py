"""Reading and fingerprinting artefacts: what is wrong is refused with the field's path."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from disttrain_cli.errors import SpecError


class Strict(BaseModel):
    """Base of every artefact: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)


MOST_NESTED = 64  # levels of lists and mappings in a YAML file

ArtefactT = TypeVar("ArtefactT", bound=BaseModel)


def fingerprint(value: Any) -> str:
    """First 16 hex digits of the SHA-256 of `value` (a model or plain data) as canonical JSON."""
    plain = value.model_dump(mode="json") if isinstance(value, BaseModel) else value
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Loader(yaml.CSafeLoader):
    """YAML's safe loader, but a key given twice is an error, not the last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice",
                                                        key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else key)
        return super().construct_mapping(node, deep)


def _check_depth(text: str) -> None:
    """Refuse nesting that would overflow the loader's stack; raises ValueError."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            place = "" if event.start_mark is None else f" in line {event.start_mark.line + 1}"
            raise ValueError(f"nested more than {MOST_NESTED} levels deep{place}")


def parse_yaml(path: Path, what: str, next_step: str) -> Any:
    """Read YAML (or JSON, its subset) safely.

    Raises:
        SpecError: the file is missing, unreadable or not YAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"There is no {what} at {path}", next_step=next_step) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"Cannot read the {what} {path}", str(error)) from None
    try:
        _check_depth(text)
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: 2026-13-45 looks like a date and is none
        raise SpecError(f"The {what} {path} is not valid YAML", str(error)) from None


def parse_json(path: Path, what: str, next_step: str) -> Any:
    """Read JSON; raises SpecError where it is missing or malformed."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"There is no {what} at {path}", next_step=next_step) from None
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"Cannot read the {what} {path}", str(error), next_step) from None


def validate(kind: type[ArtefactT], value: Any, path: Path, what: str, next_step: str = "") -> ArtefactT:
    """Check plain data against `kind`, naming every wrong field by its path, what was given and what is allowed."""
    if not isinstance(value, dict):
        raise SpecError(f"The {what} {path} must be a mapping", f"given: {type(value).__name__}", next_step)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        lines = [_explain(dict(problem), kind) for problem in error.errors()[:8]]
        raise SpecError(f"The {what} {path} has {error.error_count()} wrong field(s)", "\n".join(lines),
                        next_step) from None


def _explain(problem: dict[str, Any], kind: type[BaseModel]) -> str:
    parts = [str(part) for part in problem["loc"] if not str(part).startswith(("constrained-", "literal["))]
    where = ".".join(parts) or "(top level)"  # without the choices of a union, which are no places in the file
    if problem["type"] == "extra_forbidden":
        allowed = ", ".join(_fields_at(kind, problem["loc"][:-1]))
        return f"  {where}: unknown key" + (f"; allowed here: {allowed}" if allowed else "")
    given = problem.get("input")
    shown = "" if isinstance(given, dict) or problem["type"] == "missing" else f" (given: {given!r})"
    message = problem["msg"].removeprefix("Value error, ")
    return f"  {where}: {message[0].lower()}{message[1:]}{shown}"


def _fields_at(kind: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    """Names of the fields allowed at `location` inside `kind`, or none where that is not a plain model."""
    current: Any = kind
    parts = iter(location)
    for part in parts:
        if part not in current.model_fields:
            return []
        annotation = current.model_fields[part].annotation
        if get_origin(annotation) in (list, dict):
            next(parts, None)  # the place in the list, or the name in the mapping
        current = next((kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields")), None)
        if current is None:
            return []
    return sorted(current.model_fields)
