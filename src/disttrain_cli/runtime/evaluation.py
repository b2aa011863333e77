"""Losses on held-out data: the forward half of the pipeline over sequences that are never trained on.

The sequences, their noise and their timesteps are the same every time, and whole global batches, so that every layout
computes the same figures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from disttrain_cli.data.index import Index, held_out
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.runtime.feeding import fetcher
from disttrain_cli.runtime.units.topology import Place
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile import EvaluationSpec, LossWeights, Run

if TYPE_CHECKING:
    from disttrain_cli.runtime.engine.engine import UnitEngine


class Evaluation:
    """Evaluates this rank's part of the model, together with all others.

    Args:
        index: of all data, held-out ones included.
        fields: what the layers of the rank's stage need of a batch (`Loader`).
    """

    def __init__(self, run: Run, spec: EvaluationSpec, layout: Layout, index: Index, place: Place,
                 fields: set[str], dtype: torch.dtype) -> None:
        # As packed: what a policy finds for a layout does not matter here, and searches take time.
        train = run.file.train.model_copy(update={"ordering": "none"})
        self._run = run.model_copy(update={"file": run.file.model_copy(update={"train": train})})
        self._layout, self._index, self._place = layout, held_out(index), place
        self._fields, self._dtype = fields, dtype
        self._every = spec.every_steps
        self._batches = -(-spec.sequences // layout.global_batch_size)

    def due(self, step: int) -> bool:
        """Whether there is an evaluation after a step."""
        return (step + 1) % self._every == 0

    def losses(self, engine: UnitEngine) -> dict[str, float]:
        """`evaluation_loss`, `evaluation_loss_text`, `evaluation_loss_image`: means over tokens and images.

        Every rank calls this. It leaves one `evaluation` row in the trace, and the time of no step longer.
        """
        tracer, begun = engine.tracer, engine.tracer.now()
        tracer.begin("evaluation")
        text = image = 0.0
        labels = targets = 0
        orders = Orders(self._run.file, self._layout, self._index)
        with Loader(self._run, orders, unit=self._place.unit.name, replica=self._place.replica,
                    fields=self._fields) as loader:
            fetch_of = fetcher(loader, engine.device, self._dtype)
            for number in range(self._batches):
                order = loader.order(number)
                engine.evaluate(order, fetch_of(order))
                found = world_losses(engine, self._run.file.model.loss_weights)
                text += found["loss_text"] * order.label_tokens
                image += found["loss_image"] * order.targets
                labels, targets = labels + order.label_tokens, targets + order.targets
        text, image = text / max(1, labels), image / max(1, targets)
        weights = self._run.file.model.loss_weights
        tracer.record("evaluation", begun)
        return {"evaluation_loss": weights.text * text + weights.image * image, "evaluation_loss_text": text,
                "evaluation_loss_image": image}


def world_losses(engine: UnitEngine, weights: LossWeights) -> dict[str, float]:
    """Losses of the global batch since the last call: `loss`, and unweighted `loss_text` and `loss_image`."""
    own = engine.runner.take_losses()
    sums = torch.tensor([own.get("text", 0.0), own.get("image", 0.0)], dtype=torch.float64, device=engine.device)
    dist.all_reduce(sums)
    text, image = sums.tolist()
    return {"loss": text + image, "loss_text": text / weights.text if weights.text else 0.0,
            "loss_image": image / weights.image if weights.image else 0.0}
