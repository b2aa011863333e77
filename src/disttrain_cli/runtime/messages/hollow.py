"""Dry rank ("hollow"): a rank's real instructions and messages without weights, data or peers.

The engine's instruction loop, the process groups of its grid and its brokers run as in training,
over torch's fake backend, which stands for NCCL. Tensors have shapes and no memory, and layers
return empty tensors with the rows of a slot. Layers' messages to a TP or CP group are represented
by one message, as for an operator over symmetric memory, and where the group overlaps also by one
ring pass, as without such memory; those to an EP group by the exchanges of one mixture, with drawn
numbers of rows; messages to the replicas of a stage are one per layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_cli.data.slots import StepOrder
from disttrain_cli.models.experts import Counts, hops
from disttrain_cli.models.graph import LayerInfo, layer_table
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch, PipelineLayer, TensorSpec
from disttrain_cli.runtime.engine.assemble import brokers, live_at
from disttrain_cli.runtime.engine.deepspeed import StageEngine
from disttrain_cli.runtime.engine.engine import Chunk, UnitEngine
from disttrain_cli.runtime.engine.gradients import gradient_flow
from disttrain_cli.runtime.engine.stage import Segment, StageRunner, build_segments
from disttrain_cli.runtime.feeding import message_dtype
from disttrain_cli.runtime.messages.recorder import Recorder
from disttrain_cli.runtime.messages.records import Record
from disttrain_cli.runtime.units.broker import Broker, together
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.runtime.units.routes import End, local_rows
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.runfile import Run
from disttrain_cli.spec.runfile.train import TrainSpec
from disttrain_cli.spec.stage_graph import RankCoords, StageGraph

#: Device of tensors that have only a shape and dtype.
NOWHERE = torch.device("meta")


def record_steps(
    run: Run,
    graph: StageGraph,
    order: StepOrder,
    ranks: Iterable[int] | None = None,
    overlap: bool = False,
) -> Iterator[Record]:
    """Yield records of ranks' sends, receives and collectives over NCCL.

    They cover the step of `order`, and then an evaluation of its slots.

    Args:
        ranks: to record; None = all.
        overlap: of the layout: replicas that have work in the last pass reduce in it.
    """
    table = layer_table(run)
    carrying = gradient_flow(table, run.file.model.trained).carrying
    for rank in range(graph.world_size) if ranks is None else ranks:
        with alone(rank, graph.world_size), Recorder(rank) as recorder:
            engine = HollowEngine(
                run.file.train,
                table,
                carrying,
                graph,
                graph.coords(rank),
                overlap,
                run.file.cluster.gpus_per_node,
            )
            engine.run_step(order, _nothing, lambda: [0.0])
            engine.evaluate(order, _nothing)
        yield recorder.record


@contextmanager
def alone(rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed with the fake backend, as one rank of a world without others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class HollowRunner(StageRunner):
    """Stage runner whose layers return empty tensors."""

    def __init__(
        self,
        segments: list[Segment],
        coords: RankCoords,
        order: Callable[[], StepOrder],
        grid: UnitGrid,
        links: tuple[Sequence[Broker], Sequence[Broker]],
        reduction: HollowReduction,
    ) -> None:
        super().__init__(segments)
        self._coords, self._order, self._grid, self._links = coords, order, grid, links
        self._reduction = reduction

    @property
    def trained(self) -> list[Any]:
        """Numbers of the stage's layers, each of which stands for its weights."""
        return list(self._coords.stage.layers)

    def waiting(self, slots: Iterable[int]) -> list[Any]:
        return [layer for slot in slots if self._works(slot) for layer in self.trained]

    def forward(
        self, slot: int, state: dict[str, Tensor], batch: Batch, timed: Any
    ) -> dict[str, Tensor]:
        self.in_flight[slot] = []
        return self._leave(slot, self._links[1])

    def backward(self, slot: int, gradients: dict[str, Tensor], timed: Any) -> dict[str, Tensor]:
        del self.in_flight[slot]
        left = self._leave(slot, self._links[0])
        self.weights([slot], timed)
        return left

    def weights(self, slots: Sequence[int], timed: Any) -> None:
        for layer in reversed(self.trained):
            for _ in filter(self._works, slots):
                self._reduction.made(layer)

    def _works(self, slot: int) -> bool:
        """Return True if the replica has work in a slot."""
        unit, replica = self._coords.unit.name, self._coords.replica
        items = self._order().slots[slot].replicas[unit][replica]
        return any(len(positions) for positions in items.values())

    def _leave(self, slot: int, links: Sequence[Broker]) -> dict[str, Tensor]:
        group = self._grid.tp
        for one in (group, self._grid.cp):
            join(one and one.ranks)
        if self._grid.ep is not None:
            route(self._grid.ep, slot)
        if group is not None and group.overlap:
            for _ in range(group.size - 1):
                chunk = torch.empty(1, device=NOWHERE)
                group.pass_on(chunk, torch.empty_like(chunk)).wait()
        return {
            spec.name: self._empty(slot, spec, link.dtype) for link in links for spec in link.sends
        }

    def _empty(self, slot: int, spec: TensorSpec, dtype: torch.dtype) -> Tensor:
        end = End.of(self._coords)
        rows = local_rows(self._order().slots[slot], spec.item, spec.rows, end.unit, end.replica)
        if spec.split:
            start, stop = end.place.own_rows(rows)
            rows = stop - start
        return torch.empty((rows, *spec.shape), dtype=dtype, device=NOWHERE)


def route(group: Group, slot: int) -> None:
    """Exchange counts, rows and results with an EP group, as a mixture's forward.

    The routing is drawn for a group and slot, the same on all ranks; some of them exchange no rows.
    """
    assert group.ranks is not None
    first, ranks, halves = (
        dist.get_process_group_ranks(group.ranks)[0],
        group.size,
        1 + group.overlap,
    )
    drawn = np.random.default_rng([first, slot]).integers(0, 3, (halves, ranks, ranks))
    there = []
    for rows_RR in drawn:
        by_node = rows_RR.reshape(ranks, group.nodes, -1).max(axis=2)
        there.append(hops(Counts(rows_RR, rows_RR, by_node), 1, group))
    messages = [([halves] * ranks, [halves] * ranks)]
    messages += [(hop.give, hop.take) for half in there for hop in half]
    messages += [(hop.take, hop.give) for half in there for hop in reversed(half)]
    for sent, taken in messages:
        group.exchanged(torch.empty(sum(sent), 1, device=NOWHERE), sent, taken)


class HollowReduction:
    """Messages of `Reduction`, one per layer."""

    def __init__(self, grid: UnitGrid, coords: RankCoords, overlaps: bool) -> None:
        self._replicas, self._layers, self._overlaps = replicas(grid), coords.layers, overlaps
        self._to_come: Counter[int] | None = None  # outstanding gradients by layer
        self._left = list(self._layers)

    def expect(self, layers: Iterable[int] | None = None) -> None:
        """Start the last passes: they compute these layers' gradients, or every layer's once."""
        if self._overlaps:
            self._to_come = Counter(self._layers if layers is None else layers)
            self._begin_complete()

    def made(self, layer: int) -> None:
        """Record the reductions that begin with a gradient of a layer."""
        if self._to_come is not None:
            self._to_come[layer] -= 1
            self._begin_complete()

    def finish(self) -> None:
        """Record the remaining reductions after the last pass."""
        self._to_come = Counter()
        self._begin_complete()
        self._to_come, self._left = None, list(self._layers)

    def _begin_complete(self) -> None:
        while self._left and not (self._to_come and self._to_come[self._left[-1]]):
            self._left.pop()
            for group in self._replicas:
                join(group)


def replicas(grid: UnitGrid) -> list[dist.ProcessGroup]:
    """Return the rank's groups of ranks with the same weights, and with the same experts."""
    groups = (grid.replicas, *((grid.expert_replicas,) if grid.ep is not None else ()))
    return [one.ranks for one in groups if one.size > 1 and one.ranks is not None]


@dataclass
class HollowStage:
    """Stage without weights, which DeepSpeed would require."""

    mpu: UnitGrid
    reduction: HollowReduction
    module: nn.Module = field(default_factory=nn.Module)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    optimizer: None = None


class HollowEngine(UnitEngine):
    """Engine of a dry rank."""

    def __init__(
        self,
        train: TrainSpec,
        table: list[LayerInfo],
        carrying: Sequence[frozenset[str]],
        graph: StageGraph,
        coords: RankCoords,
        overlap: bool,
        gpus_per_node: int,
    ) -> None:
        grid = UnitGrid(graph, coords)
        nodes = coords.stage.ep_nodes(gpus_per_node)
        grid.ep = grid.ep and replace(grid.ep, nodes=nodes)
        reduction = HollowReduction(grid, coords, overlap)
        chunks = []
        for stage in coords.stages:
            place = replace(coords, stage=stage)
            links = brokers(
                graph,
                place,
                table,
                message_dtype(train),
                NOWHERE,
                carrying.__getitem__,
                grid,
            )
            segments = build_segments(
                cast(Sequence[PipelineLayer], table[stage.layers.start : stage.layers.stop]),
                stage.layers.start,
                partial(live_at, table, stage),
                carrying.__getitem__,
            )
            runner = HollowRunner(segments, place, lambda: self.order, grid, links, reduction)
            chunks.append(Chunk(runner, *map(together, links)))
        super().__init__(
            stage=cast(StageEngine, HollowStage(grid, reduction)),
            chunks=chunks,
            coords=coords,
            tracer=cast(Tracer, _Silence()),
            layout=cast(Layout, None),  # only used in errors about memory
            train_spec=train,
            loss_modules={info.loss: info.module for info in table if info.loss is not None},
            trained=(),
        )

    def _sum_tied_gradients(self) -> None:
        join(self.grid.twins)

    def _sum_partial_gradients(self) -> None:
        join(self.grid.tp and self.grid.tp.ranks)

    def _update(self) -> None:
        super()._update()
        # ZeRO's replicas gather the weights that each has updated
        for _ in self.coords.layers:
            for group in replicas(self.grid):
                join(group)

    def _at(self, operation: str, slot: int) -> Any:
        return _Silence()


def _nothing(slot: int) -> Batch:
    return Batch()


def join(group: dist.ProcessGroup | None) -> None:
    """Execute one collective of a group, if there is one."""
    if group is not None:
        dist.all_reduce(torch.empty(1, device=NOWHERE), group=group)


class _Silence:
    """Substitute for a tracer that returns 0 for every call."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *given, **named: 0

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
