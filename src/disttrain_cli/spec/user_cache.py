"""Folder in the user's cache: `$XDG_CACHE_HOME/disttrain` or `~/.cache/disttrain`."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of the cached files.

    Raises:
        RuntimeError: the user has no home folder.
    """
    home = os.environ.get("XDG_CACHE_HOME")
    return (
        Path(home) if home and Path(home).is_absolute() else Path.home() / ".cache"
    ) / "disttrain"
