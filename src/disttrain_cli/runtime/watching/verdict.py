"""The verdict: a file beside the ranks' states that says why the job is over. Every rank looks for
it and ends.

It is opened each time as if to be written, also by those who read: a file system of several hosts
then asks its server, while it may believe for a minute that a file which it has not seen is not
there.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel


class Verdict(BaseModel):
    """Why the job is over."""

    text: str
    told_on: str | None  # the host on whose terminal it stands already, if any
    hang: bool = False  # whether nobody failed, and all wait


def publish_verdict(folder: Path, verdict: Verdict) -> None:
    """Leave a verdict where there is none yet. Where nothing can be written, or ranks have no
    states, none is left."""
    with suppress(OSError):
        descriptor = _open(folder)
        try:
            # the second to report has nothing to add
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_size == 0:
                os.write(descriptor, verdict.model_dump_json().encode())
        finally:
            os.close(descriptor)


def read_verdict(folder: Path) -> Verdict | None:
    """The verdict, if there is one."""
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
