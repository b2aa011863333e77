"""Interleaved 1F1B: its order, the closed form of equal chunks, any durations, and layouts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.interleaved import cut_into, interleaved_s, order, step_s
from disttrain_cli.planning.predict import simulated_s
from disttrain_cli.planning.units import Cluster
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.trace import BACKWARD, FORWARD
from tests.planning import synthetic

SHAPES = [(2, 1, 5), (2, 2, 2), (2, 2, 8), (3, 2, 6), (4, 3, 8), (4, 4, 16), (8, 2, 8)]


def pipeline(count: int, forward_s: np.ndarray, backward_s: np.ndarray, transfer_s: float = 0.0):
    """A pipeline of so many chunks in a line, of one replica."""
    return Pipeline(
        replicas=np.ones(count, dtype=np.int64),
        entry=np.arange(count) == 0,
        cuts=tuple((chunk, chunk + 1) for chunk in range(count - 1)),
        forward_s=forward_s[..., None],
        backward_s=backward_s[..., None],
        transfer_s=np.full(count - 1, transfer_s),
        reduce_s=np.zeros(count),
    )


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_every_pass_once_and_no_backward_before_its_forward(
    devices: int, chunks: int, slots: int
) -> None:
    for device in range(devices):
        passes = order(devices, chunks, slots, device)
        own = range(device, devices * chunks, devices)
        every = {
            (what, chunk, slot)
            for what in (FORWARD, BACKWARD)
            for chunk in own
            for slot in range(slots)
        }
        assert set(passes) == every and len(passes) == len(every)
        for chunk in own:
            for slot in range(slots):
                assert passes.index((FORWARD, chunk, slot)) < passes.index((BACKWARD, chunk, slot))


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_the_bubble_of_equal_chunks(devices: int, chunks: int, slots: int) -> None:
    count, forward, backward = devices * chunks, 1.0, 2.0
    ones = np.ones((slots, count))
    taken = step_s(pipeline(count, forward * ones, backward * ones), np.zeros(devices))
    ideal = slots * chunks * (forward + backward)
    assert taken / ideal - 1 == pytest.approx((devices - 1) / (chunks * slots))


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_any_durations(devices: int, chunks: int, slots: int) -> None:
    """Against the longest path through everything that waits for something, relaxed to its end."""
    random, count, transfer_s = np.random.default_rng(devices), devices * chunks, 0.3
    times = random.random((2, slots, count))
    waits = []
    for device in range(devices):
        passes = order(devices, chunks, slots, device)
        waits += [(before, after, 0.0) for before, after in itertools.pairwise(passes)]
    for slot in range(slots):
        for chunk in range(count - 1):
            waits.append(((FORWARD, chunk, slot), (FORWARD, chunk + 1, slot), transfer_s))
            waits.append(((BACKWARD, chunk + 1, slot), (BACKWARD, chunk, slot), transfer_s))
    took = {
        (what, chunk, slot): times[what][slot, chunk]
        for what in (FORWARD, BACKWARD)
        for chunk in range(count)
        for slot in range(slots)
    }
    ends = dict(took)
    for _ in range(len(took)):
        late = [
            (after, ends[before] + wait_s + took[after])
            for before, after, wait_s in waits
            if ends[before] + wait_s + took[after] > ends[after] + 1e-12
        ]
        if not late:
            break
        for after, end in late:
            ends[after] = max(ends[after], end)
    simulated = step_s(
        pipeline(count, times[FORWARD], times[BACKWARD], transfer_s),
        np.arange(devices, dtype=float),
    )
    device_ends = [
        max(end for (_, chunk, _), end in ends.items() if chunk % devices == device)
        for device in range(devices)
    ]
    assert simulated == pytest.approx(max(end + device for device, end in enumerate(device_ends)))


def made(overlap: bool = False, slots: int = 4) -> tuple[Profile, Cluster, Layout]:
    """Four stages of all modules of the tiny model, two replicas on nodes of four devices."""
    run = synthetic.run_file(batch=2 * slots, gpus=8, nodes=2)
    profile = synthetic.on_nodes(synthetic.tiny(run, kind="cuda"), 4)
    unit = UnitPlan(
        name="model",
        modules=list(profile.modules),
        dp=2,
        pp=4,
        gpus=8,
        layers_per_stage=[4, 3, 3, 4],
    )
    layout = Layout(
        strategy="megatron",
        global_batch_size=2 * slots,
        microbatch_size=1,
        microbatches=slots,
        gpus_used=8,
        overlap=overlap,
        units=[unit],
    )
    return profile, Cluster(8, 4, 4.0, 1, 2 * slots), layout


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("slots", [3, 8])
def test_one_chunk_is_the_simulators_step(overlap: bool, slots: int) -> None:
    profile, cluster, layout = made(overlap, slots)
    draws = Draws(profile, cluster)
    expected = simulated_s(profile, layout, cluster, draws=draws)
    assert interleaved_s(profile, layout, cluster, draws, 1) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_of_a_layout(overlap: bool) -> None:
    profile, cluster, layout = made(overlap)
    draws = Draws(profile, cluster)
    balanced = cut_into(profile, layout, 1)
    cut = cut_into(profile, layout, 2)
    assert balanced is not None and cut is not None
    assert sum(cut.units[0].layers_per_stage) == 14 and len(cut.units[0].layers_per_stage) == 8
    free = {
        name: 1e9 if name.endswith("gbps") else 0.0
        for name in type(profile.links).model_fields
        if name.endswith(("gbps", "us"))
    }
    between = profile.links.inter_node.model_copy(update=free)
    links = profile.links.model_copy(update={**free, "inter_node": between})
    fast = profile.model_copy(update={"links": links})
    whole = interleaved_s(fast, balanced, cluster, draws, 1)
    assert interleaved_s(fast, balanced, cluster, draws, 2) < whole
    # messages: twice as many cuts
    assert interleaved_s(profile, layout, cluster, draws, 2) > interleaved_s(
        fast, layout, cluster, draws, 2
    )
    assert interleaved_s(profile, layout, cluster, draws, 4) == math.inf  # 16 chunks of 14 layers
    odd = made(slots=6)
    assert interleaved_s(*odd[:1], odd[2], odd[1], Draws(odd[0], odd[1]), 2) == math.inf


def test_chunks_keep_more_slots_in_flight() -> None:
    profile, cluster, layout = made(slots=8)
    draws = Draws(profile, cluster)
    peak = max(stage.peak_gib for stage in layout_memory(profile, layout, 4.0))
    tight = replace(cluster, memory_gib=1.02 * peak)
    assert interleaved_s(profile, layout, tight, draws, 1) < math.inf
    assert interleaved_s(profile, layout, tight, draws, 2) == math.inf
    assert interleaved_s(profile, layout, cluster, draws, 2) < math.inf
