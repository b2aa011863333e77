"""Ranks with several stages: recorded steps are replayed in the order of interleaved 1F1B."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from tests.analysis import simulated
from tests.planning import synthetic

STEPS = 4


@pytest.fixture(scope="module")
def job() -> tuple[Profile, Layout]:
    profile = synthetic.tiny(synthetic.run_file(batch=16, gpus=4), kind="cuda")
    unit = UnitPlan(
        name="model",
        modules=list(profile.modules),
        dp=2,
        pp=2,
        chunks=2,
        gpus=4,
        layers_per_stage=[4, 3, 3, 4],
    )
    layout = Layout(
        global_batch_size=16, microbatch_size=1, microbatches=8, gpus_used=4, units=[unit]
    )
    return profile, layout


def test_the_replay_is_the_recorded_step(tmp_path: Path, job: tuple[Profile, Layout]) -> None:
    timelines = simulated.write(tmp_path, *job, STEPS)
    graph = build_graph(open_database([tmp_path]))
    assert graph is not None and len(graph.rank) == 2 * 8 * 2 * 4  # passes, slots, DP, stages
    for rank in range(4):
        assert set(graph.stage[graph.rank == rank].tolist()) == {rank // 2, rank // 2 + 2}
    np.testing.assert_allclose(graph.predicted, graph.recorded.compute, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(graph.replay(graph.recorded), graph.window, rtol=1e-6)
    expected = [line.iteration_s for line in timelines[-len(graph.window) :]]
    np.testing.assert_allclose(graph.window, expected, rtol=1e-6)


@pytest.mark.slow
def test_a_slow_stage_is_found(tmp_path: Path, job: tuple[Profile, Layout]) -> None:
    simulated.write(tmp_path, *job, STEPS, stretch={(3, True): 1.5, (3, False): 1.5})
    found = analyze([tmp_path])
    assert found.verdict.place is not None and found.verdict.place.stage == 3
    assert found.job.iteration_s is not None
    assert abs(found.stragglers.lost_s["unexplained"]) < 1e-3 * found.job.iteration_s
