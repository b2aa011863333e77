"""Recorded steps are replayed with the exposed part of messages overlapped with passes."""

import numpy as np
import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.costs import buckets
from disttrain_cli.costs.layout import reduce_s
from disttrain_cli.profiling.layer_factors import correct_layers
from disttrain_cli.profiling.link_factors import correct_links, correct_optimizer
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from tests.analysis import simulated, synthetic
from tests.planning import synthetic as planning
from tests.profiling.test_calibrate import with_weights

STEPS = 4
UNITS = {
    "image_encoder": {"layers_per_stage": [4]},
    "llm": {"dp": 2, "layers_per_stage": [3, 3], "weight_delay": [0, 1]},
    "image_generator": {"layers_per_stage": [4]},
}


@pytest.fixture
def job(monkeypatch):
    """Slow links and an optimizer that takes its time; a bucket for every layer."""
    monkeypatch.setattr(buckets, "BUCKET_NUMBERS", 1)
    profile = with_weights(planning.tiny(planning.run_file(batch=48, gpus=6), kind="cuda"), 0.4)
    slow = {"reduce_scatter_gbps": 0.5, "all_gather_gbps": 0.5}
    profile = profile.model_copy(
        update={
            "links": profile.links.model_copy(update=slow),
            "device": profile.device.model_copy(update={"optimizer_ns_per_parameter": 50.0}),
        }
    )
    layout = simulated.layout_of(profile, 48, 12, **UNITS)
    return profile, layout.model_copy(update={"overlap": True})


def test_the_replay_is_the_recorded_step(tmp_path, job):
    timelines = simulated.write(tmp_path, *job, STEPS)
    graph = build_graph(open_database([tmp_path]))
    played = list(simulated.play(*job, STEPS))
    lead_s = np.array([pipeline.lead_s[0, 0] for _, _, pipeline, _ in played])[-len(graph.steps) :]
    first = np.flatnonzero((graph.depth == 0) & (graph.replica == 0) & (graph.slot == 0))[0]
    np.testing.assert_allclose(graph.recorded.handover[first], lead_s, rtol=1e-5)
    assert lead_s.min() > 1e-3
    np.testing.assert_allclose(graph.predicted, graph.recorded.compute, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(graph.replay(graph.recorded), graph.window, rtol=1e-6)
    np.testing.assert_allclose(
        graph.window, [line.iteration_s for line in timelines[-len(graph.window) :]], rtol=1e-6
    )
    assert graph.recorded.update.min() > 1e-3
    assert graph.expected_update_s == pytest.approx(graph.recorded.update.mean(), rel=0.3)


def test_reductions_are_as_predicted_where_they_are(tmp_path, job):
    simulated.write(tmp_path, *job, STEPS)
    found = synthetic.judged(tmp_path)
    reduced = {(row.unit, row.stage): row for row in found.operations if row.operation == "reduce"}
    assert reduced["llm", 0].predicted > 1.0 and ("llm", 1) in reduced
    for row in reduced.values():
        assert row.measured == pytest.approx(row.predicted, rel=1e-3, abs=1e-3)
    assert not [row for row in found.operations if row.operation == "step"]


def test_on_shared_cores_nothing_is_expected_to_be_hidden(tmp_path, job):
    profile, layout = job
    device = profile.device.model_copy(update={"kind": "cpu"})
    simulated.write(tmp_path, profile.model_copy(update={"device": device}), layout, STEPS)
    database = open_database([tmp_path])
    assert database.job is not None
    found = [row for row in synthetic.judged(tmp_path).operations if row.operation == "reduce"]
    stages = {(stage.unit.name, stage.index): stage for stage in database.stages}
    assert found
    for row in found:
        whole_s = reduce_s(
            database.job.profile, layout, stages[row.unit, row.stage], database.job.gpus_per_node
        )
        assert row.predicted == pytest.approx(1e3 * whole_s)


@pytest.mark.slow
def test_slow_reductions_are_communication(tmp_path, job):
    simulated.write(tmp_path, *job, STEPS, slow_reduce=20.0)
    found = synthetic.judged(tmp_path)
    without, slow = (
        np.mean(
            [line.iteration_s for *_, line in simulated.play(*job, STEPS, slow_reduce=more)][1:]
        )
        for more in (1.0, 20.0)
    )
    assert found.verdict.cause == "communication"
    assert abs(found.stragglers.lost_s["unexplained"]) < 1e-3 * slow
    assert found.stragglers.lost_s["communication"] == pytest.approx(slow - without, rel=0.35)


def test_calibrating_takes_no_rest_for_a_message(tmp_path, job):
    profile, layout = job
    simulated.write(tmp_path, profile, layout, STEPS)
    database = open_database([tmp_path])
    assert database.job is not None
    linked, links = correct_links(database, database.job, profile)
    assert {one.what for one in links} <= {"p2p_gbps", "p2p_us"} and links
    assert linked.links.reduce_scatter_gbps == profile.links.reduce_scatter_gbps
    assert correct_optimizer(database, database.job, profile) == (profile, [])
    changed = correct_layers(database, database.job)[1]
    slots = layout.microbatches
    forward, backward = (
        next(one.rows for one in changed if (one.module, one.operation) == ("llm", operation))
        for operation in ("forward", "backward")
    )
    assert forward * slots == backward * (slots - 1)


@pytest.mark.slow
def test_a_slow_rank_is_found(tmp_path, job):
    slow = FaultSpec(slow="rank", unit="llm", stage=1, replica=0, factor=1.4)
    simulated.write(tmp_path, *job, STEPS, faults=[slow])
    found = synthetic.judged(tmp_path)
    assert found.verdict.cause == "worker"
    assert (found.verdict.place.stage, found.verdict.place.replica) == (1, 0)
