"""Array helpers of the data package: hashes instead of random states, concatenated ranges."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from disttrain_cli.data.slots import Ints


def mix(*values: ArrayLike) -> NDArray[np.uint64]:
    """Hash integers, broadcast against each other, to 64 bits (SplitMix64 over each value in turn).

    The result is the same on every machine and library version, which random generators do not
    guarantee.
    """
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = state ^ np.atleast_1d(np.asarray(value, dtype=np.int64)).view(np.uint64)
        state = state + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


def starts_of(counts: Ints) -> Ints:
    """Return the offsets [N + 1] of consecutive groups of the given sizes."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def ranges(starts: Ints, counts: Ints) -> Ints:
    """Return the concatenation of `arange(start, start + count)` over all pairs."""
    shift = np.repeat(starts - starts_of(counts)[:-1], counts)
    return np.arange(len(shift), dtype=np.int64) + shift
