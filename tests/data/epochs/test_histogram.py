"""The second order is best fit decreasing over all samples of a block, sample for sample, as a
plain implementation has it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.epochs.drawing import DRAW, ORDER, SEQUENCE_ORDER
from disttrain_cli.data.epochs.histogram import fill, order_blocks
from disttrain_cli.data.index import Index
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.index import TEXT
from tests.data.dataset import PROPERTY
from tests.data.epochs.test_permutation import plain as permuted
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


def plain_epoch(index: Index, seed: int, epoch: int, block_samples: int) -> list[list[int]]:
    """The samples of every sequence, in order, as the second order has them."""
    drawn: list[int] = []
    for source, weight in enumerate(index.weights):
        own = [row for row in range(len(index)) if index.source[row] == source]
        again = round((weight - int(weight)) * len(own))
        drawn += own * int(weight)
        drawn += [own[permuted(at, len(own), seed, epoch, DRAW, source)] for at in range(again)]
    places = range(len(drawn))
    shuffled = [drawn[permuted(at, len(drawn), seed, epoch, ORDER)] for at in places]
    blocks = -(-len(drawn) // block_samples)
    sequences = []
    for number in range(blocks):
        first, last = (at * len(drawn) // blocks for at in (number, number + 1))
        block = shuffled[first:last]
        filled = plain_fill(index.lengths[block].tolist(), index.inputs.sequence_length)
        by = [int(mix(seed, epoch, SEQUENCE_ORDER, number, at)[0]) for at in range(len(filled))]
        for at in sorted(range(len(filled)), key=by.__getitem__):
            sequences.append([block[place] for place in filled[at]])
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


@given(
    st.lists(st.tuples(st.integers(1, 126), st.integers(0, 1)), min_size=1, max_size=60),
    st.sampled_from([[1.0, 1.0], [2.5, 0.5], [1.25, 3.0], [0.9, 1.0]]),
    st.integers(0, 5),
    st.integers(5, 40),
)
@PROPERTY
def test_an_epoch_is_as_defined(
    samples: list[tuple[int, int]], weights: list[float], epoch: int, block_samples: int
) -> None:
    source = np.array([0, *(source for _, source in samples)])
    index = make_index([[TEXT]] * len(source), [[9], *([n] for n, _ in samples)], weights, source)
    blocks = list(order_blocks(index, 11, epoch, block_samples))
    assert [block[:2] for block in blocks] == [(at, len(blocks)) for at in range(len(blocks))]
    found = [one for _, _, start, rows in blocks for one in split(start, rows)]
    assert found == plain_epoch(index, 11, epoch, block_samples)


def test_sequences_alike_are_spread_over_the_epoch() -> None:
    """Best fit fills thousands of sequences alike, one after the other: the epoch mixes them."""
    lengths = (mix(1, np.arange(40_000)) % 60 + 20).astype(np.int64)
    index = make_index([[TEXT]] * len(lengths), [[length - 2] for length in lengths.tolist()])
    (_, _, start, _), *more = order_blocks(index, 0, 0)
    assert not more
    counts = np.diff(start).astype(float)
    assert abs(np.corrcoef(counts[1:], counts[:-1])[0, 1]) < 0.03
    halves = np.split(counts[: len(counts) // 2 * 2], 2)
    assert abs(halves[0].mean() - halves[1].mean()) < 0.03 * counts.mean()


def test_samples_of_a_length_meet_others_in_every_epoch() -> None:
    index = make_index([[TEXT]] * 4000, [[30]] * 4000)
    pairs, ascending = Counter[tuple[int, int]](), []
    for epoch in range(3):
        for _, _, start, samples in order_blocks(index, 0, epoch):
            for one in split(start, samples):
                ascending.append(one == sorted(one))
                pairs.update((a, b) for a in one for b in one if a < b)
    assert np.mean(ascending) < 2 / 24  # of four samples, one in 24 by chance
    assert max(pairs.values()) == 1 or sum(n > 1 for n in pairs.values()) < 0.01 * len(pairs)
