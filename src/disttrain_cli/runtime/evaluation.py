"""Losses on held-out data: forwards over sequences that are never trained on.

The sequences, their noise and their timesteps are the same every time, and whole global batches, so
that every layout computes the same losses.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from disttrain_cli.data.index.sample_index import Index, held_out
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.runtime.feeding import fetcher, message_dtype
from disttrain_cli.runtime.hooks import Hook, Step
from disttrain_cli.runtime.units.routes import place_of
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import LossWeights
from disttrain_cli.spec.runfile.train import EvaluationSpec

if TYPE_CHECKING:
    from disttrain_cli.runtime.engine.engine import UnitEngine

#: Defaults: share of a run's time for evaluations, and their maximum number; and the cost of an
#: evaluation batch in training steps: a third by FLOPs, 0.47 measured with its loading on two
#: cores (preset tiny).
SHARE, OFTEN, FORWARD = 0.03, 10, 0.45
TEXT = "text"  # the loss of the LLM; all others are of generators


@dataclass(frozen=True)
class Standing:
    """Lowest held-out loss so far."""

    loss: float | None = None
    step: int = -1
    since: int = 0  # number of evaluations after it


def schedule(spec: EvaluationSpec, steps: int, batch: int, sequences: float) -> tuple[int, int]:
    """Return (steps between evaluations, global batches of each) for a run of `steps` steps.

    Args:
        sequences: approximate number of packed sequences of the held-out data.
    """
    if spec.sequences == "auto":
        affordable = int(SHARE / FORWARD * steps / OFTEN)
        batches = max(1, min(affordable, math.ceil(sequences / batch)))
    else:
        batches = -(-spec.sequences // batch)
    if spec.every_steps == "auto":
        return max(
            math.ceil(steps / OFTEN), math.ceil(round(batches * FORWARD / SHARE, 6))
        ), batches
    return spec.every_steps, batches


class Evaluation(Hook):
    """Evaluation of this rank's part of the model, together with all other ranks.

    Args:
        index: of all data, held-out samples included.
        fields: batch fields that the layers of the rank's stage need (`Loader`).
        steps: total training steps of the run.
        before: lowest loss of earlier starts.
    """

    def __init__(
        self,
        engine: UnitEngine,
        run: Run,
        spec: EvaluationSpec,
        index: Index,
        fields: set[str],
        steps: int | None = None,
        before: Standing | None = None,
    ) -> None:
        # No ordering policy: its balance does not matter here, and its search takes time.
        train = run.file.train.model_copy(update={"ordering": "none"})
        self._run = run.model_copy(update={"file": run.file.model_copy(update={"train": train})})
        self._engine, self._index, self._fields = engine, held_out(index), fields
        self.spec = spec
        kept = self._index.chosen
        assert kept is not None, "some are held out"
        self._steps = steps if steps is not None else run.file.train.total_steps
        self._every, self._batches = schedule(
            spec,
            self._steps,
            engine.layout.global_batch_size,
            int(self._index.lengths @ kept) / index.inputs.sequence_length,
        )
        self.standing = before or Standing()

    @property
    def plan(self) -> str:
        """Sentence for the user: when it evaluates how much, and at what cost."""
        if self._every > self._steps:
            return (
                f"No evaluation in {self._steps:,} steps: the first is due after"
                f" {self._every:,} (train.evaluation.every_steps)"
            )
        share = self._batches * FORWARD / self._every
        sequences = self._batches * self._engine.layout.global_batch_size
        return (
            f"Evaluating {sequences} held-out sequences every"
            f" {self._every:,} steps: about {100 * share:.2g} % of the run"
        )

    def ended(self, step: Step) -> None:
        """Evaluate if it is due; request a checkpoint of the lowest loss, or the end."""
        if self.due(step.number):
            losses = self.losses()
            best = self.take(step.number, losses["evaluation_loss"])
            step.row |= losses
            step.about["held_out_loss"] = losses["evaluation_loss"]
            step.saves |= best and self.spec.keep_best
        step.about["held_out"] = asdict(self.standing)
        if self.stops and not step.last:
            step.ends = (
                f"Training ends after step {step.number + 1:,}: the held-out loss has not fallen in"
                f" {self.standing.since} evaluations since step {self.standing.step:,};"
                " train.evaluation.stop_after."
            )

    def due(self, step: int) -> bool:
        """Return True if an evaluation follows a step."""
        last = self.spec.every_steps == "auto" and step + 1 == self._steps >= self._every
        return last or (step + 1) % self._every == 0

    def take(self, step: int, loss: float) -> bool:
        """Record the loss after a step; return True if it is the lowest so far."""
        lowest = math.inf if self.standing.loss is None else self.standing.loss
        best = loss < lowest
        self.standing = (
            Standing(loss, step) if best else replace(self.standing, since=self.standing.since + 1)
        )
        return best

    @property
    def stops(self) -> bool:
        """True if the loss has not fallen for `stop_after` evaluations."""
        return 0 < self.spec.stop_after <= self.standing.since

    def losses(self) -> dict[str, Any]:
        """Return the `loss_fields` of the held-out batches, under names with `evaluation_`.

        Losses are means over tokens and images. Every rank calls this. It adds one `evaluation` row
        to the trace, outside the time of any step.
        """
        engine, coords = self._engine, self._engine.coords
        tracer, begun = engine.tracer, engine.tracer.mark()
        tracer.begin("evaluation")
        weights = self._run.file.model.loss_weights
        totals, counts = (
            dict.fromkeys(engine.loss_modules, 0.0),
            dict.fromkeys(engine.loss_modules, 0),
        )
        orders = Orders(self._run.file, engine.layout, self._index)
        with Loader(
            self._run,
            orders,
            unit=coords.unit.name,
            replica=coords.replica,
            fields=self._fields,
        ) as loader:
            dtype = message_dtype(self._run.file.train)
            fetch_of = fetcher(loader, engine.device, dtype, place_of(coords))
            for number in range(self._batches):
                order = loader.order(number)
                for name, loss in engine.evaluate(order, fetch_of(order)).items():
                    count = order.label_tokens if name == TEXT else order.targets
                    totals[name], counts[name] = totals[name] + loss * count, counts[name] + count
        tracer.record("evaluation", begun)
        means = {name: total / max(1, counts[name]) for name, total in totals.items()}
        return {
            f"evaluation_{key}": value
            for key, value in loss_fields(engine.loss_modules, means, weights).items()
        }


def world_losses(engine: UnitEngine, weights: LossWeights) -> dict[str, Any]:
    """Return the losses of the last step's global batch, as `loss_fields`."""
    return loss_fields(engine.loss_modules, engine.step_losses, weights)


def loss_fields(
    modules: dict[str, str], losses: dict[str, float], weights: LossWeights
) -> dict[str, Any]:
    """Return the reported losses: weighted sum `loss`, unweighted `loss_text` and `loss_image`.

    Without a generator `loss_image` is None; with several it is their mean, and `generator_losses`
    has each by module.

    Args:
        modules: module that computes each loss, by name of the loss.
        losses: weighted losses by name.
    """
    weight = {
        name: weights.text if name == TEXT else weights.of(module)
        for name, module in modules.items()
    }
    plain = {name: loss / weight[name] if weight[name] else 0.0 for name, loss in losses.items()}
    images = {modules[name]: loss for name, loss in plain.items() if name != TEXT}
    values = {
        "loss": sum(losses.values()),
        "loss_text": plain.get(TEXT, 0.0),
        "loss_image": sum(images.values()) / len(images) if images else None,
    }
    return values if len(images) < 2 else values | {"generator_losses": images}
