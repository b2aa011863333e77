"""Token arrays of packed sequences: ids, labels, positions, and the places of images and
conditioning tokens.

A sample is BOS, its segments in order, EOS. Images and audio clips are rows of IMAGE placeholders
(an encoder's output replaces both), images to be generated rows of CONTEXT placeholders. A label is
the next token of the same sample, only where that is a token of a trained text, or EOS of a sample
whose last text is trained (or that has none): `Index.label_tokens` counts them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from disttrain_cli.data.arrays import ranges, starts_of
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.spec.index import KINDS, SAMPLE_SPECIALS, TEXT

NOT_TRAINED = -100
PADDING_DOCUMENT = -1

#: Token ids of each text segment of a sample, by the sample's row.
ReadTexts = Callable[[int], list[list[int]]]


class SequencePlan:
    """Where everything lies in one packed sequence; known from the index, no file read."""

    def __init__(self, packing: Packing, number: int) -> None:
        index = packing.index
        self.samples = packing.samples[
            packing.sample_start[number] : packing.sample_start[number + 1]
        ]
        self.length = index.inputs.sequence_length
        self.sample_tokens = index.lengths[self.samples]
        self.sample_at = starts_of(self.sample_tokens)[:-1]
        counts = index.segment_start[self.samples + 1] - index.segment_start[self.samples]
        segments = ranges(index.segment_start[self.samples], counts)
        self.kinds = index.kinds[segments]
        self.tokens = index.tokens[segments]
        self.trained = index.trained[segments]
        self.end_trained = index.end_trained[self.samples]
        # Besides the segments before it, a segment lies behind the specials of earlier samples and
        # its own BOS.
        samples_before = np.repeat(np.arange(len(self.samples)), counts)
        self.segment_at = starts_of(self.tokens)[:-1] + SAMPLE_SPECIALS * samples_before + 1

    def rows(self, kind: int) -> list[Ints]:
        """Places of the tokens of each item of a kind."""
        chosen = np.flatnonzero(self.kinds == kind)
        return [np.arange(self.segment_at[s], self.segment_at[s] + self.tokens[s]) for s in chosen]

    def layout(self) -> tuple[Ints, Ints]:
        """(positions, documents), each [L]: restarting with every sample; -1 = padding."""
        positions = np.zeros(self.length, dtype=np.int64)
        documents = np.full(self.length, PADDING_DOCUMENT, dtype=np.int64)
        used = int(self.sample_tokens.sum())
        positions[:used] = ranges(np.zeros(len(self.samples), dtype=np.int64), self.sample_tokens)
        documents[:used] = np.repeat(np.arange(len(self.samples)), self.sample_tokens)
        return positions, documents

    def token_ids(self, tokenizer: Tokenizer, read_texts: ReadTexts) -> tuple[Ints, Ints]:
        """(ids, labels), each [L]."""
        ids = np.full(self.length, tokenizer.pad, dtype=np.int64)
        trained = np.zeros(self.length, dtype=bool)
        ends = self.sample_at + self.sample_tokens - 1
        ids[self.sample_at], ids[ends], trained[ends] = (
            tokenizer.bos,
            tokenizer.eos,
            self.end_trained,
        )
        for item, kind in KINDS.items():
            for index in self.rows(kind):
                ids[index] = tokenizer.context if item == "target" else tokenizer.image
        texts = [text for row in self.samples.tolist() for text in read_texts(row)]
        for segment, text in zip(np.flatnonzero(self.kinds == TEXT), texts, strict=True):
            first = self.segment_at[segment]
            ids[first : first + len(text)], trained[first : first + len(text)] = (
                text,
                self.trained[segment],
            )
        labels = np.full(self.length, NOT_TRAINED, dtype=np.int64)
        labels[:-1] = np.where(trained[1:], ids[1:], NOT_TRAINED)
        return ids, labels
