"""Draws: microbatches of the data's own sequences, enough of them, none without work."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.profiling.sizes import (
    SEQUENCES,
    PackedSizes,
    draw_sizes,
    needed_draws,
    sequences_per_draw,
    spread,
    with_work,
)
from disttrain_cli.spec.work import Work

TEXT_ONLY = PackedSizes([100, 120])
MIXED = PackedSizes([200], {"image": [(4, 4), (2, 6)], "target": [(1, 1)]})


def test_at_least_256_sequences_are_drawn_and_each_as_often_as_the_others() -> None:
    sequences = [PackedSizes([number + 1]) for number in range(SEQUENCES // 2)]
    drawn = [
        document for draw in draw_sizes("sequence", sequences) for (document,) in draw["documents"]
    ]
    assert len(drawn) >= SEQUENCES
    counts = [drawn.count(number + 1) for number in range(len(sequences))]
    assert min(counts) >= 2 and max(counts) <= 3


def test_an_llm_draw_brings_the_images_and_targets_of_its_sequences() -> None:
    for draw in draw_sizes("sequence", [MIXED, TEXT_ONLY]):
        mixed = draw["documents"].count([200])
        assert len(draw["image"]) == 2 * mixed and len(draw["target"]) == mixed


def test_encoders_and_generators_get_whole_slots_and_shares_of_them() -> None:
    sizes = [len(draw["image"]) for draw in draw_sizes("image", [MIXED])]
    assert {1, 2, 4, 8} == set(sizes)
    assert {len(draw["target"]) for draw in draw_sizes("target", [MIXED])} == {1, 2, 4}


def test_a_gpu_is_measured_up_to_a_global_batch_and_at_the_largest_size_always() -> None:
    per_draw = sequences_per_draw("cuda", 8)
    assert per_draw == [1, 2, 4, 8] and sequences_per_draw("cpu", 8) == [1, 2, 4]
    draws = draw_sizes("sequence", [MIXED, TEXT_ONLY], per_draw=per_draw)
    assert {len(draw["documents"]) for draw in draws} == set(per_draw)
    order, flops = [3, 1, 0, 2], [2.0, 8.0, 4.0, 1.0]
    assert needed_draws(order, flops, "cpu") == [3, 0]
    assert needed_draws(order, flops, "cuda") == [3, 1, 0]
    assert needed_draws([0], [1.0], "cuda") == [0]


def test_draws_without_work_are_left_out() -> None:
    assert draw_sizes("image", [TEXT_ONLY]) == [] == draw_sizes("target", [TEXT_ONLY])
    some = draw_sizes("image", [TEXT_ONLY] * 3 + [MIXED])
    assert some and all(draw["image"] for draw in some)


def test_rare_work_is_found_among_all_sequences() -> None:
    assert (
        with_work("image", [TEXT_ONLY, MIXED]) == [MIXED] == with_work("target", [TEXT_ONLY, MIXED])
    )
    assert with_work("sequence", [TEXT_ONLY, MIXED]) == [TEXT_ONLY, MIXED]


def test_the_first_draws_are_the_smallest_the_largest_and_what_lies_between() -> None:
    works = [Work(1, float(tokens), 0) for tokens in (35, 10, 80, 20, 160)]
    assert spread(works) == [1, 4, 0, 2, 3]
    assert spread(works[:1]) == [0]
    assert spread([works[0]] * 3 + works[1:2]) == [3, 0, 1, 2]  # what is there already comes last


@given(st.lists(st.tuples(*[st.integers(0, 10**6)] * 3), min_size=2, max_size=30))
def test_every_further_draw_is_the_farthest_from_those_before(amounts: list[tuple[int]]) -> None:
    works = [Work(*map(float, one)) for one in amounts]
    order = spread(works)
    assert sorted(order) == list(range(len(works)))
    places = np.log1p(np.array(works))
    places = (places - places.min(axis=0)) / np.maximum(np.ptp(places, axis=0), 1e-9)
    gaps = [
        min(np.linalg.norm(places[draw] - places[before]) for before in order[:number])
        for number, draw in enumerate(order)
        if number >= 2
    ]
    assert all(later <= gap + 1e-9 for gap, later in pairwise(gaps))


def test_the_same_seed_draws_the_same() -> None:
    sequences = [PackedSizes([n + 1], {"image": [(n % 5 + 1, 2)]}) for n in range(40)]
    assert draw_sizes("image", sequences, seed=3) == draw_sizes("image", sequences, seed=3)
    assert draw_sizes("image", sequences, seed=3) != draw_sizes("image", sequences, seed=4)
