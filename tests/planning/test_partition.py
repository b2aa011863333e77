"""Splits of layers into stages against every split there is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.planning.partition import fewest_stages, slowest_stage, split
from tests.planning.synthetic import cuts


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 2**16),
    st.integers(0, 3),
    st.integers(1, 5),
    st.floats(1.0, 12.0),
)
def test_split_is_the_best_of_all_splits(
    layers: int, seed: int, after: int, slots: int, limit: float
) -> None:
    random = np.random.default_rng(seed)
    times, states, activations, more = random.random((4, layers))
    working = activations + more
    table = slowest_stage(
        times[None],
        states[None],
        activations[None],
        working[None],
        np.array([limit]),
        slots,
        after,
        layers,
    )[0]
    for stages in range(1, layers + 1):
        best = np.inf
        for counts in cuts(layers, stages):
            ends = np.cumsum(counts)
            ranges = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
            peak = max(
                states[r].sum()
                + activations[r].sum() * (min(slots, stages - stage + after) - 1)
                + max(
                    activations[r.start : layer].sum() + working[layer]
                    for layer in range(r.start, r.stop)
                )
                for stage, r in enumerate(ranges)
            )
            if peak <= limit:
                best = min(best, max(times[r].sum() for r in ranges))
        assert table[stages] == pytest.approx(best)
        chosen = split(times, states, activations, working, limit, slots, after, stages)
        assert (chosen is None) == (best == np.inf)
        if chosen is not None:
            assert sum(chosen) == layers and min(chosen) >= 1
            ends = np.cumsum(chosen)
            assert max(
                times[e - c : e].sum() for c, e in zip(chosen, ends, strict=True)
            ) == pytest.approx(best)


def test_equally_fast_splits_are_even() -> None:
    ones, none = np.ones(6), np.zeros(6)
    assert split(ones, none, none, none, 1.0, 4, 0, 4) in (
        [2, 2, 1, 1],
        [1, 2, 2, 1],
        [1, 1, 2, 2],
        [2, 1, 1, 2],
        [2, 1, 2, 1],
        [1, 2, 1, 2],
    )
    assert split(np.array([9.0, 1, 1, 1, 1, 1]), none, none, none, 1.0, 4, 0, 3) in (
        [1, 2, 3],
        [1, 3, 2],
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(0, 2**16),
    st.integers(0, 3),
    st.integers(1, 5),
    st.floats(0.5, 8.0),
    st.floats(0.3, 4.0),
)
def test_fewest_stages_is_the_least_number_that_any_split_needs(
    layers: int, seed: int, after: int, slots: int, limit: float, within: float
) -> None:
    random = np.random.default_rng(seed)
    times, states, activations, more = random.random((4, 1, layers))
    working = activations + more
    table = slowest_stage(
        times, states, activations, working, np.array([limit]), slots, after, layers
    )[0]
    possible = np.flatnonzero(table[1:] <= within) + 1
    found = fewest_stages(
        times, states, activations, working, np.array([limit]), slots, after, np.array([within])
    )[0]
    assert found == (possible[0] if len(possible) else layers + 1)
