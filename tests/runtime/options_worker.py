"""Ranks of the tests of training options: several runs and layouts, one after the other, in the
same processes."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from disttrain_cli.costs import buckets
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime.engine.assemble import build_engine
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.faults import NotFiniteError
from disttrain_cli.runtime.engine.optimizer import set_lrs
from disttrain_cli.runtime.feeding import fetcher, message_dtype
from disttrain_cli.runtime.launching.process import joined
from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.batches import changed
from tests.runtime.equivalence_worker import BUCKET_NUMBERS


class CountingTracer(Tracer):
    """Keeps how often every operation was recorded, and the bytes it moved."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.counts: Counter[str] = Counter()

    def record(self, operation: str, start: Any, end: Any = None, **amounts: Any) -> None:
        self.counts[operation] += 1
        super().record(operation, start, end, **amounts)


def before_fork(payload: dict[str, Any]) -> None:
    for case in payload["cases"]:
        layer_table(read_run(*case["run"]))


def ranks(payload: dict[str, Any]) -> None:
    """Train every case; rank 0 writes losses and norms, the first replica of every stage its
    weights, all a summary."""
    buckets.BUCKET_NUMBERS = BUCKET_NUMBERS
    with joined("cpu", 120.0) as device:
        for case in payload["cases"]:
            _train(case, device)


def _train(case: dict[str, Any], device: torch.device) -> None:
    run, plan, out = (
        read_run(*case["run"]),
        Plan.model_validate(case["plan"]),
        Path(case["out"]),
    )
    table = layer_table(run)
    graph = stage_graph(plan.plan, "llm")
    place = graph.coords(int(os.environ["RANK"]))
    own = table[place.stage.layers.start : place.stage.layers.stop]
    tracer = CountingTracer(out / "traces", "test", place, wall_clock())
    engine = build_engine(run, plan, graph, place, device, tracer)
    history, stopped = [], ""
    with Loader(
        run,
        Orders(run.file, plan.plan, read_index(run, describe(run))),
        unit=place.unit.name,
        replica=place.replica,
        fields={field for info in own for field in info.needs},
    ) as loader:
        fetch_of = fetcher(loader, device, message_dtype(run.file.train))
        for step in range(case["steps"]):
            order = loader.order(step)
            set_lrs(engine.optimizer, engine.train_spec, step)
            fetch = fetch_of(order)
            try:
                engine.run_step(
                    order,
                    (lambda slot, f=fetch: _spoilt(f(slot))) if step == case["spoilt"] else fetch,
                )
            except NotFiniteError as error:
                stopped = str(error)
                break
            history.append([*engine.step_losses.values(), engine.grad_norm()])
    out.mkdir(parents=True, exist_ok=True)
    if place.rank == 0:
        (out / "history.json").write_text(json.dumps(history))
    engine.settle()
    if place.replica == 0 and place.tp_rank == 0:
        save_file(
            {
                f"{layer.name}/{name}": p.detach().clone()
                for layer in engine.module.layers
                for name, p in layer.named_parameters()
            },
            out / f"stage-{place.stage.number}.safetensors",
        )
    summary = {
        "unit": place.unit.name,
        "counts": tracer.counts,
        "stopped": stopped,
        "skipped": engine.skipped_steps,
        **_held(engine),
    }
    (out / f"rank-{place.rank}.json").write_text(json.dumps(summary))
    tracer.close()
    engine.stage.destroy()


def _held(engine: UnitEngine) -> dict[str, Any]:
    """What a rank holds beside its weights."""
    states = engine.basic_optimizer.state.values() if engine.stage.basic_optimizer else []
    moments = [moment for state in states for key, moment in state.items() if key != "step"]
    return {
        "moments": sum(moment.numel() for moment in moments),
        "gradients": sum(p.grad is not None for p in engine.module.parameters()),
        "frozen": sum(not p.requires_grad for p in engine.module.parameters()),
    }


def _spoilt(batch: Batch) -> Batch:
    """Pixels that are no numbers."""
    values = batch.of("image").values
    spoilt = {number: [p * torch.nan for p in blocks] for number, blocks in values.items()}
    return changed(batch, "image", values=spoilt)
