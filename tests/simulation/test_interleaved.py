"""Interleaved 1F1B in the simulator: the closed form of equal chunks, and any durations."""

import itertools

import numpy as np
import pytest

from disttrain_cli.schedule.interleaved import passes
from disttrain_cli.simulation.interleaved import simulate
from disttrain_cli.simulation.shared_cores import simulate_shared
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.trace import BACKWARD, FORWARD
from tests.schedule.test_interleaved import SHAPES


def pipeline(
    count: int,
    forward_s: np.ndarray,
    backward_s: np.ndarray,
    reduced_s: np.ndarray,
    transfer_s: float = 0.0,
):
    """A pipeline of so many chunks in a line, of one replica, on devices that reduce so long."""
    return Pipeline(
        replicas=np.ones(count, dtype=np.int64),
        entry=np.arange(count) == 0,
        cuts=tuple((chunk, chunk + 1) for chunk in range(count - 1)),
        forward_s=forward_s[..., None],
        backward_s=backward_s[..., None],
        transfer_s=np.full(count - 1, transfer_s),
        reduce_s=np.resize(reduced_s, count),
        devices=len(reduced_s),
    )


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_the_bubble_of_equal_chunks(devices: int, chunks: int, slots: int) -> None:
    count, forward, backward = devices * chunks, 1.0, 2.0
    ones = np.ones((slots, count))
    step = simulate(pipeline(count, forward * ones, backward * ones, np.zeros(devices)))
    taken = step.iteration_s
    assert step.busy_s.tolist() == [[slots * (forward + backward)]] * count
    ideal = slots * chunks * (forward + backward)
    assert taken / ideal - 1 == pytest.approx((devices - 1) / (chunks * slots))


@pytest.mark.parametrize(("devices", "chunks", "slots"), SHAPES)
def test_any_durations(devices: int, chunks: int, slots: int) -> None:
    """Against the longest path through everything that waits for something, relaxed to its end."""
    random, count, transfer_s = np.random.default_rng(devices), devices * chunks, 0.3
    times = random.random((2, slots, count))
    waits = []
    for device in range(devices):
        order = passes(devices, chunks, slots, device)
        waits += [(before, after, 0.0) for before, after in itertools.pairwise(order)]
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
    reduced_s = np.arange(devices, dtype=float)
    own = pipeline(count, times[FORWARD], times[BACKWARD], reduced_s, transfer_s)
    simulated = simulate(own).iteration_s
    alone = simulate_shared(own, devices, devices)
    assert alone.iteration_s == pytest.approx(simulated)
    assert alone.backward_end == pytest.approx(simulate(own).backward_end)
    device_ends = [
        max(end for (_, chunk, _), end in ends.items() if chunk % devices == device)
        for device in range(devices)
    ]
    assert simulated == pytest.approx(max(end + device for device, end in enumerate(device_ends)))
