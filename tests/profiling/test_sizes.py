"""Draws: microbatches of the data's own sequences, enough of them, none without work."""

from __future__ import annotations

from disttrain_cli.profiling.sizes import SEQUENCES, PackedSizes, draw_sizes

TEXT_ONLY = PackedSizes([100, 120], [], 0)
MIXED = PackedSizes([200], [(4, 4), (2, 6)], 1)


def test_at_least_256_sequences_are_drawn_and_each_as_often_as_the_others() -> None:
    sequences = [PackedSizes([number + 1], [], 0) for number in range(SEQUENCES // 2)]
    drawn = [document for draw in draw_sizes("llm", sequences) for (document,) in draw["documents"]]
    assert len(drawn) >= SEQUENCES
    counts = [drawn.count(number + 1) for number in range(len(sequences))]
    assert min(counts) >= 2 and max(counts) <= 3


def test_an_llm_draw_brings_the_images_and_targets_of_its_sequences() -> None:
    for draw in draw_sizes("llm", [MIXED, TEXT_ONLY]):
        mixed = draw["documents"].count([200])
        assert len(draw["grids"]) == 2 * mixed and draw["targets"] == mixed


def test_encoders_and_generators_get_whole_slots_and_shares_of_them() -> None:
    sizes = [len(draw["grids"]) for draw in draw_sizes("encoder", [MIXED])]
    assert {1, 2, 4, 8} == set(sizes)
    assert {draw["targets"] for draw in draw_sizes("generator", [MIXED])} == {1, 2, 4}


def test_draws_without_work_are_left_out() -> None:
    assert draw_sizes("encoder", [TEXT_ONLY]) == [] == draw_sizes("generator", [TEXT_ONLY])
    some = draw_sizes("encoder", [TEXT_ONLY] * 3 + [MIXED])
    assert some and all(draw["grids"] for draw in some)


def test_the_same_seed_draws_the_same() -> None:
    sequences = [PackedSizes([n + 1], [(n % 5 + 1, 2)], n % 3) for n in range(40)]
    assert draw_sizes("encoder", sequences, seed=3) == draw_sizes("encoder", sequences, seed=3)
    assert draw_sizes("encoder", sequences, seed=3) != draw_sizes("encoder", sequences, seed=4)
