"""Manifests: YAML that every parser reads as the same values."""

from __future__ import annotations

import re
from typing import Any

import yaml

#: Words that no YAML parser reads as a number, a boolean or null.
PLAIN = re.compile(r"(?!(y|n|yes|no|on|off|true|false|null|nan|inf)$)[a-z][a-z0-9_./-]*", re.I)


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings other than plain words, as Go's parser reads 1e3 as a number.

    PyYAML's does not.
    """

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if PLAIN.fullmatch(text) else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def to_yaml(comment: str, value: dict[str, Any]) -> str:
    """Return a manifest, with keys in their given order."""
    body = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=1000)
    return f"# {comment}\n{body}"


def without_nothing(value: Any) -> Any:
    """Return the value without None, empty lists and empty mappings."""
    if isinstance(value, dict):
        some = {key: without_nothing(one) for key, one in value.items()}
        return {key: one for key, one in some.items() if one not in (None, {}, [])}
    return [without_nothing(one) for one in value] if isinstance(value, list) else value
