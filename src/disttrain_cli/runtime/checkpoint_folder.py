"""Checkpoints from outside: which is the newest, what it says of itself, and whether it belongs to a run.

Apart from `checkpoint.py`, which reads and writes the tensors, so that the launcher needs no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.spec.files import parse_json


def latest(checkpoints: Path) -> Path | None:
    """Folder of the newest complete checkpoint."""
    found = sorted(path for path in checkpoints.glob("step-*") if (path / "checkpoint.json").exists())
    return found[-1] if found else None


def describe(folder: Path) -> dict[str, Any]:
    """The description of a checkpoint; raises SpecError."""
    value = parse_json(folder / "checkpoint.json", "checkpoint",
                       f"Move {folder} away to go on from the checkpoint before it, or start without --resume.")
    if not isinstance(value, dict) or not {"step", "model", "files"} <= value.keys():
        raise SpecError(f"The checkpoint {folder} is damaged", "checkpoint.json lacks step, model or files")
    return value


def check_belongs(folder: Path, model_fingerprint: str, data_fingerprint: str) -> int:
    """The step of a checkpoint that was made from this model and data.

    Raises:
        MismatchError: it was made from others; both fingerprints are named.
        SpecError: its description cannot be read.
    """
    described = describe(folder)
    for what, here, remedy in (("model", model_fingerprint, "restore the model section of the run file"),
                               ("dataset", data_fingerprint, "bring the data back as it was")):
        theirs = described.get(what, here)
        if theirs != here:
            raise MismatchError(f"The checkpoint {folder} was made from another {what}",
                                f"{what} of the checkpoint: {theirs}; here: {here}",
                                f"Start without --resume, or {remedy}.")
    return int(described["step"])
