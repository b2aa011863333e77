"""Keeps C libraries that decode from writing to the terminal: what they find wrong is told by
ours."""

from __future__ import annotations

import ctypes
import functools
import os
import sys


@functools.cache
def mute_libraries() -> None:
    """Let C's `stderr` of this process lead nowhere: libpng and mpg123 write to it, and have no
    setting.

    Python's, and the file descriptor, stay as they are.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.fopen.restype = ctypes.c_void_p
        ctypes.c_void_p.in_dll(library, "stderr").value = library.fopen(os.devnull.encode(), b"w")
