"""Atomic writes of files; devices and pipes are written directly."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from disttrain_cli.errors import SpecError

MOST_LINKS = 40  # followed by the kernel


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write `content` atomically as `whole_file` does; raise SpecError as it does."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


def keep_before(path: Path) -> Path | None:
    """Copy a file that is about to be replaced to NAME.before; return None if there is no file."""
    if is_own_file(path):
        return write_whole(path.with_name(f"{path.name}.before"), path.read_bytes())
    return None


def is_own_file(path: Path) -> bool:
    """Return True for a regular file next to which others may be created.

    False for devices, pipes, and the target of stdout.
    """
    return path.is_file() and _descriptor(path) is None


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file next to `path`, renamed to it at the end of the context.

    If anything fails, `path` is unchanged. A link stays and the file that it names is written. An
    existing file keeps its mode and owner, a new one follows the umask. A device or pipe is opened
    and written directly; a descriptor of this process (/dev/stdout, /dev/fd/3) continues at its
    position.

    Raises:
        SpecError: it cannot be written (missing permission, disk full).
    """
    temporary = None
    try:
        there, descriptor = _status(path), _descriptor(path)
        if descriptor is not None:
            sys.stdout.flush()  # earlier output comes first
            with open(os.dup(descriptor), "wb") as file:
                yield file
            return
        if there is not None and not stat.S_ISREG(there.st_mode):
            with path.open("wb") as file:
                yield file
            return
        real = Path(os.path.realpath(path))
        real.parent.mkdir(parents=True, exist_ok=True)
        temporary = real.with_name(f".{real.name[:50]}.{secrets.token_hex(8)}")
        with open(temporary, "xb") as file:
            if there is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(there.st_mode))
                with suppress(PermissionError):  # only root may change owners
                    os.fchown(file.fileno(), there.st_uid, there.st_gid)
            yield file
        os.replace(temporary, real)
        temporary = None
    except OSError as error:
        raise SpecError(
            f"Cannot write {path}", str(error), "Free space there or choose another folder."
        ) from None
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def _descriptor(path: Path) -> int | None:
    """Return the open descriptor of this process that `path` stands for, such as 1 for /dev/stdout.

    None if it stands for none.
    """
    for _ in range(MOST_LINKS):
        if os.path.realpath(path.parent) in (f"/proc/{os.getpid()}/fd", "/dev/fd"):
            return int(path.name) if path.name.isdecimal() else None
        if not path.is_symlink():
            break
        path = path.parent / os.readlink(path)
    return None


def _status(path: Path) -> os.stat_result | None:
    """Return the status of the file that `path` leads to; None if it does not exist."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
