"""Long documents, cut into pieces of at most a sequence each, as is usual in training LLMs.

A piece becomes a sample: BOS, its tokens, EOS. EOS is trained only at the end of the document.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from disttrain_cli.data.tokenizer import Tokenizer

WORD = 64  # characters before the end of a piece that are searched for a space
SPARE = 8  # tokens by which a piece's count by itself may exceed its count inside the document


class Piece(NamedTuple):
    """A part of a text and its token count when tokenized by itself."""

    first: int
    characters: int
    tokens: int


def pieces(text: str, most: int, tokenizer: Tokenizer) -> list[Piece]:
    """Split a text into consecutive pieces of at most `most` tokens.

    Pieces end between words if the text has spaces. A single character of more tokens stays one
    piece.
    """
    cuts = [0, *_ends(text, max(1, most - min(SPARE, most // 8)), tokenizer), len(text)]
    return [
        piece
        for first, end in pairwise(cuts)
        for piece in _fitting(text, first, end, most, tokenizer)
    ]


def _ends(text: str, most: int, tokenizer: Tokenizer) -> Iterator[int]:
    """Yield the characters at which pieces end, without the last."""
    starts = np.maximum.accumulate(tokenizer.starts(text))
    first = 0
    while (token := int(np.searchsorted(starts, first)) + most) < len(starts):
        end = max(int(starts[token]), first + 1)
        space = max(text.rfind(space, max(first, end - WORD) + 1, end) for space in " \n")
        first = end if space < 0 else space
        yield first


def _fitting(text: str, first: int, end: int, most: int, tokenizer: Tokenizer) -> list[Piece]:
    """Return one piece, or its halves if it has too many tokens when tokenized by itself."""
    (tokens,) = tokenizer.count([text[first:end]])
    if tokens <= most or end - first == 1:
        return [Piece(first, end - first, tokens)]
    middle = (first + end) // 2
    return [
        *_fitting(text, first, middle, most, tokenizer),
        *_fitting(text, middle, end, most, tokenizer),
    ]
