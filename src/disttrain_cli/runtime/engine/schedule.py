"""Learning rates by module and step."""

from __future__ import annotations

import math

from disttrain_cli.calls import argument, spelled
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.train import TrainSpec


def learning_rate(train: TrainSpec, module: str, step: int) -> float:
    """Return the rate of a module (or "projectors") in a step.

    Linear warm-up, then the module's schedule, which ends at the run file's last step.
    """
    spec = train.optimizer.of(module)
    if step < spec.warmup_steps:
        return spec.lr * (step + 1) / spec.warmup_steps
    if spec.schedule == "constant":
        return spec.lr
    done = min(1.0, (step - spec.warmup_steps) / max(1, train.total_steps - spec.warmup_steps))
    left = 1.0 - done if spec.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return spec.lr * (spec.min_lr_fraction + (1.0 - spec.min_lr_fraction) * left)


def lrs(run: Run, step: int) -> dict[str, float]:
    """Return the learning rates of all trained modules, and of the projectors, in a step."""
    return {
        name: learning_rate(run.file.train, name, step) for name in run.file.model.trained_names
    }


def beyond_schedule(run: Run, total: int) -> list[str]:
    """Return a warning for modules whose schedule ends at zero before the last of `total` steps."""
    end, field = run.file.train.total_steps, run.file.train.ends_by
    idle = [name for name, lr in lrs(run, total - 1).items() if lr == 0.0] if total > end else []
    return (
        [
            f"warning: {', '.join(idle)}: the schedule ends at {field}, {end}, and the learning"
            f" rate is 0 from there on. To learn in all {total} steps, raise {field} to as many"
            f" instead of {spelled(argument('steps'))}."
        ]
        if idle
        else []
    )
