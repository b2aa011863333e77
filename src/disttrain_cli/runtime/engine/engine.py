"""Step of one rank in a pipeline over units of different shapes.

Executes its program (`schedule.program`), one method per instruction: loads, computes
(`StageRunner`) and moves (`Broker`) slots of its stage or, with several, of the one that the
instruction names; then has gradients reduced (`Reduction`) and DeepSpeed's optimizer step
(`StageEngine`). The gradient norm is computed once over all units: each rank counts
its own partition or share. A stage without trained weights has no optimizer, but takes part in that
reduction (deepspeed traps 7, 19, 33; docs/deepspeed.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from disttrain_cli.data.ordering.levelling import dealt
from disttrain_cli.data.slots import ReplicaItems, Slot, StepOrder
from disttrain_cli.models.division import of_experts
from disttrain_cli.models.host import read, to_device
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.parallel import sum_over
from disttrain_cli.runtime.engine.expert_rows import ExpertRows
from disttrain_cli.runtime.engine.faults import MOST_SKIPPED, located, not_finite, out_of_memory
from disttrain_cli.runtime.engine.optimizer import (
    drop_gradients,
    partial_gradients,
    reduced_gradients,
    sum_of_squares,
    tied_gradients,
)
from disttrain_cli.runtime.engine.stage import StageRunner
from disttrain_cli.runtime.units import communicators
from disttrain_cli.runtime.units.broker import Broker, Brokers
from disttrain_cli.runtime.watching.sensors import sensor_of
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.runtime.watching.turns import Turns
from disttrain_cli.schedule.one_f_one_b import last_slots
from disttrain_cli.schedule.program import Instruction, evaluation, program
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile.train import TrainSpec
from disttrain_cli.spec.stage_graph import RankCoords

if TYPE_CHECKING:
    from disttrain_cli.runtime.engine.deepspeed import StageEngine
    from disttrain_cli.runtime.watching.tracing import Time


class Chunk(NamedTuple):
    """One of a rank's stages: its layers, and its brokers to the previous and the next stages."""

    runner: StageRunner
    upstream: Broker | Brokers | None
    downstream: Broker | Brokers | None


class UnitEngine:
    """Engine of one rank. `run_step` executes one optimizer step.

    Args:
        stage: the weights under DeepSpeed.
        chunks: the rank's stages, whose runners share their losses.
        loss_modules: module that computes each loss of the whole model, by name of the loss.
        trained: owners of the whole model's trained weights: modules, "projectors".
    """

    def __init__(
        self,
        stage: StageEngine,
        chunks: Sequence[Chunk],
        coords: RankCoords,
        tracer: Tracer,
        layout: Layout,
        train_spec: TrainSpec,
        loss_modules: dict[str, str],
        trained: Sequence[str],
    ) -> None:
        self.stage, self.module, self.grid = stage, stage.module, stage.mpu
        self.optimizer, self.device = stage.optimizer, stage.device
        self.chunks, self.coords, self.tracer = chunks, coords, tracer
        self.layout, self.train_spec = layout, train_spec
        self.loss_modules = loss_modules
        self.order: StepOrder
        self.fetch: Callable[[int], Batch]
        # slot → loaded inputs and, by chunk, tensors that wait between two instructions
        self._loaded: dict[int, Batch] = {}
        self._states: list[dict[int, dict[str, Tensor]]] = [{} for _ in chunks]
        self._turn_to(0)
        # of this step, by slot and module
        self._amounts: dict[tuple[int, str], dict[str, int]] = {}
        self.data_wait_ns = 0
        #: Number of updates in the moments of each owner in `trained`.
        self.updates = dict.fromkeys(trained, 0)
        self.skipped_steps = self.skipped_in_a_row = 0
        self._norm = math.nan
        # of the last step's global batch, weighted, by name
        self.step_losses: dict[str, float] = {}
        # maxima over the ranks of the last step's `to_maximise` values
        self.largest: list[float] = []
        #: Rows by expert of the last step; of no layer where they are not counted.
        self.expert_rows = ExpertRows({}, {})
        self._sensor = sensor_of(self.device)
        self._reading: dict[str, int] = {}  # the sensor's of this step, as columns of a row

    @property
    def basic_optimizer(self) -> Any:
        """torch's optimizer inside DeepSpeed's; None where nothing is trained."""
        return self.stage.basic_optimizer

    # ---- one step -------------------------------------------------------------------------------
    def get_ready(self) -> None:
        """Prepare a step before its clock starts; nothing to do here, for subclasses."""

    def run_step(
        self,
        order: StepOrder,
        fetch: Callable[[int], Batch],
        to_maximise: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """Train on the global batch of `order`.

        The host waits for its device once, for the norm, and continues while the device takes the
        optimizer step. The same wait yields `step_losses` and `largest`.

        Args:
            fetch: waits for this rank's inputs of a slot and returns them.
            to_maximise: returns this rank's values to be maximised over all ranks into `largest`.

        Raises:
            NotFiniteError: a loss or the norm is not finite, and `train.on_bad_loss` is not "skip".
            OutOfMemoryError: the device has no memory left.
        """
        self.order, self.fetch, self.data_wait_ns, self._amounts, self._to_maximise = (
            order,
            fetch,
            0,
            {},
            to_maximise,
        )
        self.runner.losses.clear()
        if self.runner.sums is not None:
            self.runner.sums.clear()
        self.module.train()
        for broker in self._brokers():
            broker.expect(order.slots)
        sends_first = not communicators.in_order()
        self._execute(program(self.coords.stage, len(order.slots), sends_first))

    def evaluate(self, order: StepOrder, fetch: Callable[[int], Batch]) -> dict[str, float]:
        """Run the forwards of a step without trace rows; return the world's losses by name.

        Losses are weighted.
        """
        self.order, self.fetch = order, fetch
        self.runner.losses.clear()
        self.module.eval()
        self.tracer.silent = True
        try:
            with torch.no_grad():
                self._execute(evaluation(self.coords.stage, len(order.slots)))
            self.tracer.begin("evaluation")
            sums = torch.stack(self.runner.sum_losses(self.loss_modules, self.device))
            dist.all_reduce(sums)
            return dict(zip(self.loss_modules, read(sums), strict=True))
        finally:
            self.tracer.silent = False

    def grad_norm(self) -> float:
        """Return the global gradient norm of the last step, before clipping."""
        return self._norm

    def _execute(self, instructions: Iterable[Instruction]) -> None:
        """Execute each instruction by the method of its name, which subclasses may override."""
        self._states, self._loaded = [{} for _ in self.chunks], {}
        for operation, slot, chunk in instructions:
            self._turn_to(chunk)
            self.tracer.begin(operation, slot)
            with self._at(operation.replace("_", " "), slot):
                getattr(self, f"_{operation}")(slot)

    def _turn_to(self, chunk: int) -> None:
        """Let the next instructions be those of one of the rank's stages."""
        self._chunk, self._state = chunk, self._states[chunk]
        self._place = replace(self.coords, stage=self.coords.stages[chunk])
        self.runner, self.upstream, self.downstream = self.chunks[chunk]
        if self.coords.later:
            self.tracer.stage = self._place.stage.index

    def _brokers(self) -> Iterator[Broker | Brokers]:
        for _, *brokers in self.chunks:
            yield from (broker for broker in brokers if broker is not None)

    def _post_activation(self, slot: int) -> None:
        assert isinstance(self.upstream, Broker), "one stage before, of the same unit"
        self.upstream.post(self.order.slots[slot])

    def _post_gradient(self, slot: int) -> None:
        assert isinstance(self.downstream, Broker), "one stage after, of the same unit"
        if self.runner.segments[-1].returning:
            self.downstream.post(self.order.slots[slot])

    def _receive_activation(self, slot: int) -> None:
        assert self.upstream is not None
        start = self.tracer.mark()
        tensors, size, peer = self.upstream.receive(self.order.slots[slot])
        self._state[slot] = tensors
        self.tracer.record("receive_activation", start, slot=slot, bytes=size, peer=peer)

    def _load(self, slot: int) -> None:
        start, asked_ns = self.tracer.mark(), self.tracer.now()
        self._loaded[slot] = self.fetch(slot)
        self.data_wait_ns += self.tracer.now() - asked_ns
        self.tracer.record("load", start, slot=slot)

    def _forward(self, slot: int) -> None:
        batch = self._loaded[slot]
        if self._chunk == len(self.chunks) - 1:
            del self._loaded[slot]
        self._state[slot] = self.runner.forward(
            slot, self._state.pop(slot, {}), batch, self._timed("forward", slot)
        )

    def _send_activation(self, slot: int) -> None:
        assert self.downstream is not None
        start = self.tracer.mark()
        size, peer = self.downstream.send(self.order.slots[slot], self._state.pop(slot))
        self.tracer.record("send_activation", start, slot=slot, bytes=size, peer=peer)

    def _receive_gradient(self, slot: int) -> None:
        assert self.downstream is not None
        if not self.runner.segments[-1].returning:
            return
        start = self.tracer.mark()
        gradients, size, peer = self.downstream.receive(self.order.slots[slot])
        self._state[slot] = gradients
        self.tracer.record("receive_gradient", start, slot=slot, bytes=size, peer=peer)

    def _backward(self, slot: int) -> None:
        last = slot == len(self.order.slots) - 1 and self._chunk == len(self.chunks) - 1
        if self.coords.stage.weight_delay is None and last:
            self.stage.reduction.expect(self._last_gradients() if self._chunk else None)
        gradients = self.runner.backward(
            slot, self._state.pop(slot, {}), self._timed("backward", slot)
        )
        if self.upstream is not None and self.runner.segments[0].carrying:
            self._state[slot] = gradients

    def _last_gradients(self) -> list[Parameter]:
        """Return the weights with gradients still to come when the last stage has one slot left.

        Each once per gradient: PP slots are left for each of the rank's other stages.
        """
        *others, last = (chunk.runner.trained for chunk in self.chunks)
        return last + self.coords.unit.pp * [weight for other in others for weight in other]

    def _weights(self, slot: int) -> None:
        """Compute the weight gradients of this slot, or of all remaining slots in the cool-down."""
        left = last_slots(len(self.order.slots), self.coords.stage.weight_delay)
        slots = left if slot == left.start else range(slot, slot + 1)
        if slots is left:
            self.stage.reduction.expect(self.runner.waiting(slots))
        self._compute_weights(slots)

    def _compute_weights(self, slots: range) -> None:
        turns = Turns(self.tracer, "weights")
        self.runner.weights(slots, turns.timed)
        for slot, module, start, end in turns.rows():
            self._record("weights", slot, module, start, end)

    def _send_gradient(self, slot: int) -> None:
        assert self.upstream is not None
        if not self.runner.segments[0].carrying:
            return
        start = self.tracer.mark()
        size, peer = self.upstream.send(self.order.slots[slot], self._state.pop(slot))
        self.tracer.record("send_gradient", start, slot=slot, bytes=size, peer=peer)

    def _wait(self, slot: int) -> None:
        """Wait until all sends have finished."""
        start = self.tracer.mark()
        waited = [broker.drain() for broker in self._brokers()]
        if any(waited):
            self.tracer.record("wait", start)

    def _reduce(self, slot: int) -> None:
        start = self.tracer.mark()
        self._reduce_gradients()
        self._sum_tied_gradients()
        self._sum_partial_gradients()
        unit = self.coords.unit
        reduced = sum(
            p.numel() * p.element_size()
            for p in self.module.parameters()
            if p.requires_grad and (unit.expert_replicas if of_experts(p) else unit.dp_cp_size) > 1
        )
        self.tracer.record("reduce", start, bytes=reduced)

    def _step(self, slot: int) -> None:
        start = self.tracer.mark()
        self._update()
        self.tracer.record("step", start, **self._reading)

    def _sum_tied_gradients(self) -> None:
        """Sum the gradients of a tied weight's two copies on different stages.

        All reductions of both stages have ended before, so that no rank waits here for a peer that
        is itself waiting for another rank.
        """
        twins = self.grid.twins
        for gradient in tied_gradients(self.optimizer) if twins is not None else ():
            dist.all_reduce(gradient, group=twins)

    def _sum_partial_gradients(self) -> None:
        """Sum partial gradients of replicated weights over the TP group.

        Each rank has a part of the gradient of a weight that is not sharded
        (`tensor_parallel.join`); only the weights that this rank steps are summed.
        """
        if self.grid.tp is not None:
            sum_over(partial_gradients(self.optimizer), self.grid.tp)

    def _reduce_gradients(self) -> None:
        """Finish the reduction over the ranks with the same weights.

        These are the replicas and the CP groups in them; of experts, those with the same ones.
        Starts the reductions that are not running yet, and waits for all.
        """
        self.stage.reduction.finish()

    def _update(self) -> None:
        """Compute the world's gradient norm, clip and step; skip the update if it is not finite."""
        unit = self.coords.unit
        gradients = reduced_gradients(
            self.optimizer,
            dp=unit.dp_cp_size,
            tp=unit.tp,
            expert_replicas=unit.expert_replicas,
        )
        squared, *losses = self._sums_and_largest(sum_of_squares(gradients, self.device))
        self._norm = math.sqrt(squared) if squared >= 0 else math.nan
        self.step_losses = dict(zip(self.loss_modules, losses, strict=True))
        if not all(map(math.isfinite, (squared, *losses))):
            self._refuse_step(gradients)
            return
        self.skipped_in_a_row = 0
        self.updates = {name: count + 1 for name, count in self.updates.items()}
        if self.optimizer is None:
            return
        self.settle()
        clipping = self.train_spec.gradient_clipping
        if clipping and (scale := clipping / (self._norm + 1e-6)) < 1.0:
            torch._foreach_mul_(
                [tensor for _, tensors, _ in gradients for tensor in tensors], scale
            )
        self.stage.take_step()

    def settle(self) -> None:
        """Wait until all weights are updated by the last step."""
        self.stage.gathering.settle()

    def _sums_and_largest(self, squared: Tensor) -> list[float]:
        """Return the world's sum of squares and losses; set `largest` and `expert_rows`.

        The host waits for the device here, once.
        """
        losses = self.runner.sum_losses(self.loss_modules, self.device)
        rows = self.expert_rows.take(self.device)
        sums = torch.cat([torch.stack([squared, *losses]), rows])
        dist.all_reduce(sums)
        largest = to_device(self._to_maximise(), self.device, torch.float64)
        if len(largest):
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        if self._sensor is not None:  # while the device computes what the host has queued
            reading = self._sensor.read()
            self._reading = {} if reading is None else reading._asdict()
        values = read(torch.cat([sums, largest]))
        self.tracer.anchor()
        self.largest = values[len(sums) :]
        self.expert_rows.keep(values[1 + len(losses) : len(sums)])
        return values[: 1 + len(losses)]

    def _refuse_step(self, gradients: Sequence[tuple[str, Sequence[Tensor], float]]) -> None:
        """Drop the gradients of a non-finite step, and raise its error if the run is to stop."""
        sums = self.runner.sums
        assert sums is not None
        for module, tensors, _ in gradients:
            sums.note("gradients", 0, 0, module, tensors)
        where = sums.first(self.device)
        self.skipped_steps += 1
        self.skipped_in_a_row += 1
        skipping = self.train_spec.on_bad_loss == "skip"
        error = not_finite(
            self.order.step,
            self.step_losses,
            self._norm,
            where,
            self.skipped_in_a_row if skipping else 0,
        )
        if not skipping or self.skipped_in_a_row >= MOST_SKIPPED:
            raise error
        print(f"skipped: {error.what} ({error.why})", flush=True)
        drop_gradients(self.optimizer)

    @contextmanager
    def _at(self, operation: str, slot: int) -> Iterator[None]:
        """Locate any error of an operation, NCCL's in its messages among them."""
        with (
            located(self._place, operation, slot),
            out_of_memory(self._place, self.layout, operation, slot),
        ):
            yield

    def _timed(self, operation: str, slot: int) -> Callable[[str], Callable[[], None]]:
        """Return a function that times a module and records its trace row and work in the slot."""

        def before(module: str) -> Callable[[], None]:
            self.tracer.begin(operation, slot, module)
            start = self.tracer.mark()
            return lambda: self._record(operation, slot, module, start)

        return before

    def _record(
        self, operation: str, slot: int, module: str, start: Time, end: Time | None = None
    ) -> None:
        if (slot, module) not in self._amounts:  # the backward reuses the forward's
            current = self.order.slots[slot]
            unit, coords = self.coords.unit, self.coords
            ranks = unit.dealt_over(module)
            own = dealt(current, module, current.replicas[unit.name][coords.replica], ranks)
            self._amounts[slot, module] = amounts(current, module, own[coords.tp_rank % ranks])
        self.tracer.record(
            operation, start, end, slot=slot, module=module, **self._amounts[slot, module]
        )


def amounts(slot: Slot, module: str, items: ReplicaItems) -> dict[str, int]:
    """Return a trace row's fields for the work of some items of a slot in a module."""
    item = slot.inputs.item(module)
    work = slot.work(module, items)
    images = (
        int(np.isin(slot.items["image"].sequence, items["sequence"]).sum())
        if item == "sequence"
        else int(work.items)
    )
    return {
        "tokens": int(work.tokens),
        "images": images,
        "sequences": len(items["sequence"]),
        "sum_length_sq": int(work.sum_length_sq),
    }
