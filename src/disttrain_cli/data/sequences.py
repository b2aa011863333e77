"""Token arrays of packed sequences: ids, labels, positions, rows of images and conditioning tokens.

A sample is BOS, its segments in order, EOS; a sample rendered by a chat template is its segments
alone. Images and audio clips are rows of IMAGE placeholders (an encoder's output replaces both),
images to generate rows of CONTEXT placeholders. A label is the next token of the same sample if
that is a token of a trained text, or EOS of a sample whose last text is trained (or that has none):
`Index.label_tokens` counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from disttrain_cli.data.arrays import ranges, starts_of
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.positions import grid_positions, joined_in_time, sample_positions
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.tokenizer import Tokenizer
from disttrain_cli.spec.heads import Head, ImageInput
from disttrain_cli.spec.index import ITEMS, KINDS, SAMPLE_SPECIALS, TEXT
from disttrain_cli.spec.library_images import LibraryImages
from disttrain_cli.spec.places import Places
from disttrain_cli.spec.video_processor import Film

NOT_TRAINED = -100
PADDING_DOCUMENT = -1

#: Token ids of each text segment of a sample, by the sample's row.
ReadTexts = Callable[[int], list[list[int]]]


class SequencePlan:
    """Layout of one packed sequence, computed from the index without reading a file."""

    def __init__(self, packing: Packing, number: int) -> None:
        index = packing.index
        self.samples = packing.samples[
            packing.sample_start[number] : packing.sample_start[number + 1]
        ]
        self.length = index.inputs.sequence_length
        self.inputs = index.inputs
        self.sample_tokens = index.lengths[self.samples].astype(np.int64)
        self.sample_at = starts_of(self.sample_tokens)[:-1]
        counts = index.segment_start[self.samples + 1] - index.segment_start[self.samples]
        segments = ranges(index.segment_start[self.samples], counts)
        self.kinds = index.kinds[segments]
        self.tokens = index.tokens[segments].astype(np.int64)
        self.grids = index.grids[segments].astype(np.int64)
        self.segments, self.index = segments, index
        self.trained = index.trained[segments]
        self.films = index.frames[segments] > 0
        self.end_trained = index.end_trained[self.samples]
        self.specials = index.specials(self.samples)
        # A segment's offset includes the specials of earlier samples and its sample's BOS.
        begins = self.specials // SAMPLE_SPECIALS
        before = starts_of(self.specials)[:-1] + begins
        self.segment_at = starts_of(self.tokens)[:-1] + np.repeat(before, counts)

    def rows(self, kind: int) -> list[Places]:
        """Return the rows in the LLM of each item of a kind."""
        chosen = np.flatnonzero(self.kinds == kind)
        head = next(iter(self.inputs.of(ITEMS[kind])), None)
        if head is not None and self.index.part is not None:
            return [one for file in self._files(chosen) for one in self._rows_of(file, head)]
        return [self._run(segment) for segment in chosen.tolist()]

    def _run(self, segment: int) -> Places:
        first = self.segment_at[segment]
        return Places(np.arange(first, first + self.tokens[segment]))

    def _files(self, items: Ints) -> list[Ints]:
        """Group items by their files."""
        assert self.index.part is not None
        begins = np.flatnonzero(self.index.part[self.segments[items]] == 0)
        return np.split(items, begins[1:])

    def _rows_of(self, parts: Ints, head: Head) -> list[Places]:
        """Return the rows in the LLM of the parts of a file."""
        if not len(parts):
            return []
        first = self.segment_at[parts[0]]
        numbers = self.index.numbers_of(int(self.segments[parts[0]]))
        placed = head.places(numbers, len(parts))
        if placed is None:
            return [self._run(segment) for segment in parts.tolist()]
        return [own.moved(first) for own in placed]

    def _fixed(self) -> Iterator[tuple[int, Ints]]:
        """Yield the first token of every item with tokens between its rows, and all their ids.

        Rows have negative ids.
        """
        for item, kind in KINDS.items():
            head = next(iter(self.inputs.of(item)), None)
            if head is None or not head.packed:
                continue
            for at in np.flatnonzero(self.kinds == kind).tolist():
                ids = head.ids(self.index.numbers_of(int(self.segments[at])))
                yield int(self.segment_at[at]), np.array(ids, dtype=np.int64)

    def layout(self) -> tuple[Ints, Ints]:
        """Return (positions [L], or [3, L] with M-RoPE, documents [L]).

        Positions restart with every sample; document -1 = padding.
        """
        documents = np.full(self.length, PADDING_DOCUMENT, dtype=np.int64)
        used = int(self.sample_tokens.sum())
        documents[:used] = np.repeat(np.arange(len(self.samples)), self.sample_tokens)
        of_samples = self._positions()
        padding = np.zeros((*of_samples.shape[:-1], self.length - used), dtype=np.int64)
        return np.concatenate([of_samples, padding], axis=-1), documents

    def _positions(self) -> Ints:
        """Return the positions of the tokens of all samples."""
        if self.inputs.positions == "1d":
            return ranges(np.zeros(len(self.samples), dtype=np.int64), self.sample_tokens)
        grids, positions = self._image_grids(), []
        places = np.array([grid[0] for grid in grids], dtype=np.int64)
        for first, count in zip(self.sample_at, self.sample_tokens, strict=True):
            inside = np.flatnonzero((first <= places) & (places < first + count)).tolist()
            of_sample = [(grids[at][0] - int(first), *grids[at][1:]) for at in inside]
            positions.append(sample_positions(self.inputs.positions, int(count), of_sample))
        return np.concatenate(positions, axis=1)

    def _image_grids(self) -> list[tuple[int, Ints, *tuple[int, ...]]]:
        """Return each image grid, as `sample_positions` reads it."""
        head, times = next(iter(self.inputs.of("image")), None), dict[int, list[int]]()
        items = np.flatnonzero(self.kinds == ImageInput.kind).tolist()
        if isinstance(head, LibraryImages):
            return [
                (
                    int(self.segment_at[at]),
                    *head.positions(self.index.numbers_of(int(self.segments[at]))),
                )
                for at in items
            ]
        if not isinstance(head, ImageInput):
            return []
        grids = list[tuple[int, Ints, int | None]]()
        for at in items:
            inside = grid_positions(head.frames(self.grids[at]))
            time = self._time_in_film(head, at, times) if self.films[at] else None
            grids.append((int(self.segment_at[at]), inside, time))
        return joined_in_time(grids)

    def _time_in_film(self, head: ImageInput, at: int, known: dict[int, list[int]]) -> int | None:
        """Return the time of a part of a video after the first part; None for the first part.

        Args:
            known: cache of the times of videos, by their first part.
        """
        index, segment = self.index, int(self.segments[at])
        assert index.part is not None and index.numbers is not None and head.video is not None
        if not (part := int(index.part[segment])):
            return None
        file = int(index.file[segment])
        if file not in known:
            known[file] = head.video.times(Film(*index.numbers[segment].tolist()))
        return known[file][part]

    def _row_id(self, item: str, segment: int, tokenizer: Tokenizer) -> int:
        """Return the id of the rows of an item."""
        head = next(iter(self.inputs.of(item)), None)
        if head is not None and head.packed:
            own = head.row_id(self.index.numbers_of(int(self.segments[segment])))
            assert own is not None
            return own
        if item == "target":
            return tokenizer.context
        return tokenizer.video if self.films[segment] else tokenizer.image

    def token_ids(self, tokenizer: Tokenizer, read_texts: ReadTexts) -> tuple[Ints, Ints]:
        """Return (ids, labels), each [L]."""
        ids = np.full(self.length, tokenizer.pad, dtype=np.int64)
        trained = np.zeros(self.length, dtype=bool)
        own = self.specials > 0
        ends = (self.sample_at + self.sample_tokens - 1)[own]
        ids[self.sample_at[own]], ids[ends], trained[ends] = (
            tokenizer.bos,
            tokenizer.eos,
            self.end_trained[own],
        )
        for item, kind in KINDS.items():
            numbers = np.flatnonzero(self.kinds == kind).tolist()
            for places, number in zip(self.rows(kind), numbers, strict=True):
                ids[places.seen] = self._row_id(item, number, tokenizer)
        for first, fixed in self._fixed():
            inside = ids[first : first + len(fixed)]
            inside[fixed >= 0] = fixed[fixed >= 0]
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
