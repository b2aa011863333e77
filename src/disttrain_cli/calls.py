"""Calls and arguments in messages, spelled for a shell or for Python.

They are `disttrain train --resume` in a shell, `disttrain_cli.train(resume=True)` in Python. A
message holds them between two marks (`call`, `argument`), from where it is raised, in whichever
process, to where `spelled` writes it for the reader.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEFAULT_RUN_FILE = Path("disttrain.yaml")
#: Noncharacters of Unicode, reserved for such internal use; they occur in no text.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
#: Commands of API functions whose names differ from their command's.
COMMANDS = {
    "calibrate": "profile",
    "compare_clusters": "plan",
    "data_index_share": "data index",
    "dry_run": "train --dry-run",
    "dry_run_steps": "train --dry-run --device cuda",
    "emit": "train",
    "explain_hang": "analyze",
    "look": "watch --once",
    "preflight": "train --preflight",
    "rehearse": "train --rehearse",
    "holds": "analyze",
    "sql": "analyze",
    "write_perfetto": "analyze",
}
#: Option names of function arguments that are named differently.
OPTIONS = {
    "condition": "fail-if",
    "devices": "device",
    "every_s": "every",
    "file": "perfetto",
    "images": "image",
    "kind": "emit",
    "model": "folder",
    "origin": "from",
    "prompts": "prompt",
    "query": "sql",
    "recorded": "calibrate",
    "run_file": "run",
    "settings": "set",
}
#: Commands whose first argument is not a run file.
_OF_NO_RUN = ("analyze", "doctor", "init", "models", "sample", "schema", "watch")


@dataclass(frozen=True)
class Reader:
    """Reader of messages (shell or Python), with the run file and settings that messages repeat."""

    shell: bool = False
    run: Path | str | None = None  # the run file; in Python also an expression that is one (str)
    settings: Sequence[str] = ()  # `--set` of the command that runs
    traces: Sequence[Path] = ()


#: Reader of this process, shared by all threads.
_reader = Reader()


def read_by(reader: Reader) -> Reader:
    """Spell messages for this reader from now on; returns the previous reader."""
    global _reader
    before, _reader = _reader, reader
    return before


def now_read_by() -> Reader:
    """Return the reader that messages are spelled for."""
    return _reader


def call(function: str, *values: object, **arguments: object) -> str:
    """Return a marked call of an API function, or of its command, for a message.

    Args:
        values: positional arguments, without the run file that the reader has named.
        arguments: keyword arguments; `help=True` alone is the help of the function. A text in
            capitals, also as a positional argument, is a placeholder.
    """
    plain = {name: _plain(value) for name, value in arguments.items()}
    return f"{_BEGIN}{json.dumps([function, [*map(_plain, values)], plain])}{_END}"


def argument(name: str, value: object = None) -> str:
    """Return a marked argument for a message, with its value if any: `--resume`, `resume=True`."""
    return call("", **{name: value})


def spelled(text: str) -> str:
    """Return the message with its calls and arguments spelled for the reader."""
    if _BEGIN not in text:
        return text
    if not _reader.shell:
        text = text.replace(f"{_END} && {_BEGIN}", f"{_END}; {_BEGIN}")
    return _MARKED.sub(_spell, text)


def _spell(match: re.Match[str]) -> str:
    try:
        return (_in_shell if _reader.shell else _in_python)(*json.loads(match[1]))
    except (TypeError, ValueError):  # these characters in an untrusted name
        return match[0]


def set_words() -> list[str]:
    """Return the `--set` options of the running command, as words of a command line."""
    return [word for setting in _reader.settings for word in ("--set", setting)]


def _plain(value: object) -> Any:
    """Return the value in a form for JSON; ranges and paths, never placeholders, by type."""
    if isinstance(value, range):
        return {"range": [value.start, value.stop]}
    return {"path": str(value)} if isinstance(value, Path) else value


def _in_shell(function: str, values: list[Any], arguments: dict[str, Any]) -> str:
    command, *fixed = COMMANDS.get(function, function.replace("_", " ", 1)).split(" --")
    words = ["disttrain", *command.split()] if function else []
    if arguments != {"help": True}:
        words += map(str, _named(command, values))
        words += set_words() if function and command not in _OF_NO_RUN else []
    words += [word for option in fixed for word in f"--{option}".split()]
    words += map(_word, values)
    for name, value in arguments.items():
        option = f"--{OPTIONS.get(name, name).replace('_', '-')}"
        for one in value if isinstance(value, list) else [value]:
            words += [option] if one is None or one is True else [option, _word(one)]
    return shlex.join(words)


def _word(value: Any) -> str:
    if isinstance(value, dict):
        return value["path"] if "path" in value else "{}:{}".format(*value["range"])
    return str(value)


def _in_python(function: str, values: list[Any], arguments: dict[str, Any]) -> str:
    if arguments == {"help": True}:
        return f"help(disttrain_cli.{function})"
    spelled = [
        name if value is None else f"{name}={_expression(value)}"
        for name, value in arguments.items()
    ]
    if not function:
        return ", ".join(spelled)
    command = COMMANDS.get(function, function).split(" --")[0]
    first = [repr(str(one)) if isinstance(one, Path) else one for one in _named(command, values)]
    return f"disttrain_cli.{function}({', '.join([*first, *map(_expression, values), *spelled])})"


def _expression(value: Any) -> str:
    """Return the value as a Python expression; a placeholder unchanged."""
    if isinstance(value, dict):
        return repr(value["path"]) if "path" in value else "range({}, {})".format(*value["range"])
    return value if isinstance(value, str) and re.fullmatch("[A-Z]+", value) else repr(value)


def _named(command: str, values: list[Any]) -> Sequence[Path | str]:
    """Return the paths that the reader named and that the command takes first."""
    if command == "analyze":
        return [] if values else _reader.traces
    takes = command and command not in _OF_NO_RUN and _reader.run != DEFAULT_RUN_FILE
    return [_reader.run] if takes and _reader.run is not None else []
