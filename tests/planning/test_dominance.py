"""Of ties, however many, the simplest are found: the same ones as by listing all layouts, in little
memory."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.planning.dominance import few_dominators, undominated
from disttrain_cli.planning.search import search
from disttrain_cli.planning.sensitivity import scale_images
from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.spec.shape import ParallelShape
from tests.cases import first_fast
from tests.planning import synthetic


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**20), st.integers(1, 4), st.integers(1, 3), st.integers(1, 700))
def test_only_rows_with_enough_dominators_go(seed: int, top: int, columns: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    worse, simplicity = random.integers(0, 6, (columns, rows)), random.integers(0, 4, (2, rows))
    first = (simplicity[0][:, None] < simplicity[0]) | (
        (simplicity[0][:, None] == simplicity[0]) & (simplicity[1][:, None] < simplicity[1])
    )
    dominators = ((worse[:, :, None] <= worse[:, None, :]).all(axis=0) & first).sum(axis=0)
    kept = undominated(list(worse), list(simplicity), top)
    assert set(np.flatnonzero(dominators < top)) <= set(kept.tolist())
    if rows < 200:  # all are compared
        assert set(np.flatnonzero(dominators < top)) == set(kept.tolist())
        half = [list(part[:, ::2]) for part in (worse, simplicity)]
        assert (
            few_dominators((list(worse), list(simplicity)), (half[0], half[1]), top).tolist()
            == (
                ((worse[:, ::2, None] <= worse[:, None, :]).all(axis=0) & first[::2]).sum(axis=0)
                < top
            ).tolist()
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "memory_gib", "sound"),
    first_fast([(0.0, 4.0, False), (0.0, 0.03, True), (0.05, 4.0, True)]),
)
def test_the_simplest_of_many_ties_are_found(factor: float, memory_gib: float, sound: bool) -> None:
    run = synthetic.run_file(batch=4, gpus=6)
    profile = synthetic.tiny(run, kind="cuda", tps=(1, 2))
    profile = scale_images(synthetic.with_audio(profile) if sound else profile, factor)
    cluster = Cluster(6, 2, memory_gib, 1, 4)
    units = groupings(profile, cluster, "disaggregated")[0]
    every = search(units, cluster, top=10**9).best
    assert len(every) > 50 and len({one.total_ms for one in every}) < 0.9 * len(every)
    for top in (1, 7, 40):
        assert search(units, cluster, top).best == every[:top]


def test_text_alone_takes_little_memory_on_thousands_of_gpus() -> None:
    """Encoder and generator have nothing to do, so that all their shapes are equally fast."""
    run = synthetic.run_file(batch=1920, gpus=4096, nodes=512, precision="bf16")
    cluster = Cluster(4096, 8, 80.0, 1, 1920, checkpointing="auto")
    units = groupings(scale_images(synthetic.paper_9b(run), 0.0), cluster, "disaggregated")[0]
    tracemalloc.start()
    found = search(units, cluster, top=16)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    image, _, generator = found.best[0].units
    assert image == generator == ParallelShape() and most < 100 * 2**20
