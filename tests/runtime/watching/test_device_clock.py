"""Times of a GPU's marks, on a simulated device."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.runtime.watching.device_clock import DeviceClock, Mark
from disttrain_cli.runtime.watching.pulse import Pulse, read_state
from tests.runtime.watching.simulated_gpu import Gpu, traced


def step(gpu: Gpu, clock: DeviceClock, draw: random.Random, slots: int) -> list[tuple[Mark, int]]:
    """Marks of a step with the host's times at which the device came there; the host waits for the
    norm."""
    marks = []

    def mark() -> None:
        made = clock.mark()
        marks.append((made, made.event.at_ns))

    for _ in range(slots):
        mark()
        gpu.work(draw.randrange(10**6, 10**9))
        gpu.host_ns += draw.randrange(10**6)
    mark()
    gpu.synchronize()
    clock.anchor()
    gpu.work(10**7 + draw.randrange(10**8))  # the optimizer step, which nobody waits for
    mark()
    gpu.host_ns += 10**6
    return marks


def test_marks_get_the_time_at_which_the_device_came_there(gpu: Gpu) -> None:
    clock, draw, known = DeviceClock(gpu.now), random.Random(0), []
    for _ in range(40):
        known += step(gpu, clock, draw, 30)
        waits = gpu.waits
        clock.read()
        assert gpu.waits == waits, "reading waited for the device"
        assert [mark.ns is None for mark, _ in known] == [False] * (len(known) - 1) + [True]
    errors_ns = [mark.ns - true_ns for mark, true_ns in known[:-1]]
    assert max(map(abs, errors_ns)) < 10_000  # of steps of 15 s, in which the clocks part by 600 µs
    times = [mark.ns for mark, _ in known[:-1]]
    assert times == sorted(times)
    assert gpu.made < 80  # events of marks that were read serve again


def test_a_long_pause_costs_no_precision(gpu: Gpu) -> None:
    """Single precision holds 50 minutes to 0.25 ms; what follows them is as precise as ever."""
    clock = DeviceClock(gpu.now)
    gpu.work(3_000 * 10**9)
    marks = []
    for _ in range(100):
        gpu.work(10**6)
        marks.append(clock.mark())
    gpu.synchronize()
    clock.anchor()
    gpu.host_ns += 10**6
    clock.read()
    assert np.diff([mark.ns for mark in marks]) == pytest.approx(10**6, abs=2_000)


def test_an_interrupted_host_sets_its_anchor_again(gpu: Gpu) -> None:
    calls = []

    def now() -> int:
        calls.append(gpu.host_ns)
        if len(calls) == 4:  # between the event of the second anchor and the time after it
            gpu.host_ns += 7 * 10**6
        return gpu.now()

    clock = DeviceClock(now)
    gpu.work(10**8)
    mark = clock.mark()
    true_ns = mark.event.at_ns
    gpu.synchronize()
    clock.anchor()
    gpu.host_ns += 10**6
    clock.read()
    assert mark.ns == pytest.approx(true_ns, abs=10_000)


def test_rows_come_when_their_times_are_known(gpu: Gpu, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    tracer = traced(gpu, tmp_path)
    for tracer.step in range(3):
        for slot in range(2):
            start = tracer.mark()
            gpu.work(10**8)
            tracer.record("forward", start, slot=slot, module="llm")
        start = tracer.mark()
        gpu.synchronize()
        tracer.anchor()
        gpu.work(10**7)
        tracer.record("step", start)
        gpu.host_ns += 10**5
        tracer.end_step()
    tracer.close()
    rows = pq.read_table(tmp_path / "rank-00000").to_pylist()
    assert [(row["step"], row["operation"]) for row in rows] == [
        (number, operation) for number in range(3) for operation in ("forward", "forward", "step")
    ][:-1]
    durations = {row["operation"]: row["end_ns"] - row["start_ns"] for row in rows}
    assert durations == {
        "forward": pytest.approx(10**8, abs=20_000),
        "step": pytest.approx(10**7, abs=20_000),
    }
    assert all(before["end_ns"] <= after["start_ns"] for before, after in pairwise(rows))
    assert gpu.waits == 1 + 3  # as it began, and one for every step


def test_a_pulse_tells_what_the_device_does(gpu: Gpu, tmp_path: Path) -> None:
    tracer = traced(gpu, tmp_path)
    tracer.pulse = Pulse(tmp_path, 0, 60.0)

    def told() -> tuple[str, int]:
        assert tracer.pulse is not None
        tracer.pulse._tell()
        state = read_state(tmp_path, 0)
        assert state is not None
        return state.operation, state.slot

    for slot in range(3):  # the host asks for everything at once
        tracer.begin("receive_activation", slot)
        gpu.work(10**8)
        tracer.begin("forward", slot)
        gpu.work(10**9)
    assert told() == ("receive_activation", 0)
    gpu.host_ns += 11 * 10**8
    assert told() == ("receive_activation", 1)
    gpu.synchronize()
    assert told() == ("forward", 2)
    tracer.pulse.begin("ending")
    assert told() == ("ending", -1)


@pytest.mark.parametrize("ending", ["never comes", "failed"])
def test_a_device_that_answers_no_more_costs_the_last_rows_only(
    gpu: Gpu, tmp_path: Path, ending: str
) -> None:
    import pyarrow.parquet as pq

    tracer = traced(gpu, tmp_path)
    tracer.pulse = Pulse(tmp_path, 0, 60.0)
    for tracer.step in range(2):
        tracer.begin("forward", 0)
        start = tracer.mark()
        gpu.work(10**8 if tracer.step == 0 else 10**15)
        tracer.record("forward", start)
        if tracer.step == 0:
            gpu.synchronize()
            tracer.anchor()
            gpu.host_ns += 10**5
            tracer.end_step()
    gpu.failed, waits = ending == "failed", gpu.waits
    tracer.pulse._tell()
    tracer.close()
    assert gpu.waits == waits
    assert [row["step"] for row in pq.read_table(tmp_path / "rank-00000").to_pylist()] == [0]
