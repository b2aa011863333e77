"""Delays of weights' gradients: within memory, better than whole backwards, near the best there
is."""

import itertools
from dataclasses import replace

import pytest

from disttrain_cli.costs.memory import fits
from disttrain_cli.planning.finalists import one_batch_s
from disttrain_cli.planning.solve import cluster_of, ranking
from disttrain_cli.planning.split_backward import most_delays, timed, whole, with_delays
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from tests.planning import synthetic
from tests.profiling.test_calibrate import with_weights

GPUS, BATCH = 12, 48


@pytest.fixture(scope="module")
def profile() -> Profile:
    run = synthetic.run_file(batch=BATCH, gpus=GPUS)
    return with_weights(synthetic.tiny(run, kind="cuda"), 0.4)


@pytest.fixture(scope="module")
def cluster(profile):
    run = synthetic.run_file(batch=BATCH, gpus=GPUS)
    return replace(cluster_of(run, profile), splits=True, ordering="paper")


@pytest.fixture(scope="module")
def layouts(profile, cluster) -> list[Layout]:
    plain = replace(cluster, splits=False, overlaps=False)
    ranked, _, _ = ranking(profile, plain, "disaggregated", 3)
    return [one.layout for one in ranked]


def deep(layouts: list[Layout]) -> Layout:
    return max(layouts, key=lambda layout: sum(unit.pp for unit in layout.units))


def test_never_slower_and_the_time_is_the_simulators(profile, cluster, layouts):
    split = 0
    for layout in layouts:
        found, found_s = timed(profile, cluster, layout)
        assert found_s <= one_batch_s(profile, layout, cluster)
        assert found_s == pytest.approx(one_batch_s(profile, found, cluster), rel=1e-12)
        assert whole(found) == layout
        assert fits(profile, found, cluster.memory_gib)
        split += any(unit.weight_delay for unit in found.units)
    assert split


@pytest.mark.slow
def test_no_delays_are_much_better(profile, cluster, layouts):
    for layout in layouts:
        most = [min(m or 0, 3) for m in most_delays(profile, layout, cluster.memory_gib)]
        best_s = min(
            one_batch_s(profile, with_delays(layout, delays), cluster)
            for delays in itertools.product(*(range(m + 1) for m in most))
        )
        assert timed(profile, cluster, layout)[1] <= best_s * 1.03
        assert timed(profile, cluster, layout, [0, 0])[1] <= best_s * 1.005


@pytest.mark.slow
def test_memory_bounds_the_delays_exactly(profile, cluster, layouts):
    layout = deep(layouts)
    free = most_delays(profile, layout, 1e6)
    tight_gib = min(
        limit
        for limit in (cluster.memory_gib * share / 200 for share in range(1, 201))
        if all(delay is not None for delay in most_delays(profile, layout, limit))
    )
    most = most_delays(profile, layout, tight_gib)
    assert all(delay == layout.microbatches - 1 for delay in free)
    assert most != free
    assert fits(profile, with_delays(layout, most), tight_gib)
    for stage, delay in enumerate(most):
        if delay != free[stage]:
            more = [*most[:stage], delay + 1, *most[stage + 1 :]]
            assert not fits(profile, with_delays(layout, more), tight_gib)


def test_without_room_or_without_weights_backwards_stay_whole(profile, cluster, layouts):
    layout = deep(layouts)
    assert set(most_delays(profile, layout, 1e-3)) == {None}
    tight = timed(profile, replace(cluster, memory_gib=1e-3), layout)[0]
    assert tight == layout
    frozen = layout.model_copy(update={"trained": ["llm"]})
    most = most_delays(profile, frozen, cluster.memory_gib)
    stages = [unit.name for unit in layout.units for _ in range(unit.pp)]
    assert {name for name, delay in zip(stages, most, strict=True) if delay is not None} == {"llm"}
    assert timed(profile, replace(cluster, splits=False), layout)[0] == layout
    recomputing = layout.model_copy(
        update={"units": [u.model_copy(update={"checkpointing": True}) for u in layout.units]}
    )
    assert whole(timed(profile, cluster, recomputing)[0]) == recomputing


def test_messages_behind_passes_gain(profile, cluster, layouts):
    ranked, _, _ = ranking(profile, replace(cluster, splits=False), "disaggregated", 3)
    assert all(one.layout.overlap for one in ranked)
    assert not any(unit.weight_delay for one in ranked for unit in one.layout.units)
    for layout in layouts:
        behind = layout.model_copy(update={"overlap": True})
        assert one_batch_s(profile, behind, cluster) < one_batch_s(profile, layout, cluster)


def test_the_first_stage_computes_at_once_what_nobody_waits_for(profile, cluster, layouts):
    for layout in layouts:
        found, _ = timed(profile, cluster, layout)
        delays = found.units[0].weight_delay
        assert delays is None or delays[0] != 0


def test_cpus_hide_nothing():
    run = synthetic.run_file(batch=24, gpus=6)
    cpu, cuda = (cluster_of(run, synthetic.tiny(run, kind=kind)) for kind in ("cpu", "cuda"))
    assert not (cpu.splits or cpu.overlaps or cpu.hides)
    assert cuda.splits and cuda.overlaps and cuda.hides
