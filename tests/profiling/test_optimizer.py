"""The optimizer's time per parameter, on whatever device is here."""

from __future__ import annotations

import pytest
import torch

from disttrain_cli.profiling.optimizer import FEWEST, adamw_ns_per_parameter


@pytest.mark.parametrize("parameters", [1, 2 * FEWEST])
def test_a_step_takes_time_for_every_parameter(parameters: int) -> None:
    assert 0.0 < adamw_ns_per_parameter(parameters, torch.device("cpu")) < 1e5
