"""Construction of a rank's engine: its layers, brokers, optimizer and DeepSpeed configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from typing import Any

import torch

from disttrain_cli.models.adapters import load_adapters
from disttrain_cli.models.experts import count_rows, join_experts
from disttrain_cli.models.graph import LayerInfo, build_layers, layer_table, live_tensors
from disttrain_cli.models.layer import PipelineLayer, TensorSpec
from disttrain_cli.models.replicated import replicate
from disttrain_cli.models.symmetric import agreed
from disttrain_cli.models.tensor_parallel import join
from disttrain_cli.models.tying import copy_of, tie
from disttrain_cli.models.weight_parts import split
from disttrain_cli.models.weights import load_into
from disttrain_cli.runtime.engine.deepspeed import StageEngine
from disttrain_cli.runtime.engine.engine import Chunk, UnitEngine
from disttrain_cli.runtime.engine.expert_rows import ExpertRows
from disttrain_cli.runtime.engine.faults import Sums, out_of_memory
from disttrain_cli.runtime.engine.gradients import gradient_flow
from disttrain_cli.runtime.engine.optimizer import make_optimizer
from disttrain_cli.runtime.engine.stage import StageRunner, build_segments
from disttrain_cli.runtime.feeding import message_dtype
from disttrain_cli.runtime.units.broker import Broker, together
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.model import PROJECTORS
from disttrain_cli.spec.runfile.train import TrainSpec
from disttrain_cli.spec.stage_graph import RankCoords, Stage, StageGraph


def build_engine(
    run: Run,
    plan: Plan,
    graph: StageGraph,
    coords: RankCoords,
    device: torch.device,
    tracer: Tracer,
    given: Collection[str] = (),
    grid: UnitGrid | None = None,
    built: Callable[[], None] = lambda: None,
) -> UnitEngine:
    """Build this rank's layers with their initial weights, and the DeepSpeed engine around them.

    Args:
        given: names of layers whose weights are set afterwards, so that their folders are not read.
        grid: the rank's process groups, if they exist already.
        built: called when the layers exist, before the engine communicates with other ranks.

    Raises:
        SpecError: published weights do not fit the model.
        OutOfMemoryError: the device has not enough memory for the stage.
    """
    with out_of_memory(coords, plan.plan, "start", -1):
        return _build_engine(
            run, plan, graph, coords, device, tracer, given, grid or UnitGrid(graph, coords), built
        )


def _build_engine(
    run: Run,
    plan: Plan,
    graph: StageGraph,
    coords: RankCoords,
    device: torch.device,
    tracer: Tracer,
    given: Collection[str],
    grid: UnitGrid,
    built: Callable[[], None],
) -> UnitEngine:
    table, stage = layer_table(run), coords.stage
    places = [replace(coords, stage=one, later=()) for one in coords.stages]
    layers_of = [
        build_layers(
            run,
            place.stage.layers.start,
            place.stage.layers.stop,
            device=device,
            tp=stage.tp,
            tp_rank=coords.tp_rank,
            ep=stage.ep,
            ep_rank=coords.ep_rank,
            module_tp=coords.unit.module_tp,
        )
        for place in places
    ]
    layers = [layer for of_stage in layers_of for layer in of_stage]
    tie(layers, table)
    apart = any(copy_of(parameter) for layer in layers for parameter in layer.parameters())
    assert apart == (grid.twins is not None), "the graph knows of tied weights"
    own = [layer for layer in layers if layer.name not in given]
    for note in load_into(own, run) + load_adapters(own, run):
        print(note, flush=True)
    tp, cp, ep = (
        group and replace(group, exchanging=tracer.exchanging)
        for group in (agreed(grid.tp, device), grid.cp, grid.ep)
    )
    ep = ep and replace(ep, nodes=stage.ep_nodes(run.file.cluster.gpus_per_node))
    for layer in layers:
        if layer.module in coords.unit.module_tp:
            replicate(layer)
        else:
            join(layer, tp, cp)
        join_experts(layer, ep)
    flow = gradient_flow(table, run.file.model.trained)
    for place, of_stage in zip(places, layers_of, strict=True):
        flow.mark(of_stage, place.stage.layers.start)
    deferring = stage.weight_delay is not None
    if deferring:
        for layer in layers:
            split(layer)
    sums, losses = Sums([*run.file.model.order, PROJECTORS]), dict[str, torch.Tensor]()
    dtype = message_dtype(run.file.train)
    chunks = []
    for place, of_stage in zip(places, layers_of, strict=True):
        links = brokers(graph, place, table, dtype, device, flow.carrying.__getitem__, grid)
        runner = StageRunner(
            build_segments(
                of_stage,
                place.stage.layers.start,
                partial(live_at, table, place.stage),
                flow.carrying.__getitem__,
            ),
            recompute=coords.unit.checkpointing,
            sums=sums,
            losses=losses,
            deferring=deferring,
            tp=tp,
        )
        chunks.append(Chunk(runner, *map(together, links)))
    built()
    engine = UnitEngine(
        **engine_parts(run, plan.plan, grid, coords, layers), chunks=chunks, tracer=tracer
    )
    engine.expert_rows = ExpertRows(
        {number: info.experts for number, info in enumerate(table) if info.experts},
        {
            number: rows_E
            for number, layer in zip(coords.layers, layers, strict=True)
            if (rows_E := count_rows(layer, device)) is not None
        },
    )
    if engine.optimizer is None:  # else DeepSpeed has cast the module
        engine.module.to(dtype)
    return engine


def brokers(
    graph: StageGraph,
    coords: RankCoords,
    table: list[LayerInfo],
    dtype: torch.dtype,
    device: torch.device,
    carrying: Callable[[int], frozenset[str]] | None = None,
    grid: UnitGrid | None = None,
) -> tuple[list[Broker], list[Broker]]:
    """Return the brokers to the previous and the next stages of a rank's stage.

    `carrying(cut)` names the tensors whose gradients return over a cut (None: all of them);
    messages for which `grid` has no communicator use the world's.
    """
    stage, ways = coords.stage, {} if grid is None else grid.ways

    def crossing(before: Stage, after: Stage) -> tuple[list[TensorSpec], list[TensorSpec]]:
        cut = after.layers.start
        specs = live_tensors(table, cut, before.parallel | after.parallel)
        return specs, [spec for spec in specs if carrying is None or spec.name in carrying(cut)]

    def between(neighbour: Stage, sends: list[TensorSpec], receives: list[TensorSpec]) -> Broker:
        here, there = stage.number, neighbour.number
        return Broker(
            coords,
            neighbour,
            sends,
            receives,
            dtype,
            device,
            None if grid is None else grid.tp,
            None if grid is None else grid.cp,
            leaving=ways.get((here, there)),
            coming=ways.get((there, here)),
        )

    upstream, downstream = list[Broker](), list[Broker]()
    for neighbour in (graph.stages[number] for number in stage.before):
        activations, gradients = crossing(neighbour, stage)
        upstream.append(between(neighbour, gradients, activations))
    for neighbour in (graph.stages[number] for number in stage.after):
        activations, gradients = crossing(stage, neighbour)
        downstream.append(between(neighbour, activations, gradients))
    return upstream, downstream


def live_at(table: list[LayerInfo], stage: Stage, cut: int) -> list[TensorSpec]:
    """Return the state tensors of a stage's line that cross a cut inside it or at its ends."""
    return live_tensors(table, cut, stage.parallel)


def engine_parts(
    run: Run, layout: Layout, grid: UnitGrid, coords: RankCoords, layers: Sequence[PipelineLayer]
) -> dict[str, Any]:
    """Return the arguments of `UnitEngine` other than chunks and tracer."""
    train = run.file.train
    optimizer = make_optimizer(layers, train.optimizer)
    config = deepspeed_config(train, layout, optimizer is not None, dp=coords.unit.dp_cp_size)
    return {
        "stage": StageEngine(layers, grid, optimizer, config, layout.overlap),
        "coords": coords,
        "layout": layout,
        "train_spec": train,
        "loss_modules": {
            info.loss: info.module for info in layer_table(run) if info.loss is not None
        },
        "trained": run.file.model.trained_names,
    }


def deepspeed_config(
    train: TrainSpec, layout: Layout, trains: bool = True, *, dp: int
) -> dict[str, Any]:
    """Return the DeepSpeed configuration of one stage: the template with this run's numbers.

    micro batch 1 and train batch DP · slots satisfy DeepSpeed's assertions for any split of a slot.
    DeepSpeed neither computes norms nor clips (the engine does), partitions nothing where there is
    one replica (fp32), and optimizes nothing where the stage does not train.
    """
    config: dict[str, Any] = json.loads(
        (files("disttrain_cli") / "templates" / "deepspeed.json").read_text()
    )
    config["train_batch_size"] = dp * layout.microbatches
    config["gradient_accumulation_steps"] = layout.microbatches
    if trains and train.precision == "bf16":
        config["zero_optimization"]["stage"] = 1
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif trains and layout.zero_stage == 1 and dp > 1:
        config["zero_optimization"]["stage"] = 1
    return config
