"""Time of the runtime's optimizer step per parameter, from gradient norm to cleared sums."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from disttrain_cli.costs.hardware import Precision
from disttrain_cli.profiling.compute import Stopwatch
from disttrain_cli.runtime.engine.optimizer import reduced_gradients, sum_of_squares
from disttrain_cli.runtime.engine.partitions import Gathering, Partition, step_by_group

#: Steps measured; on a GPU about a second of them.
STEPS = {"cpu": 7, "cuda": 501}
FEWEST, MOST = (
    1 << 16,
    1 << 26,
)  # parameters measured: below, overhead hides them; above, nothing changes


def step_ns_per_parameter(parameters: int, precision: Precision, device: torch.device) -> float:
    """Return the median over some steps on about `parameters` numbers.

    On a CPU this is CPU time, as for layers (`compute.py`), and of AdamW alone: what else a step
    takes there was measured with the load of all ranks (templates/doubts.yaml, shared cores).
    """
    count = min(MOST, max(FEWEST, parameters))
    step = optimizer_step(count, precision, device, whole=device.type != "cpu")
    step()  # allocates the moments
    stopwatch, steps = Stopwatch(device), STEPS[device.type]
    for _ in range(steps):
        stopwatch.time(step)
    return sorted(stopwatch.read_ms())[steps // 2] * 1e6 / count


def optimizer_step(
    count: int, precision: Precision, device: torch.device, whole: bool = True
) -> Callable[[], object]:
    """Return the step of a rank that owns `count` numbers, without clipping.

    They are one flat tensor. In bf16 it is a ZeRO-1 partition with fp32 masters, whose values are
    rounded into the weights, and fp32 sums of gradients, which are cleared for the next step.

    Args:
        whole: False for AdamW's step alone.
    """
    master_P = torch.nn.Parameter(torch.randn(count, device=device))
    gradients_P = torch.randn_like(master_P)
    adamw = torch.optim.AdamW(
        [{"params": [master_P], "module": "", "copy": None, "tp_whole": False, "moe": False}],
        fused=True,
    )
    if not whole:
        master_P.grad = gradients_P
        return adamw.step
    weights_N = master_P.detach().bfloat16()
    partition = Partition([], weights_N, weights_N, master_P, gradients_P)
    splits = precision == "bf16"
    optimizer: Any = SimpleNamespace(optimizer=adamw) if splits else adamw
    gathering = Gathering([partition], [None])

    def step() -> None:
        master_P.grad = gradients_P
        sum_of_squares(reduced_gradients(optimizer, dp=1, tp=1), device)
        if splits:
            step_by_group(optimizer, [partition], gathering)
            gradients_P.zero_()
        else:
            adamw.step()

    return step
