"""Held-out losses: those of a direct forward pass, the same every time, and of the steps that ask
for them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disttrain_cli.data.index.sample_index import Index, held_out
from disttrain_cli.data.indexing.building import build_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.sample_data import write_sample_data
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import LOSS_PREFIX
from disttrain_cli.runtime.evaluation import Evaluation, Standing, loss_fields, schedule
from disttrain_cli.runtime.feeding import to_batch
from disttrain_cli.spec.runfile import Run, RunFile
from disttrain_cli.spec.runfile.model import LossWeights
from disttrain_cli.spec.runfile.train import EvaluationSpec
from disttrain_cli.spec.stage_graph import RankCoords, stage_graph
from tests.runtime.checkpoints.checkpoint_parts import alone
from tests.runtime.factory import plan_of, unit, write_run

SEQUENCES = 8  # two global batches of 6


class OneProcess:
    """An engine as far as an evaluation looks at it: all layers, one after the other."""

    device = torch.device("cpu")

    def __init__(self, run: Run) -> None:
        self.layers = build_layers(run, 0, len(layer_table(run)))
        self.loss_modules = {
            layer.loss: layer.module for layer in self.layers if layer.loss is not None
        }
        self.rows: list[str] = []
        self.tracer = SimpleNamespace(
            mark=lambda: 0,
            begin=lambda *_: None,
            record=lambda operation, *_: self.rows.append(operation),
        )

    def evaluate(self, order: Any, fetch: Any) -> dict[str, float]:
        losses = dict.fromkeys(self.loss_modules, 0.0)
        for slot in range(len(order.slots)):
            for name, value in losses_of(self.layers, fetch(slot)).items():
                losses[name] += value
        return losses


def losses_of(layers: list[Any], batch: Any) -> dict[str, float]:
    """Weighted losses of a batch by name."""
    state: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for layer in layers:
            state.update(layer(state, batch))
    return {
        name.removeprefix(LOSS_PREFIX): float(loss)
        for name, loss in state.items()
        if name.startswith(LOSS_PREFIX)
    }


def mean_losses(run: Run, layers: list[Any], index: Index) -> tuple[float, float]:
    """Means over tokens and images of the first held-out sequences, a whole global batch at a
    time."""
    names = list(dict.fromkeys(info.module for info in layer_table(run)))
    layout = plan_of(run, [unit("all", names, [len(layers)])], 6).plan
    text = image = labels = targets = 0.0
    with Loader(
        run, Orders(run.file, layout, held_out(index)), unit="all", replica=0, fields=fields_of(run)
    ) as loader:
        for step in range(-(-SEQUENCES // 6)):
            order = loader.order(step)
            batch = to_batch(loader.fetch(step, 0), order, torch.device("cpu"), torch.float32)
            found = losses_of(layers, batch)
            text += found["text"] * order.label_tokens / run.file.model.loss_weights.text
            image += found["image"] * order.targets / run.file.model.loss_weights.image
            labels, targets = labels + order.label_tokens, targets + order.targets
    return text / labels, image / targets


def fields_of(run: Run) -> set[str]:
    """What all layers together need of a batch."""
    return {field for info in layer_table(run) for field in info.needs}


@pytest.mark.slow
def test_losses_are_those_of_a_forward_pass_and_the_same_every_time(tmp_path: Path) -> None:
    write_sample_data(tmp_path / "data")
    run = write_run(tmp_path, tmp_path / "data", held_out=0.3)
    index = build_index(run, describe(run))
    engine: Any = OneProcess(run)
    modules = [info.module for info in layer_table(run)]
    layout = plan_of(run, [unit("all", list(dict.fromkeys(modules)), [len(modules)])], 3).plan
    place = stage_graph(layout, "llm").coords(0)
    assert isinstance(place, RankCoords)
    engine.layout, engine.coords = layout, place
    evaluation = Evaluation(
        engine, run, EvaluationSpec(every_steps=3, sequences=SEQUENCES), index, fields_of(run)
    )
    assert [step for step in range(9) if evaluation.due(step)] == [2, 5, 8]
    with alone(tmp_path):
        first, again = evaluation.losses(), evaluation.losses()
    assert first == again and engine.rows == ["evaluation"] * 2
    text, image = mean_losses(run, engine.layers, index)
    assert first["evaluation_loss_text"] == pytest.approx(text, rel=1e-5)
    assert first["evaluation_loss_image"] == pytest.approx(image, rel=1e-5)
    assert first["evaluation_loss"] == pytest.approx(text + 0.5 * image, rel=1e-5)


@pytest.mark.parametrize(
    ("steps", "sequences", "expected"),
    [
        (360, 27.0, (36, 2)),  # 10 × 2 forward passes of 360 steps: 2.5 %
        (360, 3.0, (36, 1)),
        (20, 27.0, (15, 1)),
        (5, 27.0, (15, 1)),  # none
        (100_000, 600.0, (10_000, 100)),
    ],
)
def test_evaluations_take_a_stated_share_of_a_run(
    steps: int, sequences: float, expected: tuple[int, int]
) -> None:
    every, batches = schedule(EvaluationSpec(), steps, 6, sequences)
    assert (every, batches) == expected
    assert steps // every * batches * 0.45 <= 0.03 * steps
    asked = EvaluationSpec(every_steps=5, sequences=13)
    assert schedule(asked, steps, 6, sequences) == (5, 3)
    evaluation = Evaluation.__new__(Evaluation)
    evaluation._steps, evaluation._every, evaluation._batches = steps, every, batches
    engine: Any = SimpleNamespace(layout=SimpleNamespace(global_batch_size=6))
    evaluation._engine = engine
    none = "No evaluation in 5 steps: the first is due after 15"
    assert evaluation.plan.startswith(none if steps == 5 else "Evaluating ")


def test_training_ends_after_evaluations_without_a_lower_loss() -> None:
    evaluation = Evaluation.__new__(Evaluation)
    evaluation.spec, evaluation.standing = EvaluationSpec(stop_after=2), Standing()
    found = [
        (evaluation.take(step, loss), evaluation.stops)
        for step, loss in enumerate([float("nan"), 2.0, 2.5, 1.9, 1.9, float("nan")])
    ]
    assert found == [
        (False, False),
        (True, False),
        (False, False),
        (True, False),
        (False, False),
        (False, True),
    ]
    assert evaluation.standing == Standing(1.9, 3, 2)


def test_several_generators_are_told_apart() -> None:
    """A generator's own weight is taken out of its loss; `loss_image` is the mean, and one
    generator is no list."""
    weights = LossWeights(text=2.0, image=0.5, modules={"refiner": 4.0})
    modules = {"text": "llm", "image": "painter", "image/refiner": "refiner"}
    found = loss_fields(modules, {"text": 6.0, "image": 1.0, "image/refiner": 2.0}, weights)
    assert found == {
        "loss": 9.0,
        "loss_text": 3.0,
        "loss_image": 1.25,
        "generator_losses": {"painter": 2.0, "refiner": 0.5},
    }
    one = loss_fields({"text": "llm", "image": "refiner"}, {"text": 6.0, "image": 2.0}, weights)
    assert one == {"loss": 8.0, "loss_text": 3.0, "loss_image": 0.5}
    assert loss_fields({"text": "llm"}, {"text": 6.0}, weights)["loss_image"] is None


def test_an_evaluation_needs_samples(tmp_path: Path) -> None:
    """That some are held out is known when they are indexed (tests/data/test_validation_split)."""
    run = write_run(tmp_path, tmp_path, evaluation={"every_steps": 1, "sequences": 6})
    content = run.file.model_dump(mode="json", exclude_unset=True)
    content["data"] = {"distribution": {}, "sequence_length": 256}
    with pytest.raises(ValueError, match=r"train.evaluation needs data.sources"):
        RunFile.model_validate(content)
