"""The third order is as docs/data.md defines it, sample for sample; no sample of a source is left
out or drawn twice, whatever the phases are."""

import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, count, islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.data.arrays import mix
from disttrain_cli.data.epochs import streams
from disttrain_cli.data.epochs.mixture import Mixture, Phase
from disttrain_cli.data.epochs.streams import DRAW, ORDER
from disttrain_cli.data.index.sample_index import Index
from disttrain_cli.data.packing import SequenceStream, pack
from disttrain_cli.errors import DataError
from disttrain_cli.spec.index import TEXT
from tests.data.dataset import INPUTS, PROPERTY
from tests.data.epochs.test_best_fit import plain_fill
from tests.data.epochs.test_permutation import plain as permuted
from tests.data.test_packing import make_index, sequence_samples

SEED = 11


@dataclass(frozen=True)
class Case:
    """Samples (tokens, source), phases, and how large blocks and small sources are."""

    samples: list[tuple[int, int]]
    phases: tuple[Phase, ...]
    block_samples: int
    small: int

    def index(self, sources: int = 3) -> Index:
        """The samples of the first sources."""
        own = [one for one in sorted(self.samples, key=lambda one: one[1]) if one[1] < sources]
        source = np.array([0, *(source for _, source in own)])
        tokens = [[9], *([tokens] for tokens, _ in own)]
        index = make_index([[TEXT]] * len(source), tokens, [1.0] * sources, source)
        return replace(index, of_sources=[f"source {number}" for number in range(sources)])

    def mixture(self, sources: int = 3, phases: int | None = None) -> Mixture:
        return Mixture(self.index(sources), SEED, phases=self.phases[:phases])

    @contextmanager
    def sized(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "BLOCK_SAMPLES", self.block_samples)
            patch.setattr(streams, "SMALL", self.small)
            yield


WEIGHTS = st.sampled_from([0, 0.4, 0.5, 1, 1.25, 3])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """The first source has a sample and is drawn, others may be empty, muted, or come later."""
    samples = draw(st.lists(st.tuples(st.integers(1, 126), st.integers(0, 2)), max_size=30))
    lengths = draw(st.lists(st.integers(1, 12), max_size=3))
    phases, first = list[Phase](), 0
    for length in [*lengths, 0]:
        weights = [draw(st.sampled_from([1, 1.5])), *draw(st.lists(WEIGHTS, max_size=2))]
        phases.append(Phase(first, weights))
        first += length
    return Case(samples, tuple(phases), draw(st.integers(5, 40)), draw(st.sampled_from([0, 10])))


def plain_stream(own: list[int], source: int, small: int) -> Iterator[int]:
    """A source's samples, one permutation after the other."""
    turn = 0
    while own:
        order = list(range(len(own)))
        if len(own) <= small:
            order.sort(key=lambda at: int(mix(SEED, DRAW, source, turn, at)[0]))
        else:
            order = [permuted(at, len(own), SEED, DRAW, source, turn) for at in order]
        yield from (own[at] for at in order)
        turn += 1


def own_of(index: Index) -> list[list[int]]:
    return [
        [row for row in range(len(index)) if index.source[row] == source]
        for source in range(len(index.weights))
    ]


def plain(case: Case, index: Index) -> Iterator[list[int]]:
    """The samples of every sequence, in order, as docs/data.md defines the order."""
    rest = [plain_stream(rows, source, case.small) for source, rows in enumerate(own_of(index))]
    number = 0  # of the sequence
    for phase, (_, weights) in enumerate(case.phases):
        end = case.phases[phase + 1].first if phase + 1 < len(case.phases) else None
        for key, rows in plain_blocks(case, index, rest, weights, phase):
            filled = plain_fill(index.lengths[rows].tolist(), INPUTS.sequence_length)
            by = [int(mix(*key, at)[0]) for at in range(len(filled))]
            sequences = [
                [rows[place] for place in filled[at]]
                for at in sorted(range(len(filled)), key=by.__getitem__)
            ]
            used = len(sequences) if end is None else min(len(sequences), end - number)
            yield from sequences[:used]
            number += used
            if number == end:  # what nobody used comes first in the next phase
                left = [row for sequence in sequences[used:] for row in sequence]
                rest = [
                    chain([row for row in left if index.source[row] == source], own)
                    for source, own in enumerate(rest)
                ]
                break


def plain_blocks(
    case: Case, index: Index, rest: list[Iterator[int]], weights: Sequence[float], phase: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """(key, samples) of every block of a phase that never ends."""
    each = [
        Fraction(weight) * len(rows)
        for weight, rows in zip([*weights, 0, 0], own_of(index), strict=False)
    ]
    for epoch in count():
        counts = [
            math.floor(one * (epoch + 1) + Fraction(1, 2))
            - math.floor(one * epoch + Fraction(1, 2))
            for one in each
        ]
        blocks = -(-sum(counts) // case.block_samples)
        for block in range(blocks):
            drawn = list[int]()
            for wanted, own in zip(counts, rest, strict=True):
                drawn += islice(own, wanted * (block + 1) // blocks - wanted * block // blocks)
            key = SEED, phase, epoch, block
            places = range(len(drawn))
            yield key, [drawn[permuted(at, len(drawn), *key, ORDER)] for at in places]


@pytest.mark.slow
@given(cases(), st.integers(0, 20), st.integers(1, 20))
@PROPERTY
def test_as_defined(case: Case, first: int, number: int) -> None:
    with case.sized():
        batch = SequenceStream(case.mixture()).batch(first, number)
    expected = list(islice(plain(case, case.index()), first, first + number))
    assert sequence_samples(batch) == expected
    assert batch.ids.tolist() == list(range(first, first + number))


@pytest.mark.slow
@given(cases(), st.integers(1, 40))
@PROPERTY
def test_no_sample_is_left_out_or_doubled(case: Case, used: int) -> None:
    """What sequences have of a source, and what waits for a next phase, is the begin of its
    stream, at any step."""
    mixture = case.mixture()
    mixture = replace(
        mixture,
        phases=(*(phase for phase in mixture.phases if phase.first < used), Phase(used, [1.0])),
    )
    with case.sized():
        stream = SequenceStream(mixture)
        rows = stream.batch(0, used).samples
        start = stream._start(len(mixture.phases) - 1)
    sources = mixture.index.source[rows]
    for source, own in enumerate(own_of(mixture.index)):
        seen = Counter(rows[sources == source].tolist()) + Counter(start.pending[source].tolist())
        drawn = islice(plain_stream(own, source, case.small), start.drawn[source])
        assert seen == Counter(drawn)
        assert len(start.pending[source]) <= case.block_samples * len(mixture.phases)


@pytest.mark.slow
@given(cases(), st.integers(1, 2))
@settings(parent=PROPERTY, max_examples=8)
def test_a_run_goes_on_with_more_sources(case: Case, sources: int) -> None:
    """Sequences before a phase are the same whatever follows, and without sources that came with
    it; whoever begins at any of them reads what all others do."""
    before = tuple(Phase(first, weights[:sources]) for first, weights in case.phases[:-1]) or (
        Phase(0, [1.0]),
    )
    last = Phase(case.phases[-1].first or 7, case.phases[-1].weights)
    case = replace(case, phases=(*before, last))
    with case.sized(), tempfile.TemporaryDirectory() as folder:

        def opened(mixture: Mixture) -> SequenceStream:
            index = replace(mixture.index, orders=Path(folder))
            return SequenceStream(replace(mixture, index=index))

        old = opened(case.mixture(sources, len(before)))
        early = old.batch(0, last.first)
        made = sorted(Path(folder).glob("*/*"))
        whole = SequenceStream(case.mixture()).batch(0, last.first + 5)
        resumed = opened(case.mixture()).batch(last.first, 5)
        again = opened(case.mixture()).batch(0, last.first + 5)
        assert sequence_samples(early) == sequence_samples(whole)[: last.first]
        assert sequence_samples(resumed) == sequence_samples(whole)[last.first :]
        assert sequence_samples(again) == sequence_samples(whole)
        assert set(made) < set(Path(folder).glob("*/*"))  # what was made before stays in use
        assert len(set(Path(folder).iterdir())) == len(case.phases)


def test_weights_hold_on_the_average() -> None:
    """A single sample of weight 0.4 is in two of five epochs."""
    index = make_index([[TEXT]] * 11, [[20]] * 11, [0.4, 0.25], np.array([0] + [1] * 10))
    epochs = [Counter(index.source[pack(Mixture(index, 0), n).samples].tolist()) for n in range(20)]
    assert [sum(counts[source] for counts in epochs) for source in (0, 1)] == [8, 50]


def test_a_phase_that_draws_nothing() -> None:
    index = make_index([[TEXT]], [[20]], [1.0, 1.0], np.array([0]))
    stream = SequenceStream(Mixture(index, 0, phases=(Phase(0, [1]), Phase(2, [0, 1]))))
    stream.batch(0, 2)
    with pytest.raises(DataError, match="draw no sample"):
        stream.batch(0, 3)


def test_a_phase_that_draws_nothing_in_some_epochs_is_refused_in_the_first() -> None:
    index = make_index([[TEXT]] * 30, [[20]] * 30, [0.03], np.zeros(30, np.int64))
    with pytest.raises(DataError, match="none in some epochs"):
        pack(Mixture(index, 0), 0)
