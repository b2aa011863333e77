"""Documents longer than a sequence, in pieces that fill one each, as language models are usually
trained on them.

A piece becomes a sample of its own: BOS, its tokens, EOS, which is trained only where the document
ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from disttrain_cli.data.tokenizer import Tokenizer

WORD = 64  # characters before the end of a piece in which a space is looked for
SPARE = 8  # tokens that a piece may have more by itself than it has in its document


class Piece(NamedTuple):
    """A part of a text, and how many tokens it has by itself."""

    first: int
    characters: int
    tokens: int


def pieces(text: str, most: int, tokenizer: Tokenizer) -> list[Piece]:
    """Consecutive pieces of at most `most` tokens that make up a text; they end between words where
    there are spaces.

    A single character of more tokens stays as it is.
    """
    cuts = [0, *_ends(text, max(1, most - min(SPARE, most // 8)), tokenizer), len(text)]
    return [
        piece
        for first, end in pairwise(cuts)
        for piece in _fitting(text, first, end, most, tokenizer)
    ]


def _ends(text: str, most: int, tokenizer: Tokenizer) -> Iterator[int]:
    """Characters at which pieces end, without the last."""
    starts = np.maximum.accumulate(tokenizer.starts(text))
    first = 0
    while (token := int(np.searchsorted(starts, first)) + most) < len(starts):
        end = max(int(starts[token]), first + 1)
        space = max(text.rfind(space, max(first, end - WORD) + 1, end) for space in " \n")
        first = end if space < 0 else space
        yield first


def _fitting(text: str, first: int, end: int, most: int, tokenizer: Tokenizer) -> list[Piece]:
    """One piece, or halves of it where it has more tokens by itself than in its document."""
    (tokens,) = tokenizer.count([text[first:end]])
    if tokens <= most or end - first == 1:
        return [Piece(first, end - first, tokens)]
    middle = (first + end) // 2
    return [
        *_fitting(text, first, middle, most, tokenizer),
        *_fitting(text, middle, end, most, tokenizer),
    ]
