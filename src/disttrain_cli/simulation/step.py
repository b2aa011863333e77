"""Simulator input for one training step of a layout, from the work of every replica and slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from disttrain_cli.costs.layout import (
    CostedStage,
    by_device,
    optimizer_s,
    reduce_s,
    replica_ms,
    transfers_s,
)
from disttrain_cli.costs.overlap import hidden
from disttrain_cli.costs.preparing import prepare_s
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.stage_graph import cuts_of
from disttrain_cli.spec.trace import BACKWARD, COMPUTE, FORWARD, WEIGHTS

Floats = NDArray[np.float64]


def pipeline_of(
    profile: Profile,
    layout: Layout,
    stages: list[CostedStage],
    loads: dict[str, Floats],
    gpus_per_node: int,
) -> Pipeline:
    """Return the step of a layout as simulator input.

    Args:
        profile: costs of the modules.
        layout: the layout.
        stages: its stages.
        loads: by module [n slots, DP, 3]; for modules whose items are distributed over a TP group,
            of every rank [n slots, DP · TP, 3].
        gpus_per_node: devices of a node.
    """
    return pipelines_of(profile, layout, stages, [loads], gpus_per_node)[0]


def pipelines_of(
    profile: Profile,
    layout: Layout,
    stages: list[CostedStage],
    several: Sequence[dict[str, Floats]],
    gpus_per_node: int,
) -> list[Pipeline]:
    """Return steps of a layout that differ in their loads."""
    times_s = [_times_s(layout, stages, loads) for loads in several]
    split = any(stage.weight_delay is not None for stage in stages)
    reducing, gathering = (
        hidden(profile, layout, stages, gpus_per_node) if layout.overlap else (None, None)
    )
    devices = by_device(stages)
    reduced_s = [reduce_s(profile, layout, device, gpus_per_node) for device in devices]
    first = Pipeline(
        replicas=np.array([stage.unit.dp for stage in stages]),
        entry=np.array([stage.index == 0 for stage in stages]),
        cuts=tuple(cuts_of(stages)),
        forward_s=times_s[0][FORWARD],
        backward_s=times_s[0][BACKWARD],
        transfer_s=transfers_s(profile, layout, stages, gpus_per_node),
        reduce_s=np.resize(reduced_s, len(stages)),
        step_s=max(optimizer_s(profile, layout, device, gpus_per_node) for device in devices),
        devices=len(devices) if len(devices) < len(stages) else 0,
        reducing=reducing,
        gathering=gathering,
        weight_s=times_s[0][WEIGHTS] if split else None,
        weight_delay=np.array([stage.weight_delay or 0 for stage in stages]) if split else None,
    )
    others = [
        dataclasses.replace(
            first,
            forward_s=parts_s[FORWARD],
            backward_s=parts_s[BACKWARD],
            weight_s=parts_s[WEIGHTS] if split else None,
        )
        for parts_s in times_s[1:]
    ]
    return [first, *others]


def _times_s(layout: Layout, stages: list[CostedStage], loads: dict[str, Floats]) -> Floats:
    """Return [operations, n, S, R] times of all passes."""
    shape = (layout.microbatches, len(stages), max(unit.dp for unit in layout.units))
    times_s = np.zeros((len(COMPUTE), *shape))
    known: dict[tuple[str, bytes], Floats] = {}  # many stages have the same layers
    for number, stage in enumerate(stages):
        for cost in stage.costs:
            for part_s, part_ms in zip(times_s, cost.parts_ms, strict=True):
                key = cost.module, part_ms.tobytes()
                if key not in known:
                    known[key] = (
                        replica_ms(
                            part_ms, loads[cost.module], stage.unit.dp, stage.unit.replicas_together
                        )
                        / 1e3
                    )
                part_s[:, number, : stage.unit.dp] += known[key]
    return times_s


def fed(
    pipeline: Pipeline,
    profile: Profile,
    stages: Sequence[CostedStage],
    loads: Mapping[str, Floats],
    workers: int,
    prefetch: int,
) -> Pipeline:
    """Return the step with data that `workers` cores prepare for every replica.

    Args:
        pipeline: the step.
        profile: costs of the modules.
        stages: stages of the layout.
        loads: as in `pipeline_of`.
        workers: cores per replica.
        prefetch: slots that are prepared ahead.
    """
    load_s = np.zeros_like(pipeline.forward_s)
    for number, device in enumerate(by_device(stages)):  # a slot's data are loaded once for all
        load_s[:, number, : device.unit.dp] = prepare_s(profile, device, loads, workers)
    return dataclasses.replace(pipeline, load_s=load_s, prefetch=prefetch)
