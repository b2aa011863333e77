"""Trackers of metrics and samples: TensorBoard, Weights & Biases.

A tracker never stops training: an error is reported once, and the tracker is disabled.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.data.sources.samples import printable
from disttrain_cli.runtime.hooks import Hook, Step
from disttrain_cli.runtime.watching.judged import Judged
from disttrain_cli.spec.extras import install_command
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.samples import FILE, Samples, read_samples

#: Metrics of a step's row, under names that trackers group by.
FIGURES = {
    "loss": "loss/total",
    "loss_text": "loss/text",
    "loss_image": "loss/image",
    "evaluation_loss": "held_out/total",
    "evaluation_loss_text": "held_out/text",
    "evaluation_loss_image": "held_out/image",
    "grad_norm": "train/grad_norm",
    "learning_rate": "train/learning_rate",
    "iteration_s": "speed/iteration_s",
    "mfu": "speed/mfu",
    "sequences_per_s": "speed/sequences_per_s",
    "tokens_per_s": "speed/tokens_per_s",
    "images_per_s": "speed/images_per_s",
    "data_wait_s": "speed/data_wait_s",
    "core_wait_s": "speed/core_wait_s",
    "memory_gib": "memory/peak_gib",
}

MOST_SHOWN, MOST_LETTERS = 24, 300  # limits of images and texts, and of a text's letters

Value = float | str | NDArray[np.uint8]  # a metric, a text in Markdown, an image [H, W, C]
Write = Callable[[int, Mapping[str, Value]], None]


class Tracker:
    """One tracker. `connect` returns functions that write a step's values, and that close it."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], tuple[Write, Callable[[], None]]],
        say: Callable[[str], None],
    ) -> None:
        self._name, self._say = name, say
        self._write: Write | None = None
        self._end: Callable[[], None] = lambda: None
        try:
            self._write, self._end = connect()
        except Exception as error:
            self._give_up(error)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Write values of a step."""
        if self._write is None:
            return
        try:
            self._write(step, values)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Write the remaining values."""
        if self._write is None:
            return
        try:
            self._end()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._write = None
        hint = (
            f"; install it: {install_command(self._name)}" if isinstance(error, ImportError) else ""
        )
        self._say(f"warning: {self._name} gets no figures ({type(error).__name__}: {error}{hint})")


def figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of a step's row, by the names that trackers show."""
    known = {
        FIGURES[key]: float(value)
        for key, value in row.items()
        if key in FIGURES and value is not None and math.isfinite(value)
    }
    known |= {
        f"loss/{module}": float(value)
        for module, value in (row.get("generator_losses") or {}).items()
        if math.isfinite(value)
    }
    known |= {f"experts/{module}": load for module, load in row.get("expert_load", {}).items()}
    known |= {f"data/{name}": weight for name, weight in row.get("data_weights", {}).items()}
    known |= {f"watch/{cause}": float(share) for cause, share in row.get("watch", {}).items()}
    known |= {f"plan/{name}": float(value) for name, value in row.get("plan", {}).items()}
    return known | {
        f"mfu/{unit}": float(value) for unit, value in (row.get("unit_mfu") or {}).items()
    }


def sampled(folder: Path, samples: Samples) -> dict[str, Value]:
    """Return the values that trackers show of a folder's samples.

    Mean scores, the judge's results, texts next to those of the data, and images.
    """
    import cv2

    drawn, written = samples.drawn, [one for one in samples.written if one.recorded is not None]
    values: dict[str, Value] = {f"samples/{name}": mean for name, mean in samples.metrics.items()}
    if samples.judge is not None and drawn:
        values["samples/recognised"] = samples.recognised / len(drawn)
    if samples.judge is not None and written:
        values["samples/named"] = samples.named / len(written)
    for name, rows in (
        ("answers", [(one.prompt, one.text, one.recorded) for one in samples.answers]),
        ("read", [(one.image, one.text, one.recorded) for one in written]),
    ):
        if rows:
            values[f"samples/{name}"] = _table(("asked", "model", "data"), rows)
    for one in drawn[:MOST_SHOWN]:
        pixels = cv2.imread(str(folder / one.file))
        if pixels is not None:
            name = f"{Path(one.file).with_suffix('')}: {printable(one.prompt, MOST_LETTERS)}"
            values[f"drawn/{name}"] = np.ascontiguousarray(pixels[:, :, ::-1])
    return values


def _table(header: Sequence[str], rows: Sequence[Sequence[str | None]]) -> str:
    """Return the first rows as a Markdown table."""
    lines = [header, ["---"] * len(header), *rows[:MOST_SHOWN]]
    cells = [
        [printable(cell or "", MOST_LETTERS).replace("|", "\\|") for cell in row] for row in lines
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


class NewSamples:
    """Samples of checkpoints that are written during training.

    Existing ones at the beginning are of an earlier start.
    """

    def __init__(self, images: Path) -> None:
        self._images, self._seen = images, set(images.glob(f"*/{FILE}"))

    def take(self) -> list[tuple[Path, Samples]]:
        """Return folder and content of the samples that are new since the last call."""
        new = sorted(set(self._images.glob(f"*/{FILE}")) - self._seen)
        self._seen.update(new)
        return [
            (file.parent, samples)
            for file in new
            if (samples := read_samples(file.parent)) is not None
        ]


class Tracking(Hook):
    """Trackers of a job, on rank 0: metrics of every step, verdicts, the plan, new samples."""

    def __init__(
        self,
        trackers: Sequence[Tracker],
        planned: Mapping[str, float],
        judged: Judged,
        new_samples: NewSamples | None,
    ) -> None:
        self._trackers, self._planned = trackers, planned
        self._judged, self._new_samples = judged, new_samples

    def reported(self, step: Step) -> None:
        row = step.row | {"watch": self._judged.lost(), "plan": self._planned}
        values: list[tuple[int, Mapping[str, Value]]] = [(step.number, figures(row))]
        if self._new_samples is not None:
            # at the last step that the sampled weights were trained on: what a resumed start
            # repeats, and trackers drop, begins after it
            values += [
                (max(0, one.step - 1), sampled(folder, one))
                for folder, one in self._new_samples.take()
            ]
        for tracker, (number, shown) in product(self._trackers, values):
            tracker.write(number, shown)

    def __exit__(self, *error: Any) -> None:
        for tracker in self._trackers:
            tracker.close()


def figures_of(plan: Plan) -> dict[str, float]:
    """Return the values that trackers show of a plan, next to the steps that it runs."""
    return {
        "devices": plan.plan.gpus_used,
        "left_out": len(plan.plan.left_out),
        "predicted_iteration_s": plan.predicted.iteration_s,
    }


def trackers_of(run: Run, resumed: int | None, say: Callable[[str], None]) -> list[Tracker]:
    """Return the run file's trackers, in the run's folder.

    Args:
        resumed: step at which this start goes on with the same curves, whose values from there on
            it repeats; None at step 0 of new curves.
    """
    connects = {
        "tensorboard": lambda: _tensorboard(run.dir.tensorboard, resumed),
        "wandb": lambda: _wandb(run, resumed is not None),
    }
    return [Tracker(kind, connects[kind], say) for kind in dict.fromkeys(run.file.train.track)]


def _tensorboard(folder: Path, resumed: int | None) -> tuple[Write, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder), purge_step=resumed)

    def write(step: int, values: Mapping[str, Value]) -> None:
        for name, value in values.items():
            if isinstance(value, str):
                writer.add_text(name, value, step)
            elif isinstance(value, np.ndarray):
                writer.add_image(name, value, step, dataformats="HWC")
            else:
                writer.add_scalar(name, value, step)

    return write, writer.close


def _wandb(run: Run, resume: bool) -> tuple[Write, Callable[[], None]]:
    import wandb

    folder = run.dir.root / "wandb"
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "id"  # so that a resumed run continues there, too
    number = known.read_text() if resume and known.exists() else uuid.uuid4().hex[:12]
    known.write_text(number)
    started = wandb.init(
        project="disttrain",
        name=run.file.name,
        id=number,
        resume="allow",
        dir=str(run.dir.root),
        config=run.file.model_dump(mode="json"),
    )

    def write(step: int, values: Mapping[str, Value]) -> None:
        shown = {
            name: wandb.Image(value) if isinstance(value, np.ndarray) else value
            for name, value in values.items()
        }
        # samples arrive after later steps, and W&B drops values of steps before the last one
        started.log(shown, step=max(step, started.step))

    return write, started.finish
