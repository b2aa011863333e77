"""Packing is best fit decreasing over all samples of a block, sample for sample, as a plain
implementation has it."""

from bisect import bisect_left, insort
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.epochs.best_fit import fill
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.packing import pack
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.index import TEXT
from tests.data.dataset import PROPERTY
from tests.data.test_packing import make_index


def plain_fill(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best fit decreasing: the longest first, each into the fullest sequence that has room."""
    sequences: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        at = bisect_left(room, (lengths[place], 0))
        if at < len(room):
            free, number = room.pop(at)
        else:
            free, number = capacity, len(sequences)
            sequences.append([])
        sequences[number].append(place)
        insort(room, (free - lengths[place], number))
    return sequences


def split(start: Ints, samples: Ints) -> list[list[int]]:
    return [part.tolist() for part in np.split(samples, start[1:-1])]


@given(st.lists(st.integers(1, 128), min_size=1, max_size=400), st.integers(128, 200))
@PROPERTY
def test_fill_is_best_fit_decreasing(lengths: list[int], capacity: int) -> None:
    assert split(*fill(np.array(lengths), capacity)) == plain_fill(lengths, capacity)


@given(st.lists(st.sampled_from([1, 2, 3, 40, 41, 64, 65, 127, 128]), min_size=1, max_size=400))
@PROPERTY
def test_fill_of_few_lengths(lengths: list[int]) -> None:
    assert split(*fill(np.array(lengths), 128)) == plain_fill(lengths, 128)


def test_fill_of_lengths_beyond_16_bits() -> None:
    lengths = (mix(5, np.arange(3000)) % 131_072 + 1).astype(np.int64)
    assert split(*fill(lengths, 131_072)) == plain_fill(lengths.tolist(), 131_072)


def test_sequences_alike_are_spread_over_the_epoch() -> None:
    """Best fit fills thousands of sequences alike, one after the other: the epoch mixes them."""
    lengths = (mix(1, np.arange(40_000)) % 60 + 20).astype(np.int64)
    index = make_index([[TEXT]] * len(lengths), [[length - 2] for length in lengths.tolist()])
    counts = np.diff(pack(Mixture(index, 0), 0).sample_start).astype(float)
    assert abs(np.corrcoef(counts[1:], counts[:-1])[0, 1]) < 0.03
    halves = np.split(counts[: len(counts) // 2 * 2], 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 0.03 * counts.mean()


def test_samples_of_a_length_meet_others_in_every_epoch() -> None:
    index = make_index([[TEXT]] * 4000, [[30]] * 4000)
    pairs, ascending = Counter[tuple[int, int]](), []
    for epoch in range(3):
        packing = pack(Mixture(index, 0), epoch)
        for one in split(packing.sample_start, packing.samples):
            ascending.append(one == sorted(one))
            pairs.update((a, b) for a in one for b in one if a < b)
    assert np.mean(ascending) < 2 / 24  # of four samples, one in 24 by chance
    assert max(pairs.values()) == 1 or sum(n > 1 for n in pairs.values()) < 0.01 * len(pairs)
