"""A new plan from recorded times, beside the simulated job that it would make."""

import numpy as np
import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.job.remedies.replanning import cluster_of, corrected, replan
from disttrain_cli.analysis.job.remedies.replicas import record_of
from disttrain_cli.analysis.losses import explain
from tests.analysis import simulated, synthetic
from tests.planning import synthetic as planning

STEPS = 4
UNITS = {
    "image_encoder": {"dp": 3, "layers_per_stage": [4]},
    "llm": {"dp": 2, "layers_per_stage": [6]},
    "image_generator": {"dp": 3, "layers_per_stage": [4]},
}


@pytest.fixture(scope="module")
def profile():
    return planning.tiny(planning.run_file(batch=48, gpus=12), kind="cuda")


def recorded(folder, profile, layout, stretch=None):
    simulated.write(folder, profile, layout, STEPS, stretch=stretch)
    database = open_database([folder])
    graph = build_graph(database)
    return record_of(database, graph), explain(graph, graph.recorded.compute, graph.predicted)


def played_s(profile, layout, stretch=None):
    return np.mean(
        [
            timeline.iteration_s
            for *_, timeline in simulated.play(profile, layout, STEPS, None, stretch)
        ]
    )


@pytest.mark.slow
def test_the_new_plan_gains_what_its_job_would_and_stays(tmp_path, profile):
    record, why = recorded(tmp_path, profile, simulated.layout_of(profile, 48, 12, **UNITS))
    found = replan(record, why)
    assert found.layout.gpus_used <= record.job.layout.gpus_used
    assert found.present_s == pytest.approx(played_s(profile, record.job.layout), rel=0.03)
    assert found.then_s == pytest.approx(played_s(profile, found.layout), rel=0.03)
    assert found.then_s < 0.7 * found.present_s
    record, why = recorded(tmp_path / "best", profile, found.layout)
    again = replan(record, why)  # the best plan stays
    assert again.then_s == pytest.approx(again.present_s, rel=0.02)


def test_costs_follow_what_was_recorded(tmp_path, profile):
    """An encoder twice as slow as profiled, in both directions, and nothing else."""
    stretch = {(0, True): 2.0, (0, False): 2.0}
    layout = simulated.layout_of(profile, 48, 12, **UNITS)
    record, why = recorded(tmp_path, profile, layout, stretch)
    found = corrected(record, why)
    for name, factor in (("image_encoder", 2.0), ("llm", 1.0), ("image_generator", 1.0)):
        for kind, cost in found.modules[name].costs.items():
            before = profile.modules[name].costs[kind].tp["1"]
            for time in ("forward_ms", "backward_ms", "backward_input_ms"):
                now, then = getattr(cost.tp["1"], time), getattr(before, time)
                assert now.per_token == pytest.approx(factor * then.per_token, rel=1e-3)
                assert now.base == pytest.approx(factor * then.base, rel=1e-3)
            assert cost.tp["1"].activation_bytes == before.activation_bytes


def test_a_slow_rank_is_not_planned_for(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(slow_rank={3: 2.0}))
    database = open_database([tmp_path])
    graph = build_graph(database)
    record = record_of(database, graph)
    why = explain(graph, graph.recorded.compute, graph.predicted)
    cost = corrected(record, why).modules["llm"].costs["block"]
    assert cost.tp["1"].forward_ms.per_token == pytest.approx(synthetic.RATE_MS["llm"], rel=1e-3)
    assert replan(record, why) is None  # its profile does not say what brings the encoder its work


def test_the_job_s_own_choices_bind(tmp_path, profile):
    layout = simulated.layout_of(profile, 48, 12, ["llm"], **UNITS)
    record, _ = recorded(tmp_path, profile, layout)
    cluster = cluster_of(record.job)
    assert (cluster.gpus, cluster.batch, cluster.trained, cluster.checkpointing) == (
        8,
        48,
        ("llm",),
        "none",
    )
    mixed = [unit.model_copy(update={"checkpointing": unit.name == "llm"}) for unit in layout.units]
    job = record.job.model_copy(update={"layout": layout.model_copy(update={"units": mixed})})
    assert cluster_of(job).checkpointing == "auto"
