"""The search against brute force over every layout and every split of layers, and against an
integer programme."""

import itertools
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from disttrain_cli.costs import context, experts
from disttrain_cli.costs.context import misfit
from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.costs.replicated import undealt
from disttrain_cli.planning import search as searching
from disttrain_cli.planning import units as units_
from disttrain_cli.planning.bounds import (
    Space,
    divisors,
    llm_floors,
    narrowed,
    rough_floor,
    side_by_side,
)
from disttrain_cli.planning.layouts import layout_of
from disttrain_cli.planning.objective import combine, layout_time, planned_stages_ms, unit_stages_ms
from disttrain_cli.planning.options import Options
from disttrain_cli.planning.search import search
from disttrain_cli.planning.units import Cluster, Unit, groupings, holder_of
from disttrain_cli.spec.layer_costs import Heads, LayerCost
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import ModuleProfile, Profile
from disttrain_cli.spec.shape import CpCommType, ParallelShape
from disttrain_cli.spec.stage_graph import stage_graph
from disttrain_cli.spec.work import Work
from tests.planning import synthetic
from tests.planning.synthetic import cuts


@pytest.fixture(autouse=True)
def _short_sequences_may_be_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_, "LEAST_TOKENS", 1)


def fits_nodes(unit: Unit, shape: ParallelShape) -> bool:
    """True if CP groups divide rows and heads, or gather keys and values, and groups of other sizes
    beside each other stay in nodes, or are whole ones."""
    node, ranks = unit.cluster.gpus_per_node, shape.tp_cp_size
    inside = node % ranks == 0 and ranks in (1, 2, 4, 8)
    why = misfit(unit.profile, unit.modules, shape)
    return why is None and (inside or ranks % node == 0)


def shapes(unit: Unit, size: int, gpus: int) -> list[UnitPlan]:
    choices = {"none": [False], "full": [True], "auto": [False, True]}[unit.cluster.checkpointing]
    plans = [
        UnitPlan(
            name=unit.name,
            modules=list(unit.modules),
            module_tp=dict.fromkeys(unit.replicated, 1),
            tp=tp,
            cp=cp,
            cp_comm_type=how,
            ep=ep,
            dp=dp,
            pp=pp,
            gpus=tp * cp * dp * pp,
            layers_per_stage=[int(count) for count in layers],
            checkpointing=recompute,
            tp_overlap=unit.overlaps(ParallelShape(tp=tp, cp=cp, recompute=recompute)),
        )
        for tp in unit.tps
        for cp in (range(1, gpus // tp + 1) if not unit.replicated else [1])
        for how in get_args(CpCommType)[: 2 if cp > 1 and unit.holds_llm else 1]
        if fits_nodes(unit, ParallelShape(tp=tp, cp=cp, cp_comm_type=how))
        for dp in range(1, gpus + 1)
        if tp * cp * dp <= gpus and not (unit.holds_llm and size % dp)
        for ep in range(1, tp * cp * dp + 1)
        if tp * cp * dp % ep == 0
        and experts.misfit(unit.profile, unit.modules, ParallelShape(dp=dp, ep=ep)) is None
        for pp in range(1, unit.layers + 1)
        if tp * cp * dp * pp <= gpus
        for layers in cuts(unit.layers, pp)
        for recompute in choices
    ]
    return [plan for plan in plans if undealt(unit.profile, plan) is None]


def brute_force(units: list[Unit], cluster: Cluster) -> float:
    """Time of the best layout, every combination tried; infinite where none fits."""
    best = np.inf
    for size in divisors(cluster.batch):
        slots = cluster.batch // size
        tables = [
            [
                (
                    plan,
                    planned_stages_ms(unit, plan, size),
                )
                for plan in shapes(unit, size, cluster.gpus - len(units) + 1)
            ]
            for unit in units
        ]
        for chosen in itertools.product(*tables):
            plans = [plan for plan, _ in chosen]
            used = sum(plan.gpus for plan in plans)
            unit_ms, stage_ms = [sum(ms) for _, ms in chosen], [max(ms) for _, ms in chosen]
            time = combine(unit_ms, stage_ms, slots, holder_of(units)).total_ms
            if used > cluster.gpus or time >= best:
                continue
            holder = next(plan for plan in plans if "llm" in plan.modules)
            layout = Layout(
                global_batch_size=cluster.batch,
                microbatch_size=size // holder.dp,
                microbatches=slots,
                gpus_used=used,
                zero_stage=cluster.zero_stage,
                trained=list(cluster.trained) if cluster.trained else None,
                units=plans,
            )
            memory = layout_memory(units[0].profile, layout, cluster.memory_gib)
            if all(stage.peak_gib <= stage.limit_gib for stage in memory):
                best = time
    return best


@st.composite
def small_profiles(
    draw: st.DrawFn, long: bool = False, mixtures: bool = False
) -> tuple[Profile, Cluster]:
    """Two to four modules of one to three layers with random costs, and a cluster that may be too
    small. LLM and image encoder may share rows (CP), inside nodes or over several; long: few
    sequences, and an LLM that surely may. Layers of the LLM, and of a generator, may hold experts.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    known = [Heads(2, 1, 64), Heads(4, 2, 512), Heads(6, 3, 8)]
    tps = draw(st.sampled_from([(1,), (1, 2)]))
    image, llm, generator = synthetic.MODULES
    heads = {
        llm: draw(st.sampled_from(known if long else [None, *known])),
        image: draw(st.sampled_from([None, Heads(4, 4, 256), Heads(2, 2, 8)])),
    }
    few = [(llm, generator), (image, llm)]
    groups = [
        synthetic.MODULES,
        *few,
        (image, "audio_encoder", llm),
        (image, "audio_encoder", llm, generator),
    ]
    names = draw(st.sampled_from(few if mixtures else groups))
    modules: dict[str, ModuleProfile] = {}
    for name in names:
        kinds = [f"k{i}" for i in range(random.integers(1, 4))]
        costs: dict[str, LayerCost] = {
            kind: synthetic.layer(
                random.uniform(0.1, 2.0),
                random.uniform(-2, 5),
                int(random.integers(1, 50)) * 10**6,
                random.uniform(1e4, 3e6),
                tps,
                1e6,
                float(random.choice([0.0, 0.2, -0.1])),
            )
            for kind in kinds
        }
        if name in heads:  # its last kind of layer is attention
            costs[kinds[-1]] = costs[kinds[-1]].model_copy(update={"heads": heads[name]})
        if mixtures and name in (llm, generator):
            for kind in kinds[:2]:
                total, width = int(random.choice([2, 4, 6])), int(random.choice([8, 4096]))
                share = float(random.choice([0.3, 0.9]))
                costs[kind] = synthetic.mixed(costs[kind], share, total, width)
        items = 1.0 if name == "llm" else float(random.choice([0.0, 0.3, 2.0, 5.0]))
        tokens = 50 * items
        layers = [kinds[0]] * int(random.integers(0, 2)) + kinds
        modules[name] = synthetic.module(
            synthetic.KINDS[name],
            layers,
            costs,
            Work(items, tokens, 0),
            Work(2 * items, 2 * tokens, 0),
            1e5,
        ).model_copy(
            update={"cut_bytes_per_sequence": random.choice([1e5, 1e7, 3e7], len(layers)).tolist()}
        )
    clusters = [
        (4, 5),
        (6, 4),
        (12, 3),
        (8, 1),
        *[(5, 6), (6, 7)][: 4 - len(names)],
    ]  # few GPUs for many units
    if mixtures:
        clusters = [(4, 4), (2, 6)]
    if long:
        clusters = [(1, 6), (2, 4), (2, 6)]
    batch, gpus = draw(st.sampled_from(clusters))
    run = synthetic.run_file(batch=batch, gpus=gpus)
    # of gradients that appear in a first backward (fp32) the search counts more than there are
    node = draw(st.sampled_from([2, gpus])) if gpus % 2 == 0 else 1
    profile = synthetic.tiny(run).model_copy(update={"modules": modules, "precision": "bf16"})
    if mixtures:  # reading and summing an expert layer's weights takes up to all of its base
        each_ns = {"optimizer_ns_per_parameter": float(random.choice([0.0, 0.1, 1.0]))}
        profile = profile.model_copy(update={"device": profile.device.model_copy(update=each_ns)})
    return synthetic.on_nodes(profile, node) if node < gpus else profile, Cluster(
        gpus,
        node,
        draw(st.sampled_from([0.3, 0.6, 1.0, 1.5, 3.0, 100.0])),
        draw(st.sampled_from([0, 1])),
        batch,
        trained=draw(st.sampled_from([None, ("llm",), (names[-1],), (names[0], "projectors")])),
        checkpointing=draw(st.sampled_from(["none", "full", "auto"])),
        hides=draw(st.booleans()),
    )


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(small_profiles(), st.integers(0, 11))
def test_search_of_any_grouping_equals_brute_force(
    case: tuple[Profile, Cluster], place: int
) -> None:
    groups = groupings(*case, "auto")
    check_against_brute_force(groups[place % len(groups)])


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(small_profiles(long=True))
def test_search_of_few_long_sequences_equals_brute_force(case: tuple[Profile, Cluster]) -> None:
    check_against_brute_force(groupings(*case, "disaggregated")[0])


@pytest.mark.parametrize(
    ("limit", "place", "eps"), [(0.25, 1, [4]), (0.32, 1, [2]), (0.4, 0, [1, 2]), (0.4, 1, [2])]
)
def test_experts_are_divided_as_far_as_memory_needs(
    limit: float, place: int, eps: list[int]
) -> None:
    """EP 1 is faster by the formula, as it exchanges no rows."""
    profile, cluster = synthetic.mixture(), Cluster(4, 4, limit, 1, 2)
    units = groupings(profile, cluster, "auto")[place]
    assert [shape.ep for shape in search(units, cluster).best[0].units] == eps
    check_against_brute_force(units)


def test_experts_are_divided_where_their_weights_take_longest() -> None:
    """Passes take 30 ms whatever their rows, all for experts; memory would hold all of them."""
    profile = synthetic.mixture()
    llm, base = profile.modules["llm"], {"base": 30.0}
    block = llm.costs["block"]
    shards = {
        tp: shard.model_copy(
            update={
                name: getattr(shard, name).model_copy(update=base)
                for name in ("forward_ms", "backward_ms", "backward_input_ms")
            }
        )
        for tp, shard in block.tp.items()
    }
    costs = {"block": block.model_copy(update={"tp": shards})}
    update = {
        "modules": profile.modules | {"llm": llm.model_copy(update={"costs": costs})},
        "device": profile.device.model_copy(update={"optimizer_ns_per_parameter": 1e3}),
    }
    units = groupings(profile.model_copy(update=update), Cluster(4, 4, 4.0, 1, 2), "auto")[1]
    assert [shape.ep for shape in search(units, units[0].cluster).best[0].units] == [4]
    check_against_brute_force(units)


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(small_profiles(mixtures=True), st.integers(0, 2))
def test_search_of_mixtures_of_experts_equals_brute_force(
    case: tuple[Profile, Cluster], place: int
) -> None:
    groups = groupings(*case, "auto")
    check_against_brute_force(groups[place % len(groups)])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(small_profiles(), st.integers(0, 11))
def test_no_layout_is_faster_than_the_floors_of_its_slots(
    case: tuple[Profile, Cluster], place: int
) -> None:
    groups = groupings(*case, "auto")
    units, sizes = groups[place % len(groups)], divisors(case[1].batch)
    for size, floor in zip(sizes, llm_floors(units, sizes, case[1]), strict=True):
        for best in search(units, case[1], slots_of=[size]).best:
            assert max(floor, rough_floor(units, size, case[1])) <= best.total_ms


@pytest.mark.parametrize("node", [1, 3, 6, 8])
@pytest.mark.parametrize("most", [None, 1, 5, 16])
def test_tp_and_cp_fill_nodes_evenly(node: int, most: int | None) -> None:
    """As by trying every number."""
    run = synthetic.run_file(batch=24, gpus=10 * node, nodes=10)
    profile = synthetic.on_nodes(
        synthetic.attending(synthetic.tiny(run), Heads(48, 48, 8), 4800), node
    )
    unit = groupings(profile, Cluster(10 * node, node, 4.0, 1, 24, most_cp=most), "auto")[0][1]
    assert unit.widths == [
        (tp, cp)
        for tp in unit.tps
        for cp in range(1, min(10 * node // tp, most or 10 * node) + 1)
        if context.fits_nodes(ParallelShape(tp=tp, cp=cp), node)
        and (tp * cp >= node or (tp * cp).bit_count() == 1)
        and unit.ways(tp=tp, cp=cp)
    ]


def check_against_brute_force(units: list[Unit]) -> None:
    profile, cluster = units[0].profile, units[0].cluster
    expected = brute_force(units, cluster)
    found = search(units, cluster, top=3).best
    if not found:
        assert expected == np.inf
        return
    layout = layout_of(units, cluster, found[0], "disaggregated")
    assert found[0].total_ms == pytest.approx(expected, rel=1e-9)
    for unit, plan in zip(units, layout.units, strict=True):
        on, off = (
            sum(map(np.sum, unit.layer_ms(plan.shape, overlap))) for overlap in (True, False)
        )
        assert plan.tp_overlap == (cluster.hides and on < off)
    assert layout_time(units, layout).total_ms == pytest.approx(expected, rel=1e-9)
    memory = layout_memory(profile, layout, cluster.memory_gib)
    assert all(stage.peak_gib <= stage.limit_gib * (1 + 1e-9) for stage in memory)
    for stage in stage_graph(layout, profile.inputs.llm).stages:
        assert stage.ranks[0] % min(stage.unit.tp_cp_size, cluster.gpus_per_node) == 0
    assert found == sorted(found) and len({(c.units, c.microbatch) for c in found}) == len(found)


def by_milp(units: list[Unit], cluster: Cluster) -> float:
    """Time of the best layout by HiGHS, memory aside: one shape of each unit, a variable above all
    stages, and one above the encoders, which stand side by side.
    """
    best = np.inf
    for size in divisors(cluster.batch):
        slots, columns = cluster.batch // size, []
        for number, unit in enumerate(units):
            for tp, dp in itertools.product(unit.tps, range(1, cluster.gpus + 1)):
                if tp * dp > cluster.gpus or (unit.holds_llm and size % dp):
                    continue
                times = np.array(
                    unit_stages_ms(unit, ParallelShape(tp=tp, dp=dp), [1] * unit.layers, size)
                )
                columns += [
                    (
                        number,
                        tp * dp * pp,
                        times.sum(),
                        min(
                            max(part.sum() for part in np.split(times, np.cumsum(layers)[:-1]))
                            for layers in cuts(unit.layers, pp)
                        ),
                    )
                    for pp in range(1, min(unit.layers, cluster.gpus // (tp * dp)) + 1)
                ]
        unit_of, gpus, unit_ms, stage_ms = (
            np.array(values) for values in zip(*columns, strict=True)
        )
        encodes = np.array(
            [unit.profile.modules[unit.modules[0]].kind == "encoder" for unit in units]
        )
        # The last variables are the slowest stage and the slowest encoder.
        cost = np.append(np.where(encodes[unit_of], 0.0, unit_ms), [slots - 1, 1])
        mine = [unit_of == number for number in range(len(units))]
        one_each = [np.append(own, [0.0, 0.0]) for own in mine]
        slowest = [np.append(own * stage_ms, [-1.0, 0.0]) for own in mine]
        slowest += [np.append(own * unit_ms, [0.0, -1.0]) for own in np.array(mine)[encodes]]
        found = milp(
            cost,
            integrality=np.append(np.ones(len(columns)), [0, 0]),
            bounds=Bounds(0, np.append(np.ones(len(columns)), [np.inf, np.inf])),
            options={"mip_rel_gap": 0.0},
            constraints=[
                LinearConstraint(np.array(one_each), 1, 1),
                LinearConstraint(np.append(gpus, [0, 0])[None], 0, cluster.gpus),
                LinearConstraint(np.array(slowest), -np.inf, 0),
            ],
        )
        best = min(best, found.fun if found.success else np.inf)
    return float(best)


@pytest.mark.parametrize(
    ("tps", "gpus", "batch"), [((1,), 9, 6), ((1, 2), 12, 12), ((1, 2, 4), 16, 4)]
)
def test_search_equals_an_integer_programme(tps: tuple[int, ...], gpus: int, batch: int) -> None:
    profile = synthetic.tiny(synthetic.run_file(batch=batch, gpus=gpus), tps=tps, memory_gib=1e6)
    cluster = Cluster(gpus, gpus, 1e6, 1, batch)
    units = groupings(profile, cluster, "disaggregated")[0]
    assert search(units, cluster).best[0].total_ms == pytest.approx(
        by_milp(units, cluster), rel=1e-6
    )


@pytest.mark.parametrize(
    ("gpus", "batch", "share"), [(10, 4, 1.0), (10, 4, 0.3), (14, 6, 2.0), (12, 1, 3.0)]
)
def test_two_encoders_equal_an_integer_programme(gpus: int, batch: int, share: float) -> None:
    """An audio encoder beside the image encoder: more than two units share what the LLM leaves."""
    profile = synthetic.with_audio(
        synthetic.tiny(synthetic.run_file(batch=batch, gpus=gpus), memory_gib=1e6), share=share
    )
    cluster = Cluster(gpus, gpus, 1e6, 1, batch)
    units = groupings(profile, cluster, "disaggregated")[0]
    found = search(units, cluster).best[0]
    assert len(found.units) == 4
    assert found.total_ms == pytest.approx(by_milp(units, cluster), rel=1e-6)


@pytest.mark.parametrize("batch", [1, 12])
def test_looking_near_the_bound_first_finds_the_same_layouts(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = synthetic.with_audio(
        synthetic.tiny(synthetic.run_file(batch=batch, gpus=40), memory_gib=1e6)
    )
    cluster = Cluster(40, 40, 1e6, 1, batch)
    at_once = search(groupings(profile, cluster, "disaggregated")[0], cluster, top=8).best
    limits: list[float] = []

    def seen(space: Space, limit: float) -> tuple[list[Options] | None, float]:
        limits.append(limit)
        return narrowed(space, limit)

    monkeypatch.setattr(searching, "MANY", 0)
    monkeypatch.setattr(searching, "narrowed", seen)
    assert search(groupings(profile, cluster, "disaggregated")[0], cluster, top=8).best == at_once
    assert any(after < before for before, after in itertools.pairwise(limits))


@given(
    st.lists(
        st.lists(st.sampled_from([1.0, 2.0, 2.5, 4.0, np.inf]), min_size=9, max_size=9),
        min_size=1,
        max_size=3,
    )
)
def test_units_side_by_side_share_gpus_exactly(times: list[list[float]]) -> None:
    tables = [np.minimum.accumulate([np.inf, *of_unit]) for of_unit in times]
    expected = [
        min(
            max(table[share] for table, share in zip(tables, shares, strict=True))
            for shares in itertools.product(range(gpus + 1), repeat=len(tables))
            if sum(shares) <= gpus
        )
        for gpus in range(10)
    ]
    assert side_by_side(tables).tolist() == expected


def test_a_batch_that_no_dp_divides_leaves_gpus_idle() -> None:
    run = synthetic.run_file(batch=7, gpus=12)
    cluster = Cluster(12, 12, 4.0, 1, 7)
    found = search(groupings(synthetic.tiny(run), cluster, "disaggregated")[0], cluster).best[0]
    assert found.units[1].dp in (1, 7) and found.gpus <= 12


def test_tp_may_be_limited() -> None:
    run = synthetic.run_file(batch=240, gpus=96, nodes=12, precision="bf16")
    profile, cluster = synthetic.paper_9b(run), Cluster(96, 8, 30.0, 1, 240)
    free = search(groupings(profile, cluster, "disaggregated")[0], cluster).best[0]
    one = Cluster(96, 8, 30.0, 1, 240, most_tp=1)
    limited = search(groupings(profile, one, "disaggregated")[0], one).best[0]
    assert max(unit.tp for unit in free.units) > 1 and max(unit.tp for unit in limited.units) == 1
    assert limited.total_ms >= free.total_ms


def test_recomputing_is_chosen_where_memory_binds_only() -> None:
    run = synthetic.run_file(batch=240, gpus=96, nodes=12, precision="bf16")
    profile = synthetic.paper_9b(run)
    for limit, recomputes in ((16.0, True), (1e4, False)):
        times = {}
        for choice in ("none", "full", "auto"):
            cluster = Cluster(96, 8, limit, 1, 240, checkpointing=choice)  # type: ignore[arg-type]
            best = search(groupings(profile, cluster, "disaggregated")[0], cluster).best
            times[choice] = best[0].total_ms if best else np.inf
        assert any(unit.recompute for unit in best[0].units) == recomputes
        assert times["auto"] <= min(times["none"], times["full"])


def test_memory_makes_the_llm_deeper() -> None:
    run = synthetic.run_file(batch=240, gpus=96, nodes=12, precision="bf16")
    profile = synthetic.paper_9b(run)
    depth = {}
    for limit in (40.0, 400.0):
        cluster = Cluster(96, 8, limit, 1, 240)
        found = search(groupings(profile, cluster, "disaggregated")[0], cluster).best[0]
        depth[limit] = found.units[1].tp * found.units[1].pp
    assert depth[40.0] > depth[400.0]
