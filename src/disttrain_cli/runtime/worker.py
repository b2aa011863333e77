"""One rank of a training job: builds its stage, joins the others, and runs the steps.

Called by `launch` with the payload that `train.py` writes: `run` (path of the run file), `plan`, `profile`
(their JSON), `name` (of this start, used in trace files), `steps` (the last one), `resume`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disttrain_cli.costs.flops import mfu, module_flops
from disttrain_cli.data.index import read_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.slots import SlotBatch, StepOrder
from disttrain_cli.models.graph import layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime import checkpoint
from disttrain_cli.runtime.assemble import build_engine
from disttrain_cli.runtime.checkpoint_folder import latest
from disttrain_cli.runtime.process import joined
from disttrain_cli.runtime.topology import build_topology
from disttrain_cli.runtime.tracing import Tracer, step_writer
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import OptimizerSpec, Run, read_run


def before_fork(payload: dict[str, Any]) -> None:
    """Import the model's classes and build its table once for all ranks."""
    layer_table(read_run(Path(payload["run"])))


def main(payload: dict[str, Any]) -> None:
    """Train until `payload["steps"]`."""
    run = read_run(Path(payload["run"]))
    plan, profile = Plan.model_validate(payload["plan"]), Profile.model_validate(payload["profile"])
    table = layer_table(run)
    topology = build_topology(plan.plan, [info.module for info in table])
    place = topology.place(int(os.environ["RANK"]))
    stage_layers = table[place.stage.layers.start:place.stage.layers.stop]
    fields = {field for info in stage_layers for field in info.needs}
    with ExitStack() as stack:
        device = stack.enter_context(joined(profile.device.kind, run.file.train.timeout_s))
        tracer = Tracer(run.dir.traces, payload["name"], place,
                        torch.cuda.synchronize if device.type == "cuda" else None)
        stack.callback(tracer.close)
        engine = build_engine(run, plan, topology, place, device, tracer)
        resumed = latest(run.dir.checkpoints) if payload["resume"] else None
        index = read_index(run, profile.inputs)
        first = checkpoint.load(resumed, run.file.model_fingerprint(), index.fingerprint, engine) if resumed else 0
        loader = stack.enter_context(Loader(
            run, profile.inputs, plan.plan, index, unit=place.unit.name,
            replica=place.replica, fields=fields, first_step=first))
        _train(run, plan, profile, payload, engine, loader, first, device)


def _train(run: Run, plan: Plan, profile: Profile, payload: dict[str, Any], engine: Any, loader: Loader,
           first: int, device: torch.device) -> None:
    """The step loop: train, report, checkpoint."""
    train, dtype = run.file.train, torch.bfloat16 if run.file.train.precision == "bf16" else torch.float32
    last, rank0 = int(payload["steps"]), engine.place.rank == 0
    steps = step_writer(run.dir.traces, payload["name"])
    for step in range(first, last):
        engine.tracer.step = step
        order = loader.order(step)
        fetch = fetcher(loader, order, device, dtype)
        start = time.perf_counter()
        rate = learning_rate(train.optimizer, step)
        engine.run_step(order, fetch, rate)
        losses = _world_losses(run, engine, device)
        row = _step_row(run, step_flops(profile, plan.plan, order), profile, payload["name"], order, losses,
                        engine.grad_norm(), rate, time.perf_counter() - start)
        if rank0:
            steps.rows.append(row | {"end_ns": engine.tracer.now()})
            _publish(Path(payload["steps_file"]), row)
        every = train.checkpoint.every_steps
        if step + 1 == last or (every and (step + 1) % every == 0):
            begun = engine.tracer.now()
            checkpoint.save(run.dir.checkpoints, step + 1, run.file.model_fingerprint(),
                            profile.fingerprints.data, engine, train.checkpoint.keep)
            engine.tracer.record("checkpoint", begun)
            steps.flush()
        engine.tracer.end_step()
    if loader.skipped:
        Path(payload["skipped_dir"], f"skipped-rank-{engine.place.rank:05d}.json").write_text(
            json.dumps([[f"{s.shard}/{s.key}", s.reason] for s in loader.skipped]))


def learning_rate(optimizer: OptimizerSpec, step: int) -> float:
    """Rate of a step: linear warm-up, then constant."""
    return optimizer.lr * min(1.0, (step + 1) / max(1, optimizer.warmup_steps))


def fetcher(loader: Loader, order: StepOrder, device: torch.device, dtype: torch.dtype) -> Callable[[int], Batch]:
    """What the engine calls to wait for this rank's inputs of a slot."""
    def fetch(slot: int) -> Batch:
        return to_batch(loader.fetch(order.step, slot), order, device, dtype)
    return fetch


def to_batch(arrays: SlotBatch, order: StepOrder, device: torch.device, dtype: torch.dtype) -> Batch:
    """Prepared arrays as tensors on the device; pixels take the model's precision."""
    def tensor(value: Any, kind: torch.dtype | None = None) -> Any:
        return None if value is None else torch.as_tensor(value).to(device, kind, non_blocking=True)

    return Batch(
        image_grids=[(int(rows), int(columns)) for rows, columns in arrays.image_grids],
        pixels=None if arrays.pixels is None else [tensor(group, dtype) for group in arrays.pixels],
        token_ids=tensor(arrays.token_ids), positions=tensor(arrays.positions), documents=tensor(arrays.documents),
        image_rows=tensor(arrays.image_rows), context_rows=tensor(arrays.context_rows), labels=tensor(arrays.labels),
        target_pixels=tensor(arrays.target_pixels, dtype), target_weights=tensor(arrays.target_weights),
        noise_seeds=None if arrays.noise_seeds is None else torch.as_tensor(arrays.noise_seeds),
        label_tokens=float(max(1, order.label_tokens)), targets=float(max(1, order.targets)))


def _world_losses(run: Run, engine: Any, device: torch.device) -> dict[str, float]:
    """Losses of the global batch (sums over ranks, unweighted) and the longest data wait in seconds."""
    weights = run.file.model.loss_weights
    own = engine.runner.take_losses()
    sums = torch.tensor([own.get("text", 0.0), own.get("image", 0.0)], dtype=torch.float64, device=device)
    longest = torch.tensor([engine.data_wait_ns / 1e9], dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    text, image = sums.tolist()
    return {"loss": text + image, "text": text / weights.text if weights.text else 0.0,
            "image": image / weights.image if weights.image else 0.0, "data_wait_s": float(longest)}


def _step_row(run: Run, flops: float, profile: Profile, name: str, order: StepOrder, losses: dict[str, float],
              grad_norm: float, rate: float, iteration_s: float) -> dict[str, Any]:
    """One row of `spec.trace.STEP_COLUMNS`, without its end."""
    return {"run": name, "step": order.step, "loss": losses["loss"], "loss_text": losses["text"],
            "loss_image": losses["image"], "grad_norm": grad_norm, "learning_rate": rate,
            "iteration_s": iteration_s, "sequences_per_s": run.file.train.global_batch_size / iteration_s,
            "mfu": mfu(flops, iteration_s, profile.device, int(os.environ["WORLD_SIZE"])),
            "data_wait_s": losses["data_wait_s"],
            "tokens": int(sum(slot.sequence_tokens.sum() for slot in order.slots)),
            "images": sum(len(slot.image_sequence) for slot in order.slots),
            "targets": order.targets, "model_flops": flops}


def step_flops(profile: Profile, layout: Layout, order: StepOrder) -> float:
    """Model FLOPs of a global batch, forward and backward, from the counted models."""
    return sum(module_flops(profile, name, slot.work(module.kind, items), layout.trained)
               for slot in order.slots for name, module in profile.modules.items()
               for items in slot.replicas[layout.unit_of(name).name])


def _publish(path: Path, row: dict[str, Any]) -> None:
    """Append a step to the file that the launcher reads."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
