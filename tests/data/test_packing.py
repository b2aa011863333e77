"""Sequences hold whole samples, every sample as often as its weight says, and the stream crosses
epochs in order."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.arrays import mix, ranges, starts_of
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.packing import Packing, SequenceStream, pack
from disttrain_cli.data.slots import Ints
from disttrain_cli.spec.index import IMAGE, TARGET, TEXT
from tests.data.dataset import INPUTS, PROPERTY


def make_index(
    kinds: list[list[int]],
    tokens: list[list[int]],
    weights: list[float] | None = None,
    source: Ints | None = None,
) -> Index:
    """An index of sizes alone; images are 2 x 4 patches."""
    grid_of = {IMAGE: (2, 4), TARGET: (1, 1), TEXT: (0, 0)}
    flat_kinds = np.array([k for row in kinds for k in row], dtype=np.int64)
    zeros = np.zeros(len(flat_kinds), dtype=np.int64)
    return Index(
        fingerprint="",
        inputs=INPUTS,
        weights=weights or [1.0],
        shards=[],
        skipped=[],
        source=np.zeros(len(kinds), dtype=np.int64) if source is None else source,
        shard=np.zeros(len(kinds), dtype=np.int64),
        keys=[str(n) for n in range(len(kinds))],
        segment_start=starts_of(np.array([len(row) for row in kinds])),
        kinds=flat_kinds,
        tokens=np.array([t for row in tokens for t in row], dtype=np.int64),
        trained=flat_kinds == TEXT,
        ended=np.zeros(len(flat_kinds), dtype=bool),
        offsets=zeros,
        sizes=zeros,
        grids=np.array([grid_of[kind] for kind in flat_kinds.tolist()], np.int64).reshape(-1, 2),
    )


def sequence_samples(packing: Packing) -> list[list[int]]:
    return [part.tolist() for part in np.split(packing.samples, packing.sample_start[1:-1])]


def test_pairs_of_tokens_follow_the_windows() -> None:
    index = make_index([[TEXT], [TEXT], [TEXT]], [[1], [8], [38]])  # and two marks each
    assert pack(Mixture(index, 0), 0).length_sq.sum() == 9 + 100 + 1600
    windowed = replace(index, inputs=INPUTS.model_copy(update={"windows": [4, 4]}))
    assert pack(Mixture(windowed, 0), 0).length_sq.sum() == 9 + (100 - 6 * 7) + (1600 - 36 * 37)


def test_a_packing_counts_its_members(index: Index) -> None:
    packing = pack(Mixture(index, 3), 0)
    assert sorted(packing.samples) == list(range(len(index)))
    assert packing.fill_fraction > 0.9 and packing.tokens.max() <= INPUTS.sequence_length
    images = targets = 0
    for number, samples in enumerate(sequence_samples(packing)):
        segments = [
            s
            for row in samples
            for s in range(index.segment_start[row], index.segment_start[row + 1])
        ]
        kinds = index.kinds[segments]
        assert packing.tokens[number] == index.tokens[segments].sum() + 2 * len(samples)
        assert packing.length_sq[number] == sum(index.lengths[row] ** 2 for row in samples)
        assert packing.label_tokens[number] == index.tokens[segments][kinds == TEXT].sum() + len(
            samples
        )
        own = slice(packing.items["image"].start[number], packing.items["image"].start[number + 1])
        assert packing.items["image"].segment[own].tolist() == [
            s for s in segments if index.kinds[s] == IMAGE
        ]
        assert np.array_equal(
            packing.items["image"].grid[own], index.grids[packing.items["image"].segment[own]]
        )
        own = slice(
            packing.items["target"].start[number], packing.items["target"].start[number + 1]
        )
        assert packing.items["target"].segment[own].tolist() == [
            s for s in segments if index.kinds[s] == TARGET
        ]
        images, targets = images + (kinds == IMAGE).sum(), targets + (kinds == TARGET).sum()
    assert (
        (images, targets)
        == (len(packing.items["image"].segment), len(packing.items["target"].segment))
        and images
        and targets
    )


def test_seed_and_epoch_shuffle(index: Index) -> None:
    packed = {(s, e): pack(Mixture(index, s), e).samples.tolist() for s in (0, 1) for e in (0, 1)}
    assert len({tuple(samples) for samples in packed.values()}) == 4
    assert pack(Mixture(index, 1), 1).samples.tolist() == packed[1, 1]


def test_weights_draw_samples() -> None:
    index = make_index([[TEXT]] * 30, [[20]] * 30, [2.5, 0.5, 1.0], np.repeat(np.arange(3), 10))
    epochs = [pack(Mixture(index, 0), epoch) for epoch in (0, 1)]
    drawn = [Counter(epoch.samples.tolist()) for epoch in epochs]
    for counts in drawn:
        assert sorted(counts[row] for row in range(10)) == [2] * 5 + [3] * 5
        assert (
            sum(counts[row] for row in range(10, 20)) == 5
            and max(counts[row] for row in range(10, 20)) == 1
        )
        assert all(counts[row] == 1 for row in range(20, 30))
    assert drawn[0] != drawn[1]


@pytest.mark.slow
@given(st.integers(0, 60), st.integers(1, 40))
@PROPERTY
def test_stream_is_the_epochs_one_after_the_other(first: int, count: int) -> None:
    index = make_index([[TEXT, IMAGE]] * 25, [[5 + n, 2] for n in range(25)])
    expected: list[list[int]] = []
    epoch = 0
    while len(expected) < first + count:
        expected += sequence_samples(pack(Mixture(index, 5), epoch))
        epoch += 1
    batch = SequenceStream(Mixture(index, 5)).batch(first, count)
    assert sequence_samples(batch) == expected[first : first + count]
    assert batch.ids.tolist() == list(range(first, first + count))


def test_stream_jumps_back(index: Index) -> None:
    stream = SequenceStream(Mixture(index, 0))
    early = stream.batch(3, 5).samples
    stream.batch(200, 5)
    assert np.array_equal(stream.batch(3, 5).samples, early)


def test_ranges_and_hash() -> None:
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []
    values = mix(1, 2, np.arange(1000))
    assert len(set(values.tolist())) == 1000
    assert values[:2].tolist() == [
        16613338946343043936,
        13264548337748323810,
    ]  # on every machine, for ever
    assert 0.45 < (values / 2**64).mean() < 0.55


@pytest.mark.parametrize("epoch", [0, 3])
def test_one_sample_is_one_sequence(epoch: int) -> None:
    packing = pack(Mixture(make_index([[TEXT]], [[9]]), 0), epoch)
    assert len(packing) == 1 and packing.tokens.tolist() == [11]
