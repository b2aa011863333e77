"""How much a profile may spend, what counts, and how long the next measurement is expected to
take."""

import pytest

from disttrain_cli.profiling import budget as room
from disttrain_cli.profiling.budget import CPU_S, LEAST_S, Budget, Meter, Rate, cpu_budget_s


def test_reading_the_data_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = {"cpu": 100.0, "cuda": 50.0}
    monkeypatch.setattr(Meter, "_now", lambda self: dict(clocks))
    meter = Meter()
    clocks["cpu"] += 3.0
    with meter.stopped():
        clocks["cpu"] += 40.0
        clocks["cuda"] += 20.0
    clocks["cuda"] += 2.0
    assert (meter.read_s("cpu"), meter.read_s("cuda")) == (3.0, 2.0)


def test_a_budget_of_wall_time_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    payload = {"device": "cuda", "budget_s": 180.0, "before_s": 20.0, "started_s": 1000.0}
    monkeypatch.setattr(room.time, "monotonic", lambda: 1030.0)
    budget = Budget.of(payload, 8)
    assert budget.spent_s == 50.0 and budget.left_s == 130.0
    monkeypatch.setattr(room.time, "process_time", lambda: 2.0)
    budget = Budget.of(payload | {"device": "cpu"}, 8)
    assert budget.spent_s == 36.0 and budget.left_s == 18.0


def test_the_budget_is_of_all_processes_and_a_tenth_of_a_short_training() -> None:
    now_s = 0.0
    budget = Budget(30.0, 6.0, 4, lambda: now_s)
    assert budget.left_s == 6.0
    now_s = 7.0
    assert budget.spent_s == 34.0 and budget.left_s == -1.0
    assert cpu_budget_s(1e4) == CPU_S and cpu_budget_s(120.0) == 12.0 and cpu_budget_s(1) == LEAST_S


def test_what_a_measurement_takes_is_expected_from_the_largest_so_far() -> None:
    rate = Rate()
    assert rate.expected_s(10.0) == 0.0
    rate.see(2.0, 1.0)
    assert rate.expected_s(10.0) == 5.0
    rate.see(10.0, 3.0)
    rate.see(1.0, 0.9)
    assert rate.expected_s(10.0) == 3.0 and rate.expected_s(20.0) == 6.0
