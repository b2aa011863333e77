"""Ranks of the tests of checkpoints in other layouts: train, save, load elsewhere and go on, in the
same processes."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import torch

from disttrain_cli.costs import buckets
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.models.tying import tied_layers
from disttrain_cli.runtime.checkpoints import checkpoint, origin, storage
from disttrain_cli.runtime.checkpoints.averaging import Average
from disttrain_cli.runtime.engine.assemble import build_engine
from disttrain_cli.runtime.engine.optimizer import set_lrs
from disttrain_cli.runtime.evaluation import Evaluation, world_losses
from disttrain_cli.runtime.feeding import fetcher, message_dtype
from disttrain_cli.runtime.launching.process import joined
from disttrain_cli.runtime.units.routes import place_of
from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.runtime.equivalence_worker import BUCKET_NUMBERS, check_twins

MADE_FROM = {"model": "test"}


def history_of(out: Path, name: str) -> torch.Tensor:
    """Losses and norms of a case by step."""
    return torch.tensor(json.loads((out / name / "history.json").read_text()), dtype=torch.float64)


def before_fork(payload: dict[str, Any]) -> None:
    for case in payload.get("cases", []):
        layer_table(read_run(*case["run"]))


def ranks(payload: dict[str, Any]) -> None:
    """Run the cases one after the other; rank 0 writes what came out of each."""
    buckets.BUCKET_NUMBERS = BUCKET_NUMBERS
    with joined("cpu", 120.0) as device:
        for case in payload["cases"]:
            _train(case, device)


def _train(case: dict[str, Any], device: torch.device) -> None:
    """Steps `first` .. `last` - 1 from the checkpoint `load`, or with the weights of `start`, with
    ones at `save`."""
    run, plan, out = (
        read_run(*case["run"]),
        Plan.model_validate(case["plan"]),
        Path(case["out"]),
    )
    graph = stage_graph(plan.plan, "llm", tied_layers(layer_table(run)))
    place = graph.coords(int(os.environ["RANK"]))
    own = layer_table(run)[place.stage.layers.start : place.stage.layers.stop]
    fields = {field for info in own for field in info.needs}
    tracer = Tracer(out / "traces", "test", place, wall_clock())
    start = Path(case["start"]) if case["start"] else None
    engine = build_engine(
        run, plan, graph, place, device, tracer, origin.given_layers(run, start) if start else ()
    )
    if start is not None:
        origin.start_from(start, engine, run)
    index, dtype = read_index(run, describe(run)), message_dtype(run.file.train)
    spec = run.file.train
    assert spec.ema and spec.evaluation
    average = Average(engine, spec.ema)
    evaluation = Evaluation(engine, run, spec.evaluation, index, fields)
    first, history = 0, []
    if case["load"]:
        first = checkpoint.load(Path(case["load"]), MADE_FROM, engine, average)
    with (
        checkpoint.Saver(out / "checkpoints", MADE_FROM, engine, 3, average) as saver,
        Loader(
            run,
            Orders(run.file, plan.plan, index),
            unit=place.unit.name,
            replica=place.replica,
            fields=fields,
            first_step=first,
        ) as loader,
    ):
        if 0 in case["save"]:
            saver.save(0)
        for step in range(first, case["last"]):
            order = loader.order(step)
            set_lrs(engine.optimizer, engine.train_spec, step)
            engine.run_step(order, fetcher(loader, device, dtype, place_of(place))(order))
            average.update()
            losses = world_losses(engine, run.file.model.loss_weights)
            history.append(
                [
                    losses["loss_text"],
                    losses["loss_image"],
                    engine.grad_norm(),
                    *evaluation.losses().values(),
                ]
            )
            if step + 1 in case["save"]:
                saver.save(step + 1)
    check_twins(engine)
    tracer.close()
    if place.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "history.json").write_text(json.dumps(history))
    engine.stage.destroy()


def killed(payload: dict[str, Any]) -> None:
    """Save, and save again with one rank killed at a stage of writing."""
    from tests.runtime.checkpoints.checkpoint_parts import engine_of

    rank, folder = int(os.environ["RANK"]), Path(payload["folder"])
    with joined("cpu", 60.0):
        engine = engine_of(1, dp=2, replica=rank, zero=True)
        checkpoint.save(folder, 1, MADE_FROM, engine, keep=3)
        if rank == payload["rank"]:
            setattr(storage, payload["stage"], lambda *known: os.kill(os.getpid(), signal.SIGKILL))
        checkpoint.save(folder, 2, MADE_FROM, engine, keep=3)


def opened(payload: dict[str, Any]) -> None:
    """Open the newest checkpoint in another layout than that of `killed`, and clear up."""
    from tests.runtime.checkpoints.checkpoint_parts import engine_of

    with joined("cpu", 60.0):
        engine = engine_of(5)
        assert checkpoint.resume(Path(payload["folder"]), MADE_FROM, engine) == 1
        with checkpoint.Saver(Path(payload["folder"]), MADE_FROM, engine, 3):
            pass
        torch.save(
            [p.detach() for p in engine.module.layers[0].parameters()],
            Path(payload["folder"]).parent / "got",
        )
