"""Measured layers, in a file next to the profile, from which later profiles resume.

An interrupted profile resumes from it, and so does the profile of a cluster of another size. A
record is one draw of one variant (module, TP size, frozen or not). The file's key is a fingerprint
of everything that records depend on; a file with another key is ignored, and so is one whose
profile was completed for the same cluster: profiling again measures again. Records of a machine
that was busier, or is now, are ignored, too: other programs make a CPU's passes dearer, in CPU
time as well, and its peak with them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypedDict

from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.whole import write_whole


class Record(TypedDict):
    """Measurements of one draw, by kind of layer."""

    times: dict[str, list[list[float]]]  # (forward, backward) in ms of every pass
    kept_bytes: dict[str, float]  # from forward to backward; empty where it was not counted


#: Largest ratio of two measured peaks of one machine at similar load.
ALIKE = 1.5
#: By `record_name`.
Records = dict[str, Record]


def record_name(module: str, frozen: bool, draw: int, *, tp: int) -> str:
    return f"{module}/tp{tp}/{'frozen' if frozen else 'trained'}/{draw}"


def records_path(run: Run) -> Path:
    """Return the path of the file next to the profile."""
    return run.dir.root / "profile.layers.json"


def load(path: Path, key: str, peak_tflops: float, cluster: dict[str, Any]) -> Records:
    """Return the records with this key from an interrupted profile or one of another cluster.

    Args:
        peak_tflops: of the device, as measured now.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        alike = 1 / ALIKE <= stored["peak_tflops"] / peak_tflops <= ALIKE
        usable = alike and stored["key"] == key and stored["completed_for"] != cluster
        return dict(stored["records"]) if usable else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def save(
    path: Path,
    key: str,
    peak_tflops: float,
    records: Records,
    completed_for: dict[str, Any] | None = None,
) -> None:
    """Write the file atomically; `completed_for` is the cluster of a complete profile.

    Raises:
        SpecError: its folder cannot be written.
    """
    content = {"key": key, "peak_tflops": peak_tflops, "completed_for": completed_for}
    write_whole(path, json.dumps(content | {"records": records}))
