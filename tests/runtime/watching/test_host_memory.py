"""A rank's host memory: growth is extrapolated from its minima, freed pages go back."""

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from disttrain_cli.runtime.watching import host_memory
from disttrain_cli.runtime.watching.host_memory import (
    MIB,
    MINIMA,
    SLACK_BYTES,
    WARM_UP_STEPS,
    HostMemory,
    container_limits,
    share_of_host,
)

BASE = 300 * MIB
GROWN_MIB = SLACK_BYTES // MIB + 4  # at the step that trims, with 2 MiB a step


def sawtooth(step: int) -> int:
    return BASE + step % 60 * MIB


def copied(step: int) -> int:
    """A checkpoint's copy, for 20 of 150 steps."""
    return BASE + 3_000 * MIB * (step % 150 < 20)


def noisy(step: int) -> int:
    return 10_000 * MIB + int(np.random.default_rng(step).normal(0, 80 * MIB))


@pytest.mark.parametrize(
    ("resident", "steps", "growth_mib"),
    [
        pytest.param(lambda step: BASE, 1_000, 0.0, id="constant"),
        pytest.param(sawtooth, 5_000, 0.0, id="sawtooth-of-trims"),
        pytest.param(copied, 5_000, 0.0, id="copies"),
        pytest.param(noisy, 5_000, 0.0, id="noise"),
        pytest.param(lambda step: BASE + min(step, 220) * MIB, 5_000, 0.0, id="fills-once"),
        pytest.param(lambda step: BASE - step * MIB // 100, 5_000, 0.0, id="falls"),
        pytest.param(lambda step: BASE + step * MIB, 400, 1.0, id="grows"),
        pytest.param(lambda step: BASE + step * MIB, 50_000, 1.0, id="grows-long"),
        pytest.param(lambda step: sawtooth(step) + step * MIB // 8, 9_000, 0.125, id="grows-slow"),
        pytest.param(lambda step: BASE + step * MIB, WARM_UP_STEPS, 0.0, id="warming-up"),
    ],
)
def test_growth_is_that_of_the_minima(
    resident: Callable[[int], int], steps: int, growth_mib: float
) -> None:
    numbers = count()
    memory = HostMemory(lambda: resident(next(numbers)), None)
    growth = [memory.end_step() / MIB for _ in range(steps)]
    assert growth[-1] == pytest.approx(growth_mib, rel=0.05)
    assert max(growth) <= 1.05 * growth_mib
    assert len(memory._minima) <= MINIMA


@pytest.mark.parametrize(
    ("trim_s", "trims"),
    [
        pytest.param(0.001, 1_000 * 2 // GROWN_MIB, id="whenever-grown-by-the-slack"),
        pytest.param(1.0, 1_000 // 200, id="for-half-a-percent-of-the-time"),
    ],
)
def test_trims(trim_s: float, trims: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1 s, each of which leaves 2 MiB."""
    heap_mib, now_s, trimmed_at = 0, 0.0, []
    monkeypatch.setattr(host_memory.time, "monotonic", lambda: now_s)

    def trim() -> None:
        nonlocal heap_mib, now_s
        trimmed_at.append(heap_mib)
        heap_mib, now_s = 0, now_s + trim_s

    memory = HostMemory(lambda: BASE + heap_mib * MIB, trim)
    for _ in range(1_000):
        heap_mib, now_s = heap_mib + 2, now_s + 1
        memory.end_step()
    assert len(trimmed_at) == trims
    assert min(trimmed_at) == GROWN_MIB


FRAGMENTED = """
import torch
from disttrain_cli.runtime.watching.host_memory import resident_bytes, watched_memory
memory = watched_memory()
memory.end_step()
base = resident_bytes()
blocks = [torch.ones(2**14) for _ in range(4_000)]
blocks = blocks[::16]
grown = resident_bytes() - base
memory.end_step()
print(grown // 2**20, (resident_bytes() - base) // 2**20)
"""


@pytest.mark.slow
def test_pages_of_a_fragmented_heap_go_back_to_the_system() -> None:
    """250 MiB of tensors of 64 KiB, one in sixteen of which stays."""
    printed = subprocess.run(
        [sys.executable, "-c", FRAGMENTED], check=True, capture_output=True, text=True
    ).stdout
    before_mib, after_mib = map(int, printed.split())
    assert before_mib > 200
    assert after_mib < 60


def test_share_of_host_counts_all_its_ranks() -> None:
    assert share_of_host(0.0, 8) == 0.0
    one = share_of_host(MIB, 1)
    assert 0 < one < 1
    assert share_of_host(MIB, 8) == pytest.approx(8 * one, rel=0.2)


@pytest.mark.parametrize(
    ("files", "limits"),
    [
        ({}, []),
        ({"memory.max": "max", "memory.current": "5"}, []),
        ({"memory.max": "100", "memory.current": "90"}, [(100, 90)]),
        (
            {
                "memory.max": "100",
                "memory.current": "90",
                "memory.stat": "file 70\ninactive_file 60",
            },
            [(100, 30)],
        ),
        ({"memory.max": "100"}, []),
        (
            {
                "memory/memory.limit_in_bytes": "100",
                "memory/memory.usage_in_bytes": "90",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 20\n",
            },
            [(100, 70)],
        ),
    ],
)
def test_limits_of_containers(
    files: dict[str, str], limits: list[tuple[int, int]], tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert container_limits(tmp_path) == limits
