"""Planners by rule, which benchmarks compare with."""

from dataclasses import replace

import pytest

from benchmarks.rules import by_rule, planned_by, proportional
from disttrain_cli.planning.search import search
from disttrain_cli.planning.solve import cluster_of, solve
from disttrain_cli.planning.units import Cluster, groupings
from tests.planning import synthetic


@pytest.mark.parametrize("sound", [False, True])
def test_the_search_finds_no_slower_layouts(sound: bool) -> None:
    run = synthetic.run_file(batch=24, gpus=8)
    profile, cluster = synthetic.tiny(run), Cluster(8, 8, 4.0, 1, 24)
    profile = synthetic.with_audio(profile) if sound else profile
    best = search(groupings(profile, cluster, "disaggregated")[0], cluster).best[0]
    for rule in ("distmm", "paper"):
        assert by_rule(profile, cluster, rule)[1].best[0].total_ms >= best.total_ms


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "spread"), [(6, 1), (8, 3)])
def test_plans_are_no_slower_in_the_same_simulator(gpus: int, spread: int) -> None:
    run = synthetic.run_file(batch=24, gpus=gpus)
    profile = synthetic.tiny(run, kind="cuda", tps=(1, 2))
    sample = profile.data.sample
    skewed = sample.model_copy(
        update={
            "images": [
                images * spread if place % spread == 0 else []
                for place, images in enumerate(sample.images)
            ]
        }
    )
    profile = profile.model_copy(
        update={"data": profile.data.model_copy(update={"sample": skewed})}
    )
    plan = solve(run, profile, top=2)
    plain = replace(cluster_of(run, profile), splits=False, overlaps=False, hides=False)
    for rule in ("distmm", "paper"):
        found = planned_by(profile, plain, rule)
        assert found is not None
        assert plan.predicted.iteration_s <= found[1].iteration_s * (1 + 1e-9)
    assert plan.search.simulated >= 3
    if spread == 1:
        assert plan == solve(run, profile, top=2).model_copy(update={"search": plan.search})


def test_shares_follow_flops() -> None:
    assert proportional([1.0, 2.0, 1.0], 8) == [2, 4, 2]
    assert proportional([1.0, 1000.0, 1.0], 6) == [1, 4, 1]
    assert sum(proportional([0.3, 0.3, 0.4], 10)) == 10
