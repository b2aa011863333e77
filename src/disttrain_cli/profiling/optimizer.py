"""Time of an AdamW step per parameter, with the optimizer that the runtime uses
(`runtime.engine.optimizer`)."""

from __future__ import annotations

import torch

from disttrain_cli.profiling.compute import Stopwatch

STEPS = 7
FEWEST, MOST = (
    1 << 16,
    1 << 26,
)  # parameters measured: below, overhead hides them; above, nothing changes


def adamw_ns_per_parameter(parameters: int, device: torch.device) -> float:
    """Median over some steps on about `parameters` numbers, one flat tensor in fp32 as ZeRO-1 keeps
    its share.

    On a CPU this is CPU time, as that of layers (`compute.py`).
    """
    count = min(MOST, max(FEWEST, parameters))
    weights = torch.nn.Parameter(torch.randn(count, device=device))
    weights.grad = torch.randn_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    optimizer.step()  # takes the memory of its states
    stopwatch = Stopwatch(device)
    for _ in range(STEPS):
        stopwatch.time(optimizer.step)
    return sorted(stopwatch.read_ms())[STEPS // 2] * 1e6 / count
