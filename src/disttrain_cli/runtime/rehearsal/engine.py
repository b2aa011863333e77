"""Engine on emulated devices: profiled reduction and optimizer times, traces of all replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from disttrain_cli.costs.overlap import Hidden
from disttrain_cli.data.ordering.levelling import dealt
from disttrain_cli.data.slots import StepOrder
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime.engine.engine import UnitEngine, amounts
from disttrain_cli.runtime.rehearsal.device import Device
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.schedule.one_f_one_b import last_slots
from disttrain_cli.spec.trace import FORWARD, WEIGHTS

if TYPE_CHECKING:
    from disttrain_cli.runtime.rehearsal.feeding import Feeder

#: Margin between the last ready host and the step, for all hosts to issue the first operation.
MARGIN_S = 0.1


class NodeTracer(Tracer):
    """Traces of all replicas that a process stands for, which run in lockstep.

    Args:
        tracers: of every replica, one after the other: of its first rank or, where a rank of a CP
            group is slow, of every CP rank.
        waited: returns for a step, by tracer, the share of passes in which its rank waits for
            others of its CP group; None where one rank of a replica is recorded.
        ranks: the rank that each process stands for; -1 where there are several.
        device: the emulated device.
    """

    def __init__(
        self,
        tracers: list[Tracer],
        ranks: Mapping[int, int],
        device: Device,
        waited: Callable[[int], Sequence[float]] | None = None,
    ) -> None:
        self.tracers, self.now, self.ranks, self._emulated = tracers, tracers[0].now, ranks, device
        self._waited = waited

    def exchanged(self, number: int, operation: str, length_ns: int) -> dict[str, int]:
        """Return the column `exchange_ns` of a pass of one of the tracers."""
        if self._waited is None or operation == "weights":
            return {}
        return {"exchange_ns": round(self._waited(self.step)[number] * length_ns)}

    @property
    def step(self) -> int:
        """Number of the step that rows belong to."""
        return self.tracers[0].step

    @step.setter
    def step(self, number: int) -> None:
        for tracer in self.tracers:
            tracer.step = number

    @property
    def stage(self) -> int:
        """Stage of its unit that the next rows belong to."""
        return self.tracers[0].stage

    @stage.setter
    def stage(self, index: int) -> None:
        for tracer in self.tracers:
            tracer.stage = index

    def record(self, operation: str, start: Any, end: Any = None, **amounts: Any) -> None:
        """Add a row to every replica's trace."""
        end = self.mark() if end is None else end
        if "peer" in amounts:
            amounts["peer"] = self.ranks.get(amounts["peer"], -1)
        if operation.startswith("receive"):
            amounts["late_ns"] = round(1e9 * self._emulated.delayed_s)
        for tracer in self.tracers:
            tracer.record(operation, start, end, **amounts)

    def end_step(self) -> None:
        for tracer in self.tracers:
            tracer.end_step()

    def close(self) -> None:
        for tracer in self.tracers:
            tracer.close()


class EmulatedEngine(UnitEngine):
    """Engine whose rank stands for several replicas of its stage in lockstep."""

    clock: Device
    feeder: Feeder
    reduce_s: float
    optimizer_s: float
    # by stage of the rank, instead of `reduce_s`, `optimizer_s` where messages overlap with passes
    # (`costs.overlap`)
    reducing: list[Hidden] | None
    gathering: list[Hidden] | None
    _ended_s: dict[int, float]  # by stage, when its passes so far have ended

    def get_ready(self) -> None:
        """Agree on the start of the step: all devices begin together, once every host is ready."""
        latest = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX)
        self.clock.begin(float(latest) + MARGIN_S)

    def run_step(
        self,
        order: StepOrder,
        fetch: Callable[[int], Batch],
        to_maximise: Callable[[], Sequence[float]] = tuple,
    ) -> None:
        """Execute one optimizer step.

        Where the previous step's weights are gathered during the first forward of each stage, that
        forward starts late enough that it need not wait inside.
        """
        if self.gathering is not None:
            start = self.tracer.mark()
            self.clock.enqueue(self._lead_s(order.step, 0))
            self.tracer.record("wait", start)
        self._ended_s = {}
        super().run_step(order, fetch, to_maximise)
        if self.gathering is None:  # the step ends with the last optimizer step
            self._together(None, 0.0)
        self.clock.end()

    def _lead_s(self, step: int, chunk: int) -> float:
        """Return the time from a step's start to the first forward of one of the rank's stages.

        Weights of one stage are gathered after those of the stages before it.
        """
        assert self.gathering is not None
        first_s = self.feeder.work(step).stages[chunk].pass_s(FORWARD, range(1))
        before_s = sum(float(one.until_s.max()) for one in self.gathering[:chunk])
        return before_s + float(self.gathering[chunk].left_s(np.array([[first_s]])).max())

    def _forward(self, slot: int) -> None:
        if self.gathering is not None and self._chunk and not slot:
            lead_s = self._lead_s(self.order.step, self._chunk) * self.clock.time_scale
            self.clock.arrive(self.clock.began_s + lead_s)
        super()._forward(slot)

    def _backward(self, slot: int) -> None:
        super()._backward(slot)
        self._ended_s[self._chunk] = self.clock.free_s

    def _compute_weights(self, slots: range) -> None:
        """Compute weight gradients slot by slot, which takes as long as layer by layer."""
        for slot in slots:
            timed = self._timed("weights", slot)
            waits = self.feeder.work(self.order.step).stages[self._chunk].waits[slot]
            for module in reversed([module for module, times in waits.items() if times[WEIGHTS]]):
                done = timed(module)
                self.clock.run(waits[module][WEIGHTS])
                done()
        self._ended_s[self._chunk] = self.clock.free_s

    def _reduce_gradients(self) -> None:
        super()._reduce_gradients()
        replicas = self.grid.replicas.ranks
        if self.reducing is None:
            self._together(replicas, self.reduce_s)
        else:
            self._reduce_behind(self.reducing, replicas)

    def _reduce_behind(self, stages: list[Hidden], replicas: dist.ProcessGroup | None) -> None:
        """Reduce buckets from the last one on, each once all replicas have its gradients."""
        last = last_slots(len(self.order.slots), self.coords.stage.weight_delay)
        scale, work = self.clock.time_scale, self.feeder.work(self.order.step)
        final_s = [
            self._ended_s[chunk]
            - messages.before[:, 0]
            * work.stages[chunk].pass_s(int(messages.operation[0]), last)
            * scale
            for chunk, messages in enumerate(stages)
        ]
        final = torch.tensor(np.concatenate(final_s))
        dist.all_reduce(final, op=dist.ReduceOp.MAX, group=replicas)
        each_s = np.concatenate([np.diff(one.until_s[:, 0], prepend=0.0) for one in stages])
        done_s = 0.0
        for ready_s, message_s in reversed(list(zip(final.tolist(), each_s.tolist(), strict=True))):
            done_s = max(done_s, ready_s) + message_s * scale
        self.clock.arrive(done_s)
        self.clock.enqueue(0.0)

    def _update(self) -> None:
        super()._update()
        self._together(None, self.optimizer_s if self.gathering is None else 0.0)

    def _together(self, group: dist.ProcessGroup | None, seconds: float) -> None:
        """Execute an operation that a group starts together once all its devices are free.

        `group` None means all ranks.
        """
        latest = torch.tensor([self.clock.free_s], dtype=torch.float64)
        dist.all_reduce(latest, op=dist.ReduceOp.MAX, group=group)
        self.clock.arrive(float(latest))
        self.clock.enqueue(seconds)

    def _timed(self, operation: str, slot: int) -> Callable[[str], Callable[[], None]]:
        """Return a function that records a trace row per module and replica, with its own time."""
        node = self.tracer
        assert isinstance(node, NodeTracer)
        tracers, work, chunk = node.tracers, self.feeder.work(self.order.step), self._chunk
        items, current = self.feeder.items(self.order.step, slot), work.order.slots[slot]
        unit, seconds = self.feeder.unit, work.stages[chunk].seconds[operation]
        each = len(tracers) // len(items)  # ranks of a replica
        starts: list[int] = []  # start of the next module, by tracer

        def before(module: str) -> Callable[[], None]:
            if not starts:
                pause_s = self.feeder.pause_s(self.order.step, slot, operation, chunk)
                if pause_s > 0.0:
                    self.clock.arrive(self.clock.next_s + pause_s * self.clock.time_scale)
                starts.extend([self.tracer.now()] * len(tracers))

            def after() -> None:
                for index, tracer in enumerate(tracers):
                    replica = index // each
                    length = int(1e9 * seconds[module][slot, replica])
                    dealt_out = dealt(current, module, items[replica], unit.dealt_over(module))
                    busiest = max(dealt_out, key=lambda own: current.work(module, own)[1:])
                    tracer.record(
                        operation,
                        starts[index],
                        starts[index] + length,
                        slot=slot,
                        module=module,
                        **amounts(current, module, busiest),
                        **node.exchanged(index, operation, length),
                    )
                    starts[index] += length

            return after

        return before
