"""Reductions behind an emulated device's last pass end when the simulator says."""

import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given, settings

from disttrain_cli.runtime.rehearsal import engine as module
from disttrain_cli.runtime.rehearsal.device import Device
from disttrain_cli.runtime.rehearsal.engine import EmulatedEngine
from disttrain_cli.runtime.rehearsal.feeding import StageWork
from disttrain_cli.simulation.pipeline import simulate
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.trace import WEIGHTS
from tests.simulation.test_pipeline import pipelines

SCALE, BEGAN_S = 3.0, 100.0


@settings(max_examples=40, deadline=None)
@given(pipelines().filter(lambda pipeline: pipeline.reducing is not None))
def test_a_rank_s_reductions_end_as_simulated(pipeline: Pipeline) -> None:
    """Of one replica per stage, whatever is left of its weights' parts after the last backward."""
    assert pipeline.reducing is not None
    pipeline = dataclasses.replace(
        pipeline,
        replicas=np.ones_like(pipeline.replicas),
        forward_s=pipeline.forward_s[..., :1],
        backward_s=pipeline.backward_s[..., :1],
        weight_s=None if pipeline.weight_s is None else pipeline.weight_s[..., :1],
    )
    timeline = simulate(pipeline)
    ends_s = [timeline.backward_end, timeline.weight_end]
    last_s = np.max([end_s[-1] for end_s in ends_s if end_s is not None], axis=0)[:, 0]
    for stage, operation in enumerate(pipeline.reducing.operation.tolist()):
        delay = None
        if operation == WEIGHTS:
            assert pipeline.weight_delay is not None
            delay = int(pipeline.weight_delay[stage])
        parts_s = [part_s[:, stage, 0].tolist() for part_s in pipeline.parts_s]
        waits = [{"llm": times} for times in zip(*parts_s, strict=True)]
        work = SimpleNamespace(stages=[StageWork({}, waits)])
        made = cast(Any, EmulatedEngine.__new__(EmulatedEngine))
        made.clock, made._ended_s = Device(SCALE), {0: BEGAN_S + SCALE * float(last_s[stage])}
        made.feeder = SimpleNamespace(work=lambda step, work=work: work)
        made.order = SimpleNamespace(step=0, slots=waits)
        made.coords = SimpleNamespace(stage=SimpleNamespace(weight_delay=delay))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module.dist, "all_reduce", lambda tensor, op, group: None)
            made._reduce_behind([pipeline.reducing.of([stage])], cast(dist.ProcessGroup, None))
        reduced_s = (made.clock.free_s - BEGAN_S) / SCALE
        assert reduced_s == pytest.approx(last_s[stage] + pipeline.exposed_s[stage, 0])
