"""Other numbers of replicas: what the replay predicts beside the changed job, simulated itself."""

import itertools

import numpy as np
import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.graph import build_graph
from disttrain_cli.analysis.job.remedies.replicas import (
    moved,
    one_more,
    record_of,
    seconds_with,
    with_replicas,
)
from tests.analysis import simulated, synthetic
from tests.planning import synthetic as planning

STEPS = 5
#: Of the recorded step: the changed job orders the same data anew, and its slots and replicas are
#: as uneven as that makes them; a step of the true job that is as the replay says but for that is
#: this far away at most.
TOLERANCE = 0.05

TINY = {
    "llm binds": (
        12,
        {
            "image_encoder": {"layers_per_stage": [4]},
            "llm": {"dp": 2, "layers_per_stage": [6]},
            "image_generator": {"dp": 2, "layers_per_stage": [4]},
        },
        {},
    ),
    "one sequence": (
        24,
        {
            "image_encoder": {"dp": 2, "layers_per_stage": [4]},
            "llm": {"dp": 2, "layers_per_stage": [6]},
            "image_generator": {"dp": 2, "layers_per_stage": [4]},
        },
        {},
    ),
    "a slow stage": (
        12,
        {
            "image_encoder": {"layers_per_stage": [4]},
            "llm": {"dp": 2, "layers_per_stage": [3, 3]},
            "image_generator": {"layers_per_stage": [2, 2]},
        },
        {(1, True): 1.5},
    ),
    "encoder binds": (
        12,
        {
            "image_encoder": {"layers_per_stage": [4]},
            "llm": {"dp": 4, "layers_per_stage": [6]},
            "image_generator": {"dp": 2, "layers_per_stage": [4]},
        },
        {(0, True): 6.0, (0, False): 6.0},
    ),
}


def step_s(profile, layout, stretch):
    """The mean step of the simulated job, the first one left out as warm-up is."""
    return np.mean(
        [
            timeline.iteration_s
            for *_, timeline in simulated.play(profile, layout, STEPS, None, stretch)
        ][1:]
    )


def record(folder, profile, layout, stretch=None):
    simulated.write(folder, profile, layout, STEPS, stretch=stretch)
    database = open_database([folder])
    return record_of(database, build_graph(database))


def layouts(job):
    names = [unit.name for unit in job.layout.units]
    found = [one_more(job, name) for name in names]
    found += [moved(job, *pair) for pair in itertools.permutations(names, 2)]
    return [layout for layout in found if layout is not None]


@pytest.mark.parametrize(
    "case",
    [
        "a slow stage",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("llm binds", "encoder binds")),
    ],
)
def test_the_changed_job_takes_what_the_replay_says(tmp_path, case):
    slots, units, stretch = TINY[case]
    profile = planning.tiny(planning.run_file(batch=48, gpus=12), kind="cuda")
    recorded = record(tmp_path, profile, simulated.layout_of(profile, 48, slots, **units), stretch)
    now = recorded.graph.replay(recorded.graph.recorded).mean()
    true_now = step_s(profile, recorded.job.layout, stretch)
    tried = layouts(recorded.job)
    assert len(tried) >= 5
    gains = []
    for layout in tried:
        predicted, true = seconds_with(recorded, layout).mean(), step_s(profile, layout, stretch)
        gains.append(1 - true / true_now)
        assert predicted - now == pytest.approx(
            true - true_now, abs=TOLERANCE * max(true, true_now)
        ), layout.describe()
    assert max(gains) - min(gains) > 0.3  # there was something to predict


def test_large_images_and_tensor_parallel_units(tmp_path):
    profile = planning.paper_9b(planning.run_file(batch=48, gpus=8))
    recorded = record(
        tmp_path,
        profile,
        simulated.layout_of(
            profile,
            48,
            12,
            image_encoder={"layers_per_stage": [32]},
            llm={"tp": 8, "dp": 2, "layers_per_stage": [17, 17]},
            image_generator={"layers_per_stage": [11]},
        ),
    )
    now, true_now = recorded.graph.window.mean(), step_s(profile, recorded.job.layout, {})
    for layout in layouts(recorded.job):
        predicted, true = seconds_with(recorded, layout).mean(), step_s(profile, layout, {})
        assert predicted - now == pytest.approx(
            true - true_now, abs=TOLERANCE * max(true, true_now)
        ), layout.describe()


def test_the_same_replicas_change_nothing(tmp_path):
    profile = planning.tiny(planning.run_file(batch=48, gpus=12), kind="cuda")
    recorded = record(
        tmp_path, profile, simulated.layout_of(profile, 48, 12, **TINY["llm binds"][1])
    )
    same = with_replicas(recorded.job, {})
    assert same == recorded.job.layout
    assert seconds_with(recorded, same) == pytest.approx(
        recorded.graph.replay(recorded.graph.recorded), rel=1e-12
    )


def test_images_cannot_be_cut(tmp_path):
    """A slot of one image takes one replica its time, however many replicas there are."""
    profile = planning.tiny(planning.run_file(batch=8, gpus=12), kind="cuda")
    sample = profile.data.sample
    one = sample.model_copy(
        update={
            "images": [images[:1] or [40] for images in sample.images],
            "targets": [1] * len(sample.targets),
        }
    )
    profile = profile.model_copy(update={"data": profile.data.model_copy(update={"sample": one})})
    units = {
        "image_encoder": {"layers_per_stage": [4]},
        "llm": {"layers_per_stage": [6]},
        "image_generator": {"layers_per_stage": [4]},
    }
    recorded = record(tmp_path, profile, simulated.layout_of(profile, 8, 8, **units))
    more = one_more(recorded.job, "image_encoder")
    assert seconds_with(recorded, more) == pytest.approx(
        recorded.graph.replay(recorded.graph.recorded), rel=5e-3
    )


def test_layouts_divide_the_batch_and_fit_the_memory(tmp_path):
    job = synthetic.make_job(synthetic.Synthetic())  # 12 sequences in 6 slots, LLM DP 2 PP 2
    more = one_more(job, "llm")
    assert (more.units[1].dp, more.microbatches, more.microbatch_size, more.gpus_used) == (
        3,
        4,
        1,
        8,
    )
    assert moved(job, "encoder", "generator") is None  # it would have no replica left
    assert with_replicas(job, {"llm": 5}) is None
    giving = moved(job, "llm", "generator")  # a replica of the LLM's unit has two devices
    assert ([unit.dp for unit in giving.units], giving.gpus_used) == ([1, 1, 2], 5)
    assert (giving.microbatches, giving.microbatch_size) == (6, 2)

    profile = planning.tiny(planning.run_file(batch=48, gpus=12), kind="cuda", memory_gib=1e-3)
    layout = simulated.layout_of(profile, 48, 24, **TINY["one sequence"][1])
    simulated.write(tmp_path, profile, layout, 2)
    # microbatches of two keep twice as much
    assert with_replicas(open_database([tmp_path]).job, {"llm": 1}) is None


@pytest.mark.slow
def test_without_devices_of_their_own_or_all_replicas_there_is_no_record(tmp_path):
    for name, spec in {
        "cores": synthetic.Synthetic(device="cpu", peak_tflops=1.2),
        "devices": synthetic.Synthetic(),
    }.items():
        synthetic.write(tmp_path / name, spec)
        database = open_database([tmp_path / name])
        assert (record_of(database, build_graph(database)) is None) == (name == "cores")
    for rank in (1, 3):  # the first replica of the LLM
        for segment in (tmp_path / "devices" / f"rank-{rank:05d}").iterdir():
            segment.unlink()
    database = open_database([tmp_path / "devices"])
    assert record_of(database, build_graph(database)) is None
