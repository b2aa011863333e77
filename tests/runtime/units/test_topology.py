"""Every rank has one place; TP groups are next to each other and stay inside a node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.runtime.units.topology import Topology, build_topology
from disttrain_cli.spec.plan import Layout
from tests.runtime.factory import unit


def _topology(shapes: list[tuple[int, int, int]]) -> Topology:
    """Units of (TP, DP, PP), one module each."""
    units = [unit(f"m{place}", [f"m{place}"], [1] * pp, dp, tp) for place, (tp, dp, pp) in enumerate(shapes)]
    layout = Layout(global_batch_size=1, microbatch_size=1, microbatches=1, gpus_used=sum(u.gpus for u in units),
                    units=units)
    return build_topology(layout, [module for u in units for module in u.modules for _ in u.layers_per_stage])


@given(st.lists(st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=4))
def test_every_rank_has_one_place(shapes: list[tuple[int, int, int]]) -> None:
    topology = _topology(shapes)
    assert sorted(rank for stage in topology.stages for rank in stage.ranks) == list(range(topology.world_size))
    for stage in topology.stages:
        groups = [stage.tp_group(replica) for replica in range(stage.unit.dp)]
        assert [rank for group in groups for rank in group] == list(stage.ranks)
        assert all(group[0] % stage.tp == 0 and group[-1] == group[0] + stage.tp - 1 for group in groups)
        assert sorted(rank for t in range(stage.tp) for rank in stage.dp_group(t)) == list(stage.ranks)
        for replica, group in enumerate(groups):
            for tp_rank, rank in enumerate(group):
                place = topology.place(rank)
                assert (place.stage, place.replica, place.tp_rank) == (stage, replica, tp_rank)
                assert stage.rank(replica, tp_rank) == rank == stage.dp_group(tp_rank)[replica]


def test_units_of_one_tp_size_are_numbered_in_pipeline_order() -> None:
    assert [stage.ranks for stage in _topology([(1, 2, 1), (1, 1, 2)]).stages] == [(0, 1), (2,), (3,)]


def test_larger_tp_groups_come_first() -> None:
    """A unit of three ranks in front would put a group of eight over two nodes of eight."""
    stages = _topology([(1, 3, 1), (8, 2, 1), (2, 1, 2)]).stages
    assert stages[1].tp_group(1) == list(range(8, 16))
    assert (stages[2].ranks, stages[3].ranks, stages[0].ranks) == ((16, 17), (18, 19), (20, 21, 22))


def test_encoders_stand_side_by_side_before_the_llm() -> None:
    shapes = {"eye": 1, "ear": 2, "llm": 2, "generator": 1}
    units = [unit(name, [name], [1] * pp) for name, pp in shapes.items()]
    layout = Layout(global_batch_size=1, microbatch_size=1, microbatches=1, gpus_used=6, units=units)
    modules = [name for name, pp in shapes.items() for _ in range(pp)]
    stages = build_topology(layout, modules, "llm").stages
    assert [(stage.before, stage.after) for stage in stages] == [
        ((), (3,)), ((), (2,)), ((1,), (3,)), ((0, 2), (4,)), ((3,), (5,)), ((4,), ())]
    assert [(stage.position, stage.line) for stage in stages] == [(0, 4), (0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]
    assert [set(stage.beside) for stage in stages] == [{1, 2}, {0}, {0}, set(), set(), set()]
    in_a_line = build_topology(layout, modules).stages
    assert [(stage.position, stage.line) for stage in in_a_line] == [(place, 6) for place in range(6)]
    assert not any(stage.beside for stage in in_a_line)


def test_generators_stand_side_by_side_behind_the_llm() -> None:
    """The shorter one's schedule is that of the longer one: its last stage is as far from the end as its peer there."""
    shapes = {"eye": 1, "llm": 2, "short": 1, "long": 3}
    units = [unit(name, [name], [1] * pp) for name, pp in shapes.items()]
    layout = Layout(global_batch_size=1, microbatch_size=1, microbatches=1, gpus_used=7, units=units)
    stages = build_topology(layout, [name for name, pp in shapes.items() for _ in range(pp)], "llm").stages
    assert [(stage.before, stage.after) for stage in stages] == [
        ((), (1,)), ((0,), (2,)), ((1,), (3, 4)), ((2,), ()), ((2,), (5,)), ((4,), (6,)), ((5,), ())]
    assert [stage.position for stage in stages] == [0, 1, 2, 3, 3, 4, 5]
    assert {stage.line for stage in stages} == {6}
    assert [set(stage.beside) for stage in stages] == [set(), set(), set(), {4, 5, 6}, {3}, {3}, {3}]
