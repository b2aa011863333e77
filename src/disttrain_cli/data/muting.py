"""Silence C libraries that write decoding errors to the terminal; this package reports them."""

from __future__ import annotations

import ctypes
import functools
import os
import sys


@functools.cache
def mute_libraries() -> None:
    """Redirect C's `stderr` of this process to /dev/null.

    libpng and mpg123 write to it, and have no setting for it. Python's `stderr` and the file
    descriptor are unchanged.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        library.fopen.restype = ctypes.c_void_p
        ctypes.c_void_p.in_dll(library, "stderr").value = library.fopen(os.devnull.encode(), b"w")
