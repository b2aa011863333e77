"""Process of a rehearsal: builds its emulated stage, joins the others, and runs the steps.

Called by `launch` with the payload that `rehearse.py` writes: that of training, and `shares`
(replicas per process, by unit), `assignments` (of steps, computed in advance), `gpus_per_node`,
`time_scale`, `began_ns` (monotonic clock), `faults` (for this layout), `dies` (first step that a
process on a lost node does not finish).
"""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from disttrain_cli.costs.layout import (
    by_device,
    optimizer_s,
    reduce_s,
    stages_of,
    transfers_s,
)
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.data.ordering.orders import Orders
from disttrain_cli.data.slots import Assignment, StepOrder
from disttrain_cli.models.graph import LayerInfo, layer_table
from disttrain_cli.models.group import Group
from disttrain_cli.models.layer import Batch
from disttrain_cli.runtime.engine.assemble import brokers, engine_parts, live_at
from disttrain_cli.runtime.engine.engine import Chunk
from disttrain_cli.runtime.engine.stage import StageRunner, build_segments
from disttrain_cli.runtime.feeding import message_dtype
from disttrain_cli.runtime.launching.process import joined
from disttrain_cli.runtime.rehearsal.device import Device
from disttrain_cli.runtime.rehearsal.engine import EmulatedEngine, NodeTracer
from disttrain_cli.runtime.rehearsal.feeding import Feeder, rehearsed_index
from disttrain_cli.runtime.rehearsal.joining import joined_layout, ranks_of
from disttrain_cli.runtime.rehearsal.layers import EmulatedLayer, EmulatedModule, message_specs
from disttrain_cli.runtime.rehearsal.transfers import EmulatedBroker
from disttrain_cli.runtime.steps import first_step, run_task
from disttrain_cli.runtime.task import Task
from disttrain_cli.runtime.units.broker import Broker, Brokers, together
from disttrain_cli.runtime.units.grid import UnitGrid
from disttrain_cli.runtime.watching.tracing import Tracer
from disttrain_cli.runtime.watching.watch import StopRequests
from disttrain_cli.simulation.faults import begun, slowdown, waited
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.rundir import stop_file
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.stage_graph import Cut, RankCoords, Stage, cuts_of, stage_graph
from disttrain_cli.spec.whole import write_whole


def before_fork(payload: dict[str, Any]) -> None:
    """Import the model's classes and build its layer table once for all processes."""
    layer_table(read_run(*payload["run"]))


def main(payload: dict[str, Any]) -> None:
    """Rehearse until `payload["steps"]`."""
    run = with_faults(read_run(*payload["run"]), payload["faults"])
    plan, profile = Plan.model_validate(payload["plan"]), Profile.model_validate(payload["profile"])
    task, layout = Task.of(payload, run, plan, profile), plan.plan
    table, shares = layer_table(run), payload["shares"]
    graph = stage_graph(joined_layout(layout, shares), profile.inputs.llm)
    coords = graph.coords(int(os.environ["RANK"]))
    stages, gpus_per_node = stages_of(profile, layout), payload["gpus_per_node"]
    places = [replace(coords, stage=stage) for stage in coords.stages]
    own = [stages[place.stage.number] for place in places]
    clock = Device(payload["time_scale"])
    with ExitStack() as stack:
        device = stack.enter_context(joined("cpu", run.file.train.timeout_s))
        index = rehearsed_index(run, profile.inputs)
        known = {
            int(step): Assignment(np.array(positions), carry)
            for step, (positions, carry) in payload["assignments"].items()
        }
        feeder = Feeder(
            run.file,
            profile,
            shares,
            Orders(run.file, layout, index, profile, known),
            own,
            coords,
            clock,
        )
        whole = stage_graph(layout, profile.inputs.llm)
        recorded, waits = recorded_ranks(
            whole.stages[coords.stage.number], feeder.replicas, run.file.rehearse.faults
        )
        tracer = NodeTracer(
            [
                Tracer(
                    task.dir.traces,
                    task.name,
                    replace(rank, stage=coords.stage),
                    cluster_clock(clock, payload["began_ns"]),
                    task.say,
                    kept_steps=run.file.train.keep_trace_steps,
                    ranks=whole.world_size,
                )
                for rank in recorded
            ],
            ranks_of(graph, whole, shares),
            clock,
            waits,
        )
        stack.callback(tracer.close)
        times_s = dict(
            zip(
                cuts_of(stages),
                transfers_s(profile, layout, stages, gpus_per_node).tolist(),
                strict=True,
            )
        )
        grid, losses = UnitGrid(graph, coords), dict[str, torch.Tensor]()
        chunks = []
        for place in places:
            links = brokers(graph, place, table, message_dtype(run.file.train), device)
            chunks.append(
                Chunk(
                    emulated_runner(run, table, place, clock, grid.ep, losses),
                    *emulated_brokers(run, times_s, place, tracer, clock, links),
                )
            )
        engine = EmulatedEngine(
            **engine_parts(
                run,
                layout,
                grid,
                coords,
                [EmulatedLayer(table[number]) for number in coords.layers],
            ),
            chunks=chunks,
            tracer=tracer,
        )
        engine.clock, engine.feeder = clock, feeder
        (together,) = by_device(own)
        engine.reduce_s = reduce_s(profile, layout, together, gpus_per_node)
        engine.optimizer_s = optimizer_s(profile, layout, together, gpus_per_node)
        engine.reducing, engine.gathering = (
            [messages.of([stage.number]) for stage in own] if layout.overlap else None
            for messages in hidden(profile, layout, stages, gpus_per_node)
        )
        first = first_step(task, engine)
        cpu_s = time.process_time()
        dies = payload["dies"].get(str(coords.rank))

        def fetch_of(order: StepOrder) -> Callable[[int], Batch]:
            if dies is not None and order.step >= dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return lambda slot: feeder.fetch(order.step, slot)

        stops = StopRequests(stop_file(task.dir.logs) if coords.rank == 0 else None)
        run_task(task, first, engine, feeder, fetch_of, stops)
        _tell(
            task.dir.logs / f"{task.name}-host-{coords.rank:05d}.json",
            clock,
            time.process_time() - cpu_s,
        )


def with_faults(run: Run, faults: list[dict[str, Any]]) -> Run:
    """Return the run with these faults in place of its file's."""
    found = [FaultSpec.model_validate(fault) for fault in faults]
    spec = run.file.rehearse.model_copy(update={"faults": found})
    return run.model_copy(update={"file": run.file.model_copy(update={"rehearse": spec})})


def recorded_ranks(
    stage: Stage, replicas: Iterable[int], faults: Sequence[FaultSpec]
) -> tuple[list[RankCoords], Callable[[int], list[float]] | None]:
    """Return the traced ranks of a stage's replicas, and their waits for CP groups.

    Traced are the first rank of each replica or, where a CP rank of the unit is slow, all CP ranks.
    In the latter case the second value is a function of a step that returns, by rank, the share of
    its passes in which it waits for its CP group; else it is None.
    """
    unit = stage.unit.name
    grouped = any(fault.unit == unit and fault.cp_rank is not None for fault in faults)
    ranks = [
        RankCoords(stage.rank(replica, 0, cp_rank), stage, replica, 0, cp_rank)
        for replica in replicas
        for cp_rank in range(stage.cp if grouped else 1)
    ]

    def waits(step: int) -> list[float]:
        now = begun(faults, step)
        return [waited(now, unit, stage.index, rank.replica, rank.cp_rank) for rank in ranks]

    return ranks, waits if grouped else None


def emulated_runner(
    run: Run,
    table: list[LayerInfo],
    coords: RankCoords,
    clock: Device,
    ep: Group | None,
    losses: dict[str, torch.Tensor],
) -> StageRunner:
    """Return the stage's runner, with a wait for each module; `ep` are processes of an EP group."""
    first, infos = (
        coords.stage.layers.start,
        table[coords.stage.layers.start : coords.stage.layers.stop],
    )
    dtype, scaled = message_dtype(run.file.train), run.file.rehearse.messages == "scaled"
    segments = build_segments(
        [EmulatedLayer(info) for info in infos],
        first,
        lambda cut: live_at(table, coords.stage, cut),
    )
    for segment in segments:
        layers = [info for info in infos if info.module == segment.module]
        segment.layers = [
            EmulatedModule(
                layers, segment.entry, segment.exit, clock, dtype, scaled, ep, coords.stage.chunk
            )
        ]
    return StageRunner(segments, losses=losses)


def emulated_brokers(
    run: Run,
    times_s: Mapping[Cut, float],
    coords: RankCoords,
    tracer: Tracer,
    clock: Device,
    links: tuple[list[Broker], list[Broker]],
) -> list[Broker | Brokers | None]:
    """Return the brokers over emulated links to the previous and next stages.

    Args:
        times_s: of one slot's tensors over each cut.
        tracer: determines the current step.
    """
    scaled = run.file.rehearse.messages == "scaled"

    def emulated(link: Broker) -> EmulatedBroker:
        sender, taker = sorted((coords.stage, link.neighbour), key=lambda stage: stage.number)
        unit, index = sender.unit.name, sender.index % sender.unit.pp

        def transfer_s() -> float:
            faults = begun(run.file.rehearse.faults, tracer.step)
            return times_s[sender.number, taker.number] * slowdown(faults, "link", unit, index)

        sends, receives = (message_specs(specs, scaled) for specs in (link.sends, link.receives))
        return EmulatedBroker(
            coords,
            link.neighbour,
            sends,
            receives,
            link.dtype,
            link.device,
            clock=clock,
            transfer_s=transfer_s,
            full={spec.name: spec for spec in (*link.sends, *link.receives)},
        )

    return [together([emulated(link) for link in side]) for side in links]


def cluster_clock(device: Device, began_ns: int) -> Callable[[], int]:
    """Return the device's clock in ns of the cluster, the same on all processes of a host.

    Time is stretched from a common start.
    """
    offset = time.time_ns() - time.monotonic_ns() + began_ns
    return lambda: offset + int((device.now_s * 1e9 - began_ns) / device.time_scale)


def _tell(path: Path, clock: Device, cpu_s: float) -> None:
    """Write this process's measurements of the emulation itself."""
    late_ms = 1e3 * np.array(clock.late_s or [0.0])
    write_whole(
        path,
        json.dumps(
            {
                "operations": len(clock.late_s),
                "late_ms": np.round(late_ms, 4).tolist(),
                "cpu_s": cpu_s,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        ),
    )
