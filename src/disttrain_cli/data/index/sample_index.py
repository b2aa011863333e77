"""The sample index: one pass over the sources that reads sizes only, stored as Parquet.

The file's columns are in `spec.index`. All later stages (packing, ordering, planning) work on these
numbers; only the loader opens shards again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.arrays import starts_of
from disttrain_cli.data.distribution import draw
from disttrain_cli.data.index.index_checks import (
    Listed,
    check_files,
    check_same,
    check_sources,
    checked_tokenizer,
    list_shards,
    made_for,
    states_of,
)
from disttrain_cli.data.index.index_columns import columns_of, stored_index
from disttrain_cli.data.index.index_file import Stored
from disttrain_cli.data.mixtures import Phases, weights_of
from disttrain_cli.data.parts import counts_of_parts, first_parts
from disttrain_cli.data.slots import Ints
from disttrain_cli.data.sources import Shard, Skipped
from disttrain_cli.data.unread_keys import merged
from disttrain_cli.errors import DataError
from disttrain_cli.spec.heads import Numbers
from disttrain_cli.spec.index import SAMPLE_SPECIALS, TEXT
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.progress import Progress, silent
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.data import DistributionSpec

#: Fields of `Index` that are columns: of every index, and of some.
FIELDS = (
    *("source", "shard", "segment_start", "kinds", "tokens", "trained", "ended"),
    *("offsets", "sizes", "grids"),
)
OPTIONAL_FIELDS = ("pieces", "drawn", "repeated", "templated", "part", "numbers")
#: Properties that are columns as well: of every index; if files are cut into parts; if there are
#: videos.
DERIVED = ("lengths", "label_tokens", "end_trained", "own_texts", "files")
OF_PARTS, OF_FILMS = ("file", "parts"), ("frames",)
COUNTED = (
    "file_count",
    "held_count",
    "repeated_count",
)  # properties that are sums over all samples


class Keys(Sequence[str]):
    """Names of samples, stored as bytes and offsets [N + 1] instead of one object each."""

    def __init__(self, content: NDArray[np.uint8], start: Ints) -> None:
        self._content, self._start = content, start

    def __len__(self) -> int:
        return len(self._start) - 1

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        if isinstance(at, slice):
            return [self[one] for one in range(*at.indices(len(self)))]
        at = range(len(self))[at]
        return self._content[self._start[at] : self._start[at + 1]].tobytes().decode()


Value = TypeVar("Value")


def derived(compute: Callable[[Index], Value]) -> cached_property[Value]:
    """Cached property computed from the fields; read from `Index.known` if it is there."""
    name = compute.__name__

    def taken(index: Index) -> Value:
        return index.known[name] if name in index.known else compute(index)

    return cached_property(taken)


@dataclass(frozen=True)
class Index:
    """Sizes of every sample; the segments of all samples are concatenated."""

    fingerprint: str
    inputs: ModelInputs
    weights: list[float]  # per source
    shards: list[Shard]
    skipped: list[Skipped]
    source: Ints  # [N samples]
    shard: Ints  # [N] index into `shards`, which is empty if the sizes were drawn
    keys: Sequence[str]  # [N]
    segment_start: Ints  # [N + 1]
    kinds: Ints  # [segments] TEXT, or one of `KINDS`
    tokens: Ints  # [segments]
    trained: NDArray[np.bool_]  # [segments] a text whose tokens are labels
    ended: NDArray[np.bool_]  # [segments] a text whose last token is an EOS inside the sample
    # [segments] location in the shard: two numbers whose meaning depends on the shard's format
    offsets: Ints
    sizes: Ints  # [segments]
    grids: Ints  # [segments, 2] rows, columns of items (`spec.heads.Head`); 0 of texts
    #: [N, 2] (first character, characters) of samples that are pieces of a document
    #: (`data.indexing.documents`), else 0; None = there is no such sample
    pieces: Ints | None = None
    # images read that have more pixels than the model's budget; images in files only
    scaled_down: int | None = None
    # by `UNREAD`, the number of files for which the model has no module
    unread: dict[str, int] = field(default_factory=dict)
    unread_files: list[str] = field(default_factory=list)  # files next to shards, and why
    #: per source, samples by key of their records that no reader reads
    unread_keys: list[dict[str, int]] = field(default_factory=list)
    drawn: NDArray[np.bool_] | None = None  # [N] samples that training draws; None = all
    #: [N] True if a sample repeats an earlier one: it is never drawn; None = not checked
    repeated: NDArray[np.bool_] | None = None
    #: [N] True if a chat template rendered a sample: its only BOS and EOS are the template's; None
    #: = there is no such sample
    templated: NDArray[np.bool_] | None = None
    #: [segments] index of an item among the parts of its file, `AROUND` for texts around them; None
    #: = every file is one item (`data.parts`)
    part: Ints | None = None
    #: [segments, 2] sizes in the headers of items' files, [segments, 4] if there are videos; None
    #: if `part` is None
    numbers: Ints | None = None
    #: [shards] True if all images and clips of a shard have been decoded once
    checked: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool))
    held: bool = False  # True: `chosen` are the held-out samples instead of those of training
    orders: Path | None = None  # folder of its epochs' orders (`data.epochs.making`)
    #: Fingerprint of each source: its shards and which of its samples are drawn; empty if sizes
    #: were drawn.
    of_sources: list[str] = field(default_factory=list)
    #: (first step, weight of each source) as in the run file; the first weights are `weights`.
    phases: Phases = field(default_factory=list)
    known: Mapping[str, Any] = field(default_factory=dict)  # precomputed properties

    def __len__(self) -> int:
        return len(self.keys)

    def per_sample(self, values: Ints) -> Ints:
        """Sum values over the segments of each sample."""
        total = starts_of(values)
        return total[self.segment_start[1:]] - total[self.segment_start[:-1]]

    def specials(self, samples: Any = slice(None)) -> Ints:
        """Return the number of BOS and EOS tokens of these samples: 2, or 0 if `templated`."""
        if self.templated is None:
            return np.broadcast_to(np.int64(SAMPLE_SPECIALS), len(self))[samples]
        return np.where(self.templated[samples], 0, SAMPLE_SPECIALS)

    @property
    def chosen(self) -> NDArray[np.bool_] | None:
        """[N] mask of the samples that are packed into sequences; None = all."""
        kept = ~self.drawn if self.held and self.drawn is not None else self.drawn
        if self.repeated is None:
            return kept
        return ~self.repeated if kept is None else kept & ~self.repeated

    @derived
    def held_count(self) -> int:
        """Number of held-out samples, which training leaves out."""
        if self.drawn is None:
            return 0
        return int((~self.drawn if self.repeated is None else ~(self.drawn | self.repeated)).sum())

    @derived
    def repeated_count(self) -> int:
        """Number of samples that repeat an earlier one."""
        return 0 if self.repeated is None else int(self.repeated.sum())

    @property
    def sample_count(self) -> int:
        """Number of samples in the shards; the pieces of a document count as one."""
        later = 0 if self.pieces is None else int((self.pieces[:, 0] > 0).sum())
        return len(self) - later

    @derived
    def lengths(self) -> Ints:
        """[N] tokens of each sample, BOS and EOS included."""
        return self.per_sample(self.tokens) + self.specials()

    @derived
    def end_trained(self) -> NDArray[np.bool_]:
        """[N] mask of the samples whose EOS is a label.

        It is not a label if the last text is not trained, the document continues, or a chat
        template rendered the sample.
        """
        goes_on = np.zeros(len(self), dtype=bool)
        if self.pieces is not None:
            goes_on[:-1] = self.pieces[1:, 0] > 0  # the next sample continues this one's document
        if self.templated is not None:
            goes_on |= self.templated
        texts = np.flatnonzero(self.own_texts)
        if not len(texts):
            return np.ones(len(self), dtype=bool)
        # of this sample, or of another one
        last = texts[np.searchsorted(texts, self.segment_start[1:]) - 1]
        inside = (last >= self.segment_start[:-1]) & (last < self.segment_start[1:])
        return (~inside | self.trained[last]) & ~goes_on

    @derived
    def own_texts(self) -> NDArray[np.bool_]:
        """[segments] mask of the texts that are not written around the parts of a file."""
        texts = self.kinds == TEXT
        return texts if self.part is None else texts & (self.part >= 0)

    @derived
    def file(self) -> Ints:
        """[segments] index of the first part of each item's file; of a text its own index."""
        if self.part is None:
            return np.arange(len(self.kinds))
        return first_parts(self.kinds, self.part)

    @derived
    def parts(self) -> Ints:
        """[segments] number of items in each item's file."""
        return counts_of_parts(self.file)

    @derived
    def files(self) -> NDArray[np.bool_]:
        """[segments] mask of items that are the first, or only, part of their file."""
        items = self.kinds != TEXT
        return items if self.part is None else items & (self.part == 0)

    @derived
    def file_count(self) -> int:
        """Number of images, clips and other files of all samples."""
        return int(self.files.sum())

    @derived
    def frames(self) -> Ints:
        """[segments] frames of the video that an item is a part of; 0 for all others."""
        if self.numbers is None or self.numbers.shape[1] < 4:
            return np.broadcast_to(np.int64(0), len(self.kinds))
        return np.where(self.kinds == TEXT, 0, self.numbers[:, 2])

    def numbers_of(self, segment: int) -> Numbers:
        """Return the sizes in the header of an item's file.

        Without `numbers`, an image's is the size that it is resized to, as if its record stated it.
        """
        if self.numbers is not None:
            numbers: list[int] = self.numbers[segment].tolist()
            return tuple(numbers if any(numbers[2:]) else numbers[:2])
        assert self.inputs.image is not None
        rows, columns = (self.grids[segment] * self.inputs.image.patch_px).tolist()
        return -columns, -rows

    @derived
    def label_tokens(self) -> Ints:
        """[N] label tokens of each sample: its trained texts, and EOS if `end_trained`."""
        return self.per_sample(np.where(self.trained, self.tokens, 0)) + self.end_trained


def read_index(run: Run, inputs: ModelInputs) -> Index:
    """Read the run's index and check it against the files on disk (names, sizes, times).

    Raises:
        DataError: there is no index, it cannot be read, or the run has a distribution instead of
            data.
        MismatchError: it was made for another model, tokenizer or list of sources, or a shard was
            added, removed or changed.
    """
    check_sources(run)
    stored = stored_index(run, inputs)
    check_same(stored, made_for(run, inputs, checked_tokenizer(run, inputs)))
    listed = list_shards(run)
    check_files(stored, states_of(listed.shards), listed.shards)
    return opened(run, inputs, stored, listed)


def opened(
    run: Run, inputs: ModelInputs, stored: Stored, listed: Listed, progress: Progress = silent
) -> Index:
    """Open an index whose shards equal those on disk, with the samples of training drawn.

    Raises:
        DataError: evaluation is requested, and no sample is held out.
    """
    header, columns = columns_of(
        run, inputs, stored, listed.shards, partial(_derive, inputs), progress
    )
    counts = header["counts"]
    fields: dict[str, Any] = {
        name: columns[name] for name in (*FIELDS, *OPTIONAL_FIELDS) if name in columns
    }
    of_all = {name: columns[name] for name in (*DERIVED, *OF_PARTS, *OF_FILMS) if name in columns}
    data = run.file.data
    drawn = [counts[f"drawn {number}"] for number in range(len(data.sources))]
    phases = [
        (step, weights_of(weights, drawn, data.temperature)) for step, weights in data.phases()
    ]
    index = Index(
        fingerprint=_fingerprint(run, stored),
        inputs=inputs,
        weights=phases[0][1],
        phases=phases,
        of_sources=header["sources"],
        shards=[shard for _, shard in listed.shards],
        unread_files=listed.unread,
        skipped=[one for _, one in stored.skipped],
        keys=Keys(columns["keys"], columns["key_start"]),
        checked=np.array([indexed.checked for indexed in stored.files], dtype=bool),
        unread=dict(sum((Counter(indexed.unread) for indexed in stored.files), Counter[str]())),
        unread_keys=[
            merged(indexed.unread_keys for indexed in stored.files if indexed.source == number)
            for number in range(len(data.sources))
        ],
        scaled_down=counts["scaled_down"],
        orders=run.dir.orders,
        known={**of_all, **{name: counts[name] for name in COUNTED}},
        **fields,
    )
    if run.file.train.asks_evaluation:
        held_out(index)
    return index


def _fingerprint(run: Run, stored: Stored) -> str:
    """Return the fingerprint of an index and of the choice of its samples that are drawn."""
    data, named = run.file.data, []
    if data.held_out:
        named.append(str(data.held_out))
    if data.deduplicate:
        named.append("deduplicated")
    if data.temperature != 1:
        named.append(f"temperature {data.temperature}")
    if data.curriculum:
        named.append(f"phases {data.phases()}")
    if not named:
        return stored.fingerprint
    return hashlib.sha256(" ".join([stored.fingerprint, *named]).encode()).hexdigest()[:16]


def _derive(
    inputs: ModelInputs, fields: Mapping[str, Any], samples: int
) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """Compute (properties that are columns, properties that are sums) of some samples."""
    zeros = np.zeros(samples, dtype=np.int64)
    index = Index(
        fingerprint="",
        inputs=inputs,
        weights=[],
        shards=[],
        skipped=[],
        source=zeros,
        shard=zeros,
        keys=Keys(np.zeros(0, np.uint8), np.zeros(samples + 1, np.int64)),
        **fields,
    )
    films = index.numbers is not None and index.numbers.shape[1] == 4
    names = (*DERIVED, *(OF_PARTS if index.part is not None else ()), *(OF_FILMS if films else ()))
    return {name: getattr(index, name) for name in names}, {
        name: getattr(index, name) for name in COUNTED
    }


def held_out(index: Index) -> Index:
    """Return the index of the same data with the held-out samples drawn instead.

    They are those of `data.held_out`, or of validation splits.

    Raises:
        DataError: there is none.
    """
    if not index.held_count:
        raise DataError(
            "No sample is held out for the evaluation (train.evaluation)",
            f"samples: {len(index)}; without data.held_out the validation split of a folder in"
            " data.sources is used, and there is none",
            "Set or raise data.held_out, the share of the samples to evaluate on, name a folder"
            " that has a train and a validation split, or remove train.evaluation.",
        )
    return replace(index, held=True)


def drawn_index(spec: DistributionSpec, inputs: ModelInputs) -> Index:
    """Return an index of drawn documents, without files."""
    drawn = draw(spec, inputs)
    documents = len(drawn.segment_start) - 1
    nowhere = np.zeros(len(drawn.kinds), dtype=np.int64)
    source = np.zeros(documents, dtype=np.int64)
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
