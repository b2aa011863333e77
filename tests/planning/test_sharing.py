"""Plans whose ranks share tokens (CP) or divide experts (EP): where they are chosen, and their
explanation."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.planning import predict
from disttrain_cli.planning.climb import climb, neighbours
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.finalists import CP_GAIN, Ranked, chosen_first
from disttrain_cli.planning.infeasible import infeasible
from disttrain_cli.planning.layouts import layout_of
from disttrain_cli.planning.layouts import layout_with as build_layout
from disttrain_cli.planning.search import search
from disttrain_cli.planning.sensitivity import sensitivity
from disttrain_cli.planning.sharing import experts_sentence, sharing_sentence
from disttrain_cli.planning.solve import solve_for
from disttrain_cli.planning.units import Cluster, groupings
from disttrain_cli.spec.layer_costs import Heads
from disttrain_cli.spec.plan import Layout, Plan, UnitPlan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.shape import ParallelShape
from tests.cases import first_fast
from tests.planning import synthetic

ONE = Cluster(8, 8, 4.0, 1, 1, climbs=False)  # one long sequence, on which DP has nothing to do


def profile_of(heads: Heads | None = Heads(8, 4, 16), length: int = 256) -> Profile:
    tiny = synthetic.tiny(synthetic.run_file(batch=1, gpus=8), kind="cuda", tps=(1, 2))
    return synthetic.attending(tiny, heads, length)


def heavy(profile: Profile) -> Profile:
    """The profile with one sequence of 32 times the tokens."""
    llm = profile.modules["llm"]
    most = llm.max_work_per_sequence.scaled(32)._replace(items=1)
    worse = llm.model_copy(update={"max_work_per_sequence": most})
    return profile.model_copy(update={"modules": profile.modules | {"llm": worse}})


def test_degrees_divide_heads_tokens_and_nodes() -> None:
    def widths(profile: Profile, cluster: Cluster = ONE, strategy: str = "disaggregated") -> object:
        return [unit.widths for unit in groupings(profile, cluster, strategy)[0]]

    alone = [(1, 1), (2, 1)]
    shared = [(1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4)]
    assert widths(profile_of()) == [alone, shared, alone]
    assert widths(profile_of(None)) == [alone] * 3
    assert widths(profile_of(length=4))[1] == [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]  # type: ignore[index]
    assert widths(profile_of(), replace(ONE, most_cp=2))[1] == [(1, 1), (1, 2), (2, 1), (2, 2)]  # type: ignore[index]
    assert widths(profile_of(), strategy="megatron") == [alone]


def test_groups_on_several_nodes_are_whole_nodes() -> None:
    nodes = replace(ONE, gpus=16, gpus_per_node=4)
    known = synthetic.on_nodes(profile_of(), 4)
    inside = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)]
    assert groupings(known, nodes, "disaggregated")[0][1].widths == sorted(
        [*inside, (1, 8), (2, 4)]
    )
    for profile, cluster in (
        (profile_of(), nodes),  # of a single node
        (known, replace(nodes, over_nodes=False)),
        (known, replace(nodes, gpus=4)),
    ):
        assert groupings(profile, cluster, "disaggregated")[0][1].widths == inside


@pytest.mark.slow
@pytest.mark.parametrize(("speed", "over"), first_fast([(0.5, True), (1e-3, False)]))
def test_a_plan_shares_over_nodes_where_that_is_faster(
    speed: float, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "SEQUENCES", 4)
    nodes = replace(ONE, gpus_per_node=2)
    profile = synthetic.on_nodes(heavy(profile_of()), 2, speed)
    plan, inside = (solve_for(profile, replace(nodes, over_nodes=may)) for may in (True, False))
    assert max(unit.tp_cp_size for unit in inside.plan.units) <= 2
    assert (max(unit.tp_cp_size for unit in plan.plan.units) > 2) == over
    assert (plan.plan == inside.plan) == (not over)
    gain = 1 - plan.predicted.iteration_s / inside.predicted.iteration_s
    assert gain > CP_GAIN if over else gain == 0


def test_one_sequence_is_shared() -> None:
    profile = profile_of()
    units = groupings(profile, ONE, "disaggregated")[0]
    best = search(units, ONE).best[0]
    assert best.units[1].cp > 1 and best.units[0].cp == best.units[2].cp == 1
    assert best.gpus == sum(unit.gpus for unit in best.units) <= 8
    alone = replace(ONE, most_cp=1)
    other = search(groupings(profile, alone, "disaggregated")[0], alone).best[0]
    assert {unit.cp for unit in other.units} == {1} and other.total_ms > 1.1 * best.total_ms
    layout = layout_of(units, ONE, best, "disaggregated")
    assert [unit.cp for unit in layout.units] == [unit.cp for unit in best.units]


def test_what_fits_only_shared_is_found_and_what_cannot_be_is_named() -> None:
    tight = replace(ONE, gpus=16, memory_gib=0.04)
    profile = heavy(profile_of())
    best = search(groupings(profile, tight, "disaggregated")[0], tight).best[0]
    assert best.units[1].cp > 1
    layout = layout_of(groupings(profile, tight, "disaggregated")[0], tight, best, "disaggregated")
    assert all(s.peak_gib <= s.limit_gib for s in layout_memory(profile, layout, 0.04))
    alone = replace(tight, most_cp=1)
    assert not search(groupings(profile, alone, "disaggregated")[0], alone).best
    old = heavy(profile_of(None, length=32_768))
    why = infeasible(old, tight, "disaggregated").why
    assert "cannot be shared (CP): llm has no attention" in why
    assert "CP" not in infeasible(heavy(profile_of(None)), tight, "disaggregated").why


def test_degrees_that_heads_forbid_are_searched_where_keys_are_gathered() -> None:
    """Three heads: rows cannot be exchanged for them, but two ranks may gather keys and values."""
    long = profile_of(Heads(3, 1, 16), length=4096)
    llm = groupings(long, ONE, "disaggregated")[0][1]
    assert [way.cp_comm_type for way in llm.ways(tp=1, cp=2)] == ["all_gather"] and (
        1,
        2,
    ) in llm.widths
    without = groupings(long, replace(ONE, cp_comm_types=("a2a",)), "disaggregated")[0][1]
    assert without.ways(tp=1, cp=2) == [] and without.widths == [(tp, 1) for tp in without.tps]
    assert groupings(long, ONE, "disaggregated")[0][0].gathers is False


def test_neighbours_share_more_or_fewer() -> None:
    units = groupings(profile_of(), ONE, "disaggregated")[0]
    start = [ParallelShape(), ParallelShape(pp=2, cp=2), ParallelShape()]
    found = {
        (shapes[1].tp, shapes[1].cp, shapes[1].pp) for shapes, _ in neighbours(units, ONE, start, 1)
    }
    assert {(1, 4, 1), (1, 1, 2), (1, 1, 4), (2, 1, 2), (2, 2, 1)} <= found
    assert all((tp, cp) in units[1].widths for tp, cp, _ in found)


@pytest.mark.parametrize(("memory_gib", "divides"), first_fast([(0.32, True), (0.4, False)]))
def test_a_plan_divides_experts_where_that_pays_and_names_the_gain(
    memory_gib: float, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "SEQUENCES", 4)
    profile, cluster = synthetic.mixture(), Cluster(4, 4, memory_gib, 1, 2, climbs=False)
    draws = Draws(profile, cluster)
    plan = solve_for(profile, cluster, draws=draws)
    llm = plan.plan.unit_of("llm")
    said = experts_sentence(plan, profile, cluster, draws)
    assert said is not None and (llm.ep > 1) == divides
    if divides:
        assert f"EP {llm.ep} " in plan.plan.describe()
        assert f"{llm.name} over {llm.ep} ranks" in said and "% longer" in said
    else:
        assert "EP 1" in said
        assert experts_sentence(plan, profile, replace(cluster, most_ep=1), draws) is None


def test_neighbours_have_other_expert_groups() -> None:
    """Those whose ranks an EP degree does not divide have a smaller one."""
    cluster = Cluster(4, 4, 4.0, 1, 2)
    units = groupings(synthetic.mixture(), cluster, "megatron")[0]
    start = ParallelShape(tp=2, ep=2, dp=2)
    assert {1, 4} <= {shape.ep for (shape,), _ in neighbours(units, cluster, [start], 1)}
    built: list[ParallelShape] = []

    def build(shapes: Sequence[ParallelShape], slot_sequences: int) -> Layout | None:
        built.extend(shapes)
        return build_layout(units, cluster, shapes, slot_sequences, "megatron")

    layout = build([replace(start, ep=4)], 2)
    assert layout is not None
    climb(
        units,
        cluster,
        layout,
        1.0,
        build,
        lambda _: True,
        lambda _: 1.0,
        lambda one: (one, 1.0),
        set(),
    )
    assert {2, 4} == {shape.ep for shape in built}
    assert all(shape.tp_cp_size * shape.dp % shape.ep == 0 for shape in built)


def layout_with(cp: int) -> Layout:
    units = groupings(profile_of(), replace(ONE, most_cp=cp), "disaggregated")[0]
    best = search(units, ONE).best[0]
    return layout_of(units, ONE, best, "disaggregated")


@pytest.mark.parametrize(("gain", "first"), [(2 * CP_GAIN, "shared"), (CP_GAIN / 2, "alone")])
def test_tokens_are_shared_where_that_gains_more_than_prices_are_worth(
    gain: float, first: str
) -> None:
    shared, alone = Ranked(layout_with(8), 1.0), Ranked(layout_with(1), 1.0 / (1.0 - gain))
    slow = Ranked(layout_with(2), 2.0)
    ranked = chosen_first([shared, alone, slow], 8)
    assert ranked[0] is (shared if first == "shared" else alone)
    assert {id(one) for one in ranked} == {id(shared), id(alone), id(slow)}
    assert chosen_first([shared, slow], 1) == [shared, slow]


@pytest.mark.slow
def test_a_plan_says_what_sharing_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "SEQUENCES", 4)  # else 256 batches of one
    profile = profile_of()
    plan = solve_for(profile, ONE)
    llm = plan.plan.units[1]
    assert llm.cp > 1
    said = sharing_sentence(plan, profile, ONE, Draws(profile, ONE))
    assert said is not None and f"llm over {llm.cp} ranks" in said and "% longer" in said
    found = sensitivity(profile, ONE, plan.plan, silent)
    assert found is not None
    (alone,) = [one for one in found.changes if one.what == "CP 1 everywhere"]
    assert alone.speedup is not None and alone.speedup < 1
    assert all(move.cp_then == 1 for move in alone.units)
    for move in found.now.units:
        tp, dp, pp = move.shape_then
        assert move.gpus_then == tp * move.cp_then * dp * pp


def test_a_baseline_without_sharing_has_the_baseline_s_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    profile, clusters = profile_of(), list[Cluster]()
    unit = UnitPlan(name="llm", modules=["llm"], cp=2, gpus=2, layers_per_stage=[6])
    layout = SimpleNamespace(strategy="megatron", units=[unit])
    plan = cast(Plan, SimpleNamespace(plan=layout, alternatives=[]))

    def ranking(profile: Profile, cluster: Cluster, *given: object, **named: object) -> object:
        clusters.append(cluster)
        return [], 0, 0

    monkeypatch.setattr("disttrain_cli.planning.sharing.ranking", ranking)
    cluster = replace(ONE, splits=True)
    said = sharing_sentence(plan, profile, cluster, Draws(profile, cluster))
    assert said is not None and said.endswith("no layout without it fits.")
    assert [(one.splits, one.most_cp) for one in clusters] == [(False, 1)]


@pytest.mark.slow
def test_a_plan_for_long_sequences_says_why_they_are_not_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(predict, "SEQUENCES", 64)
    many = replace(ONE, batch=64, gpus=4)
    short, long, old = profile_of(), profile_of(length=32_768), profile_of(None, 32_768)
    plan = solve_for(long, many)
    assert not any(unit.cp > 1 for unit in plan.plan.units)
    draws = Draws(long, many)
    assert sharing_sentence(plan, short, many, draws) is None
    said = sharing_sentence(plan, long, many, draws)
    assert said is not None and "32,768 tokens are not shared (CP)" in said and "% longer" in said
    assert "has no attention whose rows" in (sharing_sentence(plan, old, many, draws) or "")
