"""Rehearsals with real processes: what they record is the plan's and the profile's, whatever the
machine is doing."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.costs.layout import CostedStage, amount
from disttrain_cli.errors import MismatchError, RankFailedError, SpecError
from disttrain_cli.models.graph import layer_table
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.runtime.rehearsal import emulation as launcher
from disttrain_cli.runtime.rehearsal.feeding import rehearsed_index
from disttrain_cli.runtime.rehearsal.rehearse import rehearse
from disttrain_cli.runtime.rehearsal.setting import setting_of
from disttrain_cli.simulation.faults import begun
from disttrain_cli.spec.plan import Plan, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.trace import COMPUTE, WEIGHTS, read_job
from tests.runtime.factory import MODEL, plan_of

PROFILES: list[Profile] = []
DISTRIBUTION = {"images_per_sequence": 3.0, "generated_per_sequence": 2.0, "sequences": 64}


def job(
    folder: Path,
    dps: tuple[int, int, int] = (3, 2, 2),
    pp: int = 1,
    tp: int = 1,
    model: dict[str, Any] | None = None,
    **rehearsing: Any,
) -> tuple[Run, Plan, Profile]:
    """The tests' small model on A800s that are not here, its LLM on `pp` stages."""
    content = {
        "name": "test",
        "model": MODEL | (model or {}),
        "data": {"distribution": DISTRIBUTION, "sequence_length": 256, "max_image_pixels": 4096},
        "cluster": {"nodes": 2, "gpus_per_node": 8, "device": "analytic:A800"},
        "train": {"global_batch_size": 16, "steps": 3},
        "rehearse": {"steps": 2, "time_scale": 20.0, "gpus_per_process": 2} | rehearsing,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(content))
    run = read_run(folder / "disttrain.yaml")
    modules = [info.module for info in layer_table(run)]
    units = []
    for name, dp in zip(dict.fromkeys(modules), dps, strict=True):
        own, stages, degree = (
            modules.count(name),
            pp if name == "llm" else 1,
            tp if name == "llm" else 1,
        )
        layers = [own - own // stages * (stages - 1), *[own // stages] * (stages - 1)]
        units.append(
            UnitPlan(
                name=name,
                modules=[name],
                tp=degree,
                dp=dp,
                pp=stages,
                gpus=degree * dp * stages,
                layers_per_stage=layers,
            )
        )
    if not PROFILES:  # the same for all tests, which differ in how they rehearse
        PROFILES.append(analytic_profile(run, "A800"))
    plan, profile = plan_of(run, units, 2), PROFILES[0]
    trained = (model or {}).get("trained")
    plan = plan.model_copy(update={"plan": plan.plan.model_copy(update={"trained": trained})})
    return run, plan, profile


def rows(
    trace: str, operation: str, unit: str, stage: int = 0
) -> dict[int, dict[tuple[int, int], dict[str, Any]]]:
    """Replica → (step, slot) → its row."""
    found: dict[int, dict[tuple[int, int], dict[str, Any]]] = {}
    for folder in sorted(Path(trace).glob("rank-*")):
        for row in pq.read_table(folder).to_pylist():
            if (row["operation"], row["unit"], row["stage"]) == (operation, unit, stage):
                found.setdefault(row["replica"], {})[row["step"], row["slot"]] = row
    return found


def rows_in(trace: str, stage: CostedStage, replica: int, step: int) -> list[dict[str, Any]]:
    """All rows of a replica in a step, in order of time."""
    own = [row for row in _rows(folder_of(trace, stage, replica)) if row["step"] == step]
    return sorted(own, key=lambda row: (row["start_ns"], row["end_ns"]))


def folder_of(trace: str, stage: CostedStage, replica: int) -> Path:
    """Rows of a replica's first rank on a stage."""
    return Path(trace) / f"rank-{stage.rank(replica):05d}"


def took_s(row: dict[str, Any]) -> float:
    return (row["end_ns"] - row["start_ns"]) / 1e9


@pytest.mark.slow
def test_every_replica_records_what_the_profile_says_of_its_work(tmp_path: Path) -> None:
    """Six replicas of the encoder and eight GPUs more in seven processes, a rank that is slow from
    step 1 on among them; weights' gradients of the first two units come later, and messages run
    overlapped with passes."""
    place = {"unit": "llm", "stage": 1, "replica": 1}
    fault = {"slow": "rank", "factor": 3.0, "from_step": 1, **place}
    run, plan, profile = job(tmp_path, (3, 4, 2), pp=2, faults=[fault])
    delays = {"image_encoder": [1], "llm": [0, 1]}
    units = [
        unit.model_copy(update={"weight_delay": delays.get(unit.name)}) for unit in plan.plan.units
    ]
    behind = plan.plan.model_copy(update={"units": units, "overlap": True})
    plan = plan.model_copy(update={"plan": behind})
    result = rehearse(run, plan, profile)
    assert (result.processes, result.gpus) == (2 + 4 + 1, 13)
    assert read_job(Path(result.trace) / "job.json").rehearsed.processes == 7
    assert (
        [row["step"] for row in result.steps] == [row["step"] for row in result.simulated] == [0, 1]
    )
    # the simulator's own pipeline of the same steps, before replicas are joined, holds the expected
    # times
    stages = launcher.stages_of(profile, plan.plan)
    orders = launcher.Orders(run.file, plan.plan, rehearsed_index(run, profile.inputs), profile)
    for number, stage in enumerate(stages):
        parts = COMPUTE if stage.unit.weight_delay is not None else COMPUTE[:WEIGHTS]
        recorded_of = {
            part: rows(result.trace, part, stage.unit.name, stage.index) for part in COMPUTE
        }
        assert not any(recorded_of.pop(part) for part in COMPUTE[len(parts) :])
        assert all(set(of) == set(range(stage.unit.dp)) for of in recorded_of.values())
        for step in (0, 1):
            loads = launcher.order_loads(orders.of(step)[0], plan.plan)
            pipeline = launcher.inject(
                launcher.pipeline_of(profile, plan.plan, stages, loads, 8),
                stages,
                begun(run.file.rehearse.faults, step),
            )
            for recorded, times in zip(recorded_of.values(), pipeline.parts_s, strict=False):
                for replica in range(stage.unit.dp):
                    own = [
                        took_s(recorded[replica][step, slot])
                        for slot in range(plan.plan.microbatches)
                    ]
                    assert own == pytest.approx(times[:, number, replica].tolist(), abs=1e-6)
            if stage.unit.name != "image_generator":  # two of whose replicas are one process
                own_rows = [rows_in(result.trace, stage, r, step) for r in range(stage.unit.dp)]
                for own, lead_s in zip(own_rows, pipeline.lead_s[number], strict=False):
                    assert own[0]["operation"] == "wait"
                    assert took_s(own[0]) == pytest.approx(lead_s, abs=1e-6) and lead_s > 0
                last_ns = [
                    max(row["end_ns"] for row in own if row["operation"] in parts)
                    for own in own_rows
                ]
                exposed_ns = 1e9 * pipeline.exposed_s[number, : len(last_ns)]
                reduced_ns = {
                    row["end_ns"] for own in own_rows for row in own if row["operation"] == "reduce"
                }
                # by which clocks of two processes may differ, and a busy host be late
                clocks_ns = 1e5 + 1e6 * result.late_ms.max
                assert max(reduced_ns) - min(reduced_ns) < clocks_ns
                assert max(reduced_ns) == pytest.approx((last_ns + exposed_ns).max(), abs=clocks_ns)
                assert exposed_ns.min() > 0
    busiest_s = max(
        sum(
            took_s(row)
            for part in COMPUTE
            for (step, _), row in rows(result.trace, part, "llm", 1)[1].items()
            if step == 1
        ),
        0.0,
    )
    assert result.steps[1]["iteration_s"] >= busiest_s > 0
    sizes = pq.read_table(Path(result.trace) / "sizes").to_pylist()
    assert len(sizes) == 2 * 16 and np.mean([len(row["images"]) for row in sizes]) == pytest.approx(
        3, abs=1.5
    )
    batch = orders.of(1)[1]
    samples = ask(
        [Path(result.run_dir)], "SELECT sample FROM samples WHERE step = 1 ORDER BY sequence, place"
    ).rows
    assert [sample for (sample,) in samples] == batch.samples.tolist()

    again = rehearse(run, plan, profile, steps=3, resume=True)
    assert again.resumed_from_step == 2 and [row["step"] for row in again.steps] == [2]
    assert Path(again.checkpoint).is_dir()


@pytest.mark.slow
def test_a_busy_host_begins_late_and_a_slow_link_delays_from_their_step_on(tmp_path: Path) -> None:
    place: dict[str, Any] = {"unit": "llm", "stage": 0, "from_step": 1}
    host = {"slow": "host", "replica": 1, "factor": 2.0, **place}
    link = {"slow": "link", "factor": 1e4, **place}
    run, plan, profile = job(tmp_path, faults=[host, link], gpus_per_process=1)
    result = rehearse(run, plan, profile)
    for replica in (0, 1):
        (whole,) = [
            rows
            for rows in map(_rows, Path(result.trace).glob("rank-*"))
            if (rows[0]["unit"], rows[0]["replica"]) == ("llm", replica)
        ]
        for step in (0, 1):
            own = sorted(
                (row for row in whole if row["step"] == step),
                key=lambda row: (row["start_ns"], row["end_ns"]),
            )
            for before, row in itertools.pairwise(own):
                if row["operation"] in ("forward", "backward"):
                    gap_s, late = (row["start_ns"] - before["end_ns"]) / 1e9, replica * step
                    assert gap_s == pytest.approx(late * took_s(row), abs=1e-3 + 0.02 * took_s(row))
    steps_s, simulated_s = (
        [row["iteration_s"] for row in rows] for rows in (result.steps, result.simulated)
    )
    assert steps_s[0] < simulated_s[1] / 2 and steps_s[1] > 0.999 * simulated_s[1]


def _rows(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder).to_pylist()
    return rows


@pytest.mark.slow
def test_steps_that_are_ordered_beforehand_are_those_of_the_policy(tmp_path: Path) -> None:
    run, plan, profile = job(tmp_path)
    train = run.file.train.model_copy(update={"ordering": "best"})
    run = run.model_copy(update={"file": run.file.model_copy(update={"train": train})})
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(run.file.model_dump(mode="json")))
    result = rehearse(run, plan, profile)
    index, steps = rehearsed_index(run, profile.inputs), range(2)
    expected = launcher.simulated(
        run, plan.plan, profile, index, setting_of(run.file, plan, profile), steps, {}, ()
    )
    assert result.simulated == [row | {"predicted_iteration_s": 1.0} for row in expected]
    found = launcher.found_orders(run, plan.plan, profile, index, steps)
    orders = launcher.Orders(run.file, plan.plan, index, profile)
    assert all(
        np.array_equal(found[step].positions, orders.assignment(step).positions) for step in steps
    )
    recorded = rows(result.trace, "forward", "image_encoder", 0)
    assert [
        [
            recorded[replica][step, slot]["images"]
            for step in steps
            for slot in range(plan.plan.microbatches)
        ]
        for replica in range(3)
    ] == [
        [
            len(slot.replicas["image_encoder"][replica]["image"])
            for step in steps
            for slot in orders.of(step)[0].slots
        ]
        for replica in range(3)
    ]


@pytest.mark.slow
def test_replicas_of_a_monolithic_stage_keep_their_own_times(tmp_path: Path) -> None:
    """One process for two replicas of a stage with all modules, of which now one, now the other is
    the slower."""
    run, _, profile = job(tmp_path)
    layers = [len(module.layers) for module in profile.modules.values()]
    unit = UnitPlan(
        name="all", modules=[*profile.modules], dp=2, gpus=2, layers_per_stage=[sum(layers)]
    )
    plan = plan_of(run, [unit], 2)
    result = rehearse(run, plan, profile, steps=1)
    assert (result.processes, result.gpus) == (1, 2)
    order, _ = launcher.Orders(
        run.file, plan.plan, rehearsed_index(run, profile.inputs), profile
    ).of(0)
    loads = launcher.order_loads(order, plan.plan)
    recorded = [
        row
        for folder in Path(result.trace).glob("rank-*")
        for row in pq.read_table(folder).to_pylist()
    ]
    for cost in launcher.stages_of(profile, plan.plan)[0].costs:
        for part in ("forward", "backward"):
            expected_s = amount(getattr(cost, f"{part}_ms"), loads[cost.module]) / 1e3
            for row in recorded:
                if (row["operation"], row["module"]) == (part, cost.module):
                    assert took_s(row) == pytest.approx(
                        expected_s[row["slot"], row["replica"]], abs=1e-6
                    )


@pytest.mark.slow
def test_several_stages_on_a_rank_take_as_long_as_simulated(tmp_path: Path) -> None:
    """Two replicas on two ranks of two stages each, one of them slow from step 1 on."""
    place = {"unit": "model", "stage": 1, "replica": 1}
    fault = {"slow": "rank", "factor": 2.0, "from_step": 1, **place}
    run, _, profile = job(tmp_path, faults=[fault], gpus_per_process=1, time_scale=200.0)
    depth = sum(len(module.layers) for module in profile.modules.values())
    unit = UnitPlan(
        name="model",
        modules=[*profile.modules],
        dp=2,
        pp=2,
        chunks=2,
        gpus=4,
        layers_per_stage=[depth - 9, 2, 3, 4],
    )
    plan = plan_of(run, [unit], 1, overlap=True)
    result = rehearse(run, plan, profile)
    assert (result.processes, result.gpus) == (4, 4)
    steps_s, simulated_s = (
        [row["iteration_s"] for row in rows] for rows in (result.steps, result.simulated)
    )
    assert steps_s == pytest.approx(simulated_s, rel=0.02) and steps_s[1] > 1.2 * steps_s[0]
    stages = launcher.stages_of(profile, plan.plan)
    orders = launcher.Orders(run.file, plan.plan, rehearsed_index(run, profile.inputs), profile)
    for stage in stages:
        for number, part in enumerate(COMPUTE[:WEIGHTS]):
            of_replica: dict[int, dict[tuple[int, int], float]] = {}
            for row in (
                row for replica in (0, 1) for row in _rows(folder_of(result.trace, stage, replica))
            ):
                if (row["operation"], row["stage"]) == (part, stage.index):
                    took = of_replica.setdefault(row["replica"], {})
                    at = row["step"], row["slot"]
                    took[at] = took.get(at, 0.0) + took_s(row)
            for step in (0, 1):
                pipeline = launcher.inject(
                    launcher.pipeline_of(
                        profile,
                        plan.plan,
                        stages,
                        launcher.order_loads(orders.of(step)[0], plan.plan),
                        8,
                    ),
                    stages,
                    begun(run.file.rehearse.faults, step),
                )
                for replica, took in of_replica.items():
                    expected = pipeline.parts_s[number][:, stage.number, replica]
                    own = [took[step, slot] for slot in range(plan.plan.microbatches)]
                    assert own == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.slow
def test_tensor_parallel_frozen_and_full_messages_are_rehearsed(tmp_path: Path) -> None:
    frozen = {"trained": ["llm", "projectors"]}
    run, plan, profile = job(
        tmp_path,
        (1, 2, 1),
        tp=2,
        model=frozen,
        messages="real",
        noise=0.1,
        gpus_per_process=1,
        distribution=DISTRIBUTION | {"images_per_sequence": 1.0},
    )
    result = rehearse(run, plan, profile)
    assert (result.processes, result.gpus, result.messages) == (4, 6, "real")
    frozen_backward = [
        took_s(row) for row in rows(result.trace, "backward", "image_encoder")[0].values()
    ]
    generator = [
        took_s(row) for row in rows(result.trace, "backward", "image_generator")[0].values()
    ]
    assert max(frozen_backward) < min(filter(None, generator))  # some slots have nothing to draw
    images = [row["images"] for row in result.steps]
    assert np.mean(images) / 16 == pytest.approx(1, abs=0.6)
    sent = rows(result.trace, "send_activation", "image_encoder")[0]
    width = MODEL["modules"]["llm"]["config"]["hidden_size"]
    assert all(row["bytes"] % (2 * width) == 0 for row in sent.values()) and sum(
        row["bytes"] for row in sent.values()
    )


@pytest.mark.slow
def test_what_cannot_be_rehearsed_is_refused_before_anything_starts(tmp_path: Path) -> None:
    run, plan, profile = job(
        tmp_path, faults=[{"slow": "stage", "unit": "llm", "stage": 4, "factor": 2.0}]
    )
    with pytest.raises(SpecError, match=r"rehearse.faults\[0\].stage"):
        rehearse(run, plan, profile)
    run, plan, profile = job(tmp_path)
    other = profile.fingerprints.model_copy(update={"data": "1" * 16})
    with pytest.raises(MismatchError, match="not the one that was profiled"):
        rehearse(run, plan, profile.model_copy(update={"fingerprints": other}))
    with pytest.raises(SpecError, match="no checkpoint to resume from"):
        rehearse(run, plan, profile, resume=True)
    assert not run.dir.rehearsal.traces.exists()


@pytest.mark.slow
def test_a_process_that_dies_ends_the_rehearsal(tmp_path: Path) -> None:
    import os
    import signal

    run, plan, profile = job(tmp_path, (1, 1, 1), steps=50)

    def kill(step: dict[str, Any]) -> None:
        line = (run.dir.rehearsal.logs / "rank-00001.log").read_text().splitlines()[0]
        os.kill(int(line.rsplit(" ", 1)[1]), signal.SIGKILL)

    with pytest.raises(RankFailedError, match="Rank 1 was killed by SIGKILL"):
        rehearse(run, plan, profile, on_step=kill)


@pytest.mark.slow
def test_the_time_scale_gives_the_host_room(tmp_path: Path) -> None:
    run, plan, profile = job(tmp_path, time_scale="auto", gpus_per_process="auto")
    setting = setting_of(run.file, plan, profile)
    assert setting.processes == 7 and setting.time_scale > 0
    slower = plan.model_copy(
        update={"predicted": plan.predicted.model_copy(update={"iteration_s": 10.0})}
    )
    assert setting_of(run.file, slower, profile).time_scale == pytest.approx(
        setting.time_scale / 10, rel=0.05
    )

    images = profile.modules["image_encoder"].work_per_sequence.items
    rates = profile.preprocess.model_copy(update={"images_per_s_per_core": 16 * images / 30})
    late = profile.model_copy(update={"preprocess": rates})
    assert setting_of(run.file, plan, late).time_scale == pytest.approx(
        setting.time_scale * plan.predicted.iteration_s / (30.0 / plan.plan.units[0].dp), rel=0.05
    )


@pytest.mark.slow
def test_a_slow_rank_inside_a_cp_group_is_named(tmp_path: Path) -> None:
    place = {"unit": "llm", "replica": 1, "cp_rank": 1}
    fault = {"slow": "rank", "factor": 8.0, "from_step": 1, **place}
    run, plan, profile = job(tmp_path, (1, 2, 1), faults=[fault], gpus_per_process=1)
    eye, llm, painter = plan.plan.units
    units = [eye, llm.model_copy(update={"cp": 2, "gpus": 4}), painter]
    layout = plan.plan.model_copy(update={"units": units, "gpus_used": 6})
    result = rehearse(run, plan.model_copy(update={"plan": layout}), profile)
    assert result.processes == 4
    asked = ask(
        [Path(result.trace)],
        "SELECT step, replica, cp_rank, round(sum(exchange_ns) / sum(end_ns - start_ns), 3) FROM"
        " trace WHERE unit = 'llm' AND operation IN ('forward', 'backward') GROUP BY ALL ORDER BY"
        " ALL",
    )
    assert [tuple(row) for row in asked.rows] == [
        (step, replica, cp_rank, 0.875 if (step, replica, cp_rank) == (1, 1, 0) else 0.0)
        for step in (0, 1)
        for replica in (0, 1)
        for cp_rank in (0, 1)
    ]
    found = analyze([Path(result.trace)])
    named = [one.place for one in found.causes if one.cause == "worker"]
    assert [(place.replica, place.cp_rank) for place in named] == [(1, 1)]
    assert "slow rank (llm stage 0 replica 1 CP rank 1, × 8 from step 1)" in str(found.to_json())
