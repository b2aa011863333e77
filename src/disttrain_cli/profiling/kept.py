"""Measurements that outlive an interrupted profile: one file beside the profile, written whole
while it is made.

A record is one draw of one variant (module, TP size, frozen or not). The file's key is a
fingerprint of everything that decides the records; with another key the file is of no use and is
passed over.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypedDict

from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole


class Record(TypedDict):
    """What was measured of one draw; by kind of layer."""

    times: dict[str, list[list[float]]]  # (forward, backward) in ms of every pass
    kept_bytes: dict[str, float]  # from forward to backward; empty where it was not counted


#: By `record_name`.
Records = dict[str, Record]


def record_name(module: str, tp: int, frozen: bool, draw: int) -> str:
    return f"{module}/tp{tp}/{'frozen' if frozen else 'trained'}/{draw}"


def kept_path(run: Run) -> Path:
    """The file beside the profile."""
    return run.dir.root / "profile.partial.json"


def load(path: Path, key: str) -> Records:
    """The records of an interrupted profile with this key; none where there is no such file."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return dict(stored["records"]) if stored["key"] == key else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def save(path: Path, key: str, records: Records) -> None:
    """Write the file, whole or not at all; raises SpecError where its folder cannot be written."""
    write_whole(path, json.dumps({"key": key, "records": records}))
