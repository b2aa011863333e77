"""Prediction of a layout: simulated steps over sampled global batches, memory, MFU, traffic.

Every batch is drawn from the sizes that the profile stores and ordered as training would order it,
so that layouts are compared under the data's own skew; the same batches for all layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.flops import mfu, peak_tflops
from disttrain_cli.costs.layout import CostedStage, amount, stages_of
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.costs.routing import QUANTILE, balanced
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.objective import layout_time
from disttrain_cli.planning.traffic import preprocess_need, traffic_of
from disttrain_cli.planning.units import Cluster, Unit
from disttrain_cli.simulation.makespan import steps_s
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.shared_cores import simulate_shared
from disttrain_cli.simulation.step import pipeline_of, pipelines_of
from disttrain_cli.simulation.timeline import Pipeline, Timeline
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.prediction import Prediction, StageMemory, StageTime, UnitTime
from disttrain_cli.spec.profile import DeviceProfile, Profile
from disttrain_cli.spec.trace import COMPUTE

Floats = NDArray[np.float64]
BATCHES, SEQUENCES = (
    3,
    256,
)  # global batches whose simulated times are averaged, and sequences in all, at least


@dataclass(frozen=True)
class Step:
    """One simulated step of a layout."""

    stages: list[CostedStage]
    loads: dict[str, Floats]  # by module [n, DP, 3]
    pipeline: Pipeline
    timeline: Timeline


def simulated_steps(
    profile: Profile,
    layout: Layout,
    cluster: Cluster,
    numbers: Iterable[int] | None = None,
    shared: bool = True,
    draws: Draws | None = None,
) -> Iterator[Step]:
    """Yield the steps over these global batches drawn from the data, or over all (`batches`).

    Args:
        shared: ranks of a CPU share its cores; if not, every rank has a device of its own, as on a
            cluster.
        draws: the batches; None = new ones.
    """
    stages, draws = stages_of(profile, layout), draws or Draws(profile, cluster)
    device = profile.device
    for number in batches(cluster) if numbers is None else numbers:
        loads = draws.loads(layout, number, cluster.ordering)
        pipeline = pipeline_of(profile, layout, stages, loads, cluster.gpus_per_node)
        if device.kind == "cpu" and shared:
            timeline = simulate_shared(pipeline, device.cores, device.shared_by)
        else:
            timeline = simulate(pipeline)
        yield Step(stages, loads, pipeline, timeline)


def simulated_step(
    profile: Profile,
    layout: Layout,
    cluster: Cluster,
    number: int = 0,
    draws: Draws | None = None,
) -> Step:
    """Return the step over the `number`-th global batch drawn from the data."""
    return next(simulated_steps(profile, layout, cluster, [number], draws=draws))


def batches(cluster: Cluster) -> range:
    """Return the indices of the global batches that are drawn.

    Few large ones, or more of small ones, whose sizes vary more. The policy `best` takes longer,
    and its steps vary less.
    """
    return range(max(1 if cluster.ordering == "best" else BATCHES, -(-SEQUENCES // cluster.batch)))


def simulated_s(
    profile: Profile,
    layout: Layout,
    cluster: Cluster,
    numbers: Iterable[int] | None = None,
    shared: bool = True,
    draws: Draws | None = None,
) -> float:
    """Return the mean time of `simulated_steps`."""
    if profile.device.kind == "cpu" and shared:
        steps = simulated_steps(profile, layout, cluster, numbers, draws=draws)
        return float(np.mean([step.timeline.iteration_s for step in steps]))
    stages, draws = stages_of(profile, layout), draws or Draws(profile, cluster)
    loads = [
        draws.loads(layout, number, cluster.ordering)
        for number in (batches(cluster) if numbers is None else numbers)
    ]
    pipelines = pipelines_of(profile, layout, stages, loads, cluster.gpus_per_node)
    return float(steps_s(pipelines).mean())


def predict(
    units: list[Unit], layout: Layout, cluster: Cluster, draws: Draws | None = None
) -> Prediction:
    """Return time, MFU, memory and traffic of a layout.

    Times come from the simulator, `warmup_s` and `steady_s` from the formula, which assumes a
    device of its own for every rank and equal sequences. FLOPs are those of the batches that were
    simulated.

    Args:
        draws: the batches; None = new ones.

    Raises:
        SpecError: the predicted MFU exceeds 100 %, so the profile's peak is wrong.
    """
    profile = units[0].profile
    draws = draws or Draws(profile, cluster)
    steps = list(simulated_steps(profile, layout, cluster, draws=draws))
    stages = steps[0].stages
    iteration_s = float(np.mean([step.timeline.iteration_s for step in steps]))
    work = {
        module: np.mean([_total(step.loads[module]) for step in steps], axis=0)
        for module in steps[0].loads
    }
    flops = [
        {cost.module: float(cost.flops @ work[cost.module]) for cost in stage.costs}
        for stage in stages
    ]
    formula = layout_time(units, layout)
    memory = layout_memory(profile, layout, cluster.memory_gib)
    computing = _rank_seconds(steps)
    orchestration = _orchestration(profile.device, layout, computing, iteration_s)
    stage_times = _stage_times(profile, steps, layout, flops, iteration_s)
    done = sum(sum(by_module.values()) for by_module in flops)
    llm = profile.inputs.llm
    scores = sum(
        float(cost.flops[-1] * work[llm][-1])
        for stage in stages
        for cost in stage.costs
        if cost.module == llm
    )
    given = max(cluster.gpus, layout.gpus_used)
    divided = any(unit.ep > 1 for unit in layout.units)
    mfu_used = mfu(done, iteration_s, profile.device, layout.gpus_used)
    return Prediction(
        layout=fingerprint(layout),
        ordering=cluster.ordering,
        iteration_s=iteration_s,
        balanced_s=simulated_s(balanced(profile), layout, cluster, draws=draws)
        if divided
        else None,
        routing_quantile=QUANTILE if divided else None,
        sequences_per_s=layout.global_batch_size / iteration_s,
        mfu=mfu(done, iteration_s, profile.device, given),
        mfu_causal=mfu(done - scores / 2, iteration_s, profile.device, given),
        mfu_used=mfu_used,
        warmup_s=formula.warmup_ms / 1e3,
        steady_s=formula.steady_ms / 1e3,
        bubble_fraction=_bubble(steps, layout),
        memory=memory,
        memory_binds=_fullest(memory),
        units=_unit_times(profile, steps, layout, flops, iteration_s),
        stages=stage_times,
        reduce_s=float(steps[0].pipeline.reduce_s.max()),
        optimizer_s=steps[0].pipeline.step_s,
        exposed_reduce_s=_longest_s(steps, lambda pipeline: pipeline.exposed_s),
        exposed_optimizer_s=steps[0].pipeline.closing_s
        + _longest_s(steps, lambda pipeline: pipeline.lead_s),
        kernel_mfu=_kernel_mfu(profile.device, flops, computing),
        orchestration_efficiency=orchestration,
        traffic=traffic_of(profile, layout, stages, cluster.gpus_per_node),
        preprocess=preprocess_need(
            profile, layout.global_batch_size / iteration_s, cluster.cpu_node_cores
        ),
    )


def _longest_s(steps: list[Step], part: Callable[[Pipeline], Floats]) -> float:
    """Return the mean over the steps of a pipeline part [S, R], maximised over replicas."""
    return float(np.mean([part(step.pipeline)[step.pipeline.present].max() for step in steps]))


def _total(loads: Floats) -> Floats:
    """Return [4] the number of replica slots with any work, Σ items, Σ tokens, Σ length²."""
    return np.concatenate([[float(loads.any(axis=2).sum())], loads.sum(axis=(0, 1))])


def _rank_seconds(steps: list[Step]) -> dict[tuple[int, str], float]:
    """Return by (stage, module) the seconds of all ranks in a step, as on devices of their own."""
    return {
        (number, cost.module): float(
            np.mean(
                [
                    sum(amount(part, step.loads[cost.module]).sum() for part in cost.parts_ms)
                    for step in steps
                ]
            )
        )
        * (stage.unit.tp_cp_size // stage.unit.dealt_over(cost.module))
        / 1e3
        for number, stage in enumerate(steps[0].stages)
        for cost in stage.costs
    }


def _rank_flops(device: DeviceProfile) -> float:
    """Return the peak FLOP/s of one rank in the measurement: on a CPU its share of the cores."""
    return (
        peak_tflops(device, 1)
        * 1e12
        / (max(device.cores, device.shared_by) if device.kind == "cpu" else 1)
    )


def _kernel_mfu(
    device: DeviceProfile, flops: list[dict[str, float]], computing: dict[tuple[int, str], float]
) -> dict[str, float]:
    """Return by module its FLOPs over the peak of its computing ranks; 0 without work."""
    names = dict.fromkeys(module for by_module in flops for module in by_module)
    seconds = {
        name: sum(value for (_, module), value in computing.items() if module == name)
        for name in names
    }
    return {
        name: sum(by_module.get(name, 0.0) for by_module in flops)
        / (seconds[name] * _rank_flops(device))
        if seconds[name]
        else 0.0
        for name in names
    }


def _orchestration(
    device: DeviceProfile,
    layout: Layout,
    computing: dict[tuple[int, str], float],
    iteration_s: float,
) -> float:
    """Return MFU ÷ (ΣFLOPs / Σ(FLOPs / kernel MFU)).

    FLOPs / kernel MFU is a module's computing time at the peak.
    """
    peak = peak_tflops(device, layout.gpus_used) * 1e12
    return sum(computing.values()) * _rank_flops(device) / (iteration_s * peak)


def _bubble(steps: list[Step], layout: Layout) -> float:
    """Return the share of the devices' time in which they do not compute."""
    width = np.array([stage.unit.tp_cp_size for stage in steps[0].stages])
    busy = sum(float(np.nansum(step.timeline.busy_s, axis=1) @ width) for step in steps)
    return 1.0 - busy / (layout.gpus_used * sum(step.timeline.iteration_s for step in steps))


def _fullest(memory: list[StageMemory]) -> str:
    fullest = max(memory, key=lambda stage: stage.peak_gib / stage.limit_gib)
    return f"{fullest.unit} stage {fullest.stage}"


def _mfu(
    device: DeviceProfile,
    layout: Layout,
    flops: list[dict[str, float]],
    ranks: int,
    iteration_s: float,
) -> float:
    """Return the MFU of some of a layout's ranks, for the FLOPs of their stages."""
    peak = peak_tflops(device, layout.gpus_used) * 1e12 * ranks / layout.gpus_used
    return sum(sum(by_module.values()) for by_module in flops) / (peak * iteration_s)


def _unit_times(
    profile: Profile,
    steps: list[Step],
    layout: Layout,
    flops: list[dict[str, float]],
    iteration_s: float,
) -> list[UnitTime]:
    rows, first = [], 0
    for unit in layout.units:
        stages = slice(first, first + unit.stages)
        times = [_own(step.pipeline, stages, dp=unit.dp) for step in steps]
        forward, backward, weights = np.mean(
            [[part.sum(axis=1).mean() for part in parts] for parts in times], axis=0
        )
        of_ranks = (-1, unit.chunks, unit.pp, unit.dp)
        slowest = np.mean(
            [
                parts.sum(axis=0).reshape(of_ranks).sum(axis=1).max(axis=2).mean(axis=0)
                for parts in times
            ],
            axis=0,
        ).max()
        alone = sum(float(parts.sum()) for parts in times)
        busy = sum(float(step.timeline.busy_s[stages, : unit.dp].sum()) for step in steps)
        rows.append(
            UnitTime(
                unit=unit.name,
                forward_ms=1e3 * float(forward),
                backward_ms=1e3 * float(backward),
                weights_ms=1e3 * float(weights),
                stage_ms=1e3 * float(slowest),
                sharing=busy / alone if alone else 1.0,
                mfu=_mfu(profile.device, layout, flops[stages], unit.gpus, iteration_s),
            )
        )
        first += unit.stages
    return rows


def _stage_times(
    profile: Profile,
    steps: list[Step],
    layout: Layout,
    flops: list[dict[str, float]],
    iteration_s: float,
) -> list[StageTime]:
    rows = []
    for number, stage in enumerate(steps[0].stages):
        stages = slice(number, number + 1)
        forward, backward, weights = np.mean(
            [
                [part.mean() for part in _own(step.pipeline, stages, dp=stage.unit.dp)]
                for step in steps
            ],
            axis=0,
        )
        rows.append(
            StageTime(
                unit=stage.unit.name,
                stage=stage.index,
                forward_ms=1e3 * float(forward),
                backward_ms=1e3 * float(backward),
                weights_ms=1e3 * float(weights),
                mfu=_mfu(profile.device, layout, flops[stages], len(stage.ranks), iteration_s),
            )
        )
    return rows


def _own(pipeline: Pipeline, stages: slice, *, dp: int) -> Floats:
    """Return times by operation (`COMPUTE`) of some stages of one unit, [3, n, PP, DP]."""
    parts = [*pipeline.parts_s, np.zeros_like(pipeline.forward_s)]
    return np.stack(parts[: len(COMPUTE)])[:, :, stages, :dp]
