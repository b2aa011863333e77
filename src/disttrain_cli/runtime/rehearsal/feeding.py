"""Work of a process in every slot, and arrival of its data: replaces the loader in a rehearsal.

The order of a step is the run's, computed before the step begins: many processes share few cores,
and between steps the devices' clocks stand still. Times come from the cost models at the work of
every replica. Nothing is decoded: preprocessing cores take the profile's time per image and
sequence, one slot after the other, and no more than `preprocess.prefetch_slots` ahead, as
`data.loader` does.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.layout import Cost, CostedStage, by_device, replica_ms
from disttrain_cli.costs.preparing import prepare_s
from disttrain_cli.data.index.sample_index import Index, read_index
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.ordering.loads import unit_loads
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.packing import Packing
from disttrain_cli.data.slots import ReplicaItems, StepOrder
from disttrain_cli.models.experts import Counts, hops
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import TensorSpec
from disttrain_cli.runtime.rehearsal.device import Device
from disttrain_cli.runtime.rehearsal.joining import Shares, joined_order, replicas_of
from disttrain_cli.runtime.rehearsal.layers import EmulatedBatch, Routes
from disttrain_cli.runtime.units.routes import local_rows
from disttrain_cli.simulation.faults import begun, slowdown
from disttrain_cli.simulation.routing import added_s, dispatched_rows
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, RunFile
from disttrain_cli.spec.stage_graph import RankCoords
from disttrain_cli.spec.trace import COMPUTE, WEIGHTS

Floats = NDArray[np.float64]


def rehearsed_index(run: Run, inputs: ModelInputs) -> Index:
    """Return the index of the rehearsed data: the run's, or that of `rehearse.distribution`.

    Raises:
        DataError, MismatchError: the run's index cannot be read, or its data changed.
        SpecError: the images of the distribution do not fit the sequences.
    """
    other = run.file.rehearse.distribution
    if other is not None:
        data = run.file.data.model_copy(update={"sources": [], "distribution": other})
        run = run.model_copy(update={"file": run.file.model_copy(update={"data": data})})
    return (
        open_index(run, inputs)
        if run.file.data.distribution is not None
        else read_index(run, inputs)
    )


@dataclass(frozen=True)
class StageWork:
    """Times of a stage of one process, which stands for k replicas, in a step of n slots."""

    # by operation of `COMPUTE` and module: [n, k], faults and noise included
    seconds: dict[str, dict[str, Floats]]
    # by slot and module: forward and backward of the slowest replica
    waits: list[dict[str, tuple[float, ...]]]

    def pass_s(self, operation: int, slots: range) -> float:
        """Return the seconds of a pass (its index in `COMPUTE`) over some slots."""
        return sum(times[operation] for slot in slots for times in self.waits[slot].values())


@dataclass(frozen=True)
class StepWork:
    """Work of one process in a step of n slots."""

    order: StepOrder  # for the plan's layout
    joined: StepOrder  # for the processes
    batch: Packing
    stages: list[StageWork]  # of the process's stages
    prepare_s: Floats  # [n] preparation time of a slot's data


class Feeder:
    """Per-step work of one process.

    Args:
        stages: of the process, in the plan's layout.
    """

    def __init__(
        self,
        run: RunFile,
        profile: Profile,
        shares: Shares,
        orders: Orders,
        stages: list[CostedStage],
        coords: RankCoords,
        device: Device,
    ) -> None:
        self._run, self._profile, self._shares = run, profile, shares
        self._stages, self.unit, self._coords, self._device = (
            stages,
            stages[0].unit,
            coords,
            device,
        )
        self.replicas = replicas_of(shares[coords.unit.name], coords.replica)
        # EP groups of which the process has ranks, numbered by the replicas that share one
        together = self.unit.replicas_together
        self._blocks = range(self.replicas.start // together, -(-self.replicas.stop // together))
        self._orders = orders
        self._steps: dict[int, StepWork] = {}
        self._prepared_s = 0.0
        # request times of the last slots
        self._asked_s: deque[float] = deque(maxlen=run.preprocess.prefetch_slots + 1)

    def work(self, step: int) -> StepWork:
        """Return a step's work; that of the last step is cached."""
        if step not in self._steps:
            self._steps = {step: self._prepare(step)}
        return self._steps[step]

    def order(self, step: int) -> StepOrder:
        """Return the work of every process of every unit in a step."""
        return self.work(step).joined

    def batch(self, step: int) -> Packing:
        """Return a step's global batch, in the order of the data."""
        return self.work(step).batch

    def items(self, step: int, slot: int) -> list[ReplicaItems]:
        """Return the items of each of the process's replicas in a slot."""
        of_unit = self.work(step).order.slots[slot].replicas[self._coords.unit.name]
        return [of_unit[replica] for replica in self.replicas]

    def fetch(self, step: int, number: int) -> EmulatedBatch:
        """Delay the device until a slot's data are prepared, and return them."""
        work, asked_s = self.work(step), self._device.next_s
        if self._asked_s:
            self._asked_s.append(asked_s)
        else:  # the cores start on the first slots when the first step begins
            self._prepared_s = self._device.began_s
            self._asked_s.extend([self._prepared_s] * (self._run.preprocess.prefetch_slots + 1))
        self._prepared_s = (
            max(self._prepared_s, self._asked_s[0])
            + work.prepare_s[number] * self._device.time_scale
        )
        if self._prepared_s > asked_s:
            self._device.arrive(self._prepared_s)
        slot = work.joined.slots[number]

        def rows(spec: TensorSpec) -> int:
            return local_rows(
                slot, spec.item, spec.rows, self._coords.unit.name, self._coords.replica
            )

        return EmulatedBatch(
            rows=rows,
            seconds=[of_stage.waits[number] for of_stage in work.stages],
            routes=[self._routes(stage, step, number) for stage in self._stages],
        )

    def _routes(self, stage: CostedStage, step: int, slot: int) -> dict[str, list[Routes]]:
        """Return rows to and from each process of an EP group by hop of a mixture, by module.

        Empty if the process has whole groups. Messages of a module's mixtures are those of one.
        """
        processes, own = self._coords.unit.ep, self._coords.ep_rank
        if processes == 1:
            return {}
        at, ranks = (self._run.train.seed, step, slot), stage.ep
        nodes = stage.ep_nodes(self._run.cluster.gpus_per_node)
        routes: dict[str, list[Routes]] = {}
        for module in (cost.module for cost in stage.costs):
            table = dispatched_rows(self._profile, stage, module, at, self._blocks.start, nodes)
            if table is None:
                continue
            of_ranks = [
                [hop.give for hop in hops(Counts(*table), 1, Group(None, ranks, rank, nodes=nodes))]
                for rank in range(ranks)
            ]
            routes[module] = []
            for give_RR in np.array(of_ranks).swapaxes(0, 1):
                parts = give_RR.reshape(processes, ranks // processes, processes, -1)
                between = parts.sum(axis=(1, 3))
                routes[module].append((between[own].tolist(), between[:, own].tolist()))
        return routes

    def _prepare(self, step: int) -> StepWork:
        order, batch = self._orders.of(step)
        modules = list(dict.fromkeys(cost.module for stage in self._stages for cost in stage.costs))
        together = self.unit.replicas_together
        waiting = range(self._blocks.start * together, self._blocks.stop * together)
        loads = unit_loads(order, self.unit, waiting, modules)
        noise = _noise(
            self._run,
            step,
            self._coords.rank,
            (len(self._stages), len(COMPUTE), len(order.slots), len(self.replicas)),
        )
        factors = noise * self._slowdown("stage", step)
        own = slice(self.replicas.start - waiting.start, self.replicas.stop - waiting.start)
        local = unit_loads(order, self.unit, self.replicas, modules)
        prepared = prepare_s(
            self._profile, by_device(self._stages)[0], local, self._run.preprocess.workers
        )
        return StepWork(
            order,
            joined_order(order, self._shares),
            batch,
            [
                self._stage_work(stage, loads, step, own, factors_of)
                for stage, factors_of in zip(self._stages, factors, strict=True)
            ],
            (prepared * self._slowdown("worker", step)).max(axis=1),
        )

    def _stage_work(
        self,
        stage: CostedStage,
        loads: dict[str, Floats],
        step: int,
        own: slice,
        factors: Floats,
    ) -> StageWork:
        """Return the work of a stage.

        Args:
            loads: work of all replicas that wait for each other, of which `own` are the process's.
            factors: [operations, n, k] of faults and noise.
        """
        routing_s = added_s(self._profile, stage, loads, self._run.train.seed, step, self._blocks)
        seconds = {
            part: {
                cost.module: self._seconds(cost, part, loads, routing_s)[:, own] * factor
                for cost in stage.costs
            }
            for part, factor in zip(COMPUTE, factors, strict=True)
        }
        slowest = {
            part: sum(by_module.values(), np.zeros(factors.shape[1:])).argmax(axis=1)
            for part, by_module in seconds.items()
        }
        waits = [
            {
                cost.module: tuple(
                    float(seconds[part][cost.module][slot, slowest[part][slot]]) for part in COMPUTE
                )
                for cost in stage.costs
            }
            for slot in range(factors.shape[1])
        ]
        return StageWork(seconds, waits)

    def _seconds(
        self,
        cost: Cost,
        part: str,
        loads: dict[str, Floats],
        routing_s: Mapping[str, tuple[Floats, Floats]],
    ) -> Floats:
        """Return the time of a pass [n, replicas] on all replicas that wait for each other."""
        operation, together = COMPUTE.index(part), self.unit.replicas_together
        replicas = len(self._blocks) * together
        seconds = replica_ms(cost.parts_ms[operation], loads[cost.module], replicas, together) / 1e3
        if operation == WEIGHTS or cost.module not in routing_s:
            return seconds
        return np.maximum(0.0, seconds + routing_s[cost.module][operation])

    def pause_s(self, step: int, slot: int, part: str, chunk: int) -> float:
        """Return the seconds for which a busy host delays an operation of a slot in a stage."""
        stage = self.work(step).stages[chunk]
        longest_s = stage.pass_s(COMPUTE.index(part), range(slot, slot + 1))
        return longest_s * float(self._slowdown("host", step).max() - 1.0)

    def _slowdown(self, what: str, step: int) -> Floats:
        """Return [k] factors by which faults lengthen a step; "stage" includes slow ranks."""
        kinds = ("stage", "rank") if what == "stage" else (what,)
        faults, place = begun(self._run.rehearse.faults, step), self._coords
        return np.array(
            [
                math.prod(
                    slowdown(faults, kind, place.unit.name, place.stage.index, replica)
                    for kind in kinds
                )
                for replica in self.replicas
            ]
        )


def _noise(run: RunFile, step: int, rank: int, shape: tuple[int, ...]) -> Floats:
    """Return random factors around 1, the same whenever the step is rehearsed again."""
    random = np.random.default_rng([run.train.seed, step, rank])
    return np.maximum(0.1, 1.0 + run.rehearse.noise * random.standard_normal(shape))
