"""From a plan and a place to a running engine: this rank's layers, brokers, optimizer and DeepSpeed configuration."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import torch

from disttrain_cli.models.graph import build_layers, layer_table, live_tensors
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
    train, table, stage = run.file.train, layer_table(run), place.stage
    dtype = torch.bfloat16 if train.precision == "bf16" else torch.float32
    layers = build_layers(run, stage.layers.start, stage.layers.stop, device=device)
    runner = StageRunner(build_segments(layers, stage.layers.start, lambda cut: live_tensors(table, cut)))
    upstream = downstream = None
    if stage.number > 0:
        upstream = Broker(place, topology.stages[stage.number - 1], live_tensors(table, stage.layers.start),
                          dtype, device)
    if stage.number + 1 < len(topology.stages):
        downstream = Broker(place, topology.stages[stage.number + 1], live_tensors(table, stage.layers.stop),
                            dtype, device)
    module = StageModule(layers, UnitGrid(topology, place), place)
    optimizer = torch.optim.AdamW(module.parameters(), lr=train.optimizer.lr, betas=train.optimizer.betas,
                                  eps=train.optimizer.eps, weight_decay=train.optimizer.weight_decay,
                                  fused=(device.type == "cuda" and plan.plan.zero_stage == 0) or None)
    config = deepspeed_config(train, plan.plan, place.unit.dp)
    kinds = {name: spec.kind for name, spec in run.file.model.modules.items()}
    return UnitEngine(module, optimizer, config, runner, upstream, downstream, place, tracer, kinds)


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
