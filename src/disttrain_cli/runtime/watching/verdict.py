"""Verdict of a job: a file next to the ranks' states with the reason why the job is over.

Every rank polls it and exits. It is always opened for writing, even by readers: a file system of
several hosts then asks its server, while it may otherwise cache for a minute that the file does not
exist.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel


class Verdict(BaseModel):
    """Reason why the job is over."""

    text: str
    shown_on: str | None  # the host whose terminal has shown it already, if any
    hang: bool = False  # True if no rank failed, and all wait


def publish_verdict(folder: Path, verdict: Verdict) -> None:
    """Write a verdict unless there is one.

    Nothing is written where the folder is not writable, or ranks publish no states.
    """
    with suppress(OSError):
        descriptor = _open(folder)
        try:
            # a second verdict is dropped
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size == 0:
                os.write(descriptor, verdict.model_dump_json().encode())
        finally:
            os.close(descriptor)


def read_verdict(folder: Path) -> Verdict | None:
    """Return the verdict, if there is one."""
    try:
        descriptor = _open(folder)
        try:
            return Verdict.model_validate_json(os.pread(descriptor, 1 << 20, 0))
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None


def _open(folder: Path) -> int:
    return os.open(folder / "verdict", os.O_RDWR | os.O_CREAT, 0o644)
