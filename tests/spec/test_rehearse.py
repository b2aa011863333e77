"""Fields of `rehearse` and `train` that belong together."""

from typing import Any

import pytest
from pydantic import ValidationError

from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.runfile import RunFile
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.runfile.train import TrainSpec
from tests.planning import synthetic


@pytest.mark.parametrize(
    "given",
    [
        {"slow": "node"},
        {"slow": "node", "node": 1, "unit": "llm"},
        {"slow": "node", "node": 1, "replica": 0},
        {"slow": "stage", "unit": "llm", "node": 1},
        {"slow": "stage"},
    ],
)
def test_a_fault_is_of_a_node_or_of_a_unit(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="node"):
        FaultSpec(factor=2.0, **given)


@pytest.mark.parametrize(
    "rehearse",
    [
        {"faults": [{"slow": "node", "node": 4096, "factor": 2.0}]},
        {"lost": [{"node": 4096, "step": 1}]},
    ],
)
def test_nodes_are_those_of_the_cluster(rehearse: dict[str, Any]) -> None:
    file = synthetic.run_file().model_dump(mode="json")
    with pytest.raises(ValidationError, match=r"\[0\].node: the cluster has no node 4096"):
        RunFile.model_validate(file | {"rehearse": rehearse})


def test_planning_anew_takes_a_restart() -> None:
    with pytest.raises(ValidationError, match="restarts must be 1 or more"):
        TrainSpec(global_batch_size=1, steps=1, on_straggler="replan")
    TrainSpec(global_batch_size=1, steps=1, on_straggler="replan", restarts=1)


def test_ranks_take_the_devices_that_are_left() -> None:
    unit = UnitPlan(name="llm", modules=["llm"], dp=3, gpus=3, layers_per_stage=[1])
    whole = Layout(
        global_batch_size=3, microbatch_size=1, microbatches=1, gpus_used=3, units=[unit]
    )
    assert whole.devices == [0, 1, 2]
    assert whole.model_copy(update={"left_out": [3, 0]}).devices == [1, 2, 4]
