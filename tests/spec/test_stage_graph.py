"""Every rank has its coordinates; TP groups are next to each other and stay inside a node."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.stage_graph import (
    StageGraph,
    in_line,
    neighbours,
    parallel_to,
    stage_cuts,
    stage_graph,
    stages_to_end,
)
from tests.runtime.factory import unit


def _graph(shapes: list[tuple[int, int, int]], llm: int = 0) -> StageGraph:
    """Units of (TP, DP, PP), one module each; the LLM is that at index `llm`."""
    units = [
        unit(f"m{index}", [f"m{index}"], [1] * pp, dp, tp)
        for index, (tp, dp, pp) in enumerate(shapes)
    ]
    layout = Layout(
        global_batch_size=1,
        microbatch_size=1,
        microbatches=1,
        gpus_used=sum(u.gpus for u in units),
        units=units,
    )
    return stage_graph(layout, f"m{llm}")


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 4), st.integers(1, 3)),
        min_size=1,
        max_size=4,
    )
)
def test_every_rank_has_its_coordinates(shapes: list[tuple[int, int, int]]) -> None:
    graph = _graph(shapes)
    assert sorted(rank for stage in graph.stages for rank in stage.ranks) == list(
        range(graph.world_size)
    )
    for stage in graph.stages:
        groups = stage.tp_groups()
        assert [rank for group in groups for rank in group] == list(stage.ranks)
        assert all(
            group[0] % stage.tp == 0 and group[-1] == group[0] + stage.tp - 1 for group in groups
        )
        assert sorted(rank for t in range(stage.tp) for rank in stage.dp_group(t)) == list(
            stage.ranks
        )
        for replica, group in enumerate(groups):
            for tp_rank, rank in enumerate(group):
                coords = graph.coords(rank)
                assert (coords.stage, coords.replica, coords.tp_rank) == (stage, replica, tp_rank)
                assert stage.rank(replica, tp_rank) == rank == stage.dp_group(tp_rank)[replica]


def test_ranks_of_a_cp_group_lie_beside_each_other_and_hold_the_same_weights() -> None:
    units = [
        UnitPlan(name="e", modules=["e"], tp=1, dp=3, pp=1, gpus=3, layers_per_stage=[1]),
        UnitPlan(name="l", modules=["llm"], tp=2, cp=3, dp=2, pp=1, gpus=12, layers_per_stage=[1]),
    ]
    layout = Layout(
        global_batch_size=2, microbatch_size=1, microbatches=1, gpus_used=15, units=units
    )
    graph = stage_graph(layout, "llm")
    encoder, llm = graph.stages
    assert (encoder.ranks, llm.ranks) == (tuple(range(12, 15)), tuple(range(12)))
    assert llm.tp_groups()[:3] == [[0, 1], [2, 3], [4, 5]]
    assert llm.cp_groups() == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert llm.replica_groups() == [list(range(6)), list(range(6, 12))]
    assert encoder.cp_groups() == [[12], [13], [14]]
    for rank in llm.ranks:
        place = graph.coords(rank)
        assert llm.rank(place.replica, place.tp_rank, place.cp_rank) == rank
        assert llm.dp_group(place.tp_rank)[place.holder] == rank
        assert llm.replica_groups()[place.replica][place.part] == rank


def test_ranks_of_an_ep_group_lie_beside_each_other_over_replicas() -> None:
    shape = {"tp": 2, "cp": 2, "dp": 3, "ep": 6}
    unit = UnitPlan(name="l", modules=["llm"], gpus=12, layers_per_stage=[1], **shape)
    layout = Layout(
        global_batch_size=3, microbatch_size=1, microbatches=1, gpus_used=12, units=[unit]
    )
    graph = stage_graph(layout, "llm")
    (stage,) = graph.stages
    assert stage.ep_groups() == [list(range(6)), list(range(6, 12))]
    assert [stage.expert_group(rank) for rank in range(6)] == [[r, r + 6] for r in range(6)]
    assert (unit.expert_replicas, unit.replicas_together) == (2, 3)
    for rank in stage.ranks:
        place = graph.coords(rank)
        assert stage.expert_group(place.ep_rank)[place.expert_holder] == rank
        assert stage.ep_groups()[place.expert_holder][place.ep_rank] == rank


def test_units_of_one_tp_size_are_numbered_in_pipeline_order() -> None:
    assert [stage.ranks for stage in _graph([(1, 2, 1), (1, 1, 2)]).stages] == [(0, 1), (2,), (3,)]


def test_larger_tp_groups_come_first() -> None:
    """A unit of three ranks in front would put a group of eight over two nodes of eight."""
    stages = _graph([(1, 3, 1), (8, 2, 1), (2, 1, 2)]).stages
    assert stages[1].tp_groups()[1] == list(range(8, 16))
    assert (stages[2].ranks, stages[3].ranks, stages[0].ranks) == ((16, 17), (18, 19), (20, 21, 22))


def test_encoders_are_parallel_branches_before_the_llm() -> None:
    stages = _graph([(1, 1, pp) for pp in (1, 2, 2, 1)], llm=2).stages
    assert [(stage.before, stage.after) for stage in stages] == [
        ((), (3,)),
        ((), (2,)),
        ((1,), (3,)),
        ((0, 2), (4,)),
        ((3,), (5,)),
        ((4,), ()),
    ]
    assert [(stage.depth, stage.to_end) for stage in stages] == [
        (0, 4),
        (0, 5),
        (1, 4),
        (2, 3),
        (3, 2),
        (4, 1),
    ]
    assert [set(stage.parallel) for stage in stages] == [{1, 2}, {0}, {0}, set(), set(), set()]


def test_generators_are_parallel_branches_behind_the_llm() -> None:
    """The shorter one's schedule is that of the longer one: its last stage is as far from the end
    as its peer there."""
    stages = _graph([(1, 1, pp) for pp in (1, 2, 1, 3)], llm=1).stages
    assert [(stage.before, stage.after) for stage in stages] == [
        ((), (1,)),
        ((0,), (2,)),
        ((1,), (3, 4)),
        ((2,), ()),
        ((2,), (5,)),
        ((4,), (6,)),
        ((5,), ()),
    ]
    assert [stage.depth for stage in stages] == [0, 1, 2, 3, 3, 4, 5]
    assert {stage.depth + stage.to_end for stage in stages} == {6}
    assert [stage.to_end for stage in stages] == [6, 5, 4, 3, 3, 2, 1]
    assert [set(stage.parallel) for stage in stages] == [
        set(),
        set(),
        set(),
        {4, 5, 6},
        {3},
        {3},
        {3},
    ]


def test_cuts_of_units_and_of_their_stages() -> None:
    assert neighbours(5, 2) == [(0, 2), (1, 2), (2, 3), (2, 4)]
    assert [parallel_to(index, 5, 2) for index in range(5)] == [[1], [0], [], [4], [3]]
    assert stage_cuts([1, 2, 2, 1, 2], 2) == [
        (0, 3),
        (1, 2),
        (2, 3),
        (3, 4),
        (4, 5),
        (4, 6),
        (6, 7),
    ]
    assert stage_cuts([3], 0) == [(0, 1), (1, 2)] and stage_cuts([1], 0) == []


@given(st.lists(st.integers(1, 16), min_size=1, max_size=5), st.data())
def test_amounts_in_line_are_never_fewer_than_the_stages_to_the_end(
    counts: list[int], data: st.DataObject
) -> None:
    """They are equal unless several generators branch off the LLM."""
    llm = data.draw(st.integers(0, len(counts) - 1))
    left = stages_to_end(stage_cuts(counts, llm), sum(counts))
    first = [left[sum(counts[:index])] for index in range(len(counts))]
    line = in_line(counts, llm)
    assert all(least <= most for least, most in zip(first[: llm + 1], line[: llm + 1], strict=True))
    if llm >= len(counts) - 2:
        assert first == line


@pytest.mark.parametrize(
    ("before", "dp", "ep", "node", "runs"),
    [
        (0, 8, 8, 8, 1),
        (0, 16, 16, 8, 2),
        (0, 6, 3, 8, 1),
        (2, 4, 4, 8, 1),  # ranks 2 to 5
        (2, 8, 4, 8, 2),  # ranks 6 to 9 are in two nodes
        (4, 16, 16, 8, 4),
        (1, 4, 4, 2, 4),
    ],
)
def test_runs_of_an_ep_group_lie_in_one_node_each(
    before: int, dp: int, ep: int, node: int, runs: int
) -> None:
    units = [
        UnitPlan(name=name, modules=[name], dp=count, ep=degree, gpus=count, layers_per_stage=[1])
        for name, count, degree in (("encoder", before, 1), ("llm", dp, ep))
        if count
    ]
    layout = Layout(
        global_batch_size=1, microbatch_size=1, microbatches=1, gpus_used=before + dp, units=units
    )
    assert stage_graph(layout, "llm").stages[-1].ep_nodes(node) == runs
