"""Backwards in two parts: recorded steps are replayed with the weights' parts in their places."""

import numpy as np
import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.trace import WEIGHTS
from tests.analysis import simulated, synthetic
from tests.planning import synthetic as planning
from tests.profiling.test_calibrate import with_weights

STEPS = 4
UNITS = {
    "image_encoder": {"layers_per_stage": [4], "weight_delay": [2]},
    "llm": {"dp": 2, "layers_per_stage": [3, 3], "weight_delay": [0, 1]},
    "image_generator": {"layers_per_stage": [4]},
}


@pytest.fixture(scope="module")
def job():
    profile = with_weights(planning.tiny(planning.run_file(batch=48, gpus=6), kind="cuda"), 0.4)
    return profile, simulated.layout_of(profile, 48, 12, **UNITS)


def test_the_replay_is_the_recorded_step(tmp_path, job):
    timelines = simulated.write(tmp_path, *job, STEPS)
    graph = build_graph(open_database([tmp_path]))
    places = list(zip(graph.unit, graph.operation.tolist(), strict=True))
    assert places.count(("llm", WEIGHTS)) == 4 * 12
    assert places.count(("image_encoder", WEIGHTS)) == 12
    assert not places.count(("image_generator", WEIGHTS))
    assert all(not len(graph.walk.sources[node]) for node in np.flatnonzero(graph.operation == 2))
    np.testing.assert_allclose(graph.predicted, graph.recorded.compute, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(graph.replay(graph.recorded), graph.window, rtol=1e-6)
    np.testing.assert_allclose(
        graph.window, [line.iteration_s for line in timelines[-len(graph.window) :]], rtol=1e-6
    )


@pytest.mark.slow
def test_a_slow_rank_is_found(tmp_path, job):
    slow = FaultSpec(slow="rank", unit="llm", stage=1, replica=0, factor=1.4)
    simulated.write(tmp_path, *job, STEPS, faults=[slow])
    found = synthetic.judged(tmp_path)
    without, with_fault = (
        np.mean([line.iteration_s for *_, line in simulated.play(*job, STEPS, faults=faults)][1:])
        for faults in ((), (slow,))
    )
    assert found.verdict.cause == "worker"
    assert (found.verdict.place.stage, found.verdict.place.replica) == (1, 0)
    assert abs(found.stragglers.lost_s["unexplained"]) < 1e-3 * with_fault
    assert found.stragglers.lost_s["worker"] == pytest.approx(with_fault - without, rel=0.1)
