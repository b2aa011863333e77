"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from disttrain_cli.errors import SpecError


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write `content` beside `path` and rename it into place, so that no reader sees half a file.

    Raises:
        SpecError: the folder cannot be written (missing permission, disk full).
    """
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)
    return path


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write beside `path`, renamed into place at the end; where anything fails, `path` stays as it is.

    Raises:
        SpecError: the folder cannot be written (missing permission, disk full).
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise SpecError(f"Cannot write {path}", str(error), "Free space there or choose another folder.") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
