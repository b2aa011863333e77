"""Operations beside their predictions: traces that follow the profile, and what was put in against
it."""

import json

import pytest

from disttrain_cli.analysis.analyze import ask
from disttrain_cli.analysis.job.analysis import analyze_database
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.operations import compare_operations
from disttrain_cli.analysis.job.recorded import expected_s, recorded_pipelines
from disttrain_cli.costs.flops import module_flops
from disttrain_cli.spec.profile import SizeSample
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.trace import Rehearsed
from disttrain_cli.spec.work import Work
from tests.analysis import simulated, synthetic
from tests.cases import first_fast
from tests.planning import synthetic as planning


def units_9b(checkpointing=False):
    return {
        "image_encoder": {"dp": 2, "layers_per_stage": [32]},
        "llm": {"tp": 8, "dp": 2, "layers_per_stage": [17, 17], "checkpointing": checkpointing},
        "image_generator": {"dp": 3, "layers_per_stage": [11]},
    }


@pytest.fixture(scope="module")
def large():
    return planning.paper_9b(planning.run_file(batch=16, gpus=8))


@pytest.fixture(scope="module")
def small():
    return planning.tiny(planning.run_file())


def rehearsed(**changes):
    how = {"processes": 3, "time_scale": 2.0, "messages": "scaled", "noise": 0.0, "faults": []}
    return Rehearsed(**(how | changes))


@pytest.mark.parametrize(
    ("trained", "checkpointing"),
    first_fast(
        [
            (None, False),
            (None, True),
            (["image_encoder", "image_generator"], False),
            (["image_generator"], True),
        ]
    ),
)
def test_frozen_recomputed_and_tensor_parallel_stages_are_predicted(
    tmp_path, large, trained, checkpointing
):
    layout = simulated.layout_of(large, 16, 4, trained, **units_9b(checkpointing))
    timelines = simulated.write(tmp_path, large, layout)
    found = synthetic.judged(tmp_path)
    rows = {(row.unit, row.stage, row.operation): row for row in found.operations}
    assert [row.measured for row in found.operations] == pytest.approx(
        [row.predicted for row in found.operations], rel=1e-4, abs=1e-5
    )
    assert found.operations[0].measured == pytest.approx(
        1e3 * sum(line.iteration_s for line in timelines[1:]) / 3
    )
    assert abs(found.stragglers.lost_s["unexplained"]) < 0.01 * found.job.iteration_s
    assert found.verdict.cause == "none"
    backward_over_forward = rows["llm", 0, "backward"].measured / rows["llm", 0, "forward"].measured
    does = 2 if trained is None else 1 if "image_encoder" in trained else 0
    assert backward_over_forward == pytest.approx(
        0 if does == 0 else does + checkpointing, rel=1e-6
    )

    database = open_database([tmp_path])
    works = database.sql(
        "SELECT module, max(items) AS items, max(tokens) AS tokens, max(sum_length_sq) AS squares "
        "FROM operations WHERE measured AND operation = 'forward' "
        "GROUP BY step, slot, module, replica"
    )
    flops = (
        sum(
            module_flops(
                large, row["module"], Work(row["items"], row["tokens"], row["squares"]), trained
            )
            for row in works
        )
        / 3
    )
    peak = large.device.peak_tflops * 1e12 * layout.gpus_used
    assert layout.gpus_used == 37 and found.job.ranks == 9
    assert found.job.mfu == pytest.approx(flops / (peak * found.job.iteration_s))
    assert not any("ranks" in warning for warning in found.warnings)
    if trained is None:  # bubbles count devices, not recorded ranks
        busy = sum(
            float(timeline.busy_s[stage, :replicas].sum()) * devices
            for timeline in timelines[1:]
            for stage, replicas, devices in ((0, 2, 1), (1, 2, 8), (2, 2, 8), (3, 3, 1))
        )
        window = 37 * sum(timeline.iteration_s for timeline in timelines[1:])
        assert found.job.bubble_fraction == pytest.approx(1 - busy / window, rel=1e-4)


def test_what_was_slowed_leads_the_table(tmp_path, small):
    layout = simulated.layout_of(
        small,
        24,
        6,
        image_encoder={"layers_per_stage": [4]},
        llm={"dp": 2, "layers_per_stage": [3, 3]},
        image_generator={"layers_per_stage": [4]},
    )
    simulated.write(
        tmp_path, small, layout, stretch={(1, True): 1.5, (3, False): 1.1}, rehearsed=rehearsed()
    )
    database = open_database([tmp_path])
    whole, first, second, *others = compare_operations(database)
    assert (whole.place, whole.operation) == ("job", "iteration")
    assert (first.place, first.operation) == ("llm stage 0", "forward")
    assert first.error_pct == pytest.approx(50, rel=1e-3) and first.per_step == 6
    assert (second.place, second.operation) == ("image_generator stage 0", "backward")
    assert second.error_pct == pytest.approx(10, rel=1e-3) and second.planned == 2.0
    assert all(abs(row.effect_ms) < 1e-3 for row in others)
    rows = database.sql(
        "SELECT sum(duration_ns) / 1e6 AS ms, count(DISTINCT (step, rank)) AS n FROM operations "
        "WHERE measured AND depth = 1 AND operation = 'forward'"
    )[0]
    assert first.measured * first.per_step == pytest.approx(rows["ms"] / rows["n"])
    assert first.share_of_step == pytest.approx(rows["ms"] / rows["n"] / whole.measured)
    summed = {
        (row.unit, row.what): row
        for row in analyze_database(database, lambda *_: []).predicted_vs_measured
        if row.basis == "same work"
    }
    assert summed[None, "iteration_s"].predicted == pytest.approx(whole.predicted / 1e3)
    both = (
        sum(row.predicted for row in others if row.unit == "llm" and row.operation == "forward")
        + first.predicted
    )
    assert summed["llm", "forward_ms"].error_pct == pytest.approx(
        50 * first.predicted / both, rel=1e-3
    )


def test_several_modules_on_a_stage_have_a_row_each(tmp_path, small):
    split = simulated.layout_of(
        small,
        24,
        6,
        image_encoder={"layers_per_stage": [4]},
        llm={"layers_per_stage": [6]},
        image_generator={"layers_per_stage": [4]},
    )
    unit = split.units[1].model_copy(
        update={
            "name": "all",
            "modules": list(small.modules),
            "gpus": 2,
            "pp": 2,
            "layers_per_stage": [7, 7],
        }
    )
    simulated.write(
        tmp_path,
        small,
        split.model_copy(update={"units": [unit], "gpus_used": 2}),
        rehearsed=rehearsed(),
    )
    rows = [
        row for row in compare_operations(open_database([tmp_path])) if row.operation == "forward"
    ]
    assert {row.place for row in rows} == {
        "all stage 0, image_encoder",
        "all stage 0, llm",
        "all stage 1, llm",
        "all stage 1, image_generator",
    }
    assert all(row.error_pct == pytest.approx(0, abs=1e-3) and row.planned is None for row in rows)


@pytest.mark.slow
def test_recorded_steps_are_simulated_as_they_were(tmp_path, small):
    layout = simulated.layout_of(
        small,
        24,
        6,
        image_encoder={"dp": 2, "layers_per_stage": [4]},
        llm={"dp": 2, "layers_per_stage": [6]},
        image_generator={"layers_per_stage": [4]},
    )
    timelines = simulated.write(tmp_path, small, layout, rehearsed=rehearsed())
    database = open_database([tmp_path])
    assert expected_s(database) == pytest.approx(
        {step: timelines[step].iteration_s for step in (1, 2, 3)}
    )
    pipeline = recorded_pipelines(database)[1]
    assert pipeline.forward_s.shape == (6, 3, 2)
    assert not any(
        "share" in warning for warning in analyze_database(database, lambda *_: []).warnings
    )
    simulated.write(tmp_path, small, layout)
    assert expected_s(open_database([tmp_path]))[1] != pytest.approx(
        timelines[1].iteration_s, rel=1e-3
    )  # shared cores


def test_a_layout_that_the_profile_does_not_describe_has_no_operations(tmp_path, small):
    layout = simulated.layout_of(
        small,
        24,
        6,
        image_encoder={"layers_per_stage": [4]},
        llm={"layers_per_stage": [6]},
        image_generator={"layers_per_stage": [4]},
    )
    simulated.write(tmp_path, small, layout)
    job = tmp_path / "job.json"
    job.write_text(job.read_text().replace('"layers_per_stage":[6]', '"layers_per_stage":[5]'))
    found = synthetic.judged(tmp_path)
    assert found.operations == [] and found.job.mfu is None
    assert any(
        "does not describe the layers of unit 'llm'" in warning for warning in found.warnings
    )


@pytest.mark.slow
def test_data_that_moved_are_named_and_a_new_plan_advised(tmp_path, small):
    layout = simulated.layout_of(
        small,
        24,
        6,
        image_encoder={"layers_per_stage": [4]},
        llm={"layers_per_stage": [6]},
        image_generator={"layers_per_stage": [4]},
    )
    sample = small.data.sample
    more = SizeSample(
        tokens=sample.tokens,
        length_sq=sample.length_sq,
        images=[own * 4 for own in sample.images],
        targets=sample.targets,
    )
    steady = tmp_path / "steady"
    simulated.write(steady, small, layout, steps=8, rehearsed=rehearsed())
    expected = synthetic.judged(steady)
    assert expected.drift == [] and expected.warnings == []
    assert ask([steady], "SELECT count(*) FROM sizes WHERE len(images) > 0").rows[0][0] > 0
    run = tmp_path / "run" / "traces"
    simulated.write(run, small, layout, steps=8, data={0: more}, rehearsed=rehearsed())
    job = run / "job.json"  # the plan was made for the profile's own data
    planned = json.loads((steady / "job.json").read_text())["predicted"]
    job.write_text(json.dumps(json.loads(job.read_text()) | {"predicted": planned}))
    found = synthetic.judged(run)
    assert [one.what for one in found.drift] == ["images read per sequence"]
    assert (
        found.drift[0].change_pct == pytest.approx(300, abs=10) and found.drift[0].from_step is None
    )
    assert found.warnings[-2].startswith("The data have") and "(+" in found.warnings[-2]
    assert f"profile --calibrate {run.parent} && disttrain plan" in found.warnings[-1]
    late = tmp_path / "late"
    simulated.write(late, small, layout, steps=10, data={5: more}, rehearsed=rehearsed())
    assert synthetic.judged(late).drift[0].from_step == 5


def test_a_stale_plan_outweighs_a_small_loss(tmp_path, small):
    """The encoder has four times its images: a step takes much longer than planned, though no rank
    is at fault."""
    layout = simulated.layout_of(
        small,
        24,
        6,
        image_encoder={"layers_per_stage": [4]},
        llm={"layers_per_stage": [6]},
        image_generator={"layers_per_stage": [4]},
    )
    sample = small.data.sample
    double = sample.model_copy(
        update={
            "tokens": [2 * count for count in sample.tokens],
            "images": [own * 2 for own in sample.images],
            "targets": [2 * count for count in sample.targets],
        }
    )
    simulated.write(tmp_path / "planned", small, layout, rehearsed=rehearsed())
    planned = synthetic.judged(tmp_path / "planned")
    simulated.write(tmp_path, small, layout, data={0: double}, rehearsed=rehearsed())
    database = open_database([tmp_path])
    assert database.job is not None
    database.job = database.job.model_copy(
        update={
            "predicted": database.job.predicted.model_copy(
                update={"iteration_s": planned.job.iteration_s}
            )
        }
    )
    found = analyze_database(database, lambda *_: [])
    assert {one.what for one in found.drift} == {
        "tokens per sequence",
        "images read per sequence",
        "images generated per sequence",
    }
    assert found.operations[0].predicted > 1.7 * found.operations[0].planned
    assert (
        found.verdict.next_command == f"disttrain profile --calibrate {tmp_path} && disttrain plan"
    )
    assert found.verdict.advice.startswith("The data have")


def test_a_rehearsal_says_so_with_its_faults(tmp_path, small):
    layout = simulated.layout_of(
        small,
        24,
        6,
        image_encoder={"layers_per_stage": [4]},
        llm={"layers_per_stage": [6]},
        image_generator={"layers_per_stage": [4]},
    )
    how = rehearsed(
        processes=24,
        noise=0.02,
        distribution="obelics",
        faults=[
            FaultSpec(slow="rank", unit="llm", replica=0, factor=1.5),
            FaultSpec(slow="worker", unit="image_encoder", factor=3),
        ],
    )
    simulated.write(tmp_path, small, layout, rehearsed=how)
    assert synthetic.judged(tmp_path).job.rehearsed == (
        "Rehearsal: 24 processes emulated 3 GPUs; times are those of the cluster. Injected: slow"
        " rank (llm stage 0 replica 0, × 1.5); slow worker (image_encoder, × 3); noise of 2 %; data"
        " of obelics."
    )
    job = tmp_path / "job.json"
    job.write_text(job.read_text().replace(how.model_dump_json(), "null"))
    assert synthetic.judged(tmp_path).job.rehearsed is None


@pytest.mark.slow
def test_replicas_in_lockstep_are_not_held_up_by_a_host(tmp_path):
    """In a rehearsal the faster replica of a process waits for the slower one with no row of its
    own."""
    spec = synthetic.Synthetic(gap_ms=15.0)
    synthetic.write(tmp_path, spec)
    assert synthetic.judged(tmp_path).verdict.cause == "host"
    job = synthetic.make_job(spec).model_copy(update={"rehearsed": rehearsed()})
    (tmp_path / "job.json").write_text(job.model_dump_json())
    assert abs(synthetic.judged(tmp_path).stragglers.lost_s["host"]) < 1e-3
