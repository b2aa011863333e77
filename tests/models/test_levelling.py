"""Which rows ranks have that attend with their own queries: all of them once, as many each, and
level work where attention is causal."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.models.levelling import LEAST_CHUNK, LEVEL, numbers_of, runs_of, seen_by


def lengths_of(seed: int, rows: int) -> list[int]:
    """Skewed lengths of samples that fill so many rows."""
    random, lengths = np.random.default_rng(seed), list[int]()
    while sum(lengths) < rows:
        drawn = int(random.lognormal(np.log(rows) - 3.0, 1.5)) + 1
        lengths.append(min(drawn, rows - sum(lengths)))
    return lengths


def pairs(lengths: list[int]) -> np.ndarray:
    """[R] rows that each row sees."""
    return np.concatenate([np.arange(1, length + 1) for length in lengths])


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 9), st.booleans())
def test_every_row_is_some_ranks_and_sees_its_segment(
    lengths: list[int], ranks: int, causal: bool
) -> None:
    runs = runs_of(lengths, ranks, causal)
    assert len(runs) == ranks and all(own == sorted(own) for own in runs)
    assert sorted(numbers_of([run for own in runs for run in own])) == list(range(sum(lengths)))
    sizes = [len(numbers_of(own)) for own in runs]
    assert sizes == sorted(sizes, reverse=True) and max(sizes) == -(-sum(lengths) // ranks)
    stops = np.cumsum(lengths)
    for run in (run for own in runs for run in own if run[1] > run[0]):
        queries, seen, keys = seen_by(lengths, run, causal)
        assert (sum(queries), sum(seen)) == (run[1] - run[0], keys[1] - keys[0])
        row, first = run[0], keys[0]
        for count, length in zip(queries, seen, strict=True):
            segment = int(np.searchsorted(stops, row, "right"))
            assert first == stops[segment] - lengths[segment]
            end = row + count if causal else stops[segment]
            assert first + length == end and row + count <= stops[segment]
            row, first = row + count, first + length


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_packed_samples_of_skewed_lengths_are_level(ranks: int) -> None:
    rows, ratios, halves = 131_072, [], []
    for seed in range(64):
        lengths = lengths_of(seed, rows)
        work = pairs(lengths)
        sums = [work[numbers_of(own)].sum() for own in runs_of(lengths, ranks, causal=True)]
        ratios.append(max(sums) / np.mean(sums))
        even = work.reshape(ranks, -1).sum(axis=1)
        halves.append(even.max() / even.mean())
    assert max(ratios) <= LEVEL
    assert np.mean(halves) > 1.2


def test_one_sample_is_level_with_a_head_and_a_tail_each() -> None:
    runs = runs_of([4096], 4, causal=True)
    assert sorted(runs) == [
        [(0, 512), (3584, 4096)],
        [(512, 1024), (3072, 3584)],
        [(1024, 1536), (2560, 3072)],
        [(1536, 2560)],
    ]


def test_chunks_are_no_shorter_than_kernels_like() -> None:
    """Of a long sample at the end only two chunks each are possible: as level as they get."""
    rows, ranks = 4 * 2 * LEAST_CHUNK, 4
    runs = runs_of([rows // 2] + [1] * (rows // 2), ranks, causal=True)
    assert min(stop - start for own in runs for start, stop in own) >= LEAST_CHUNK
