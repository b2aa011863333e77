"""Permutations hold everything once, whichever part is computed, and are what the definition
says."""

from collections import Counter
from itertools import permutations
from math import isqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.epochs.permutation import ROUNDS, permuted
from tests.data.dataset import PROPERTY


def plain(place: int, count: int, *key: int) -> int:
    """The definition, one place and one round at a time."""
    lefts = isqrt(count - 1) + 1
    rights = -(-count // lefts)
    thing = place
    while True:
        left, right = divmod(thing, rights)
        for number in range(ROUNDS):
            half = left if number % 2 else right
            by = int(mix(*key, number, half)[0])
            if number % 2:
                right = (right + by % rights) % rights
            else:
                left = (left + by % lefts) % lefts
        thing = left * rights + right
        if thing < count:
            return thing


@pytest.mark.slow
@given(st.integers(1, 400), st.integers(0, 2**40), st.data())
@PROPERTY
def test_everything_once_as_defined(count: int, key: int, data: st.DataObject) -> None:
    whole = permuted(0, count, count, key, 3).tolist()
    assert sorted(whole) == list(range(count))
    assert whole == [plain(place, count, key, 3) for place in range(count)]
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    assert permuted(first, last, count, key, 3).tolist() == whole[first:last]


@pytest.mark.slow
def test_every_permutation_of_a_few_is_as_likely() -> None:
    for count in (2, 3, 4):
        drawn = Counter(tuple(permuted(0, count, count, key).tolist()) for key in range(4800))
        every = list(permutations(range(count)))
        expected = 4800 / len(every)
        chi_square = sum((drawn[one] - expected) ** 2 / expected for one in every)
        assert chi_square < 2 * len(every) + 12, count  # of 23 degrees of freedom: 1 in 10^5


def test_places_say_nothing_of_things() -> None:
    count = 300_000  # over the parts that are computed together
    things = permuted(0, count, count, 1, 2)
    assert len(np.unique(things)) == count
    places = np.arange(count)
    for lag in (1, 7, 548):  # neighbours, and those of the same half
        assert abs(np.corrcoef(things[lag:], things[:-lag])[0, 1]) < 0.01
    assert abs(np.corrcoef(places, things)[0, 1]) < 0.01
    assert abs(np.corrcoef(things, permuted(0, count, count, 1, 3))[0, 1]) < 0.01
