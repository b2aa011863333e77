"""What was found in traces is kept: the same files asked again are answered without reading them.

Kept are the analysis and, where a report was wanted, what it draws, as JSON in the user's cache folder. They are of
exactly these files: the key has the path, size and time of change of every one, and of every file of this program.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from disttrain_cli import __version__
from disttrain_cli.analysis.cache import cached, forget
from disttrain_cli.analysis.result import plain
from disttrain_cli.spec.whole import write_whole

Found = TypeVar("Found")


def remembered(inputs: list[Path], about: str, kind: type[Found], find: Callable[[], Found]) -> Found:
    """What `find` finds in `inputs`, now or before.

    Args:
        inputs: every file that it depends on.
        about: what it is, and all else that it depends on.
        kind: of what is found: a struct or a dataclass.

    """
    def build(file: Path) -> None:
        write_whole(file, msgspec.json.encode(find(), enc_hook=plain))

    def known() -> Found:
        path, stays = cached(inputs, f"{about} {__version__} {_program()}", build, ".json")
        try:
            return msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.MsgspecError:
            path.unlink(missing_ok=True)
            raise
        finally:
            if not stays:
                forget(path)

    try:
        return known()
    except msgspec.MsgspecError:  # the file was damaged: found once more
        return known()


@cache
def _program() -> str:
    """Changes with any file of this package."""
    files: list[Any] = []
    folders = [str(resources.files("disttrain_cli"))]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders += [entry.path] * (entry.name != "__pycache__")
                elif entry.name.endswith((".py", ".sql", ".txt")):
                    about = entry.stat()
                    files.append((entry.path, about.st_size, about.st_mtime_ns))
    return hashlib.sha256(repr(sorted(files)).encode()).hexdigest()
