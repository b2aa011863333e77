"""Counts and ranks in sentences: nouns and verbs agree with their number."""

import pytest

from disttrain_cli.analysis.figures import agree, counted, name_ranks


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        ([3], "rank 3 waits"),
        ([1, 2], "ranks 1 and 2 wait"),
        ([1, 2, 5], "ranks 1, 2 and 5 wait"),
        (list(range(9)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more wait"),
    ],
)
def test_ranks_are_named_and_their_verb_agrees(numbers: list[int], named: str) -> None:
    assert f"{name_ranks(numbers)} {agree(len(numbers), 'waits', 'wait')}" == named


def test_nouns_agree_with_their_count() -> None:
    assert [counted(count, "step") for count in (0, 1, 2, 1000)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "1,000 steps",
    ]
