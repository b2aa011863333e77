"""Buckets: a partition in layer order, filled from the last layer backwards."""

from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.costs.buckets import BUCKET_NUMBERS, buckets

NUMBERS = st.lists(st.integers(0, 2 * BUCKET_NUMBERS), max_size=40)


@given(numbers=NUMBERS)
def test_buckets_hold_every_layer_once_and_in_order(numbers: list[int]) -> None:
    assert [layer for bucket in buckets(numbers) for layer in bucket] == list(range(len(numbers)))


@given(numbers=NUMBERS)
def test_a_bucket_closes_with_the_layer_that_fills_it(numbers: list[int]) -> None:
    for number, bucket in enumerate(buckets(numbers)):
        after_the_first = sum(numbers[layer] for layer in bucket[1:])
        assert after_the_first < BUCKET_NUMBERS
        assert number == 0 or after_the_first + numbers[bucket[0]] >= BUCKET_NUMBERS


def test_the_first_bucket_takes_what_is_left() -> None:
    half = BUCKET_NUMBERS // 2
    assert buckets([half, half, half, 3 * half, half]) == [range(1), range(1, 3), range(3, 5)]
    assert buckets([]) == []
