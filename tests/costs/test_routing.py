"""Rows that arrive at an EP group's ranks: drawn, at a quantile, in expectation, measured."""

import math

import numpy as np
import pytest

from disttrain_cli.costs.routing import QUANTILE, drawn, fullest, reached, slowest
from disttrain_cli.spec.layer_costs import Experts, Routed

DRAWS = 200
#: (experts, chosen, EP, rows of a rank)
SHAPES = [(8, 2, 2, 4096), (8, 2, 4, 4096), (64, 6, 8, 512), (128, 8, 8, 4096), (128, 8, 32, 2048)]


def experts(total: int, chosen: int, *routed: Routed) -> Experts:
    return Experts(total, chosen, 16, 100, 100, routed=routed)


def uniform(total: int, chosen: int) -> Experts:
    """Experts that rows choose independently, all alike."""
    return experts(total, chosen, Routed("text", 1.0, 1.0, (" ".join(["1"] * total),)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layers", [1, 12])
def test_at_most_the_stated_share_of_routings_is_above_the_quantile(
    shape: tuple[int, int, int, int], layers: int
) -> None:
    total, chosen, ep, rows = shape
    one = experts(total, chosen)
    loads = np.stack(
        [drawn(one, seed, ep=ep, rows=rows, layers=layers).sum(axis=1) for seed in range(DRAWS)]
    ) / (rows * chosen)  # [draws, L, R]
    assert loads.mean() == pytest.approx(1.0)
    for quantile in (0.9, QUANTILE):
        most = fullest(one, ep=ep, rows=rows, layers=layers, quantile=quantile)
        above = int((loads.mean(axis=1).max(axis=1) > most).sum())
        # with the error of so many draws: two deviations of a binomial
        share = 1.0 - quantile
        assert above <= DRAWS * share + 2 * math.sqrt(DRAWS * share * quantile)
    expected = loads.max(axis=2).mean()
    assert slowest(one, ep=ep, rows=rows) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("made", [experts, uniform])
@pytest.mark.parametrize("factor", [fullest, slowest])
def test_factors_are_1_without_a_group_and_grow_with_it(made, factor) -> None:  # type: ignore[no-untyped-def]
    for total, chosen in ((8, 2), (60, 4), (128, 8), (512, 10)):
        for rows in (1.0, 77.5, 4096.0):
            degrees = [ep for ep in range(1, total + 1) if total % ep == 0]
            loads = [factor(made(total, chosen), ep=ep, rows=rows) for ep in degrees]
            assert loads[0] == 1.0
            assert loads == sorted(loads)
            assert loads[-1] <= total / chosen


@pytest.mark.parametrize("factor", [fullest, slowest])
def test_uniform_choices_even_out_with_rows_and_stated_ones_do_not(factor) -> None:  # type: ignore[no-untyped-def]
    rows = [2.0**power for power in range(4, 32, 4)]
    even = [factor(uniform(128, 8), ep=8, rows=count) for count in rows]
    assert even == sorted(even, reverse=True)
    assert even[-1] == pytest.approx(1.0, abs=1e-3)
    stated = [factor(experts(128, 8), ep=8, rows=count) for count in rows]
    assert stated[-1] > 1.2


def test_a_seed_draws_the_same_and_no_expert_gets_more_than_all_rows() -> None:
    one = experts(8, 4)
    first, again, other = (drawn(one, seed, ep=8, rows=1000, layers=50) for seed in (1, 1, 2))
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert (first.sum(axis=2) == 4000).all()
    noise = 5 * math.sqrt(1000)
    assert first.max() <= 1000 + noise


def test_measured_routing_has_the_ranks_that_it_was_measured_on() -> None:
    text = Routed("text", 0.25, 0.0, ("3 1 2 2", "1 1 1 1"))
    image = Routed("image", 0.75, 0.0, ("1 1 1 1", "5 1 1 1"))
    one = experts(4, 1, text, image)
    first = 0.25 * 4 / 8 + 0.75 * 2 / 4  # of two experts of the first layer
    second = 0.25 * 2 / 4 + 0.75 * 6 / 8
    assert fullest(one, ep=2, rows=100.0) == pytest.approx(2 * second)
    assert fullest(one, ep=2, rows=100.0, layers=2) == pytest.approx(first + second)
    assert slowest(one, ep=2, rows=100.0) == pytest.approx(first + second)
    sent = drawn(one, 0, ep=2, rows=10_000, layers=2).sum(axis=1)
    assert sent[1, 0] / 10_000 == pytest.approx(2 * second, rel=0.02)


@pytest.mark.parametrize("spread", [0.0, 0.7])
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_reach_a_rank_as_often_as_those_with_any_expert_there(
    shape: tuple[int, int, int, int], spread: float
) -> None:
    """Rows draw their experts one after the other; shares of ranks are those of their choices."""
    total, chosen, ep, _ = shape
    random, rows = np.random.default_rng(5), 4000
    scores = spread * random.standard_normal(total) + random.gumbel(size=(rows, total))
    ranks = np.argsort(scores, axis=1)[:, -chosen:] // (total // ep)
    for rank in range(ep):
        share = float((ranks == rank).mean())
        expected = reached(experts(total, chosen), share)
        found = (ranks == rank).any(axis=1).mean()
        assert found == pytest.approx(expected, rel=0.05 if spread else 0.01, abs=0.01)
    assert reached(experts(total, chosen), 0.0) == 0.0
    assert reached(experts(total, chosen), 1.0 / chosen) == 1.0 or ep > 1
