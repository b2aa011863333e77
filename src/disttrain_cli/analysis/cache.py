"""Cache of what is built from traces: one file per set of inputs, in the user's cache folder.

Databases are stored as they are. Results (an analysis, the data of the report's pictures) are JSON,
under a key that also has every file of this program: an analysis of unchanged files is returned
without reading them again.

The folder is `$XDG_CACHE_HOME/disttrain` or `~/.cache/disttrain`. A file's name is a hash of the
inputs' absolute paths, sizes and modification times and of the reader's version, so changed inputs
are read again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from disttrain_cli import __version__
from disttrain_cli.analysis.result.summary import plain
from disttrain_cli.spec.user_cache import cache_folder
from disttrain_cli.spec.whole import write_whole

Result = TypeVar("Result")

#: Maximum size of the cache; beyond it, the least recently used files are removed.
MOST_BYTES = 8 * 2**30
_ABANDONED_S = 24 * 3600


def cached(
    inputs: list[Path], version: str, build: Callable[[Path], None], ending: str = ".duckdb"
) -> tuple[Path, bool]:
    """Return the file built from `inputs`, and True if it stays in the cache.

    A cached file is returned as it is; otherwise `build` writes it. The caller removes a file that
    does not stay (`forget`). The file is written under a temporary name and renamed at the end, so
    no reader opens a partial file; of two processes that build at once, the last one wins. If the
    cache folder cannot be written, the file is built in a temporary folder.

    Args:
        inputs: files that are read.
        version: version of the reader and of all else that the content depends on.
        build: writes the file to the path in its argument.
        ending: suffix of the file's name, `.duckdb` or `.json`.
    """
    folder = cache_folder()
    try:
        target = folder / f"{_key(inputs, version)}{ending}"
        if target.is_file():
            os.utime(target)
            return target, True
        work = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    except OSError:
        work, target = Path(tempfile.mkdtemp(prefix="disttrain-")), None
    built = work / "traces.duckdb"
    try:
        build(built)
        if target is not None:
            os.replace(built, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    if target is None:
        return built, False
    shutil.rmtree(work, ignore_errors=True)
    _bound(folder, target)
    return target, True


def cached_result(
    inputs: list[Path], about: str, kind: type[Result], find: Callable[[], Result]
) -> Result:
    """Return the cached result for `inputs`, or compute it by `find` and cache it.

    Args:
        inputs: every file that the result depends on.
        about: name of the result, and all else that it depends on.
        kind: type of the result: a struct or a dataclass.
        find: computes the result.
    """

    def build(file: Path) -> None:
        write_whole(file, msgspec.json.encode(find(), enc_hook=plain))

    def known() -> Result:
        path, stays = cached(inputs, f"{about} {program()}", build, ".json")
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
    except msgspec.MsgspecError:  # damaged file: compute the result again
        return known()


def forget(database: Path) -> None:
    """Remove a file that is not in the cache, with its temporary folder."""
    shutil.rmtree(database.parent, ignore_errors=True)


@cache
def program() -> str:
    """Return a hash of this package's version and of each of its files' path, size and time."""
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
    return hashlib.sha256(repr((__version__, sorted(files))).encode()).hexdigest()


def _key(inputs: list[Path], version: str) -> str:
    digest = hashlib.sha256(version.encode())
    folders = {folder: os.path.realpath(folder) for folder in {path.parent for path in inputs}}
    for path in inputs:
        real_path = (
            os.path.realpath(path)
            if path.is_symlink()
            else os.path.join(folders[path.parent], path.name)
        )
        about = path.stat()
        digest.update(
            f"\0{real_path}\0{about.st_size}\0{about.st_mtime_ns}".encode(
                "utf-8", "surrogateescape"
            )
        )
    return digest.hexdigest()[:32]


def _bound(folder: Path, keep: Path) -> None:
    """Remove the least recently used files beyond `MOST_BYTES`, and old unfinished builds."""
    try:
        for left in folder.glob(".building-*"):
            if time.time() - left.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)
        kept = sorted(
            (
                (file.stat().st_mtime, file.stat().st_size, file)
                for file in folder.iterdir()
                if file.suffix in (".duckdb", ".json")
            ),
            reverse=True,
        )
        total = 0
        for _, size, file in kept:
            total += size
            if total > MOST_BYTES and file != keep:
                file.unlink(missing_ok=True)
    except OSError:
        return
