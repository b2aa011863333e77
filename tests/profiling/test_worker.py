"""What each process of a profile measures, in which order, and when it stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.profiling.budget import Budget
from disttrain_cli.profiling.worker import FIRST, TIMES, Group, Session, Variant, groups, shares

MODULES = ["encoder", "llm", "generator"]


def variants(draws: int = 12, tps: tuple[int, ...] = (1, 2)) -> list[Variant]:
    """Of all modules: draws of rising FLOPs, in an order of measuring that begins with the smallest
    and the largest."""
    order = [0, draws - 1, *range(1, draws - 1)]
    return [
        Variant(module, tp, frozen, order if tp == 1 else order[:9], order[:2], order[:3])
        for module in MODULES
        for tp in tps
        for frozen in (False, True)
    ]


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 6, 7])
def test_the_processes_share_all_draws_of_all_variants(processes: int) -> None:
    measured = [
        one.name
        for rank in range(processes)
        for group in groups(variants(), shares(MODULES, rank, processes))
        for one in group.first + group.rest
    ]
    wanted = [
        f"{one.module}/tp{one.tp}/{'frozen' if one.frozen else 'trained'}/{draw}"
        for one in variants()
        for draw in one.draws
    ]
    assert sorted(measured) == sorted(wanted)


class Bench:
    """Moves a clock that stands otherwise, by `per_flop_s` for every FLOP."""

    def __init__(self, flops: dict[str, list[float]], per_flop_s: float) -> None:
        self.flops, self.per_flop_s, self.now_s = flops, per_flop_s, 0.0
        self.counts, self.ran = {"block": 2}, 0
        self.built: list[tuple[str, int]] = []

    def build(self, module: str, tp: int) -> Bench:
        self.built.append((module, tp))
        return self

    def times(self, sizes: dict[str, Any], frozen: bool) -> dict[str, tuple[float, float]]:
        module, _ = self.built[-1]
        took_s = self.per_flop_s * self.flops[module][sizes["draw"]]
        self.now_s += took_s
        self.ran += 1
        return {"block": (1e3 * took_s, 1e3 * took_s)}

    def kept_bytes(self, sizes: dict[str, Any], frozen: bool) -> dict[str, float]:
        return {"block": 1.0}


def measure(
    folder: Path, draws: int, per_flop_s: float, limit_s: float, kept: list[str] | None = None
) -> tuple[Bench, Session, list[Group]]:
    flops = {module: [float(draw + 1) for draw in range(draws)] for module in MODULES}
    bench = Bench(flops, per_flop_s)
    payload = {
        "draws": {module: [{"draw": draw} for draw in range(draws)] for module in MODULES},
        "flops": flops,
        "kept": kept or [],
    }
    budget = Budget(limit_s, 0.0, 1, lambda: bench.now_s)
    session = Session(payload, folder / "0.json", {}, budget, bench.build)  # type: ignore[arg-type]
    mine = list(groups(variants(draws), shares(MODULES, 0, 1)))
    session.measure(mine)
    return bench, session, mine


@pytest.mark.slow
@given(
    draws=st.integers(10, 30),
    per_flop_s=st.floats(1e-3, 1.0),
    limit_s=st.floats(0.0, 400.0),
)
def test_everything_is_covered_before_anything_is_refined_and_the_budget_is_kept(
    tmp_path_factory: pytest.TempPathFactory, draws: int, per_flop_s: float, limit_s: float
) -> None:
    bench, session, mine = measure(tmp_path_factory.getbasetemp(), draws, per_flop_s, limit_s)
    records = session.records
    needed_s = 0.0
    for group in mine:
        needed = [one for one in group.first if one.draw in one.variant.needed]
        assert len(needed) == 4 and {one.variant.frozen for one in needed} == {False, True}
        if group.tp == 1:
            assert all(one.name in records for one in needed)
            needed_s += per_flop_s * (sum(one.draw + 1 for one in needed) + 1 + draws)
    # a TP size that was begun within the budget is measured, too
    assert bench.now_s <= max(limit_s, needed_s) + per_flop_s * (3 * draws + 3)
    rest = {one.name for group in mine for one in group.rest}
    if rest & records.keys():
        first = {one.name for group in mine for one in group.first}
        order = list(records)
        begun = min(order.index(name) for name in rest & records.keys())
        assert set(order[:begun]) <= first
        assert {group.module for group in mine} == {name.split("/")[0] for name in order[:begun]}


def test_with_time_enough_all_is_measured_as_often_as_it_may_be(tmp_path: Path) -> None:
    bench, session, mine = measure(tmp_path, 12, 1e-3, 1e6)
    names = [one.name for group in mine for one in group.first + group.rest]
    assert sorted(session.records) == sorted(names)
    assert all(len(one["times"]["block"]) == TIMES for one in session.records.values())
    assert bench.now_s < 1e6


def test_what_an_interrupted_profile_left_is_not_measured_again(tmp_path: Path) -> None:
    _, session, _ = measure(tmp_path, 12, 1e-3, 1e6)
    kept = list(session.records)[::2]
    _, again, _ = measure(tmp_path, 12, 1e-3, 1e6, kept)
    assert not set(kept) & again.records.keys()
    assert set(kept) | again.records.keys() == session.records.keys()


def test_higher_tp_sizes_are_left_out_where_the_first_round_takes_too_long(tmp_path: Path) -> None:
    _, session, _ = measure(tmp_path, 12, 1.0, 10.0)
    assert {name.split("/")[1] for name in session.records} == {"tp1"}
    assert {name.split("/")[0] for name in session.records} == set(MODULES)


def test_repeats_go_to_the_draws_whose_times_differ_most(tmp_path: Path) -> None:
    class Noisy(Bench):
        def times(self, sizes: dict[str, Any], frozen: bool) -> dict[str, tuple[float, float]]:
            (pair,) = super().times(sizes, frozen).values()
            factor = 2.0 if sizes["draw"] == 1 and self.ran % 2 else 1.0
            return {"block": (factor * pair[0], pair[1])}

    bench = Noisy({"llm": [1.0, 1.0, 1.0]}, 1.0)
    payload = {
        "draws": {"llm": [{"draw": draw} for draw in range(3)]},
        "flops": bench.flops,
        "kept": [],
    }
    (group,) = groups([Variant("llm", 1, False, [0, 1, 2], [0], [0])], shares(["llm"], 0, 1))
    budget = Budget(9.5, 0.0, 1, lambda: bench.now_s)
    session = Session(payload, tmp_path / "0.json", {}, budget, bench.build)  # type: ignore[arg-type]
    session.measure([group])
    times = {name: len(one["times"]["block"]) for name, one in session.records.items()}
    assert times["llm/tp1/trained/1"] == TIMES and sum(times.values()) == 8
    assert len(group.first) == 3 <= FIRST
