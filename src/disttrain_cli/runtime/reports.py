"""Reports of rank 0 on every step: lines for the launcher, and rows next to the ranks' traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from disttrain_cli.costs.flops import mfu
from disttrain_cli.costs.layout import amount, stages_of
from disttrain_cli.data.contents import contents
from disttrain_cli.data.ordering.loads import order_loads
from disttrain_cli.data.sizes import Sizes, sizes_of
from disttrain_cli.data.slots import StepOrder
from disttrain_cli.models.graph import LayerInfo, layer_table
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.schedule import learning_rate, lrs
from disttrain_cli.runtime.evaluation import world_losses
from disttrain_cli.runtime.hooks import Data, Hook, Step
from disttrain_cli.runtime.task import Task, publish
from disttrain_cli.runtime.watching.tracing import SegmentWriter
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import SIZES_PER_STEP, TABLES


class Reports(Hook):
    """Writer of each step's row, and of its sequences, samples and experts' loads."""

    def __init__(self, task: Task, engine: UnitEngine, data: Data) -> None:
        self._task, self._engine, self._data = task, engine, data
        self._table = layer_table(task.run)
        kept_steps = task.run.file.train.keep_trace_steps
        self._writers = {
            name: SegmentWriter(
                task.dir.traces / name,
                columns,
                task.name,
                task.say,
                None if name == "steps" else kept_steps,
            )
            for name, columns in TABLES.items()
        }

    def begin(self, step: int) -> None:
        """Note a phase of the data that begins at the step."""
        phase = self._task.profile.data.phase_at(step)
        if (weights := self._weights(step)) and phase.step == step:
            said = ", ".join(f"{name} × {weight:g}" for name, weight in weights.items())
            self._task.say(f"Data from step {step:,} on: {said}")

    def ended(self, step: Step) -> None:
        """Add the columns `spec.trace.STEP_COLUMNS` of the step, and some more for the console."""
        run, engine, order = self._task.run, self._engine, step.order
        profile, layout = self._task.profile, self._task.plan.plan
        flops = step_flops(profile, layout, order)
        tokens, images = (
            int(sum(slot.sequence_tokens.sum() for slot in order.slots)),
            sum(len(slot.items["image"]) for slot in order.slots),
        )
        iteration_s = (step.end_ns - step.start_ns) / 1e9
        step.row |= world_losses(engine, run.file.model.loss_weights) | {
            "run": self._task.name,
            "step": step.number,
            "end_ns": step.end_ns,
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
            "grad_norm": engine.grad_norm(),
            "learning_rates": lrs(run, step.number),
            "learning_rate": learning_rate(run.file.train, "", step.number),
            "skipped_steps": engine.skipped_steps,
            "data_weights": self._weights(step.number),
            "expert_load": _loads(self._table, engine.expert_rows.last),
        }

    def reported(self, step: Step) -> None:
        """Publish the step, and write its rows; as Parquet where a checkpoint follows."""
        batch = self._data.batch(step.number)
        rows: dict[str, Iterable[dict[str, Any]]] = {
            "steps": [step.row],
            "sizes": _some_sizes(sizes_of(batch)),
            "samples": contents(step.order, batch, self._task.plan.plan),
            "experts": [
                {"module": self._table[layer].module, "layer": layer, "rows": counts}
                for layer, counts in self._engine.expert_rows.last.items()
            ],
        }
        publish(self._task.reports, step.row)
        if step.ends and not step.stop:
            self._task.say(step.ends)
        of_step = {"run": self._task.name, "step": step.number}
        for name, writer in self._writers.items():
            writer.rows += [of_step | row for row in rows[name]]
            writer.keep()
            if step.saves:
                writer.flush()

    def _weights(self, step: int) -> dict[str, float]:
        """Return the weights of the sources by name; none if they never change during the run."""
        data, names = self._task.profile.data, self._task.run.file.data.names
        if len(data.phases) < 2:
            return {}
        weights = [*data.phase_at(step).weights, *[0.0] * len(names)]
        return dict(zip(names, weights, strict=False))


def _loads(table: Sequence[LayerInfo], rows: Mapping[int, Sequence[int]]) -> dict[str, float]:
    """Return, by module with experts, the most rows of an expert over the mean of its layer.

    It is the mean over the module's layers.
    """
    by_module: dict[str, list[float]] = {}
    for layer, counts in rows.items():
        if total := sum(counts):
            by_module.setdefault(table[layer].module, []).append(max(counts) * len(counts) / total)
    return {module: sum(loads) / len(loads) for module, loads in by_module.items()}


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
