"""The sample index: one pass over the sources that reads sizes only, stored as Parquet (see
`spec.index`).

Everything after it (packing, ordering, planning) works on these numbers; only the loader opens
shards again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.distribution import draw
from disttrain_cli.data.held_out import chosen
from disttrain_cli.data.index_checks import (
    State,
    check_files,
    check_same,
    check_sources,
    checked_tokenizer,
    list_shards,
    made_for,
    states_of,
)
from disttrain_cli.data.index_file import Stored, read_stored
from disttrain_cli.data.index_rows import counts_of, flat, numbers_of, specials_of
from disttrain_cli.data.index_writing import stored_for, write_index
from disttrain_cli.data.parts import counts_of_parts, cutting, first_parts
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import Shard, Skipped
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import IMAGE, KINDS, SAMPLE_SPECIALS, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import DistributionSpec


class Keys(Sequence[str]):
    """Names of samples, kept as one array instead of an object each."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> Keys: ...

    def __getitem__(self, at: int | slice) -> str | Keys:
        return Keys(self._array[at]) if isinstance(at, slice) else self._array[at].as_py()


@dataclass(frozen=True)
class Index:
    """Sizes of every sample; segments of all samples lie one after the other."""

    fingerprint: str
    inputs: ModelInputs
    weights: list[float]  # per source
    shards: list[Shard]
    skipped: list[Skipped]
    source: Ints  # [N samples]
    shard: Ints  # [N] place in `shards`, which is empty where the sizes were drawn
    keys: Sequence[str]  # [N]
    segment_start: Ints  # [N + 1]
    kinds: Ints  # [segments] TEXT, or one of `KINDS`
    tokens: Ints  # [segments]
    trained: NDArray[np.bool_]  # [segments] a text whose tokens are labels
    ended: NDArray[np.bool_]  # [segments] a text whose last token is an EOS inside the sample
    # [segments] where it lies in its shard: two numbers whose meaning is the form's own
    offsets: Ints
    sizes: Ints  # [segments]
    grids: Ints  # [segments, 2] rows, columns of items (`spec.heads.Head`); 0 of texts
    #: [N, 2] (first character, characters) of samples that are pieces of a document
    #: (`data.documents`), else 0; None = there is no such sample
    pieces: Ints | None = None
    # images read that have more pixels than the model's budget; of files only
    scaled_down: int | None = None
    # by `UNREAD`, what the model has no module for
    unread: dict[str, int] = field(default_factory=dict)
    drawn: NDArray[np.bool_] | None = None  # [N] samples that sequences are made of; None = all
    #: [N] whether a chat template wrote a sample: it has no BOS and EOS but the template's; None =
    #: there is no such sample
    templated: NDArray[np.bool_] | None = None
    #: [segments] numbers of items among those of their file, `AROUND` for texts around them; None =
    #: every file is one item (`data.parts`)
    part: Ints | None = None
    #: [segments, 2] what the headers of items' files say, [segments, 4] where there are videos;
    #: None where `part` is
    numbers: Ints | None = None
    #: [shards] all images and clips of a shard were decoded once
    checked: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))

    def __len__(self) -> int:
        return len(self.keys)

    def per_sample(self, values: Ints) -> Ints:
        """Sums over the segments of each sample."""
        total = starts_of(values)
        return total[self.segment_start[1:]] - total[self.segment_start[:-1]]

    @cached_property
    def specials(self) -> Ints:
        """[N] BOS and EOS of each sample: both, or none where `templated`."""
        of_all = np.full(len(self), SAMPLE_SPECIALS, dtype=np.int64)
        return of_all if self.templated is None else np.where(self.templated, 0, of_all)

    @cached_property
    def lengths(self) -> Ints:
        """[N] tokens of each sample, BOS and EOS included."""
        return self.per_sample(self.tokens) + self.specials

    @cached_property
    def end_trained(self) -> NDArray[np.bool_]:
        """[N] whether a sample's EOS is a label: not where its last text is not trained, its
        document goes on, or it has none."""
        goes_on = np.zeros(len(self), dtype=bool)
        if self.pieces is not None:
            goes_on[:-1] = self.pieces[1:, 0] > 0  # the next sample does not begin its document
        if self.templated is not None:
            goes_on |= self.templated
        texts = np.flatnonzero(self.own_texts)
        if not len(texts):
            return np.ones(len(self), dtype=bool)
        # of this sample, or of another one
        last = texts[np.searchsorted(texts, self.segment_start[1:]) - 1]
        inside = (last >= self.segment_start[:-1]) & (last < self.segment_start[1:])
        return (~inside | self.trained[last]) & ~goes_on

    @cached_property
    def own_texts(self) -> NDArray[np.bool_]:
        """[segments] texts that are not written around the parts of a file."""
        texts = self.kinds == TEXT
        return texts if self.part is None else texts & (self.part >= 0)

    @cached_property
    def file(self) -> Ints:
        """[segments] of each item the first part of its file; of a text itself."""
        if self.part is None:
            return np.arange(len(self.kinds))
        return first_parts(self.kinds, self.part)

    @cached_property
    def parts(self) -> Ints:
        """[segments] how many items the file of each is."""
        return counts_of_parts(self.file)

    @cached_property
    def files(self) -> NDArray[np.bool_]:
        """[segments] items that are the first, or only, part of their file."""
        items = self.kinds != TEXT
        return items if self.part is None else items & (self.part == 0)

    @cached_property
    def frames(self) -> Ints:
        """[segments] frames of the video that an item is a part of; 0 of all others."""
        if self.numbers is None or self.numbers.shape[1] < 4:
            return np.zeros(len(self.kinds), dtype=np.int64)
        return np.where(self.kinds == TEXT, 0, self.numbers[:, 2])

    @cached_property
    def label_tokens(self) -> Ints:
        """[N] label tokens of each sample: those of its trained texts, and EOS where
        `end_trained`."""
        return self.per_sample(np.where(self.trained, self.tokens, 0)) + self.end_trained


def open_index(run: Run, inputs: ModelInputs, progress: Progress = silent) -> Index:
    """The index of the run's data: drawn from its distribution, else read; built where there is
    none for this run file, and extended where shards were added.

    Raises:
        DataError: a source is missing or empty, has too many bad samples, or no text to train on.
        MismatchError: a shard changed or went since it was indexed.
        SpecError: the tokenizer does not fit the model, or the images of the distribution not its
            sequences.
    """
    if run.file.data.distribution is not None:
        return _drawn_index(run.file.data.distribution, inputs)
    tokenizer = checked_tokenizer(run, inputs)
    shards = list_shards(run)
    stored = stored_for(run, inputs, tokenizer, shards)
    if stored and states_of(shards) == [State(*indexed[:4]) for indexed in stored.files]:
        return _index(run, inputs, stored, shards)
    write_index(run, inputs, tokenizer, shards, progress, stored)
    return _index(run, inputs, read_stored(run.dir.index), shards)


def build_index(
    run: Run, inputs: ModelInputs, progress: Progress = silent, processes: int | None = None
) -> Index:
    """Read the sizes of every sample and write the index of the run, whole or not at all; by so
    many processes (`indexing.in_order`).

    What an interrupted pass or other hosts have read (`read_share_of`) is taken. Samples that are
    broken or longer than a sequence are skipped, counted and named in `Index.skipped`; texts alone
    become several samples where they are longer.

    Raises:
        DataError: a source is missing or empty, more than `data.max_bad_fraction` of the samples
        are bad, or none
            has any text to train on.
        SpecError: the tokenizer does not fit the model, or the index cannot be written.
    """
    check_sources(run)
    tokenizer, shards = checked_tokenizer(run, inputs), list_shards(run)
    write_index(run, inputs, tokenizer, shards, progress, processes=processes)
    return _index(run, inputs, read_stored(run.dir.index), shards)


def read_index(run: Run, inputs: ModelInputs) -> Index:
    """The index of the run, checked against the files on disk (names, sizes, times).

    Raises:
        DataError: there is no index, it cannot be read, or the run has a distribution instead of
            data.
        MismatchError: it was made for another model, tokenizer or list of sources, or a shard came,
            went or changed.
    """
    check_sources(run)
    stored = read_stored(run.dir.index)
    check_same(stored, made_for(run, inputs, checked_tokenizer(run, inputs)))
    shards = list_shards(run)
    check_files(stored, states_of(shards), shards)
    return _index(run, inputs, stored, shards)


def leave_out(run: Run, inputs: ModelInputs, broken: Mapping[int, Skipped]) -> Index:
    """Write the index without these samples (rows of it), all others of which were decoded.

    Raises:
        DataError: as `build_index`; the index stays as it was.
        MismatchError: a shard came, went or changed meanwhile.
    """
    tokenizer, stored, shards = (
        checked_tokenizer(run, inputs),
        read_stored(run.dir.index),
        list_shards(run),
    )
    check_files(stored, states_of(shards), shards)
    write_index(run, inputs, tokenizer, shards, silent, stored, broken)
    return _index(run, inputs, read_stored(run.dir.index), shards)


def _index(run: Run, inputs: ModelInputs, stored: Stored, shards: list[tuple[int, Shard]]) -> Index:
    """Read the rows of an index whose shards are the same as those on disk; those of training are
    drawn."""
    rows = stored.rows()
    fraction = run.file.data.held_out
    counts = [indexed.rows for indexed in stored.files]
    kinds, widths, heights, parts, frames, rates = (
        flat(rows, name) for name in ("kinds", "widths", "heights", "parts", "frames", "rates")
    )
    of_files = {"widths": widths, "heights": heights, "frames": frames, "rates": rates}
    numbers = numbers_of(of_files)
    budget = inputs.image.max_pixels if inputs.image else 0
    start, cut = starts_of(counts_of(rows)), cutting(inputs)
    return Index(
        fingerprint=hashlib.sha256(f"{stored.fingerprint} {fraction}".encode()).hexdigest()[:16]
        if fraction
        else stored.fingerprint,
        inputs=inputs,
        weights=[source.weight for source in run.file.data.sources],
        shards=[shard for _, shard in shards],
        skipped=[one for _, one in stored.skipped],
        source=np.repeat(np.array([source for source, _ in shards], dtype=np.int64), counts),
        shard=np.repeat(np.arange(len(shards), dtype=np.int64), counts),
        keys=Keys(rows.column("key")),
        segment_start=start,
        kinds=kinds,
        tokens=flat(rows, "tokens"),
        trained=flat(rows, "trained").astype(bool),
        ended=flat(rows, "ended").astype(bool),
        offsets=flat(rows, "offsets"),
        sizes=flat(rows, "sizes"),
        grids=_grids(inputs, kinds, numbers),
        pieces=_pieces(start, kinds, widths, heights),
        templated=_templated(start, kinds, heights),
        part=parts if cut else None,
        numbers=numbers if cut else None,
        checked=np.array([indexed.checked for indexed in stored.files], dtype=bool),
        unread=dict(sum((Counter(indexed.unread) for indexed in stored.files), Counter[str]())),
        scaled_down=int(
            ((kinds == IMAGE) & (parts == 0) & (frames == 0) & (widths * heights > budget)).sum()
        ),
        drawn=~chosen(rows.column("key"), fraction) if fraction else None,
    )


def held_out(index: Index) -> Index:
    """The same data, of which the samples are drawn that training leaves out (`data.held_out`).

    Raises:
        DataError: there is none.
    """
    kept = np.zeros(len(index), dtype=bool) if index.drawn is None else ~index.drawn
    if not kept.any():
        raise DataError(
            "No sample is held out for the evaluation",
            f"samples: {len(index)}",
            "Raise data.held_out, or leave train.evaluation out.",
        )
    return replace(index, drawn=kept)


def _drawn_index(spec: DistributionSpec, inputs: ModelInputs) -> Index:
    """An index without files: documents that are drawn."""
    drawn = draw(spec, inputs)
    documents = len(drawn.segment_start) - 1
    nowhere, source = (
        np.zeros(len(drawn.kinds), dtype=np.int64),
        np.zeros(documents, dtype=np.int64),
    )
    return Index(
        fingerprint=drawn.fingerprint,
        inputs=inputs,
        weights=[1.0],
        shards=[],
        skipped=[],
        source=source,
        shard=source,
        keys=[str(number) for number in range(documents)],
        segment_start=drawn.segment_start,
        kinds=drawn.kinds,
        tokens=drawn.tokens,
        trained=drawn.kinds == TEXT,
        ended=np.zeros(len(drawn.kinds), dtype=bool),
        offsets=nowhere,
        sizes=nowhere,
        grids=drawn.grids,
    )


def _pieces(segment_start: Ints, kinds: Ints, widths: Ints, heights: Ints) -> Ints | None:
    """`Index.pieces`; such a sample has one segment."""
    texts = (kinds == TEXT) & (heights > 0)
    if not texts.any():
        return None
    first = segment_start[:-1]
    return np.where(texts[first, None], np.stack([widths, heights], axis=1)[first], 0)


def _templated(segment_start: Ints, kinds: Ints, heights: Ints) -> NDArray[np.bool_] | None:
    """`Index.templated`."""
    templated = specials_of(kinds, heights, segment_start) == 0
    return templated if templated.any() else None


def _grids(inputs: ModelInputs, kinds: Ints, sizes: Ints) -> Ints:
    """Grids [segments, 2] of items whose files' headers say these numbers."""
    grids = np.zeros((len(kinds), 2), dtype=np.int64)
    for item, kind in KINDS.items():
        indices = np.flatnonzero(kinds == kind)
        if len(indices):
            grids[indices] = inputs.of(item)[0].grids(sizes[indices])
    return grids
