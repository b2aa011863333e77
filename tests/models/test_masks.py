"""Masks of the library, read as rules, against its functions computed for all pairs of rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils as library

from disttrain_cli.errors import SpecError
from disttrain_cli.models.attention import Rule, Segments
from disttrain_cli.models.masks import mask, seen_by, spans_of, within

CPU = torch.device("cpu")
LENGTHS = [7, 1, 9]
BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, 2, 3, 3, -1, 4, 4, 4, 4, 4, -1]])
CAUSAL, WINDOW = library.causal_mask_function, library.sliding_window_overlay(3)
Function = Callable[..., Any]


def made(name: str, blocks: Tensor) -> Function:
    together = library.blockwise_overlay(blocks)
    return {
        "causal": CAUSAL,
        "window": library.sliding_window_causal_mask_function(3),
        "two windows": library.and_masks(WINDOW, CAUSAL, library.sliding_window_overlay(5)),
        "chunks": library.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        "bidirectional": library.bidirectional_mask_function,
        "Gemma 3, full": library.or_masks(CAUSAL, together),
        "Gemma 3, sliding": library.and_masks(library.or_masks(CAUSAL, together), WINDOW),
        "PaliGemma, sliding": library.or_masks(library.and_masks(WINDOW, CAUSAL), together),
    }[name]


def packed(function: Function) -> Function:
    """As the library composes it for packed samples."""
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    samples = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))[None]
    return library.packed_sequence_compatibility_function(function, positions, samples)


NAMES = [
    "causal",
    "window",
    "two windows",
    "chunks",
    "bidirectional",
    "Gemma 3, full",
    "Gemma 3, sliding",
    "PaliGemma, sliding",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrapped", [packed, lambda function: function])
def test_a_rule_sees_what_the_librarys_function_does(
    name: str, wrapped: Callable[[Function], Function]
) -> None:
    read = seen_by(wrapped(made(name, BLOCKS)), Segments(LENGTHS, CPU))
    assert read.rule is not None and sum(read.lengths) == sum(LENGTHS)
    found = torch.zeros(sum(LENGTHS), sum(LENGTHS), dtype=torch.bool)
    start, groups = 0, read.seen(read.rule, Segments(read.lengths, CPU))
    for length, seen in zip(read.lengths, groups, strict=True):
        for row in range(length):
            first, last = int(seen.first[0, row]), int(seen.last[0, row])
            found[start + row, start + first : start + last + 1] = True
        start += length
    expected = torch.zeros_like(found)
    for part in torch.arange(sum(LENGTHS)).split(LENGTHS):  # each sample alone
        alone = made(name, BLOCKS[:, part])
        place = torch.arange(len(part))
        expected[part[:, None], part] = alone(0, 0, place[:, None], place[None])
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda *_: True, "test_masks"),
        (library.blockwise_overlay(BLOCKS), "blocks alone"),
        (library.or_masks(CAUSAL, WINDOW), "a union"),
        (library.sliding_window_bidirectional_mask_function(3), "sliding_window_bidirectional"),
        (library.padding_mask_function(BLOCKS), "padding_mask_function"),
        (library.and_masks(CAUSAL, library.blockwise_overlay(BLOCKS)), "intersection of blocks"),
        (WINDOW, "window of later rows"),
    ],
)
def test_other_functions_are_refused_by_name(function: Function, named: str) -> None:
    with pytest.raises(SpecError) as raised:
        seen_by(function, Segments(LENGTHS, CPU))
    assert named in raised.value.why


def test_blocks_end_with_their_samples_and_are_refused_if_text_is_between() -> None:
    assert spans_of(torch.tensor([[0, 0, -1, 0, 0]]), [3, 2]) == ((0, 2), (3, 5))
    assert spans_of(torch.empty(1, 5, device="meta"), [3, 2]) == ()
    with pytest.raises(SpecError) as raised:
        spans_of(torch.tensor([[0, 0, -1, 0, 0]]), [5])
    assert "do not follow each other" in raised.value.why


def test_masks_are_those_of_the_rows_inside_and_none_outside() -> None:
    rows: dict[str, Any] = {"batch_size": 1, "q_length": 17, "kv_length": 17}
    assert mask(**rows, mask_function=CAUSAL) is None
    segments = Segments(LENGTHS, CPU)
    with within(segments):
        read = mask(**rows, mask_function=CAUSAL)
        assert read is mask(**rows, mask_function=CAUSAL) and read is segments.under(Rule())
        for wrong in ({"q_length": 16}, {"kv_length": 18}, {"attention_mask": BLOCKS}):
            with pytest.raises(SpecError):
                mask(**rows | wrong, mask_function=CAUSAL)
    assert mask(**rows, mask_function=CAUSAL) is None
