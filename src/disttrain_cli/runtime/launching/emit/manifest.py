"""Manifests: YAML that every reader takes for the same values, and where containers find their
files."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from disttrain_cli.calls import argument
from disttrain_cli.data.sources.files import is_url
from disttrain_cli.errors import SpecError
from disttrain_cli.spec.runfile import Run

#: Words that no reader of YAML takes for a number, a truth value or nothing.
PLAIN = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null|nan|inf)$)[a-z][a-z0-9_./-]*", re.I)


class _Dumper(yaml.SafeDumper):
    """Strings in quotes unless they are plain words: Go's reader has 1e3 for a number, and PyYAML's
    has not."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(comment: str, value: dict[str, Any]) -> str:
    """A manifest, keys in the order given; values of None, and empty lists and mappings, are left
    out."""
    body = yaml.dump(_without_nothing(value), Dumper=_Dumper, sort_keys=False, width=1000)
    return f"# {comment}\n{body}"


def _without_nothing(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _without_nothing(one) for key, one in value.items()}
        return {key: one for key, one in kept.items() if one not in (None, {}, [])}
    return [_without_nothing(one) for one in value] if isinstance(value, list) else value


def check_mounted(run: Run, mount: str, files: Sequence[Path], field: str) -> None:
    """SpecError where a file of the run would not be found in a container that mounts its volume at
    `mount`."""
    named = [run.resolve(path) for path in _named(run)]
    outside = [
        str(path.resolve())
        for path in (run.path, run.dir.root, *files, *named)
        if not path.resolve().is_relative_to(mount)
    ]
    if outside:
        raise SpecError(
            f"Containers would not find {outside[0]}",
            f"{field}: {mount} is all that they mount",
            "Mount the volume here under the path that it has there, put the run file, runs/, the"
            f" plan, {argument('out')}, data and models on it, and emit from there.",
        )


def _named(run: Run) -> list[str]:
    """Data and models on this host that the run file names by their paths."""
    file = run.file
    data = [path for source in file.data.sources for path in (source.path, source.images)]
    models = [spec.folder for spec in file.model.modules.values()]
    return [path for path in (*data, file.model.folder, *models) if path and _is_local(run, path)]


def _is_local(run: Run, path: str) -> bool:
    return not is_url(path) and path not in run.revisions
