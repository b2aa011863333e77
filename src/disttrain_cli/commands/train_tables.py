"""Final output of `disttrain train`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disttrain_cli.commands.common import percent
from disttrain_cli.commands.steps import say_drift
from disttrain_cli.naming import short_path
from disttrain_cli.runtime.watching.lines import listed

if TYPE_CHECKING:
    from disttrain_cli.console import Console
    from disttrain_cli.runtime.launching.supervise import Replanned
    from disttrain_cli.runtime.train import TrainResult
    from disttrain_cli.spec.samples import Samples

TABLE_STEPS = 7  # steps shown: the first, the last, and some between
ANSWERS = 12  # shown at most
SLOWER = 1.05  # multiple of the predicted step from which on waiting for cores is reported


def show_result(console: Console, run_file: Path, result: TrainResult) -> None:
    """Print steps, prediction next to measurement, skipped samples and written files."""
    chosen, profile = result.planned
    _show_steps(console, result.steps)
    for step in [step for step in result.steps if "evaluation" in step][-TABLE_STEPS:]:
        console.say(f"Held out, after step {step['step']}: {listed(step['evaluation'])}")
    first = result.replans[-1].step if result.replans else 0
    if steps := [step for step in result.steps if step["step"] >= first]:
        median_s = sorted(step["iteration_s"] for step in steps)[len(steps) // 2]
        predicted_s = chosen.predicted.iteration_s
        console.say(f"\nMedian step {median_s:.3f} s; the plan predicted {predicted_s:.3f} s.")
        if median_s > SLOWER * predicted_s:
            _say_cores(console, steps, median_s, result.other_cores)
    say_drift(console, run_file, profile, chosen, steps, Path(result.run_dir))
    _say_history(console, result)
    _say_files(console, result)
    console.say("\n" + "\n".join(result.learning.lines))


def _show_steps(console: Console, steps: list[dict[str, Any]]) -> None:
    gaps = min(TABLE_STEPS, len(steps)) - 1
    shown = (
        [steps[round(index * (len(steps) - 1) / gaps)] for index in range(gaps + 1)]
        if gaps > 0
        else steps
    )
    losses = [
        name
        for name in (shown[0]["losses"] if shown else ())
        if any(step["losses"][name] is not None for step in shown)
    ]
    console.grid(
        "Steps",
        shown,
        [
            ("step", lambda step: step["step"]),
            ("loss", lambda step: f"{step['loss']:.4f}"),
            *(
                (name, lambda step, name=name: _number(step["losses"][name], ".4f"))
                for name in losses
            ),
            ("grad norm", lambda step: _number(step["grad_norm"], ".3g")),
            ("s per step", lambda step: f"{step['iteration_s']:.3f}"),
            ("sequences/s", lambda step: f"{step['sequences_per_s']:.2f}"),
            ("MFU", lambda step: percent(step["mfu"])),
            ("data wait ms", lambda step: f"{1000 * step['data_wait_s']:.1f}"),
        ],
    )


def _say_cores(
    console: Console, steps: Sequence[dict[str, Any]], median_s: float, other_cores: float | None
) -> None:
    """Print the share of slow steps spent waiting for cores, and the cores of other processes."""
    waits = sorted(step["core_wait_s"] for step in steps if step.get("core_wait_s") is not None)
    wait_s = waits[len(waits) // 2] if waits else 0.0
    if wait_s < (SLOWER - 1) * median_s:
        return
    held = (
        ""
        if other_cores is None
        else (f" Other processes held {other_cores:.1f} of its {os.cpu_count()} cores on average.")
    )
    console.say(
        f"In the median step a runnable rank waited {wait_s:.3f} s"
        f" ({percent(wait_s / median_s)}) for a core of its host.{held}"
    )


def say_replans(console: Console, replans: Sequence[Replanned]) -> None:
    """Print the plans to which a job changed."""
    for one in replans:
        console.say(
            f"From step {one.step} on {one.gpus} devices: {one.layout}, predicted"
            f" {one.predicted_iteration_s:.3f} s per step"
        )


def _say_history(console: Console, result: TrainResult) -> None:
    for why in result.restarts:
        console.say(f"Restarted: {why}")
    say_replans(console, result.replans)
    if result.started_from is not None:
        console.say(f"Started from the weights of {short_path(Path(result.started_from))}")
    if result.resumed_from_step is not None:
        console.say(f"Resumed from step {result.resumed_from_step}")
    for sample in result.skipped_samples[:3]:
        console.say(f"Skipped {sample['sample']}: {sample['reason']}")
    if len(result.skipped_samples) > 3:
        console.say(f"Skipped {len(result.skipped_samples) - 3} more; see the logs folder")


def _say_files(console: Console, result: TrainResult) -> None:
    if result.checkpoint:
        console.say(f"Checkpoint  {short_path(Path(result.checkpoint))}")
    console.say(f"Traces      {short_path(Path(result.trace))}")
    if result.images:
        # one folder for each generator
        folders = dict.fromkeys(short_path(Path(image).parent) for image in result.images)
        console.say(f"Images      {len(result.images)} generated in {' and '.join(folders)}")
    if result.samples:
        _show_answers(console, result.samples)
    if result.samples and (judge := result.samples.judge):
        drawn, written = result.samples.drawn, result.samples.written
        says = (
            [f"{result.samples.recognised} of {len(drawn)} images show what the prompt requested"]
            if drawn
            else []
        )
        says += (
            [f"{result.samples.named} of {len(written)} texts name what the image shows"]
            if written
            else []
        )
        known = judge.accuracy
        right = "" if known is None else f", accuracy {percent(known)} on held-out real images"
        console.say(f"Judged      {'; '.join(says)}\n            ({judge.name}{right})")


def _show_answers(console: Console, samples: Samples) -> None:
    from disttrain_cli.data.sources.samples import printable

    console.table(
        "Answers to held-out conversations",
        ["prompt", "model", "data"],
        [
            [printable(text, 100) for text in (one.prompt, one.text, one.recorded)]
            for one in samples.answers[:ANSWERS]
        ],
    )
    if samples.answers:
        console.say(f"{samples.matched} of {len(samples.answers)} answers match the data exactly")
    means = {name: mean for name, mean in samples.metrics.items() if name != "exact_match"}
    if means:
        said = ", ".join(f"{name} {mean:.3f}" for name, mean in means.items())
        console.say(f"Mean scores of these answers: {said}")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
