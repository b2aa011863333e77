"""One rank of a training job: builds its stage, joins the others, and runs the steps.

Called by `launch` with the payload that `train.py` writes: `run` (path of the run file), `plan`, `profile`
(their JSON), `name` (of this start, used in trace files), `steps` (the last one), `resume`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from disttrain_cli.costs.flops import mfu
from disttrain_cli.costs.layout import amount, stages_of
from disttrain_cli.data.index import Index, read_index
from disttrain_cli.data.loader import Loader
from disttrain_cli.data.ordering.loads import order_loads
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.preparing import READ
from disttrain_cli.data.sizes import Sizes
from disttrain_cli.data.slots import StepOrder
from disttrain_cli.models.graph import layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime import checkpoint
from disttrain_cli.runtime.assemble import build_engine, message_dtype
from disttrain_cli.runtime.checkpoint_folder import latest
from disttrain_cli.runtime.engine import UnitEngine
from disttrain_cli.runtime.feeding import fetcher
from disttrain_cli.runtime.process import joined
from disttrain_cli.runtime.topology import Place, build_topology
from disttrain_cli.runtime.tracing import Tracer, size_writer, step_writer, wall_clock
from disttrain_cli.spec.plan import Layout, Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import OptimizerSpec, Run, read_run
from disttrain_cli.spec.trace import SIZES_PER_STEP


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
                        wall_clock(torch.cuda.synchronize if device.type == "cuda" else None))
        stack.callback(tracer.close)
        engine = build_engine(run, plan, topology, place, device, tracer)
        index = read_index(run, profile.inputs)
        first = resume(run, run.dir, index.fingerprint, engine) if payload["resume"] else 0
        loader = stack.enter_context(open_loader(
            run, plan.plan, profile, index, place, fields, first, Path(payload["steps_file"])))
        run_steps(run, plan.plan, profile, Task(run.dir, payload["name"], first, int(payload["steps"]),
                                                Path(payload["steps_file"])),
                  engine, loader, fetcher(loader, device, message_dtype(run.file.train)))
        if loader.skipped:
            Path(payload["skipped_dir"], f"skipped-rank-{place.rank:05d}.json").write_text(
                json.dumps([[f"{s.shard}/{s.key}", s.reason] for s in loader.skipped]))


def open_loader(run: Run, layout: Layout, profile: Profile, index: Index, place: Place, fields: set[str], first: int,
                reports: Path) -> Loader:
    """A rank's loader over the workers that the run file names, or over its own threads.

    A stage that reads no file needs no worker, unless for what takes a search. What workers make a rank wait for is
    reported.
    """
    known: dict[str, Any] = {"unit": place.unit.name, "replica": place.replica, "fields": fields, "first_step": first}
    searches = run.file.train.ordering == "best"
    if not run.file.preprocess.addresses or not (searches or fields & READ):
        return Loader(run, Orders(run.file, layout, index, profile), **known)
    from disttrain_cli.data.serving.client import PulledOrders, Workers

    def say(what: str, done: int, total: int) -> None:
        print(f"{what} {done}/{total}" if total else what, flush=True)
        _publish(reports, {"note": what, "done": done, "total": total})

    workers = Workers(run, layout, index, profile, say)
    orders = PulledOrders(run.file, layout, index, profile, workers) if searches else \
        Orders(run.file, layout, index, profile)
    return Loader(run, orders, source=workers, **known)


@dataclass(frozen=True)
class Task:
    """What a start has to do, and where it leaves its artefacts."""

    dir: RunDir
    name: str
    first: int  # step
    last: int
    steps_file: Path  # to which rank 0 appends a line per step, and any rank what it waits for


class Data(Protocol):
    """What the steps take their orders from."""

    def order(self, step: int) -> StepOrder:
        """What every replica of every unit does in a step."""
        ...

    def sizes(self, step: int) -> Sizes:
        """Sizes of the sequences of a step's global batch, in the order of the data."""
        ...


def resume(run: Run, folder: RunDir, data_fingerprint: str, engine: UnitEngine) -> int:
    """Load the newest checkpoint, if there is one; returns its step."""
    newest = latest(folder.checkpoints)
    return checkpoint.load(newest, run.file.model_fingerprint(), data_fingerprint, engine) if newest else 0


def run_steps(run: Run, layout: Layout, profile: Profile, task: Task, engine: UnitEngine, data: Data,
              fetch_of: Callable[[StepOrder], Callable[[int], Batch]]) -> None:
    """The step loop: train, report, checkpoint."""
    train, rank0, tracer = run.file.train, engine.place.rank == 0, engine.tracer
    writers = steps, sizes = step_writer(task.dir.traces, task.name), size_writer(task.dir.traces, task.name)
    for step in range(task.first, task.last):
        tracer.step = step
        order = data.order(step)
        engine.get_ready()
        start_ns, rate = tracer.now(), learning_rate(train.optimizer, step)
        engine.run_step(order, fetch_of(order), rate)
        losses = _world_losses(run, engine)
        end_ns = tracer.now()
        if rank0:
            row = _step_row(run, layout, profile, order, losses, (end_ns - start_ns) / 1e9)
            row |= {"run": task.name, "grad_norm": engine.grad_norm(), "learning_rate": rate}
            steps.rows.append(row | {"end_ns": end_ns})
            sizes.rows += [{"run": task.name, "step": step} | own for own in _some_sizes(data.sizes(step))]
            _publish(task.steps_file, row)
        every = train.checkpoint.every_steps
        if step + 1 == task.last or (every and (step + 1) % every == 0):
            begun = tracer.now()
            checkpoint.save(task.dir.checkpoints, step + 1, run.file.model_fingerprint(),
                            profile.fingerprints.data, engine, train.checkpoint.keep)
            tracer.record("checkpoint", begun)
            for writer in writers:
                writer.flush()
        tracer.end_step()


def learning_rate(optimizer: OptimizerSpec, step: int) -> float:
    """Rate of a step: linear warm-up, then constant."""
    return optimizer.lr * min(1.0, (step + 1) / max(1, optimizer.warmup_steps))


def _world_losses(run: Run, engine: UnitEngine) -> dict[str, float]:
    """Losses of the global batch (sums over ranks, unweighted) and the longest data wait in seconds."""
    weights = run.file.model.loss_weights
    own = engine.runner.take_losses()
    sums = torch.tensor([own.get("text", 0.0), own.get("image", 0.0)], dtype=torch.float64, device=engine.device)
    longest = torch.tensor([engine.data_wait_ns / 1e9], dtype=torch.float64, device=engine.device)
    dist.all_reduce(sums)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    text, image = sums.tolist()
    return {"loss": text + image, "loss_text": text / weights.text if weights.text else 0.0,
            "loss_image": image / weights.image if weights.image else 0.0, "data_wait_s": float(longest)}


def _step_row(run: Run, layout: Layout, profile: Profile, order: StepOrder, losses: dict[str, float],
              iteration_s: float) -> dict[str, Any]:
    """What `spec.trace.STEP_COLUMNS` say of a step's work, losses and speed."""
    flops = step_flops(profile, layout, order)
    return {"step": order.step, **losses, "iteration_s": iteration_s,
            "sequences_per_s": run.file.train.global_batch_size / iteration_s,
            "mfu": mfu(flops, iteration_s, profile.device, layout.gpus_used),
            "tokens": int(sum(slot.sequence_tokens.sum() for slot in order.slots)),
            "images": sum(len(slot.image_sequence) for slot in order.slots),
            "targets": order.targets, "model_flops": flops}


def _some_sizes(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Rows of `spec.trace.SIZE_COLUMNS` of the first sequences."""
    for number in range(min(SIZES_PER_STEP, len(sizes))):
        images = sizes.patches[sizes.image_start[number]:sizes.image_start[number + 1]]
        yield {"tokens": int(sizes.tokens[number]), "length_sq": int(sizes.length_sq[number]),
               "images": images.tolist(), "targets": int(sizes.targets[number]), "clips": int(sizes.clips[number])}


def step_flops(profile: Profile, layout: Layout, order: StepOrder) -> float:
    """Model FLOPs of a global batch, forward and backward, from the counted models."""
    loads = order_loads(order, layout, {name: module.kind for name, module in profile.modules.items()})
    return sum(float(amount(cost.flops, loads[cost.module]).sum()) for stage in stages_of(profile, layout)
               for cost in stage.costs)


def _publish(path: Path, row: dict[str, Any]) -> None:
    """Append a step or a note to the file that the launcher reads, in one write."""
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
