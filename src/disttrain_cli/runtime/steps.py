"""Step loop of a rank: train, report and checkpoint until the last step or a stop request."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from disttrain_cli.costs.flops import mfu
from disttrain_cli.costs.layout import amount, stages_of
from disttrain_cli.data.contents import contents
from disttrain_cli.data.ordering.loads import order_loads
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.sizes import Sizes, sizes_of
from disttrain_cli.data.slots import StepOrder
from disttrain_cli.models.graph import LayerInfo, layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime.checkpoints.averaging import Average
from disttrain_cli.runtime.checkpoints.checkpoint import Saver
from disttrain_cli.runtime.checkpoints.folder import recorded
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.optimizer import set_lrs
from disttrain_cli.runtime.engine.schedule import learning_rate, lrs
from disttrain_cli.runtime.evaluation import Evaluation, world_losses
from disttrain_cli.runtime.launching.ending import told_at_once
from disttrain_cli.runtime.watching.core_wait import UNKNOWN, CoreWait
from disttrain_cli.runtime.watching.host_memory import (
    HostMemory,
    share_of_host,
    watched_memory,
)
from disttrain_cli.runtime.watching.profiles import StepProfiler
from disttrain_cli.runtime.watching.tracing import (
    expert_writer,
    sample_writer,
    size_writer,
    step_writer,
)
from disttrain_cli.runtime.watching.watch import REASONS, Watch
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import RunDir
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.trace import SIZES_PER_STEP


@dataclass(frozen=True)
class Task:
    """Steps of a start, and the locations of its outputs."""

    dir: RunDir
    name: str
    first: int  # first step
    last: int
    steps_file: Path  # rank 0 appends a line per step, any rank notes on what it waits for
    watch: Watch | None = None
    average: Average | None = None
    evaluation: Evaluation | None = None
    profiler: StepProfiler | None = None
    say: Callable[[str], None] = print  # shows a note to the user
    # memory of the process before it had a stage (`peak_gib`); None: not recorded
    idle_gib: float | None = None
    reserve_gib: float = 0.0  # of this rank's stage, in the plan
    memory: HostMemory = field(default_factory=watched_memory)
    core_wait: CoreWait = field(default_factory=CoreWait)


class Data(Protocol):
    """Source of the steps' orders."""

    def order(self, step: int) -> StepOrder:
        """Return the work of every replica of every unit in a step."""
        ...

    def batch(self, step: int) -> Packing:
        """Return a step's global batch, in the order of the data."""
        ...


def run_steps(
    run: Run,
    layout: Layout,
    profile: Profile,
    task: Task,
    engine: UnitEngine,
    data: Data,
    fetch_of: Callable[[StepOrder], Callable[[int], Batch]],
) -> str:
    """Train from `task.first` to `task.last`, or until a rank's `task.watch` requests a stop.

    Ends with a checkpoint. Returns the one of `watch.REASONS` that ended it before the last step,
    or "".

    Raises:
        NotFiniteError, OutOfMemoryError: as `UnitEngine.run_step`; then nothing is saved.
        DisttrainError: a checkpoint could not be written.
    """
    every, rank0, tracer = (
        run.file.train.checkpoint.every_steps,
        engine.coords.rank == 0,
        engine.tracer,
    )
    traced = (task.dir.traces, task.name, task.say)
    kept_steps = run.file.train.keep_trace_steps
    writers = steps, sizes, samples, experts = (
        step_writer(*traced),
        size_writer(*traced, kept_steps),
        sample_writer(*traced, kept_steps),
        expert_writer(*traced, kept_steps),
    )
    table = layer_table(run)
    step, last, stopped, warned = task.first, task.last, "", False
    outside_gib = UNKNOWN
    with (
        Saver(
            task.dir.checkpoints,
            recorded(run, profile),
            engine,
            run.file.train.checkpoint.keep,
            task.average,
            task.evaluation is not None and task.evaluation.spec.keep_best,
        ) as saver,
        told_at_once(),
    ):
        while step < last and not stopped:
            tracer.step = step
            mixed, begins = _mixed(run, profile, step)
            if rank0 and begins:
                said = ", ".join(f"{name} × {weight:g}" for name, weight in mixed.items())
                task.say(f"Data from step {step:,} on: {said}")
            tracer.begin("order")
            order = data.order(step)
            engine.get_ready()
            if task.profiler is not None:
                task.profiler.begin(step)
            task.core_wait.begin_step()
            start_ns = tracer.now()
            set_lrs(engine.optimizer, engine.train_spec, step)
            skipped = engine.skipped_steps
            engine.run_step(order, fetch_of(order), partial(_figures, engine, task, outside_gib))
            if task.average is not None and engine.skipped_steps == skipped:
                task.average.update()
            if task.idle_gib is not None:
                now, held = tracer.mark(), peak_gib(engine.device) - task.idle_gib
                tracer.record("memory", now, now, bytes=round(max(0.0, held) * 2**30))
                alone = run.file.cluster.ranks_per_gpu == 1
                if step == task.first and alone and (device_bytes := of_device(engine.device)):
                    for module, size in device_bytes.items():
                        tracer.record("memory", now, now, module=module, bytes=size)
                    outside_gib = (device_bytes["device"] - device_bytes["allocator"]) / 2**30
            losses, growth, stopped = _agreed(run, engine)
            if rank0 and step == task.first + 1 and losses["outside_gib"] is not None:
                task.say(_compared(losses["outside_gib"], losses["unplanned_gib"]))
            if rank0 and not warned and growth * (task.last - step) > 1:
                warned = True
                task.say(
                    "The ranks' memory grows: at the rate of the fastest-growing rank a host's is"
                    f" full at about step {step + 1 / growth:,.0f} of {task.last:,}."
                    " train.checkpoint.every_steps limits what is lost then."
                )
            end_ns = tracer.now()
            if task.profiler is not None:
                task.profiler.end(step)
            evaluated: dict[str, Any] = {}
            best = False
            if task.evaluation and task.evaluation.due(step):
                evaluated = task.evaluation.losses(engine)
                best = task.evaluation.take(step, evaluated["evaluation_loss"])
            enough = task.evaluation is not None and task.evaluation.stops
            if rank0:
                row = _step_row(run, layout, profile, order, losses, (end_ns - start_ns) / 1e9)
                row |= {
                    "run": task.name,
                    "grad_norm": engine.grad_norm(),
                    "learning_rates": lrs(run, step),
                    "learning_rate": learning_rate(run.file.train, "", step),
                    "skipped_steps": engine.skipped_steps,
                    "data_weights": mixed,
                    "expert_load": _loads(table, engine.expert_rows.last),
                    **evaluated,
                }
                steps.rows.append(row | {"end_ns": end_ns})
                batch, told = data.batch(step), {"run": task.name, "step": step}
                sizes.rows += [told | more for more in _some_sizes(sizes_of(batch))]
                samples.rows += [told | more for more in contents(order, batch, layout)]
                experts.rows += [
                    told | {"module": table[layer].module, "layer": layer, "rows": rows}
                    for layer, rows in engine.expert_rows.last.items()
                ]
                publish(task.steps_file, row)
                if task.watch is not None:
                    task.watch.step(row)
                for writer in writers:
                    writer.keep()
            step += 1
            if enough and not stopped and step < last and task.evaluation and rank0:
                standing = task.evaluation.standing
                task.say(
                    f"Training ends after step {step:,}: the held-out loss has not fallen in"
                    f" {standing.since} evaluations since step {standing.step:,};"
                    " train.evaluation.stop_after."
                )
            last = step if enough else last
            saver.check()
            best = best and task.evaluation is not None and task.evaluation.spec.keep_best
            if stopped or step == last or best or (every and step % every == 0):
                begun = tracer.mark()
                tracer.begin("checkpoint")
                saver.save(step, engine.skipped_steps == skipped, _standing(task, evaluated))
                tracer.anchor()
                tracer.record("checkpoint", begun)
                for writer in writers:
                    writer.flush()
            tracer.end_step()
    return stopped if step < last else ""


def _loads(table: Sequence[LayerInfo], rows: Mapping[int, Sequence[int]]) -> dict[str, float]:
    """Return, by module with experts, the most rows of an expert over the mean of its layer.

    It is the mean over the module's layers.
    """
    by_module: dict[str, list[float]] = {}
    for layer, counts in rows.items():
        if total := sum(counts):
            by_module.setdefault(table[layer].module, []).append(max(counts) * len(counts) / total)
    return {module: sum(loads) / len(loads) for module, loads in by_module.items()}


def _standing(task: Task, evaluated: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's record of held-out losses: its own, and the lowest so far."""
    if task.evaluation is None:
        return {}
    own = {"held_out_loss": evaluated["evaluation_loss"]} if evaluated else {}
    return own | {"held_out": asdict(task.evaluation.standing)}


def _mixed(run: Run, profile: Profile, step: int) -> tuple[dict[str, float], bool]:
    """Return (weights of the sources by name, True if they change at this step).

    Empty if the weights never change during the run.
    """
    if len(profile.data.phases) < 2:
        return {}, False
    phase, names = profile.data.phase_at(step), run.file.data.names
    weights = [*phase.weights, *[0.0] * len(names)]
    return dict(zip(names, weights, strict=False)), phase.step == step


def _compared(outside_gib: float, unplanned_gib: float) -> str:
    """Return a sentence on devices' memory outside torch's allocator, and the plan's reserve."""
    against = (
        f"up to {unplanned_gib:.2f} GiB more than"
        if unplanned_gib > 0
        else f"everywhere at least {-unplanned_gib:.2f} GiB less than"
    )
    return (
        f"After the first step up to {outside_gib:.2f} GiB of a device are in use outside PyTorch's"
        f" allocator, {against} the plan reserves."
    )


def _figures(engine: UnitEngine, task: Task, outside_gib: float) -> list[float]:
    """Return a rank's measurements of a step, to be maximised over all ranks.

    Waits for data and for a core, memory, that outside the allocator and what of it the plan does
    not reserve, the share of its host's available memory by which its ranks grow each step, and the
    index of the reason that requested a stop.
    """
    reason = task.watch.stop_reason() if task.watch is not None else ""
    growth = share_of_host(task.memory.end_step(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    waits = [engine.data_wait_ns / 1e9, task.core_wait.of_step()]
    memory = [peak_gib(engine.device), outside_gib, outside_gib - task.reserve_gib]
    return [*waits, *memory, growth, REASONS.index(reason)]


def _agreed(run: Run, engine: UnitEngine) -> tuple[dict[str, Any], float, str]:
    """Return the values that all ranks agree on after a step.

    `world_losses` with the longest waits for data and for a core and the most memory; the largest
    growth of memory; the reason of a stop request.
    """
    *waits, memory_gib, outside_gib, unplanned_gib, growth, reason = engine.largest
    data_wait_s, core_wait_s = waits
    losses = world_losses(engine, run.file.model.loss_weights)
    figures = losses | {"data_wait_s": data_wait_s, "memory_gib": memory_gib}
    figures["outside_gib"] = None if outside_gib == UNKNOWN else outside_gib
    figures["unplanned_gib"] = unplanned_gib
    figures["core_wait_s"] = None if core_wait_s == UNKNOWN else core_wait_s
    return figures, growth, REASONS[int(reason)]


def _step_row(
    run: Run,
    layout: Layout,
    profile: Profile,
    order: StepOrder,
    losses: dict[str, Any],
    iteration_s: float,
) -> dict[str, Any]:
    """Return the columns `spec.trace.STEP_COLUMNS` of a step, and some more for the console."""
    flops = step_flops(profile, layout, order)
    tokens, images = (
        int(sum(slot.sequence_tokens.sum() for slot in order.slots)),
        sum(len(slot.items["image"]) for slot in order.slots),
    )
    return {
        "step": order.step,
        **losses,
        "iteration_s": iteration_s,
        "sequences_per_s": run.file.train.global_batch_size / iteration_s,
        "mfu": mfu(sum(flops.values()), iteration_s, profile.device, layout.gpus_used),
        "tokens": tokens,
        "images": images,
        "targets": order.targets,
        "model_flops": sum(flops.values()),
        "tokens_per_s": tokens / iteration_s,
        "images_per_s": (images + order.targets) / iteration_s,
        "unit_mfu": {
            unit.name: mfu(flops[unit.name], iteration_s, profile.device, unit.gpus)
            for unit in layout.units
        },
    }


def _some_sizes(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Yield rows of `spec.trace.SIZE_COLUMNS` of the first sequences."""
    some = sizes.take(np.arange(min(SIZES_PER_STEP, len(sizes))))
    areas = {item: items.lists() for item, items in some.items.items()}
    for number in range(len(some)):
        yield {
            "tokens": int(sizes.tokens[number]),
            "length_sq": int(sizes.length_sq[number]),
            "images": areas["image"][number],
            "targets": len(areas["target"][number]),
            "clips": len(areas["audio"][number]),
        }


def step_flops(profile: Profile, layout: Layout, order: StepOrder) -> dict[str, float]:
    """Return the model FLOPs of a global batch by unit, forward and backward."""
    loads = order_loads(order, layout)
    flops = dict.fromkeys([unit.name for unit in layout.units], 0.0)
    for stage in stages_of(profile, layout):
        flops[stage.unit.name] += sum(
            float(amount(cost.flops, loads[cost.module]).sum()) for cost in stage.costs
        )
    return flops


def peak_gib(device: torch.device) -> float:
    """Return this rank's peak memory in GiB: on its GPU, or of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (2**30 if sys.platform == "darwin" else 2**20)


def of_device(device: torch.device) -> dict[str, int]:
    """Return the bytes in use on a GPU, by its driver and by torch's allocator; empty for a CPU.

    The driver counts all processes, and with this one's its context, kernels and NCCL's buffers.
    """
    if device.type != "cuda":
        return {}
    free, total = torch.cuda.mem_get_info(device)
    return {"device": total - free, "allocator": torch.cuda.memory_reserved(device)}


def publish(path: Path, row: dict[str, Any]) -> None:
    """Append a step or a note to the launcher's file in one write; a full disk is ignored."""
    with contextlib.suppress(OSError), path.open("a") as file:
        file.write(json.dumps(row) + "\n")
