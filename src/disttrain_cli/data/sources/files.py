"""Local and remote files (URLs of fsspec) with one interface: sequential and range reads."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from disttrain_cli.data.sources.samples import is_held, printable, shown_name
from disttrain_cli.errors import DataError
from disttrain_cli.spec.runfile.data import is_url

READ_AHEAD_BYTES = 8 * 1024 * 1024  # of a URL that is read sequentially
PIECES, PIECE_BYTES = 64, 4096  # pieces of a file that identify its content
ATTEMPTS = 3  # to read a range of a URL
PAUSE_S = 0.5  # before the second attempt; twice as long before the third

READ_ONLY = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would block
#: Keys by which file systems report a file's version, the best first.
VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "modified",
    "created",
)


class File(Protocol):
    """An open file; several threads may read ranges."""

    size: int

    def read(self, offset: int, size: int) -> bytes:
        """Return bytes at `offset`, fewer at the end of the file.

        Raises:
            OSError: the file cannot be read; DataError for a URL.
        """

    def stream(self) -> BinaryIO:
        """Open the file as a stream from its beginning; seeking back is slow."""


class HeldFile:
    """A file whose bytes are in memory."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, offset: int, size: int) -> bytes:
        return self._data[offset : offset + size]

    def stream(self) -> BinaryIO:
        return io.BytesIO(self._data)


class LocalFile:
    """A local file; it is closed when the last reference to it is gone."""

    def __init__(self, path: str, flags: int = 0) -> None:
        self._path, self._descriptor = path, -1
        self._descriptor = os.open(path, READ_ONLY | flags)
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        self.size = status.st_size

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def read(self, offset: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, offset)

    def stream(self) -> BinaryIO:
        return open(self._path, "rb")


class RemoteFile:
    """A file behind a URL."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._system, self._path = file_system(url)
        try:
            self.size = int(self._system.size(self._path))
        except FileNotFoundError:
            raise
        except Exception as error:  # file systems have no common error
            raise _unreachable(url, error) from None

    def read(self, offset: int, size: int) -> bytes:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                data = bytes(self._system.cat_file(self._path, start=offset, end=offset + size))
            except FileNotFoundError:
                raise
            except Exception as error:
                if attempt == ATTEMPTS:
                    raise _unreachable(self._url, error) from None
                time.sleep(PAUSE_S * attempt)
            else:
                # the beginning of the file would look like damage
                if offset and len(data) > max(0, min(size, self.size - offset)):
                    raise DataError(
                        f"The server of {shown_url(self._url)} answers range requests with the"
                        " whole file",
                        f"asked for {size} bytes at {offset}, sent {len(data)}",
                        "Copy the data to this machine, or serve them with support for HTTP"
                        " ranges.",
                    )
                return data[:size]
        raise AssertionError("unreachable")

    def stream(self) -> BinaryIO:
        return io.BufferedReader(_Stream(self._url, self._system, self._path))


class _Stream(io.RawIOBase):
    """A file behind a URL, read ahead.

    Network errors become DataError, so that they are not taken for damage.
    """

    def __init__(self, url: str, system: Any, path: str) -> None:
        self._url = url
        try:
            self._file = system.open(
                path, "rb", block_size=READ_AHEAD_BYTES, cache_type="readahead"
            )
        except Exception as error:
            raise _unreachable(url, error) from None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return int(self._file.seek(offset, whence))

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._file.read(len(buffer))
        except Exception as error:
            raise _unreachable(self._url, error) from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def open_file(path: str) -> File:
    """Open a local file or one behind a URL.

    Raises:
        OSError: the local file cannot be opened.
        DataError: the URL cannot be reached, or fsspec lacks a package for it.
    """
    return RemoteFile(path) if is_url(path) else LocalFile(path)


def state_of(path: str) -> list[Any]:
    """Return [size, time or version] of a file, which reveal a change; DataError if it is gone."""
    if not is_url(path):
        try:
            # a dangling link is a shard that cannot be read
            status = os.stat(path) if os.path.exists(path) else os.lstat(path)
        except OSError as error:
            raise DataError(
                f"Cannot read the shard {printable(path)}",
                error.strerror or str(error),
                "Restore it, or remove it from data.sources.",
            ) from None
        return [status.st_size, status.st_mtime_ns]
    system, inside = file_system(path)
    try:
        info = system.info(inside)
    except Exception as error:
        raise _unreachable(path, error) from None
    return [
        info.get("size"),
        str(next((info[name] for name in VERSIONS if info.get(name) is not None), "")),
    ]


def content_of(path: str) -> str:
    """Return a digest of the bytes of a local file, of a large one from `PIECES` pieces of it.

    It identifies a copied file that has another time; "" for an unreadable file or a URL.
    """
    if is_url(path):
        return ""
    try:
        file = LocalFile(path)
    except OSError:
        return ""
    content = hashlib.sha256()
    last = max(0, file.size - PIECE_BYTES)
    for offset in sorted({last * number // (PIECES - 1) for number in range(PIECES)}):
        content.update(file.read(offset, PIECE_BYTES))
    return content.hexdigest()[:16]


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it; DataError if there is none."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise DataError(
            f"Cannot open {shown_url(url)}",
            str(error),
            "Correct data.sources, or install what fsspec needs for that kind of URL.",
        ) from None


def list_files(folder: str) -> Iterator[str]:
    """Yield the names of all files below a folder, relative to it; none if there is no folder.

    A link to a folder is not followed: its name ends with a slash. Hidden files are left out: names
    that begin with a dot (`._x` of macOS), and folders that begin with two underscores
    (`__MACOSX`), as in the `datasets` library.

    Raises:
        DataError: the URL cannot be listed.
    """
    if not is_url(folder):
        for root, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if not name.startswith((".", "__"))]
            for name in folders:
                if os.path.islink(os.path.join(root, name)):
                    yield f"{Path(root, name).relative_to(folder).as_posix()}/"
            for name in files:
                if not name.startswith("."):
                    yield Path(root, name).relative_to(folder).as_posix()
        return
    system, inside = file_system(folder)
    try:
        inside_files = system.find(inside)
    except Exception as error:
        raise _unreachable(folder, error) from None
    start = inside.rstrip("/") + "/"
    for name in (path.removeprefix(start) for path in inside_files):
        *folders, file = name.split("/")
        if not file.startswith(".") and not any(one.startswith((".", "__")) for one in folders):
            yield name


def is_file(path: str) -> bool:
    """Return True if there is a file; DataError if the URL cannot be reached."""
    if not is_url(path):
        return os.path.isfile(path)
    system, inside = file_system(path)
    try:
        return bool(system.info(inside)["type"] == "file")
    except FileNotFoundError:
        return False
    except Exception as error:
        raise _unreachable(path, error) from None


def is_folder(path: str) -> bool:
    """Return True if there is a folder, also behind a URL."""
    if not is_url(path):
        return os.path.isdir(path)
    system, inside = file_system(path)
    try:
        return bool(system.isdir(inside))
    except Exception:  # file systems have no common error
        return False


def without_query(path: str) -> str:
    """Return a URL without its query; names of local files may have question marks."""
    return path.partition("?")[0] if is_url(path) else path


def join(folder: str, name: str) -> str:
    """Return the path or URL of a file below a folder."""
    return f"{folder.rstrip('/')}/{name}"


def shown_url(url: str) -> str:
    """Return a URL without secrets: no user, no signature."""
    return printable(re.sub(r"//[^/@]*@", "//", url.partition("?")[0]))


def missing_file(name: str, where: str) -> ValueError:
    """Return the error that a file named by a record is missing; `where` ends its message."""
    if is_url(name):
        return ValueError(f"{shown_url(name)} is a web address: download it, and name the file")
    if is_held(name):
        return ValueError(f"{shown_name(name)} is read from JSON only: write it as a file")
    return ValueError(f"the file {shown_name(name)} {where}")


def _unreachable(url: str, error: Exception) -> DataError:
    return DataError(
        f"Cannot read {shown_url(url)}",
        printable(f"{type(error).__name__}: {error}", 1000),
        "Check data.sources, the network and what the server allows.",
    )
