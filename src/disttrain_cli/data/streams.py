"""A file inside a shard as a stream, for libraries that need one."""

from __future__ import annotations

import io
from typing import Any

from disttrain_cli.data.headers import Read


class ReadStream(io.RawIOBase):
    """A stream of `size` bytes that reads lazily."""

    def __init__(self, read: Read, size: int) -> None:
        self._read, self._size, self._at = read, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(
            0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        )
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._read(self._at, max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
