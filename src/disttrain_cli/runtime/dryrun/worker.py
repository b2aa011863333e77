"""Full step of one stage on a fake device, in its own process: real engine, brokers, optimizer.

Called by `launch` with the payload that `dryrun.py` writes: `run` (path of the run file), `plan`,
`profile` (their JSON), `stages` (by process from 1 on, numbers of identical stages; process 0
checks the messages of all ranks), `name`, `memory_gib` and `capability` of the device, `folder`
(for the results, a file per process, and `PROGRESS`) and `at_once` (the maximum of processes
that work at a time).
"""

from __future__ import annotations

import gc
import os
import resource
import struct
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import numpy as np
import torch

from disttrain_cli.data.slots import Slot, SlotBatch, StepOrder
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.layer import Batch
from disttrain_cli.models.qwen_vision import QwenLayer
from disttrain_cli.models.tying import tied_layers
from disttrain_cli.runtime.dryrun.device import pretend
from disttrain_cli.runtime.dryrun.feeding import empty_inputs
from disttrain_cli.runtime.dryrun.observing import Observer
from disttrain_cli.runtime.dryrun.routing import routed
from disttrain_cli.runtime.dryrun.stages import (
    PROGRESS,
    Failure,
    Message,
    OrderSeen,
    StageSeen,
    Wait,
    in_flight,
    slots_seen,
)
from disttrain_cli.runtime.dryrun.storages import bytes_of
from disttrain_cli.runtime.dryrun.syncs import Waits
from disttrain_cli.runtime.dryrun.worst import (
    expert_loads,
    sample_lengths,
    worst_slot,
    worst_step,
)
from disttrain_cli.runtime.engine.assemble import build_engine
from disttrain_cli.runtime.engine.engine import UnitEngine
from disttrain_cli.runtime.engine.optimizer import set_lrs
from disttrain_cli.runtime.feeding import fields_of, message_dtype, own_values, pinned, to_batch
from disttrain_cli.runtime.launching.process import import_muon
from disttrain_cli.runtime.messages.hollow import alone, record_steps
from disttrain_cli.runtime.messages.proof import faults
from disttrain_cli.runtime.units.routes import place_of
from disttrain_cli.runtime.watching.device_clock import DeviceClock
from disttrain_cli.runtime.watching.tracing import Tracer, wall_clock
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import Run, read_run
from disttrain_cli.spec.stage_graph import RankCoords, StageGraph, stage_graph
from disttrain_cli.spec.whole import write_whole

GIB = 2**30
#: Instructions of a slot; the others end the step.
OF_SLOT = (
    "_post_activation",
    "_receive_activation",
    "_load",
    "_forward",
    "_send_activation",
    "_post_gradient",
    "_receive_gradient",
    "_backward",
    "_send_gradient",
)
_LONGEST = 300  # letters of an error's first line
ORDER, MOST_FAULTS = "order.json", 4
#: Slots that take as long as building the engine, for the progress bar.
BUILDING = 2
DEVICE = torch.device("cuda", 0)
#: Pipe used as a semaphore: each process takes a byte to work, and puts it back afterwards.
_turns = (-1, -1)


def before_fork(payload: dict[str, Any]) -> None:
    """Import the model's classes and build its layer table once for all stages."""
    global _turns
    deepspeed.ops.__dict__["__compatible_ops__"] = {}  # nothing is compiled
    import_muon()
    layer_table(read_run(*payload["run"]))
    _turns = os.pipe()
    os.write(_turns[1], bytes(int(payload["at_once"])))


def main(payload: dict[str, Any]) -> None:
    """Do the work of this process when it is its turn, and write the results."""
    number, folder = int(os.environ["RANK"]), Path(payload["folder"])
    os.environ["LOCAL_RANK"] = "0"
    torch.set_num_threads(1)
    os.read(_turns[0], 1)
    run, plan = read_run(*payload["run"]), Plan.model_validate(payload["plan"])
    profile = Profile.model_validate(payload["profile"])
    graph = stage_graph(plan.plan, profile.inputs.llm, tied_layers(layer_table(run)))
    report = partial(_report, folder / PROGRESS, number)
    if number == 0:
        order = _order(run, plan, profile, graph, report)
        write_whole(folder / ORDER, order.model_dump_json())
    else:
        stages = payload["stages"][number - 1]
        seen = _seen(payload, run, plan, profile, graph, stages, report)
        write_whole(folder / f"stage-{number}.json", seen.model_dump_json())
    report(1.0)
    os.write(_turns[1], bytes(1))


def _report(path: Path, number: int, share: float) -> None:
    with path.open("r+b") as file:
        file.seek(number * len(one := struct.pack("d", share)))
        file.write(one)


def _order(
    run: Run, plan: Plan, profile: Profile, graph: StageGraph, report: Callable[[float], None]
) -> OrderSeen:
    """Record and check all ranks' messages in enough slots to fill and drain the pipeline."""
    most = plan.plan.microbatches
    slots = max(slots_seen(stage, most) for stage in graph.stages)
    order = worst_step(profile, plan.plan, slots)
    records = []
    for record in record_steps(run, graph, order, overlap=plan.plan.overlap):
        records.append(record)
        report(len(records) / (graph.world_size + 1))
    return OrderSeen(
        slots=slots,
        operations=sum(len(record.operations) for record in records),
        faults=faults(records)[:MOST_FAULTS],
    )


def _seen(
    payload: dict[str, Any],
    run: Run,
    plan: Plan,
    profile: Profile,
    graph: StageGraph,
    stages: list[int],
    report: Callable[[float], None],
) -> StageSeen:
    began_s = time.monotonic()
    coords = graph.coords(graph.stages[stages[0]].rank(0))
    most = plan.plan.microbatches
    seen = StageSeen(
        stages=stages,
        rank=coords.rank,
        slots_in_flight=in_flight(coords.stage, most),
        slots=slots_seen(coords.stage, most),
    )
    _look_up_layouts(run, coords, worst_slot(profile, plan.plan))
    with pretend(payload["name"], payload["memory_gib"], tuple(payload["capability"])):
        try:
            with alone(coords.rank, graph.world_size):
                deepspeed.init_distributed(dist_backend="fake", verbose=False)
                _take_steps(run, plan, profile, graph, coords, seen, report)
        except Exception as error:
            traceback.print_exc()
            seen.failure = _failure(error)
    seen.took_s = time.monotonic() - began_s
    seen.host_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return seen


def _look_up_layouts(run: Run, coords: RankCoords, slot: Slot) -> None:
    """Cache the layouts of the slot's images before fake tensors are active.

    The host computes them from values, which fake tensors do not have.
    """
    table = layer_table(run)
    for number in {
        (table[number].module, table[number].kind): number for number in coords.layers
    }.values():
        layer = build_layers(run, number, number + 1, "meta")[0]
        if isinstance(layer, QwenLayer):
            for rows, columns in np.unique(slot.items["image"].grid, axis=0).tolist():
                layer.layout(rows, columns)


def _take_steps(
    run: Run,
    plan: Plan,
    profile: Profile,
    graph: StageGraph,
    coords: RankCoords,
    seen: StageSeen,
    report: Callable[[float], None],
) -> None:
    """Build the engine, run a short step that allocates optimizer states, then the observed one."""
    now, table = wall_clock(), layer_table(run)
    tracer = Tracer(Path(os.devnull), "dry-run", coords, now, device_clock=DeviceClock(now))
    fields = fields_of([table[number] for number in coords.layers], coords.unit)
    lengths, dtype = sample_lengths(profile), message_dtype(run.file.train)
    place, begun = place_of(coords), count(BUILDING)

    def fetch(arrays: SlotBatch, order: StepOrder, slot: int) -> Batch:
        report(next(begun) / (BUILDING + 1 + seen.slots))
        own = own_values(arrays, order.slots[slot].inputs, place)
        return to_batch(pinned(own, dtype), order, DEVICE, dtype, place)

    with Observer() as observer:
        with Waits():
            engine = build_engine(
                run, plan, graph, coords, DEVICE, tracer, [info.name for info in table]
            )
        seen.built_gib = observer.peak_bytes / GIB
        held = [
            layer
            for chunk in engine.chunks
            for segment in chunk.runner.segments
            for layer in segment.layers
        ]
        left: list[int] = []  # bytes alive after each step
        with routed(held, expert_loads(profile, plan.plan, coords)):
            for slots in (coords.unit.pp if coords.later else 1, seen.slots):
                order = worst_step(profile, plan.plan, slots)
                arrays = empty_inputs(order.slots[0], lengths, coords.unit.name, fields)
                set_lrs(engine.optimizer, engine.train_spec, 0)
                observer.peak_bytes = observer.alive_bytes
                with Waits() as waits, watched(engine, observer, waits, seen, last=slots - 1):
                    engine.run_step(order, partial(fetch, arrays, order))
                gc.collect()
                left.append(observer.alive_bytes)
        seen.peak_gib = observer.peak_bytes / GIB
        seen.leaked_gib = (left[1] - left[0]) / GIB
    seen.devices = sorted({str(tensor.device) for tensor in engine.module.parameters()})


@contextmanager
def watched(
    engine: UnitEngine, observer: Observer, waits: Waits, seen: StageSeen, last: int
) -> Iterator[None]:
    """Record what slot `last` of a step does, per instruction, and the waits of the whole step."""
    counts, syncs, messages = Counter[str](), Counter[tuple[str, str, str]](), list[Message]()
    seen.kept_gib = 0.0

    def wrapped(name: str, stock: Callable[[int], None]) -> Callable[[int], None]:
        instruction = name.removeprefix("_")

        def call(slot: int) -> None:
            before, waited, alive = (
                Counter(observer.counts),
                Counter(waits.counts),
                observer.alive_bytes,
            )
            received = bytes_of(list(engine._state.get(slot, {}).values()))
            # only for sends: a reference would keep tensors alive that a forward frees
            state = dict(engine._state.get(slot, {})) if "send" in name else {}
            stock(slot)
            for (what, where), times in (waits.counts - waited).items():
                syncs[instruction, what, where] += times
            if slot != last:
                return
            counts.update(observer.counts - before)
            if name in ("_load", "_forward"):
                sent = bytes_of(list(engine._state.get(slot, {}).values()))  # to be sent
                seen.kept_gib += (observer.alive_bytes - alive + received - sent) / GIB
            moved = (
                state
                if "send" in name
                else engine._state.get(slot, {})
                if "receive" in name
                else {}
            )
            messages.extend(
                Message(
                    instruction=instruction,
                    tensor=tensor,
                    shape=list(value.shape),
                    dtype=str(value.dtype).removeprefix("torch."),
                )
                for tensor, value in moved.items()
            )

        return call

    for name in OF_SLOT:
        engine.__dict__[name] = wrapped(name, getattr(engine, name))
    try:
        yield
    finally:
        for name in OF_SLOT:
            del engine.__dict__[name]
    for (what, where), times in waits.counts.items():
        inside = sum(count for (_, *known), count in syncs.items() if known == [what, where])
        syncs["", what, where] += times - inside
    seen.waits = [
        Wait(instruction=instruction, what=what, where=where, times=times)
        for (instruction, what, where), times in syncs.items()
        if times
    ]
    seen.kernels, seen.host_operators, seen.messages = (
        counts["kernels"],
        counts["host_operators"],
        messages,
    )
    seen.sends, seen.receives, seen.collectives = (
        counts["sends"],
        counts["receives"],
        counts["collectives"],
    )
    seen.send_gib, seen.receive_gib, seen.collective_gib = (
        counts[f"{kind}_bytes"] / GIB for kind in ("sends", "receives", "collectives")
    )


def _failure(error: Exception) -> Failure:
    """Return the error and its line in this package (else the innermost line of a library)."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/runtime/dryrun/" not in frame.filename
    ]
    ours = [frame for frame in frames if "/disttrain_cli/" in frame.filename] or frames
    what = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    where = "/".join(Path(ours[-1].filename).parts[-2:]) + f":{ours[-1].lineno}" if ours else ""
    return Failure(what=f"{type(error).__name__}: {what}"[:_LONGEST], where=where)
