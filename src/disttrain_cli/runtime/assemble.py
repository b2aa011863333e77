"""From a plan and a place to a running engine: this rank's layers, brokers, optimizer and DeepSpeed configuration."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from disttrain_cli.models.graph import LayerInfo, build_layers, layer_table, live_tensors
from disttrain_cli.models.layer import PipelineLayer
from disttrain_cli.runtime.broker import Broker
from disttrain_cli.runtime.engine import StageModule, UnitEngine
from disttrain_cli.runtime.grid import UnitGrid
from disttrain_cli.runtime.stage import StageRunner, build_segments
from disttrain_cli.runtime.topology import Place, Topology
from disttrain_cli.runtime.tracing import Tracer
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.runfile import Run, TrainSpec


def build_engine(run: Run, plan: Plan, topology: Topology, place: Place, device: torch.device,
                 tracer: Tracer) -> UnitEngine:
    """Build this rank's layers and the DeepSpeed engine around them."""
    table, stage = layer_table(run), place.stage
    layers = build_layers(run, stage.layers.start, stage.layers.stop, device=device)
    upstream, downstream = brokers(topology, place, table, message_dtype(run.file.train), device)
    runner = StageRunner(build_segments(layers, stage.layers.start, lambda cut: live_tensors(table, cut)))
    return UnitEngine(**engine_parts(run, plan.plan, topology, place, layers), runner=runner, upstream=upstream,
                      downstream=downstream, tracer=tracer)


def message_dtype(train: TrainSpec) -> torch.dtype:
    """Precision of what ranks send each other."""
    return torch.bfloat16 if train.precision == "bf16" else torch.float32


def brokers(topology: Topology, place: Place, table: list[LayerInfo], dtype: torch.dtype,
            device: torch.device) -> tuple[Broker | None, Broker | None]:
    """Brokers to the stages before and after a rank's own, where there are any."""
    stage = place.stage
    upstream = downstream = None
    if stage.number > 0:
        upstream = Broker(place, topology.stages[stage.number - 1], live_tensors(table, stage.layers.start),
                          dtype, device)
    if stage.number + 1 < len(topology.stages):
        downstream = Broker(place, topology.stages[stage.number + 1], live_tensors(table, stage.layers.stop),
                            dtype, device)
    return upstream, downstream


def engine_parts(run: Run, layout: Layout, topology: Topology, place: Place,
                 layers: Sequence[PipelineLayer]) -> dict[str, Any]:
    """What an engine is made of besides its runner, brokers and tracer: module, optimizer, configuration."""
    train = run.file.train
    module = StageModule(layers, UnitGrid(topology, place), place)
    on_cuda = any(p.is_cuda for p in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters(), lr=train.optimizer.lr, betas=train.optimizer.betas,
                                  eps=train.optimizer.eps, weight_decay=train.optimizer.weight_decay,
                                  fused=(on_cuda and layout.zero_stage == 0) or None)
    return {"module": module, "optimizer": optimizer, "config": deepspeed_config(train, layout, place.unit.dp),
            "place": place, "module_kinds": {name: spec.kind for name, spec in run.file.model.modules.items()}}


def deepspeed_config(train: TrainSpec, layout: Layout, dp: int) -> dict[str, Any]:
    """The DeepSpeed configuration of one unit: `template.json` with the numbers of this run filled in.

    micro batch 1 and train batch DP · slots satisfy its assertions for any split of a slot.
    """
    config: dict[str, Any] = json.loads((files("disttrain_cli") / "templates" / "deepspeed.json").read_text())
    config["train_batch_size"] = dp * layout.microbatches
    config["gradient_accumulation_steps"] = layout.microbatches
    config["gradient_clipping"] = train.gradient_clipping
    config["zero_optimization"]["stage"] = layout.zero_stage
    if train.precision == "bf16":
        config["bf16"] = {"enabled": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
