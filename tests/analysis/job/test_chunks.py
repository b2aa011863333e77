"""Ranks with several stages: recorded steps are replayed in the order of interleaved 1F1B."""

from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.analysis.analyze import analyze
from disttrain_cli.analysis.job.database import Database, open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.job.recorded import waited_transfers
from disttrain_cli.analysis.job.remedies.replicas import with_replicas
from disttrain_cli.profiling.link_factors import _updates
from disttrain_cli.simulation.timeline import Timeline
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


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, job: tuple[Profile, Layout]
) -> tuple[list[Timeline], Database]:
    folder = tmp_path_factory.mktemp("recorded")
    return simulated.write(folder, *job, STEPS), open_database([folder])


def test_the_replay_is_the_recorded_step(recorded: tuple[list[Timeline], Database]) -> None:
    timelines, database = recorded
    graph = build_graph(database)
    assert graph is not None and len(graph.rank) == 2 * 8 * 2 * 4  # passes, slots, DP, stages
    for rank in range(4):
        assert set(graph.stage[graph.rank == rank].tolist()) == {rank // 2, rank // 2 + 2}
    np.testing.assert_allclose(graph.predicted, graph.recorded.compute, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(graph.replay(graph.recorded), graph.window, rtol=1e-6)
    expected = [line.iteration_s for line in timelines[-len(graph.window) :]]
    np.testing.assert_allclose(graph.window, expected, rtol=1e-6)


def test_messages_of_a_slot_are_told_apart_by_stage(
    recorded: tuple[list[Timeline], Database],
) -> None:
    _, database = recorded
    cuts = {(row["before"], row["after"], row["direction"]) for row in waited_transfers(database)}
    assert {(1, 2, "forward"), (2, 3, "backward")} <= cuts
    (unit,) = database.query("units")
    assert unit["pp"] == 2


def test_updates_of_a_rank_are_those_of_all_its_stages(
    recorded: tuple[list[Timeline], Database],
) -> None:
    layers = [len(stage.held) for stage, _ in _updates(recorded[1], "step")]
    assert layers == [4 + 3, 3 + 4]


def test_other_replicas_keep_slots_a_multiple_of_pp(
    recorded: tuple[list[Timeline], Database],
) -> None:
    job = recorded[1].job
    assert job is not None
    smaller = job.layout.model_copy(update={"global_batch_size": 12, "microbatches": 6})
    job = job.model_copy(update={"layout": smaller})
    changed = with_replicas(job, {"model": 3})
    assert changed is not None and changed.microbatches == 4
    assert with_replicas(job, {"model": 4}) is None  # 12 sequences: three slots, or one


@pytest.mark.slow
def test_a_slow_stage_is_found(tmp_path: Path, job: tuple[Profile, Layout]) -> None:
    simulated.write(tmp_path, *job, STEPS, stretch={(3, True): 1.5, (3, False): 1.5})
    found = analyze([tmp_path])
    assert found.verdict.place is not None and found.verdict.place.stage == 3
    assert found.job.iteration_s is not None
    assert abs(found.stragglers.lost_s["unexplained"]) < 1e-3 * found.job.iteration_s
