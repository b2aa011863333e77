"""The optimizer's time per parameter, on whatever device is here, and the bytes that it moves."""

from typing import Literal

import pytest
import torch

from disttrain_cli.costs.hardware import OPTIMIZER_BYTES
from disttrain_cli.profiling.optimizer import FEWEST, optimizer_step, step_ns_per_parameter
from tests.moved import Moved

CPU = torch.device("cpu")


@pytest.mark.parametrize("parameters", [1, 2 * FEWEST])
def test_a_step_takes_time_for_every_parameter(parameters: int) -> None:
    assert 0.0 < step_ns_per_parameter(parameters, "fp32", CPU) < 1e5


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_moves_the_bytes_that_are_priced(precision: Literal["fp32", "bf16"]) -> None:
    count = 1 << 16
    step = optimizer_step(count, precision, CPU)
    step()
    with Moved() as moved:
        step()
    assert moved.bytes / count == pytest.approx(OPTIMIZER_BYTES[precision], rel=0.01)
