"""Plans without what is slow or lost: made, weighed, kept; and rehearsed from end to end."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.replanning import samples
from disttrain_cli.api import rehearse
from disttrain_cli.mitigation.replanning import Replanner, goes_on_with, monitored_job
from disttrain_cli.planning.check import check
from disttrain_cli.planning.solve import solve, with_own_prediction
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.runtime.launching.supervise import Planned
from disttrain_cli.runtime.rehearsal.feeding import rehearsed_index
from disttrain_cli.spec.plan import Plan, read_plan, write_plan
from disttrain_cli.spec.profile import Profile, read_profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.whole import write_whole
from tests.runtime.factory import MODEL

PROFILES: list[Profile] = []
PLANS: dict[int, Plan] = {}  # by nodes


def job(folder: Path, nodes: int = 2, **rehearsing: Any) -> tuple[Run, Planned]:
    """The tests' small model, planned for nodes of four A800s that are not here."""
    content = {
        "name": "test",
        "model": MODEL,
        "data": {
            "distribution": {
                "images_per_sequence": 3.0,
                "generated_per_sequence": 2.0,
                "sequences": 64,
            },
            "sequence_length": 256,
            "max_image_pixels": 4096,
        },
        "cluster": {"nodes": nodes, "gpus_per_node": 4, "device": "analytic:A800"},
        "train": {
            "global_batch_size": 8,
            "steps": 6,
            "checkpoint": {"every_steps": 2},
            "restarts": 3,
            "on_straggler": "replan",
            "ordering": "none",
        },
        "rehearse": {"steps": 6, "time_scale": 20.0, "gpus_per_process": 1} | rehearsing,
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(content))
    run = read_run(folder / "disttrain.yaml")
    if not PROFILES:  # the same for all, of clusters that differ in size
        PROFILES.append(analytic_profile(run, "A800"))
    profile = PROFILES[0].model_copy(
        update={
            "device": PROFILES[0].device.model_copy(update={"count": run.file.cluster.gpus}),
            "fingerprints": PROFILES[0].fingerprints.model_copy(
                update={"cluster": run.file.cluster_fingerprint()}
            ),
        }
    )
    write_whole(run.dir.profile, profile.model_dump_json())
    if nodes not in PLANS:
        PLANS[nodes] = solve(run.file, profile, top=0)
    plan = PLANS[nodes]
    write_plan(run.dir.plan, plan)
    return run, Planned(plan, profile)


def row(**changes: Any) -> dict[str, Any]:
    """A line of `disttrain watch --json`."""
    known = {"stays": True, "blamed_ranks": [0], "confidence": 0.9}
    return known | {"iteration_s": 3.0, "lost_s": 2.0} | changes


def anew(run: Run, planned: Planned, said: list[str], emulated: bool = False) -> Replanner:
    run.dir.logs.mkdir(parents=True, exist_ok=True)
    return Replanner(run, run.dir, planned, run.dir.plan, said.append, emulated)


@pytest.mark.slow
def test_a_node_that_stays_slow_is_left_out_and_the_plan_can_be_run(tmp_path: Path) -> None:
    run, planned = job(tmp_path)
    said: list[str] = []
    made = anew(run, planned, said)
    before = run.dir.plan.read_bytes()
    made.on_verdict(row(blamed_ranks=[0]))
    assert made.ready() and run.dir.plan.read_bytes() == before
    (line,) = said
    assert line.startswith("Node 0 remains slow: without it,") and "continue with that plan" in line
    why, new = made.take()
    layout = new.plan.plan
    assert why in line and layout.left_out == [0, 1, 2, 3] and layout.devices[0] == 4
    assert layout.gpus_used <= 4 and not made.ready()
    kept, profile = read_plan(run.dir.plan), read_profile(run.dir.profile)
    check(kept, run.file, profile)
    assert with_own_prediction(kept, run.file, profile) is kept and kept.plan == layout
    assert (run.dir.root / "plan.yaml.before-start-000").read_bytes() == before
    assert f"{layout.gpus_used} GPUs" in (run.dir.root / "plan.svg").read_text()
    (told,) = (run.dir.logs / "replans.jsonl").read_text().splitlines()
    assert json.loads(told)["plan"]["left_out"] == [0, 1, 2, 3]


@pytest.mark.slow
def test_on_one_node_the_device_is_left_out(tmp_path: Path) -> None:
    run, planned = job(tmp_path, nodes=1)
    made = anew(run, planned, [])
    made.on_verdict(row(blamed_ranks=[1]))
    assert made.take()[1].plan.plan.left_out == [1]
    assert made.goes_with(3) == range(3, 4)


@pytest.mark.slow
def test_other_verdicts_change_nothing(tmp_path: Path) -> None:
    run, planned = job(tmp_path)
    said: list[str] = []
    assert planned.plan.plan.gpus_used == 8
    made = anew(run, planned, said)
    for changes in (
        {"stays": False},
        {"confidence": 0.4},
        {"blamed_ranks": []},
        {"blamed_ranks": [0, 7]},  # of both nodes
    ):
        made.on_verdict(row(**changes))
        assert not made.ready() and not said


@pytest.mark.slow
def test_a_plan_that_gains_too_little_is_only_told(tmp_path: Path) -> None:
    run, planned = job(tmp_path)
    said: list[str] = []
    made = anew(run, planned, said)
    made.on_verdict(row(lost_s=0.1))
    assert not made.ready() and said[0].endswith("Training continues unchanged.")


@pytest.mark.slow
def test_no_plan_on_what_is_left_is_said_and_nothing_changes(tmp_path: Path) -> None:
    run, planned = job(tmp_path, nodes=1)
    said: list[str] = []
    device = planned.profile.device.model_copy(update={"count": 1})
    one = Planned(planned.plan, planned.profile.model_copy(update={"device": device}))
    made, before = anew(run, one, said), run.dir.plan.read_bytes()
    made.on_verdict(row(blamed_ranks=[0]))
    assert not made.ready() and made.without(0) is None
    assert [line.rpartition(":")[2].strip().split(".")[0] for line in said] == [
        "No device is left"
    ] * 2
    assert run.dir.plan.read_bytes() == before


@pytest.mark.slow
def test_a_second_loss_adds_to_the_first_and_a_job_resumes_with_its_last_plan(
    tmp_path: Path,
) -> None:
    run, planned = job(tmp_path, nodes=3)
    assert goes_on_with(run.dir, planned.plan) is planned.plan
    made = anew(run, planned, [], emulated=True)
    first, second = made.without(5), made.without(9)
    assert first is not None and second is not None
    assert first[0] == "Node 1 is lost permanently"
    assert first[1].plan.plan.left_out == [4, 5, 6, 7]
    assert second[1].plan.plan.left_out == list(range(4, 12))
    assert second[1].profile is planned.profile  # emulated devices stay as they are
    assert second[1].plan.plan.devices[-1] < 4
    with (run.dir.logs / "replans.jsonl").open("a") as file:
        file.write('{"start": "st')  # a full disk
    assert goes_on_with(run.dir, planned.plan) == read_plan(run.dir.plan)
    assert goes_on_with(run.dir, first[1].plan).plan == second[1].plan.plan
    layout = planned.plan.plan.model_copy(update={"left_out": [11]})
    other = planned.plan.model_copy(update={"plan": layout})
    assert goes_on_with(run.dir, other) is other
    write_plan(run.dir.plan, other)
    assert goes_on_with(run.dir, planned.plan) is planned.plan
    run.dir.plan.unlink()
    assert goes_on_with(run.dir, planned.plan) is planned.plan


def test_only_a_run_that_asks_for_it_is_planned_anew(tmp_path: Path) -> None:
    run, planned = job(tmp_path)
    with monitored_job(run, run.dir, *planned, run.dir.plan, print) as replanner:
        assert isinstance(replanner, Replanner)
    train = run.file.train.model_copy(update={"on_straggler": "tell"})
    calm = run.model_copy(update={"file": run.file.model_copy(update={"train": train})})
    with monitored_job(calm, run.dir, *planned, run.dir.plan, print, emulated=True) as replanner:
        assert replanner is None


@pytest.mark.slow
def test_a_lost_node_rehearsed_loses_and_doubles_no_sample(tmp_path: Path) -> None:
    """Node 1 dies in step 3, after a checkpoint of step 2."""
    run, planned = job(tmp_path, lost=[{"node": 1, "step": 3}])
    assert planned.plan.plan.gpus_used > 4
    result = rehearse(run)
    assert len(result.restarts) == 2 and "Node 1 is lost permanently" in result.restarts[1]
    (replan,) = result.replans
    assert (replan.step, replan.left_out) == (2, [4, 5, 6, 7]) and result.gpus <= 4
    assert [step["step"] for step in result.steps] == list(range(6))
    predicted = [one["predicted_iteration_s"] for one in result.simulated]
    assert (
        predicted == [planned.plan.predicted.iteration_s] * 2 + [replan.predicted_iteration_s] * 4
    )
    index = rehearsed_index(run, planned.profile.inputs)
    found = samples(run, index, run.dir.rehearsal, 6)
    assert found["samples"] > 0 and (found["lost"], found["doubled"]) == (0, 0)
    assert read_plan(run.dir.plan).plan == planned.plan.plan  # the run's own stays
    again = rehearse(run, steps=8, resume=True)
    assert again.resumed_from_step == 6 and not again.replans and again.gpus == result.gpus
    assert [step["predicted_iteration_s"] for step in again.simulated] == predicted[-2:]
