"""The fits: exact on what is a polynomial, never negative, honest about what is not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.profiling.fitting import fit, held_out_error_pct, predict
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.work import Work


def image_works(seed: int, count: int = 30) -> list[Work]:
    """Skewed sets of images: items, tokens and Σ patches² do not move together."""
    random = np.random.default_rng(seed)
    works = []
    for _ in range(count):
        patches = np.ceil(random.lognormal(3.5, 1.0, random.integers(1, 12)))
        works.append(Work(float(len(patches)), float(patches.sum()), float((patches**2).sum())))
    return works


coefficients = st.one_of(st.just(0.0), st.floats(1e-4, 10.0))


@settings(max_examples=40, deadline=None)
@given(
    base=coefficients,
    item=coefficients,
    token=coefficients,
    square=coefficients,
    seed=st.integers(0, 1000),
)
def test_recovers_the_predictions_of_any_polynomial(
    base: float, item: float, token: float, square: float, seed: int
) -> None:
    truth = Polynomial(base=base, per_item=item, per_token=token, per_length_sq=square)
    seen, unseen = image_works(seed), image_works(seed + 1)
    found = fit(seen, predict(truth, seen))
    assert predict(found, unseen) == pytest.approx(predict(truth, unseen), rel=1e-6, abs=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    values=st.lists(st.one_of(st.just(0.0), st.floats(1e-9, 1e6)), min_size=1, max_size=20),
    seed=st.integers(0, 1000),
)
def test_no_coefficient_is_negative_whatever_was_measured(values: list[float], seed: int) -> None:
    found = fit(image_works(seed, len(values)), values)
    assert min(found.base, found.per_item, found.per_token, found.per_length_sq) >= 0.0


def test_sequences_of_one_length_share_a_cost_instead_of_cancelling() -> None:
    works = [Work(m, 512.0 * m, 512.0**2 * m) for m in (1.0, 2.0, 4.0)] * 4
    found = fit(works, [3.0 + 2.0 * work.items for work in works])
    assert found(Work(8.0, 8 * 512.0, 8 * 512.0**2)) == pytest.approx(19.0)


def test_held_out_error_is_nothing_for_a_polynomial_and_shows_what_is_none() -> None:
    works = image_works(3, 60)
    linear = [1.0 + 2.0 * work.tokens for work in works]
    assert held_out_error_pct(works, [linear, linear]) == pytest.approx(0.0, abs=1e-6)
    noise = np.random.default_rng(0).choice([0.5, 1.5], len(works))
    assert 30.0 < held_out_error_pct(works, [np.array(linear) * noise]) < 80.0


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """Relative error: a fit that served the large sizes only would miss the small ones by far."""
    works = image_works(5, 60)
    curved = [work.tokens**0.5 for work in works]
    found = fit(works, curved)
    errors = np.abs(predict(found, works) - curved) / curved
    small = np.argsort([work.tokens for work in works])[:20]
    assert errors[small].mean() < 0.2


def test_what_costs_nothing_is_nothing() -> None:
    assert fit(image_works(0), [0.0] * 30) == Polynomial()
    assert held_out_error_pct(image_works(0), [[0.0] * 30]) == 0.0
