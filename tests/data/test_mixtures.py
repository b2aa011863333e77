"""Sources are drawn in proportion to their weighted size, to the power of 1 / temperature."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.index import build_index, open_index
from disttrain_cli.data.mixtures import weights_of
from disttrain_cli.data.packing import pack
from tests.data.dataset import INPUTS, PROPERTY, interleaved, make_run, text, write_tar
from tests.data.test_index import MakeRun

SOURCES = st.lists(st.tuples(st.floats(0.01, 100), st.integers(0, 10**8)), min_size=1, max_size=8)


@given(sources=SOURCES, temperature=st.floats(1, 1000))
@PROPERTY
def test_shares(sources: list[tuple[float, int]], temperature: float) -> None:
    weights, counts = zip(*sources, strict=True)
    scaled = weights_of(weights, counts, temperature)
    before = [weight * count for weight, count in sources]
    after = [weight * count for weight, count in zip(scaled, counts, strict=True)]
    rounded = 1e-6 * sum(counts)
    assert sum(after) == pytest.approx(sum(before), rel=1e-6, abs=rounded)
    for one, first in zip(after, before, strict=True):
        for other, second in zip(after, before, strict=True):
            if one > other + 2 * rounded:
                assert first > second * (1 - 1e-6)  # the order of shares stays
    if temperature == 1:
        assert scaled == list(weights)


def test_a_temperature_of_two_takes_roots() -> None:
    assert weights_of([1, 1], [900, 100], 2) == [0.833333, 2.5]


def test_an_epoch_is_drawn_so(own_run: MakeRun) -> None:
    folder = own_run({"a.tar": [interleaved(f"{n}", text(f"word {n}")) for n in range(90)]}).folder
    others = [interleaved(f"other {n}", text(f"words {n}")) for n in range(10)]
    write_tar(folder / "other" / "b.tar", others)
    shares, fingerprints = [], set()
    for temperature in (1.0, 2.0):
        run = make_run(folder, [{"path": "own"}, {"path": "other"}], temperature=temperature)
        index = open_index(run, INPUTS)
        drawn = index.source[pack(Mixture(index, 0), 0).samples]
        shares.append(np.bincount(drawn).tolist())
        fingerprints.add(index.fingerprint)
    assert shares == [[90, 10], [75, 25]] and len(fingerprints) == 2
    assert build_index(run, INPUTS).fingerprint == index.fingerprint
