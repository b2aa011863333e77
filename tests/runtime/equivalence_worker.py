"""Ranks and reference of the equivalence tests: the same steps, once split over ranks and once in
one process."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from disttrain_cli.costs import buckets
from disttrain_cli.data.index.sample_index import read_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.models import library_decoder
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import LOSS_PREFIX
from disttrain_cli.models.tying import copy_of, tie, tied_layers
from disttrain_cli.models.weights import load_into
from disttrain_cli.runtime.checkpoints import checkpoint
from disttrain_cli.runtime.checkpoints import folder as checkpoint_folder
from disttrain_cli.runtime.engine.assemble import build_engine
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.gradients import gradient_flow
from disttrain_cli.runtime.engine.optimizer import (
    groups_of,
    parameter_groups,
    set_lrs,
)
from disttrain_cli.runtime.engine.schedule import learning_rate
from disttrain_cli.runtime.engine.stage import StageRunner
from disttrain_cli.runtime.feeding import fetcher, fields_of, message_dtype, to_batch
from disttrain_cli.runtime.launching.process import joined
from disttrain_cli.runtime.messages.recorder import Recorder
from disttrain_cli.runtime.messages.records import Record
from disttrain_cli.runtime.units import broker, communicators
from disttrain_cli.runtime.units.routes import Route, place_of
from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
from disttrain_cli.spec.plan import Layout, Plan, UnitPlan
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.stage_graph import stage_graph
from tests.commands.conftest import MODULES, make_profile, module_profile

GATHER, WEIGHTS = broker._gather, StageRunner.weights
SLOTWISE = "slotwise"  # begins the names of cases whose weights' parts are computed slot by slot
BUCKET_NUMBERS = 10_000  # the tests' layers have up to 30,000


def _reversed_rows(tensor: torch.Tensor, route: Route) -> torch.Tensor:
    """A broken broker, to show that the comparison notices one."""
    return GATHER(tensor, route).flip(0)


def _slot_by_slot(
    runner: StageRunner, slots: Sequence[int], timed: Callable[[int, str], Callable[[], None]]
) -> None:
    """The weights' parts that are left at the end, not by layer."""
    for slot in slots:
        WEIGHTS(runner, [slot], timed)


def orders_of(run: Run, layout: Layout) -> Orders:
    """The run's orders; costs are made up, for as many layers as the run's modules have."""
    inputs, table = describe(run), [info.module for info in layer_table(run)]
    modules = {
        name: module_profile(kind, ["layer"] * table.count(name), ms_per_token, work)
        for name, (kind, _, ms_per_token, work) in (
            # as folders of whole models name them
            MODULES | dict.fromkeys(("vision", "audio"), MODULES["image_encoder"])
        ).items()
        if name in table
    }
    for cost in (cost for module in modules.values() for cost in module.costs.values()):
        cost.tp.update(dict.fromkeys(("2", "4"), cost.tp["1"]))
    profile = make_profile(run.file).model_copy(update={"inputs": inputs, "modules": modules})
    return Orders(run.file, layout, read_index(run, inputs), profile)


def before_fork(payload: dict[str, Any]) -> None:
    library_decoder.MOST = max(library_decoder.MOST, len(payload["cases"]))
    for case in payload["cases"]:
        layer_table(read_run(*case["run"]))


@contextmanager
def as_over_nccl(record: Path) -> Iterator[None]:
    """Messages in NCCL's order over communicators of their own, and nobody goes on before they have
    been received.

    What gloo sends has left when its receiver has asked for it, so that waiting for it is waiting
    for the receiver.
    """
    stock = dist.batch_isend_irecv

    def blocking(operations: list[dist.P2POp]) -> list[dist.Work]:
        works = stock(operations)
        for work in works:
            work.wait()
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "in_order", lambda: True)
        patch.setattr(dist, "batch_isend_irecv", blocking)
        with Recorder(dist.get_rank()) as recorder:
            yield
    record.mkdir(parents=True, exist_ok=True)
    (record / f"{dist.get_rank()}.json").write_text(json.dumps(recorder.record.to_json()))


def recorded(out: Path) -> list[Record]:
    """What the ranks of a case sent, received and joined `as_over_nccl`."""
    return [
        Record.of_json(json.loads(path.read_text())) for path in sorted((out / "records").iterdir())
    ]


def _in_turn(cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The cases one after the other; while one with "in order" is trained, messages are
    `as_over_nccl`."""
    for case in cases:
        with as_over_nccl(Path(case["out"]) / "records") if case.get("in order") else nullcontext():
            yield case


def ranks(payload: dict[str, Any]) -> None:
    """Run several layouts, one after the other, in the same processes; rank 0 writes losses and
    norms of each."""
    buckets.BUCKET_NUMBERS = BUCKET_NUMBERS
    with joined("cpu", 120.0) as device:
        for case in _in_turn(payload["cases"]):
            run = read_run(*case["run"])
            plan = Plan.model_validate(case["plan"])
            graph = stage_graph(plan.plan, "llm", tied_layers(layer_table(run)))
            place = graph.coords(int(os.environ["RANK"]))
            table = layer_table(run)
            out = Path(case["out"])
            broker._gather = _reversed_rows if case["name"] == "faulty" else GATHER
            slotwise = case["name"].startswith(SLOTWISE)
            StageRunner.weights = _slot_by_slot if slotwise else WEIGHTS  # type: ignore[method-assign]
            tracer = Tracer(out / "traces", "test", place, wall_clock())
            engine = build_engine(run, plan, graph, place, device, tracer)
            dtype = message_dtype(run.file.train)
            history, first, origin = [], 0, case.get("origin")
            made_from = checkpoint_folder.model_of(run)
            if origin is not None:
                first = checkpoint.resume(Path(origin) / "checkpoints", made_from, engine)
            orders = orders_of(run, plan.plan)
            with Loader(
                run,
                orders,
                unit=place.unit.name,
                replica=place.replica,
                fields=fields_of([table[layer] for layer in place.layers], place.unit),
            ) as loader:
                for step in range(first, first + case["steps"]):
                    tracer.step, order = step, loader.order(step)
                    set_lrs(engine.optimizer, engine.train_spec, step)
                    engine.run_step(order, fetcher(loader, device, dtype, place_of(place))(order))
                    history.append([*engine.step_losses.values(), engine.grad_norm()])
                    check_experts(engine, run)
            check_twins(engine)
            last = first + case["steps"]
            checkpoint.save(out / "checkpoints", last, made_from, engine, keep=1)
            engine.tracer.close()
            if place.rank == 0:
                (out / "history.json").write_text(json.dumps(history))
            engine.stage.destroy()


def check_experts(engine: UnitEngine, run: Run) -> None:
    """That every row of a step was counted at the experts that it chooses, one or two, once."""
    tokens = run.file.train.global_batch_size * run.file.data.sequence_length
    for rows in engine.expert_rows.last.values():
        assert sum(rows) in (tokens, 2 * tokens), rows


def check_twins(engine: UnitEngine) -> None:
    """That both copies of a tied weight, and what the optimizers keep of them, are equal bit by
    bit."""
    twins = engine.grid.twins
    if twins is None:
        return
    engine.settle()
    copies = [p.detach() for p in engine.module.parameters() if copy_of(p)]
    masters = [p for group in groups_of(engine.optimizer) if group["copy"] for p in group["params"]]
    states = [engine.basic_optimizer.state[master] for master in masters]
    for tensor in [*copies, *masters, *(value for state in states for value in state.values())]:
        least, most = tensor.detach().float().clone(), tensor.detach().float().clone()
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=twins)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=twins)
        assert torch.equal(least, most)


def check_equals(
    out: Path, history: list[list[float]], parameters: dict[str, torch.Tensor]
) -> None:
    """Losses, norms and last weights that ranks left in `out` are those of one process
    (`reference`)."""
    folder = checkpoint_folder.latest(out / "checkpoints")
    assert folder is not None
    found, weights = json.loads((out / "history.json").read_text()), checkpoint.read_tensors(folder)
    assert torch.allclose(torch.tensor(found), torch.tensor(history), rtol=1e-5, atol=1e-5)
    for key, expected in parameters.items():
        assert torch.allclose(weights[f"weight/{key}"], expected, rtol=1e-5, atol=1e-5), key


def reference(
    run: Run, steps: int, left_out: int | None = None
) -> tuple[list[list[float]], dict[str, torch.Tensor], list[Any]]:
    """The same steps in this process: losses and norms per step, final parameters, and the orders
    used.

    Step `left_out` changes nothing.
    """
    layers = build_layers(run, 0, len(layer_table(run)))
    load_into(layers, run)
    tie(layers, layer_table(run))
    gradient_flow(layer_table(run), run.file.model.trained).mark(layers, 0)
    parameters = checkpoint.named_parameters(layers)
    spec = run.file.train.optimizer
    optimizer = torch.optim.AdamW(parameter_groups(layers, spec), betas=spec.betas, eps=spec.eps)
    batch_size = run.file.train.global_batch_size
    unit = UnitPlan(
        name="all", modules=run.file.model.order, gpus=1, layers_per_stage=[len(layers)]
    )
    layout = Layout(
        global_batch_size=batch_size,
        microbatch_size=batch_size,
        microbatches=1,
        gpus_used=1,
        units=[unit],
    )
    history, orders = [], []
    with Loader(
        run,
        Orders(run.file, layout, read_index(run, describe(run))),
        unit="all",
        replica=0,
        fields={field for layer in layers for field in layer.needs},
    ) as loader:
        for step in range(steps):
            order = loader.order(step)
            orders.append(order)
            state: dict[str, torch.Tensor] = {}
            batch = to_batch(loader.fetch(step, 0), order, torch.device("cpu"), torch.float32)
            for layer in layers:
                state.update(layer(state, batch))
            losses = {name: loss for name, loss in state.items() if name.startswith(LOSS_PREFIX)}
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(run.file.train, group["module"], step)
            optimizer.zero_grad()
            torch.stack(list(losses.values())).sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(
                [p for _, p in parameters], run.file.train.gradient_clipping
            )
            if step != left_out:
                optimizer.step()
            history.append([*(float(loss.detach()) for loss in losses.values()), float(norm)])
    return history, {name: p.detach().clone() for name, p in parameters}, orders
