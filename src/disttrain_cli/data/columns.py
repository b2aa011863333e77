"""Arrays as flat little-endian files in one folder, memory-mapped by every process that opens it.

The file `header` states the inputs of the columns and the type and shape of each: JSON after a line
with its SHA-256. A folder is written under another name and renamed when complete, so that it is
complete or absent.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.errors import SpecError
from disttrain_cli.spec.progress import Progress

HEADER = "header"
PARTIAL = ".partial-"
SAY_AFTER_S = 1.0  # seconds of waiting for another process before that is reported
LOOK_EVERY_S = 0.1

Columns = Mapping[str, NDArray[Any]]


class ColumnWriter:
    """Writer that appends to columns piece by piece; created by `writing_columns`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._files: dict[str, BinaryIO] = {}
        self._shapes: dict[str, tuple[str, list[int]]] = {}
        self.ends: dict[str, int] = {}  # last values of columns of offsets

    def add(self, name: str, piece: NDArray[Any]) -> None:
        """Append rows to a column; the first piece sets its type and the shape of a row."""
        little = piece.dtype.newbyteorder("<")
        if name not in self._files:
            self._files[name] = self._stack.enter_context((self._folder / name).open("wb"))
            self._shapes[name] = (little.str, [0, *piece.shape[1:]])
        kind, shape = self._shapes[name]
        assert kind == little.str and shape[1:] == list(piece.shape[1:])
        shape[0] += len(piece)
        if len(piece):
            self._files[name].write(np.ascontiguousarray(piece, little).data.cast("B"))

    def add_starts(self, name: str, starts: NDArray[np.int64]) -> None:
        """Append offsets [n + 1] that begin at 0, shifted by the column's last offset."""
        piece = starts + self.ends.get(name, 0)
        self.add(name, piece[name in self.ends :])
        self.ends[name] = int(piece[-1])

    def close(self, header: Mapping[str, Any]) -> None:
        """Write the header, with the inputs of the columns."""
        for file in self._files.values():
            file.flush()
        content = json.dumps({**header, "columns": self._shapes})
        (self._folder / HEADER).write_text(f"{_digest(content)}\n{content}")


@contextmanager
def writing_columns(folder: Path) -> Iterator[ColumnWriter]:
    """Yield a writer whose columns replace `folder` at the end; on any failure nothing changes.

    Call it inside `alone` (the lock): remains of interrupted writers next to `folder` are removed.

    Raises:
        SpecError: the columns cannot be written (missing permission, disk full).
    """
    partial = folder.with_name(f"{PARTIAL}{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f"{PARTIAL}*"):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir()
        with ExitStack() as stack:
            yield ColumnWriter(partial, stack)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        raise SpecError(
            f"Cannot write {folder}", str(error), "Free space there or choose another folder."
        ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_columns(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]] | None:
    """Return (header, columns by name); None if there are none, or they are truncated or damaged.

    Names, types, shapes and lengths are checked, not values: nothing is read.
    """
    try:
        digest, _, content = (folder / HEADER).read_text().partition("\n")
        if digest != _digest(content):
            return None
        header = json.loads(content)
        return header, {
            name: _mapped(folder / name, np.dtype(kind), tuple(shape))
            for name, (kind, shape) in header["columns"].items()
        }
    except (OSError, ValueError):
        return None


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _mapped(path: Path, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    if path.stat().st_size != (expected := int(np.prod(shape)) * kind.itemsize):
        raise ValueError(f"{path} does not have {expected} bytes")
    if not expected:
        return np.zeros(shape, kind)
    return np.memmap(path, kind, "r", shape=shape).view(np.ndarray)


@contextmanager
def alone(path: Path, what: str, progress: Progress) -> Iterator[None]:
    """Hold the exclusive lock `path` while `what` is made.

    The lock is held by one process at a time, of all hosts if the file system locks across them. It
    ends with the process; a waiting process reports the holder.

    Raises:
        SpecError: the lock file cannot be written (missing permission).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            _take(file, what, progress)
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            yield
    except OSError as error:
        raise SpecError(
            f"Cannot write {path}", str(error), "Free space there or choose another folder."
        ) from None


def _take(lock: TextIO, what: str, progress: Progress) -> None:
    begun, said = time.monotonic(), False
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not said and time.monotonic() - begun > SAY_AFTER_S:
                lock.seek(0)
                said = True
                progress(f"waiting for {what} from {lock.read() or 'another process'}", 0, 0)
            time.sleep(LOOK_EVERY_S)
