"""Text lines of training steps, for the command or the output of externally started ranks."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from disttrain_cli.runtime.hooks import Hook, Step

LINE_EVERY_S = 5.0
#: Optional values of a step, and their format in a line.
FIGURES = {
    "learning_rate": "lr {:.2e}",
    "tokens_per_s": "{:.0f} tokens/s",
    "images_per_s": "{:.1f} images/s",
    "memory_gib": "{:.2f} GiB",
}


def reported(row: dict[str, Any]) -> dict[str, Any]:
    """Return a step's row, as rank 0 reports it, under the names of `train --json`."""
    step = {
        "step": row["step"],
        "loss": row["loss"],
        "losses": {
            "text": row["loss_text"],
            "image": row["loss_image"],
            **row.get("generator_losses", {}),
        },
        **{
            key: row[key]
            for key in (
                "grad_norm",
                "iteration_s",
                "sequences_per_s",
                "mfu",
                "data_wait_s",
                "tokens",
                "images",
                "targets",
            )
        },
        **{key: row[key] for key in (*FIGURES, "unit_mfu", "core_wait_s") if key in row},
    }
    if "evaluation_loss" in row:
        step["evaluation"] = {
            "text": row["evaluation_loss_text"],
            "image": row["evaluation_loss_image"],
            **row.get("evaluation_generator_losses", {}),
        }
    return step


class StepLines:
    """Formatter of steps as lines, each with the latest losses on held-out data.

    A rehearsal does not learn and has no losses.
    """

    def __init__(self, learns: bool = True) -> None:
        self._learns = learns
        self._held_out: list[str] = []

    def of(self, step: dict[str, Any]) -> str:
        """Return the line of a step (`reported`)."""
        learned = [f"loss {step['loss']:.4f} ({listed(step['losses'])})"] if self._learns else []
        if "evaluation" in step:
            self._held_out = [f"held out {listed(step['evaluation'])} after step {step['step']}"]
        norm = "–" if step.get("grad_norm") is None else format(step["grad_norm"], ".3g")
        return "  ".join(
            [
                *learned,
                *self._held_out,
                f"{step['iteration_s']:.3f} s per step",
                f"{step['sequences_per_s']:.2f} sequences/s",
                "MFU –" if step["mfu"] is None else f"MFU {100 * step['mfu']:.1f} %",
                *(
                    form.format(step[name])
                    for name, form in FIGURES.items()
                    if step.get(name) is not None
                ),
                f"data wait {1000 * step['data_wait_s']:.0f} ms",
                *([f"grad norm {norm}"] if self._learns else []),
            ]
        )


class Narration(Hook):
    """Writer of step lines and notes to an open file of the terminal or job log."""

    def __init__(self, descriptor: int, total: int) -> None:
        self._descriptor, self._total = descriptor, total
        self._lines, self._said_s = StepLines(), -LINE_EVERY_S

    def reported(self, step: Step) -> None:
        """Write a step's line if it is the first, the last, or due (`LINE_EVERY_S`)."""
        line, done = self._lines.of(reported(step.row)), step.number + 1
        if done == self._total or time.monotonic() - self._said_s >= LINE_EVERY_S:
            self._said_s = time.monotonic()
            self.say(f"training  {line}  {done}/{self._total}")

    def say(self, text: str) -> None:
        """Write a line; errors, as of a closed terminal, are ignored."""
        with suppress(OSError):
            os.write(self._descriptor, f"{text}\n".encode())


def listed(losses: dict[str, float | None]) -> str:
    """Return losses by name, omitting missing ones."""
    return ", ".join(f"{name} {value:.4f}" for name, value in losses.items() if value is not None)
