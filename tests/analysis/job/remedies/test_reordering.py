"""Reordered slots: what the replay predicts beside the same steps, simulated under the policy
`paper`."""

import numpy as np
import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.job.remedies.remedies import remedies
from disttrain_cli.analysis.job.remedies.reordering import reordered_s
from disttrain_cli.analysis.job.remedies.suspects import own_suspects
from disttrain_cli.analysis.losses import explain
from tests.analysis import simulated, synthetic
from tests.planning import synthetic as planning

STEPS = 4
JOBS = {
    "tiny": (
        lambda: planning.tiny(planning.run_file(batch=48, gpus=12), kind="cuda"),
        24,
        {
            "image_encoder": {"layers_per_stage": [4]},
            "llm": {"dp": 2, "layers_per_stage": [3, 3]},
            "image_generator": {"layers_per_stage": [4]},
        },
    ),
    "9b": (
        lambda: planning.paper_9b(planning.run_file(batch=48, gpus=8)),
        24,
        {
            "image_encoder": {"layers_per_stage": [32]},
            "llm": {"tp": 8, "dp": 2, "layers_per_stage": [17, 17]},
            "image_generator": {"layers_per_stage": [11]},
        },
    ),
}


def remedies_of(folder):
    database = open_database([folder])
    graph = build_graph(database)
    why = explain(graph, graph.recorded.compute, graph.predicted)
    return graph, remedies(database, graph, own_suspects(graph, why, {}), [])


@pytest.mark.parametrize("job", JOBS)
def test_a_run_that_orders_nothing_is_told_what_ordering_gains(tmp_path, job):
    make, slots, units = JOBS[job]
    profile = make()
    layout = simulated.layout_of(profile, 48, slots, **units)
    now = simulated.write(tmp_path, profile, layout, STEPS, ordering="none")
    graph, found = remedies_of(tmp_path)
    (remedy,) = [one for one in found if "train.ordering: paper" in one.change]
    then = [timeline.iteration_s for *_, timeline in simulated.play(profile, layout, STEPS)]
    now_s = np.mean([timeline.iteration_s for timeline in now][-len(graph.steps) :])
    then_s = np.mean(then[-len(graph.steps) :])
    # the policy may also put other sequences side by side
    assert remedy.step_s == pytest.approx(then_s, rel=0.015)
    assert remedy.gain_s > 0 and (1 - then_s / now_s) > 0.003
    assert not remedy.at_most


def test_an_ordered_run_is_not_told_to_order(tmp_path):
    make, slots, units = JOBS["tiny"]
    profile = make()
    simulated.write(tmp_path, profile, simulated.layout_of(profile, 48, slots, **units), STEPS)
    _, found = remedies_of(tmp_path)
    assert not any("train.ordering: paper" in one.change for one in found)


def test_even_slots_gain_nothing_and_no_step_loses(tmp_path):
    for name, spec in {
        "even": synthetic.Synthetic(),
        "uneven": synthetic.Synthetic(slot_skew=0.5, slots=9),
    }.items():
        synthetic.write(tmp_path / name, spec)
        graph = build_graph(open_database([tmp_path / name]))
        recorded, then = graph.replay(graph.recorded), reordered_s(graph)
        assert (then <= recorded).all()
        if name == "even":
            assert then == pytest.approx(recorded, rel=1e-6)


def test_two_slots_have_no_order_to_find(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(slots=2))
    assert reordered_s(build_graph(open_database([tmp_path]))) is None
