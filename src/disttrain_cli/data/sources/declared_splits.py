"""Splits that the README.md of a Hugging Face dataset declares: `configs` in its YAML head."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from disttrain_cli.data.sources.files import join, open_file
from disttrain_cli.spec.yaml_text import load_yaml

README, HEAD_BYTES = "README.md", 1024 * 1024
HEAD = re.compile(r"\s*---[ \t]*\r?\n(.*?)\n---[ \t]*\r?(\n|$)", re.DOTALL)
DEFAULT = "default"  # name of the config that is loaded if none is named
GLOB = re.compile(r"(\*\*/)|(\*\*)|(\*)|(\?)|(\[[^]/]+\])")
GLOBS = ("(?:.*/)?", ".*", "[^/]*", "[^/]")

#: Files of each split of a config.
Splits = dict[str, list[str]]


def declared_splits(path: str, files: Sequence[str]) -> dict[str, Splits]:
    """Return the splits of each config that a folder's README.md declares for its files.

    Only the default config is returned, if there is one.
    """
    if README not in files:
        return {}
    configs = _configs(path)
    default = [
        one for one in configs if one.get("default") is True or one.get("config_name") == DEFAULT
    ]
    by_config = dict[str, Splits]()
    for number, config in enumerate(default[:1] or configs):
        splits = Splits()
        for split, pattern in _patterns(config):
            matches = _regex(pattern).fullmatch
            splits.setdefault(split, []).extend(filter(matches, files))
        if splits:
            by_config[str(config.get("config_name", number))] = splits
    return by_config


def _configs(path: str) -> list[dict[str, Any]]:
    try:
        text = open_file(join(path, README)).read(0, HEAD_BYTES).decode("utf-8-sig", "replace")
        head = HEAD.match(text)
        about = load_yaml(head[1]) if head else None
    except (OSError, ValueError, RecursionError):
        return []
    configs = about.get("configs") if isinstance(about, dict) else None
    return [one for one in configs if isinstance(one, dict)] if isinstance(configs, list) else []


def _patterns(config: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (split, pattern of its files)."""
    files, folder = config.get("data_files"), config.get("data_dir")
    below = f"{folder.strip('/')}/" if isinstance(folder, str) and folder.strip("/.") else ""
    if isinstance(files, dict):
        files = [{"split": split, "path": paths} for split, paths in files.items()]
    for one in files if isinstance(files, list) else [files]:
        split, paths = "train", one
        if isinstance(one, dict):
            split, paths = str(one.get("split", split)), one.get("path")
        for pattern in paths if isinstance(paths, list) else [paths]:
            if isinstance(pattern, str):
                yield split, below + pattern.removeprefix("./")


def _regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a glob, as fsspec interprets it."""
    expression, at = "", 0
    for glob in GLOB.finditer(pattern):
        expression += re.escape(pattern[at : glob.start()])
        kind = glob.lastindex or 0
        expression += glob[0].replace("[!", "[^") if kind > len(GLOBS) else GLOBS[kind - 1]
        at = glob.end()
    try:
        return re.compile(expression + re.escape(pattern[at:]))
    except re.error:
        return re.compile(re.escape(pattern))
