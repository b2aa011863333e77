"""Folder in the user's cache: `$XDG_CACHE_HOME/disttrain` or `~/.cache/disttrain`."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of the cached files, which is created for the user alone (mode 0700).

    A folder that cannot be created is returned, too: whoever reads or writes a file in it fails.

    Raises:
        RuntimeError: the user has no home folder.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    folder = (
        Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    ) / "disttrain"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder
