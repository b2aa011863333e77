"""Time of an AdamW step per parameter, as the runtime runs it (`runtime.engine.optimizer`)."""

from __future__ import annotations

import torch

from disttrain_cli.profiling.compute import Stopwatch

STEPS = 7
FEWEST, MOST = (
    1 << 16,
    1 << 26,
)  # parameters measured: below, overhead hides them; above, nothing changes


def adamw_ns_per_parameter(parameters: int, device: torch.device) -> float:
    """Return the median over a few steps on about `parameters` numbers.

    They are one flat fp32 tensor, like a ZeRO-1 shard. On a CPU this is CPU time, as for layers
    (`compute.py`).
    """
    count = min(MOST, max(FEWEST, parameters))
    weights = torch.nn.Parameter(torch.randn(count, device=device))
    weights.grad = torch.randn_like(weights)
    optimizer = torch.optim.AdamW([weights], fused=True)
    optimizer.step()  # allocates its states
    stopwatch = Stopwatch(device)
    for _ in range(STEPS):
        stopwatch.time(optimizer.step)
    return sorted(stopwatch.read_ms())[STEPS // 2] * 1e6 / count
