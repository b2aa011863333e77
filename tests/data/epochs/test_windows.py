"""The first order is what it was, sample for sample: runs that began with it go on with it."""

from __future__ import annotations

import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.data.epochs import WINDOWS
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.epochs.windows import fill
from disttrain_cli.data.packing import pack
from disttrain_cli.spec.index import TEXT
from tests.data.dataset import PROPERTY
from tests.data.test_packing import make_index


@given(st.lists(st.integers(1, 128), min_size=1, max_size=300))
@PROPERTY
def test_fill_holds_everything_once(lengths: list[int]) -> None:
    bins = fill(lengths, 128)
    assert sorted(place for members in bins for place in members) == list(range(len(lengths)))
    loads = sorted(sum(lengths[place] for place in members) for members in bins)
    assert loads[-1] <= 128
    # best fit never opens a sequence that was not needed
    assert len(loads) < 2 or loads[0] + loads[1] > 128


def test_the_first_order_stays() -> None:
    """Digests of what the program packed before there was another order."""
    lengths = [[1 + number * 37 % 126] for number in range(5000)]
    index = make_index([[TEXT]] * 5000, lengths, [1.5, 0.75], np.repeat([0, 1], 2500))
    digests = []
    for epoch in (0, 3):
        packing = pack(Mixture(index, 7, WINDOWS), epoch)
        content = (
            packing.sample_start.astype("<i8").tobytes() + packing.samples.astype("<i8").tobytes()
        )
        digests.append(hashlib.sha256(content).hexdigest()[:16])
    assert digests == ["db8e970ba1ff11b6", "6c896ec7a550d34e"]
