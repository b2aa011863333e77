"""Differences beyond the noise of steps: found where they are, and hardly ever where they are
not."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from disttrain_cli.analysis.significance import LEVEL, MOST_BATCHES, batches, difference, holm


def test_it_is_welchs_test_of_the_steps() -> None:
    draw = np.random.default_rng(0)
    before, after = draw.normal(1.0, 0.1, 8), draw.normal(1.1, 0.3, 10)
    found = difference(before, after)
    reference = stats.ttest_ind(after, before, equal_var=False)
    assert found.p == pytest.approx(reference.pvalue)
    low, high = reference.confidence_interval(0.95)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.mean == pytest.approx(after.mean() - before.mean())


@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_equal_runs_hardly_ever_differ(correlation: float) -> None:
    """Also where steps resemble those before them; without batches half of them would."""
    draw, trials = np.random.default_rng(1), 400

    def run(steps: int) -> np.ndarray:
        noise = draw.normal(0, 1, steps)
        for step in range(1, steps):
            noise[step] += correlation * noise[step - 1]
        return 10 + noise

    wrong = sum((difference(run(200), run(200)).p or 0) < LEVEL for _ in range(trials))
    assert wrong / trials < 0.10


def test_a_difference_is_found() -> None:
    draw, trials = np.random.default_rng(2), 200
    found = sum(
        (difference(draw.normal(1.0, 0.02, 30), draw.normal(1.02, 0.02, 30)).p or 1) < LEVEL
        for _ in range(trials)
    )
    assert found / trials > 0.9


def test_steps_without_noise_and_too_few_steps() -> None:
    same = np.full(5, 0.3)
    assert difference(same, same).p == 1 and difference(same, same + 1e-3).p == 0
    assert difference(np.zeros(5), np.zeros(4)).p == 1
    few = difference(np.array([1.0, 2.0]), np.array([1.0, 2.0, 3.0]))
    assert few.p is None and few.low is None and few.mean == 0.5


@given(st.lists(st.floats(0, 10), min_size=1, max_size=200))
def test_batches_keep_the_steps_in_order(values: list[float]) -> None:
    found = batches(np.array(values))
    assert len(found) == min(len(values), MOST_BATCHES)
    assert min(values) - 1e-9 <= found.min() <= found.max() <= max(values) + 1e-9


@given(st.lists(st.floats(0, 1) | st.none(), max_size=30))
def test_holm_rejects_what_its_definition_does(values: list[float | None]) -> None:
    adjusted = holm(values)
    known = sorted(value for value in values if value is not None)
    rejected = 0  # the smallest ones, as long as each is under its own level
    while rejected < len(known) and known[rejected] < LEVEL / (len(known) - rejected):
        rejected += 1
    assert [value is None for value in values] == [p is None for p in adjusted]
    assert sum(p is not None and p < LEVEL for p in adjusted) == pytest.approx(rejected, abs=0)
