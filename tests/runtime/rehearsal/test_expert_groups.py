"""An EP group with several processes: they exchange drawn rows; passes are the simulator's."""

from pathlib import Path

import pytest
import yaml

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.data.ordering.loads import order_loads
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.profiling.analytic import analytic_profile
from disttrain_cli.runtime.rehearsal.feeding import rehearsed_index
from disttrain_cli.runtime.rehearsal.rehearse import rehearse
from disttrain_cli.simulation.routing import with_routing
from disttrain_cli.simulation.step import pipeline_of
from disttrain_cli.spec.plan import UnitPlan
from disttrain_cli.spec.runfile import read_run
from tests.runtime.factory import MODEL, plan_of
from tests.runtime.rehearsal.test_rehearse import rows, took_s
from tests.runtime.test_expert_parallel import FAMILIES

EYE, LLM, GPUS = "image_encoder", "llm", 2  # GPUS: of a process


@pytest.mark.slow
def test_processes_of_an_ep_group_take_as_long_as_its_fullest_rank(tmp_path: Path) -> None:
    modules = {
        EYE: MODEL["modules"][EYE],
        LLM: {"kind": "llm", "architecture": "qwen3_moe", "config": FAMILIES["qwen3_moe"]},
    }
    content = {
        "name": "test",
        "model": {"modules": modules},
        "data": {
            "distribution": {"images_per_sequence": 2.0, "sequences": 64},
            "sequence_length": 256,
            "max_image_pixels": 4096,
        },
        "cluster": {"nodes": 2, "gpus_per_node": 8, "device": "analytic:H100"},
        "train": {"global_batch_size": 12, "steps": 2},
        "rehearse": {"steps": 2, "time_scale": 20.0, "gpus_per_process": GPUS},
    }
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(content))
    run = read_run(tmp_path / "disttrain.yaml")
    profile = analytic_profile(run, "H100")
    units = [
        UnitPlan(name=EYE, modules=[EYE], dp=2, gpus=2, layers_per_stage=[4]),
        UnitPlan(name=LLM, modules=[LLM], dp=4, ep=4, pp=2, gpus=8, layers_per_stage=[2, 3]),
    ]
    plan = plan_of(run, units, 1)
    result = rehearse(run, plan, profile)
    assert result.processes == 1 + 2 * 2  # each EP group has two
    stages = stages_of(profile, plan.plan)
    orders = Orders(run.file, plan.plan, rehearsed_index(run, profile.inputs), profile)
    for step in range(2):
        loads = order_loads(orders.of(step)[0], plan.plan)
        even = pipeline_of(profile, plan.plan, stages, loads, 8)
        drawn = with_routing(even, profile, stages, loads, run.file.train.seed, step)
        assert (drawn.forward_s != even.forward_s).any()
        for stage in stages[1:]:
            for part, expected in (("forward", drawn.forward_s), ("backward", drawn.backward_s)):
                recorded = rows(result.trace, part, LLM, stage.index)
                assert set(recorded) == set(range(4))
                for replica, of_replica in recorded.items():
                    for slot in range(plan.plan.microbatches):
                        took = took_s(of_replica[step, slot])
                        assert took == pytest.approx(
                            expected[slot, stage.number, replica], abs=2e-9
                        )
