"""Traces of simulated steps of any layout: what a rehearsal without noise would write, one rank per
replica.

Times follow from the profile through the simulator, slower where a test asks for it, so the
analysis must find the profile right and the rest as it was put in.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.layout import CostedStage, amount, optimizer_s, stages_of
from disttrain_cli.data.ordering.assigning import assign, count_costs
from disttrain_cli.data.ordering.loads import replica_loads
from disttrain_cli.data.sizes import Sizes, sampled_batch, sizes_of_sample
from disttrain_cli.simulation.faults import begun, inject
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.step import fed, pipeline_of
from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.prediction import Prediction, StageTime
from disttrain_cli.spec.profile import Profile, SizeSample
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from disttrain_cli.spec.trace import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    SIZE_COLUMNS,
    STEP_COLUMNS,
    TRACE_COLUMNS,
    Job,
    Rehearsed,
)
from tests.analysis.synthetic import table

Floats = NDArray[np.float64]
GPUS_PER_NODE = 8


class HeldUp(NamedTuple):
    """A host that does nothing for a while before forwards of a replica of a stage of the
    pipeline."""

    stage: int
    replica: int
    seconds: float
    step: int | None = None  # None: in all
    slot: int | None = None
    from_step: int = 0


def _held_s(pipeline: Pipeline, held_up: Sequence[HeldUp], step: int) -> Floats:
    """[n, S, R] seconds of a step."""
    held_s = np.zeros_like(pipeline.forward_s)
    for one in held_up:
        if one.step in (None, step) and one.from_step <= step:
            held_s[slice(None) if one.slot is None else one.slot, one.stage, one.replica] += (
                one.seconds
            )
    return held_s


def layout_of(
    profile: Profile,
    batch: int,
    microbatches: int,
    trained: list[str] | None = None,
    **units: dict[str, Any],
) -> Layout:
    """A layout with one unit per module: its tp, dp, layers_per_stage, checkpointing."""
    plans = [
        UnitPlan(
            name=name,
            modules=[name],
            pp=len(unit["layers_per_stage"]),
            gpus=unit.get("tp", 1) * unit.get("dp", 1) * len(unit["layers_per_stage"]),
            **unit,
        )
        for name, unit in units.items()
    ]
    dp = next(plan.dp for plan in plans if plan.name == profile.inputs.llm)
    return Layout(
        global_batch_size=batch,
        microbatch_size=batch // microbatches // dp,
        microbatches=microbatches,
        trained=trained,
        gpus_used=sum(plan.gpus for plan in plans),
        units=plans,
    )


def write(
    folder: Path,
    profile: Profile,
    layout: Layout,
    steps: int = 4,
    data: dict[int, SizeSample] | None = None,
    stretch: dict[tuple[int, bool], float] | None = None,
    rehearsed: Rehearsed | None = None,
    ordering: Literal["none", "paper"] = "paper",
    **disturbed: Any,
) -> list[Timeline]:
    """Write the traces and return what was simulated; `disturbed` as of `play`.

    Ranks with several stages wait for the tensors of one at a time.

    Args:
        data: from which step on other sizes than the profile's are read.
        stretch: times as long as the profile says, by (stage of the pipeline, is forward).
    """
    stages = stages_of(profile, layout)
    rows: dict[int, list[dict[str, Any]]] = {}
    reported, sizes, timelines, clock = [], [], [], 10**18
    played = play(profile, layout, steps, data, stretch, ordering, **disturbed)
    for step, (batch, loads, pipeline, timeline) in enumerate(played):
        held_s = _held_s(pipeline, disturbed.get("held_up", ()), step)
        for rank, row in _rows(profile, layout, stages, loads, timeline, pipeline, held_s, clock):
            rank %= layout.gpus_used  # stages are numbered round the ranks
            rows.setdefault(rank, []).append(row | {"step": step, "rank": rank})
        clock += round(1e9 * timeline.iteration_s)
        reported.append(_step(step, batch, timeline, clock))
        sizes += [row | {"step": step} for row in _sizes(batch)]
        timelines.append(timeline)
    for rank, own in rows.items():
        if layout.units[0].chunks > 1:
            own = list(_in_turn(own, layout.units[0].pp))
        table(folder / f"rank-{rank:05d}" / "segment-00000.parquet", own, TRACE_COLUMNS)
    table(folder / "steps" / "segment-00000.parquet", reported, STEP_COLUMNS)
    table(folder / "sizes" / "segment-00000.parquet", sizes, SIZE_COLUMNS)
    iteration_s = float(np.mean([timeline.iteration_s for timeline in timelines]))
    predicted = Prediction(
        ordering=ordering,
        iteration_s=iteration_s,
        sequences_per_s=layout.global_batch_size / iteration_s,
        mfu=0.3,
        warmup_s=0.1,
        steady_s=0.4,
        bubble_fraction=0.2,
        memory=[],
        stages=[
            StageTime(
                unit=stage.unit.name, stage=stage.index, forward_ms=1.0, backward_ms=2.0, mfu=0.1
            )
            for stage in stages
        ],
    )
    job = Job(
        run="demo",
        strategy="disaggregated",
        layout=layout,
        predicted=predicted,
        profile=profile,
        gpus_per_node=GPUS_PER_NODE,
        rehearsed=rehearsed,
    )
    (folder / "job.json").write_text(job.model_dump_json())
    return timelines


def play(
    profile: Profile,
    layout: Layout,
    steps: int = 4,
    data: dict[int, SizeSample] | None = None,
    stretch: dict[tuple[int, bool], float] | None = None,
    ordering: str = "paper",
    faults: Sequence[FaultSpec] = (),
    noise: float = 0.0,
    seed: int = 0,
    workers: int = 0,
    held_up: Sequence[HeldUp] = (),
    during: Collection[int] | None = None,
    slow_reduce: float = 1.0,
) -> Iterator[tuple[Sizes, dict[str, Floats], Pipeline, Timeline]]:
    """Simulate the steps; arguments as of `write`.

    Args:
        faults: what is slower (`simulation.faults`).
        noise: standard deviation of an operation's time.
        seed: of the noise and of the batches.
        workers: cores that prepare a replica's data; 0: data are always there.
        held_up: hosts that are late.
        during: steps in which the faults are; None: in all.
        slow_reduce: times as long as every gradient reduction takes.
    """
    random = np.random.default_rng(seed)
    stages, sample = stages_of(profile, layout), profile.data.sample
    for step in range(steps):
        sample = (data or {}).get(step, sample)
        batch = sampled_batch(sizes_of_sample(sample), layout.global_batch_size, 1000 * seed + step)
        places = assign(count_costs(batch, profile.inputs), layout, profile.inputs.llm, ordering)
        loads = replica_loads(batch, profile.inputs, layout, places)
        pipeline = pipeline_of(profile, layout, stages, loads, GPUS_PER_NODE)
        for (stage, forward), factor in (stretch or {}).items():
            (pipeline.forward_s if forward else pipeline.backward_s)[:, stage] *= factor
        if workers:
            pipeline = fed(pipeline, profile, stages, loads, workers, prefetch=1)
        pipeline = inject(
            pipeline, stages, begun(faults, step) if during is None or step in during else ()
        )
        behind = pipeline.reducing
        pipeline = replace(
            pipeline,
            reduce_s=slow_reduce * pipeline.reduce_s,
            reducing=behind and replace(behind, until_s=slow_reduce * behind.until_s),
        )
        for times in (pipeline.forward_s, pipeline.backward_s):
            times *= np.maximum(0.1, 1 + noise * random.standard_normal(times.shape))
        pipeline.forward_s[...] += _held_s(pipeline, held_up, step)
        yield batch, loads, pipeline, simulate(pipeline)


def _rows(
    profile: Profile,
    layout: Layout,
    stages: list[CostedStage],
    loads: dict[str, Floats],
    timeline: Timeline,
    pipeline: Pipeline,
    held_s: Floats,
    clock: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(rank, row) of one step, without its number."""
    rank, whole_ns = 0, round(1e9 * timeline.iteration_s)
    for number, stage in enumerate(stages):
        optimizer_ns = round(1e9 * optimizer_s(profile, layout, stage, GPUS_PER_NODE))
        last_s = np.max([ends[:, number].max(axis=0) for _, ends in _computed(timeline, stage)], 0)
        done_ns = round(1e9 * np.nanmax(last_s + pipeline.exposed_s[number]))
        stepped_ns = whole_ns
        if not layout.overlap:
            stepped_ns -= max(0, _longest(profile, layout, stages) - optimizer_ns)
        for replica in range(stage.unit.dp):
            place = {
                "run": "demo",
                "unit": stage.unit.name,
                "stage": stage.index,
                "replica": replica,
                "tp_rank": 0,
                "host": "host-a",
                "slot": -1,
                "module": "",
                "tokens": 0,
                "images": 0,
                "sequences": 0,
                "sum_length_sq": 0,
                "bytes": 0,
                "peer": -1,
            }

            def row(
                operation: str, start: int, end: int, place: dict[str, Any] = place, **more: Any
            ) -> dict[str, Any]:
                return (
                    place
                    | {"operation": operation, "start_ns": clock + start, "end_ns": clock + end}
                    | more
                )

            passes = sorted(
                (
                    round(1e9 * starts[slot, number, replica]),
                    round(1e9 * ends[slot, number, replica]),
                    operation,
                    slot,
                )
                for operation, (starts, ends) in enumerate(_computed(timeline, stage))
                for slot in range(layout.microbatches)
            )
            free = round(1e9 * pipeline.lead_s[number, replica])
            if free:
                yield rank, row("wait", 0, free)
            for start, end, operation, slot in passes:
                forward = operation == FORWARD
                waited = 0
                if forward and timeline.load_wait_s is not None:
                    waited = round(1e9 * timeline.load_wait_s[slot, number, replica])
                if {FORWARD: number > 0, BACKWARD: number < len(stages) - 1}.get(operation):
                    yield (
                        rank,
                        row(
                            f"receive_{'activation' if forward else 'gradient'}",
                            free,
                            start - waited,
                            slot=slot,
                        ),
                    )
                if waited:
                    yield rank, row("load", start - waited, start, slot=slot)
                start += round(1e9 * held_s[slot, number, replica]) * forward
                yield from (
                    (rank, row(*one, slot=slot, **more))
                    for *one, more in _modules(
                        profile, stage, loads, slot, replica, operation, start, end
                    )
                )
                free = end
            yield rank, row("reduce", free, done_ns, bytes=int(pipeline.reduce_s[number] > 0))
            yield rank, row("step", done_ns, stepped_ns)
            rank += 1


def _in_turn(rows: list[dict[str, Any]], devices: int) -> Iterator[dict[str, Any]]:
    """Rows of a rank with several stages: it receives after the pass before, and reduces once."""
    free = 0
    for row in sorted(rows, key=lambda row: (row["end_ns"], row["operation"] not in COMPUTE)):
        if row["operation"] in COMPUTE:
            free = row["end_ns"]
        elif row["operation"].startswith("receive"):
            row["start_ns"] = max(row["start_ns"], free)
        elif row["stage"] >= devices:  # end of the step
            continue
        yield row


def _computed(timeline: Timeline, stage: CostedStage) -> list[tuple[Floats, Floats]]:
    """Start and end of a stage's passes, by operation."""
    passes = [
        (timeline.forward_start, timeline.forward_end),
        (timeline.backward_start, timeline.backward_end),
    ]
    if stage.weight_delay is not None:
        assert timeline.weight_start is not None and timeline.weight_end is not None
        passes.append((timeline.weight_start, timeline.weight_end))
    return passes


def _longest(profile: Profile, layout: Layout, stages: list[CostedStage]) -> int:
    return max(round(1e9 * optimizer_s(profile, layout, stage, GPUS_PER_NODE)) for stage in stages)


def _modules(
    profile: Profile,
    stage: CostedStage,
    loads: dict[str, Floats],
    slot: int,
    replica: int,
    operation: int,
    start: int,
    end: int,
) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
    """A pass divided over its modules in proportion to what each costs."""
    times = [
        float(amount(cost.parts_ms[operation], loads[cost.module][slot, replica]))
        for cost in stage.costs
    ]
    share = np.concatenate([[0.0], np.cumsum(times)]) / (sum(times) or 1.0)
    for cost, before, after in zip(stage.costs, share[:-1], share[1:], strict=True):
        items, tokens, length_sq = (int(value) for value in loads[cost.module][slot, replica])
        counted = "sequences" if profile.modules[cost.module].kind == "llm" else "images"
        yield (
            COMPUTE[operation],
            round(start + before * (end - start)),
            round(start + after * (end - start)),
            {"module": cost.module, counted: items, "tokens": tokens, "sum_length_sq": length_sq},
        )


def _step(step: int, batch: Sizes, timeline: Timeline, end_ns: int) -> dict[str, Any]:
    return {
        "run": "demo",
        "step": step,
        "loss": 1.0,
        "iteration_s": timeline.iteration_s,
        "data_wait_s": 0.0,
        "tokens": int(batch.tokens.sum()),
        "images": int(batch.items["image"].start[-1]),
        "targets": int(batch.items["target"].counts.sum()),
        "end_ns": end_ns,
    }


def _sizes(batch: Sizes) -> Iterator[dict[str, Any]]:
    for number in range(min(32, len(batch))):
        yield {
            "run": "demo",
            "tokens": int(batch.tokens[number]),
            "length_sq": int(batch.length_sq[number]),
            "images": batch.items["image"]
            .area[batch.items["image"].start[number] : batch.items["image"].start[number + 1]]
            .tolist(),
            "targets": int(batch.items["target"].counts[number]),
            "clips": int(batch.items["audio"].counts[number]),
        }
