"""Cache of results about a model's layers on disk, for all devices and clusters.

A result's file is named by a hash of everything that decides it: the function and its arguments,
the model (`graph.of_model`), the process's version of FlashAttention, the installed libraries, and
the content of this package's sources. Files are written whole and never changed; the least recently
used ones are removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import resources
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from disttrain_cli.errors import SpecError
from disttrain_cli.models import flash4
from disttrain_cli.spec.user_cache import cache_folder
from disttrain_cli.spec.whole import write_whole

LIBRARIES = ("torch", "transformers", "diffusers", "numpy", "pydantic")
MOST_BYTES = 64 * 2**20  # of all files
_IMPORTED_S = time.time()


def from_disk(function: Callable[..., Any], key: object, compute: Callable[[], Any]) -> Any:
    """Return the result of `compute`, from disk if it is there; it is of the function's type.

    Without a cache folder that can be read and written, it is computed every time. So it is where
    other packages add layers, or sources were edited since this process began: no hash of files is
    then one of the code that runs.

    Args:
        function: what is computed.
        key: everything that decides its result, but for libraries and sources.
    """
    if _extended() or _edited():
        return compute()
    asked = function.__module__, function.__qualname__, key, flash4.used()
    about = *asked, _libraries(), sources()
    name = hashlib.sha256(repr(about).encode()).hexdigest()
    adapter = _adapter(function)
    try:
        path = cache_folder() / "layers" / f"{name}.json"
        digest, _, content = path.read_bytes().partition(b"\n")
        if digest == _digest(content):
            result = adapter.validate_json(content)
            with suppress(OSError):  # of another user, or read only
                os.utime(path)
            return result
    except (OSError, RuntimeError, ValidationError):
        pass
    result = compute()
    with suppress(OSError, RuntimeError, SpecError, ValueError):
        content = adapter.dump_json(result)
        if adapter.validate_json(content) == result:
            folder = cache_folder() / "layers"
            write_whole(folder / f"{name}.json", _digest(content) + b"\n" + content)
            _bound(folder)
    return result


@cache
def _extended() -> bool:
    """Return True if other packages add architectures or modalities."""
    return any(entry_points(group=f"disttrain.{kind}") for kind in ("architectures", "heads"))


@cache
def _edited() -> bool:
    """Return True if a file of this package is newer than this process's import of this module."""
    return any(path.stat().st_mtime > _IMPORTED_S for path in _files())


@cache
def _adapter(function: Callable[..., Any]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function)["return"])


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


@cache
def _libraries() -> list[str]:
    """Return Python's version and those of the libraries that run and count operators."""
    found = [platform.machine(), platform.python_version()]
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found.append(f"{library} {version(library)}")
    return found


@cache
def sources() -> str:
    """Return a hash of the content of all of this package's files."""
    root = Path(str(resources.files("disttrain_cli")))
    digest = hashlib.sha256()
    for path in _files():
        digest.update(json.dumps([str(path.relative_to(root)), path.stat().st_size]).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files() -> list[Path]:
    root = Path(str(resources.files("disttrain_cli")))
    return sorted(
        path for path in root.rglob("*") if "__pycache__" not in path.parts and path.is_file()
    )


def _bound(folder: Path) -> None:
    """Remove the least recently used files beyond `MOST_BYTES`."""
    files = sorted(
        (
            (about.st_mtime, about.st_size, path)
            for path in folder.glob("*.json")
            for about in [path.stat()]
        ),
        reverse=True,
    )
    total = 0
    for _, size, path in files:
        total += size
        if total > MOST_BYTES:
            path.unlink(missing_ok=True)
