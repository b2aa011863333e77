"""Calls and arguments in messages, spelled as the reader makes them: `disttrain train --resume` in
a shell, `disttrain_cli.train(resume=True)` in Python.

A message holds them between two marks (`call`, `argument`), from where it is raised, in whichever
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
#: Noncharacters of Unicode, which are there for such use; they stand in no text.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKED = re.compile(f"{_BEGIN}([^{_BEGIN}{_END}]*){_END}")
#: Functions of the API that are a way to call a command of another name.
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
#: Arguments of functions whose options have other names.
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
#: Commands whose first argument is no run file.
_OF_NO_RUN = ("analyze", "doctor", "init", "sample", "schema", "watch")


@dataclass(frozen=True)
class Reader:
    """Who reads messages, and what they have named: it stands in every call that takes it."""

    shell: bool = False
    run: Path | str | None = None  # the run file; in Python also an expression that is one (str)
    settings: Sequence[str] = ()  # `--set` of the command that runs
    traces: Sequence[Path] = ()


#: Of the process, its threads included.
_reader = Reader()


def read_by(reader: Reader) -> Reader:
    """Have messages from now on spelled for this reader; returns the one before."""
    global _reader
    before, _reader = _reader, reader
    return before


def now_read_by() -> Reader:
    """The reader that messages are spelled for."""
    return _reader


def call(function: str, *values: object, **arguments: object) -> str:
    """A call of the API's function, or of the command that does the same, in a message.

    Args:
        values: positional arguments, without the run file that the reader has named.
        arguments: those by name; `help=True` alone is the help of the function. A text in capitals,
            also as an argument by position, is a placeholder.
    """
    plain = {name: _plain(value) for name, value in arguments.items()}
    return f"{_BEGIN}{json.dumps([function, [*map(_plain, values)], plain])}{_END}"


def argument(name: str, value: object = None) -> str:
    """An argument in a message, with its value where one is given: `--resume`, `resume=True`."""
    return call("", **{name: value})


def spelled(text: str) -> str:
    """The message with its calls and arguments as the reader makes them."""
    if _BEGIN not in text:
        return text
    if not _reader.shell:
        text = text.replace(f"{_END} && {_BEGIN}", f"{_END}; {_BEGIN}")
    return _MARKED.sub(_spell, text)


def _spell(match: re.Match[str]) -> str:
    try:
        return (_in_shell if _reader.shell else _in_python)(*json.loads(match[1]))
    except (TypeError, ValueError):  # such characters in a stranger's name
        return match[0]


def set_words() -> list[str]:
    """The `--set` options of the command that runs, as words of a command line."""
    return [word for setting in _reader.settings for word in ("--set", setting)]


def _plain(value: object) -> Any:
    """The value as JSON can hold it; ranges and paths, which are no placeholders, by their kind."""
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
    """The value in Python; a placeholder as it is."""
    if isinstance(value, dict):
        return repr(value["path"]) if "path" in value else "range({}, {})".format(*value["range"])
    return value if isinstance(value, str) and re.fullmatch("[A-Z]+", value) else repr(value)


def _named(command: str, values: list[Any]) -> Sequence[Path | str]:
    """Paths that the reader named and the command takes first."""
    if command == "analyze":
        return [] if values else _reader.traces
    takes = command and command not in _OF_NO_RUN and _reader.run != DEFAULT_RUN_FILE
    return [_reader.run] if takes and _reader.run is not None else []
