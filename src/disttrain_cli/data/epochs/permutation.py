"""Permutations drawn by a key, any part of which can be computed by itself.

A Feistel network over pairs (left, right), whose domain is slightly larger than the number of
elements; a result beyond the last element is permuted again until it is inside (cycle walking:
Black and Rogaway, Ciphers with arbitrary finite domains, 2002). The round functions are tables of
hashes, as long as a half has values: some 10,000 for 100 million elements.
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.slots import Ints

ROUNDS = 8
AT_ONCE = 1 << 16  # indices at a time, which the caches of a core hold


def permuted(first: int, last: int, count: int, *key: int) -> Ints:
    """Return elements `first` to before `last` of a permutation of `count` elements."""
    if first >= last:
        return np.zeros(0, dtype=np.int64)
    lefts = isqrt(count - 1) + 1
    rights = -(-count // lefts)
    tables = [
        (mix(*key, number, np.arange((rights, lefts)[number % 2])) % np.uint64(size)).astype(
            np.int64
        )
        for number, size in enumerate((lefts, rights) * (ROUNDS // 2))
    ]
    return np.concatenate(
        [
            _inside(np.arange(at, min(at + AT_ONCE, last)), count, lefts, rights, tables)
            for at in range(first, last, AT_ONCE)
        ]
    )


def _inside(places: Ints, count: int, lefts: int, rights: int, tables: list[Ints]) -> Ints:
    things = _scattered(places, lefts, rights, tables)
    while len(beyond := np.flatnonzero(things >= count)):
        things[beyond] = _scattered(things[beyond], lefts, rights, tables)
    return things


def _scattered(places: Ints, lefts: int, rights: int, tables: list[Ints]) -> Ints:
    left, right = np.divmod(places, rights)
    for number in range(0, ROUNDS, 2):
        _turn(left, tables[number][right], lefts)
        _turn(right, tables[number + 1][left], rights)
    return left * rights + right


def _turn(half: Ints, by: NDArray[np.int64], size: int) -> None:
    half += by
    half -= size * (half >= size)
