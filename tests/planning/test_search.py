"""The search against brute force over every layout and every split of layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.planning.objective import busiest_load, combine, layout_time, unit_stages_ms
from disttrain_cli.planning.options import layers_per_stage
from disttrain_cli.planning.partition import slowest_stage, split
from disttrain_cli.planning.search import divisors, search
from disttrain_cli.planning.solve import layout_of
from disttrain_cli.planning.units import Cluster, Unit, group
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.profile import LayerCost, ModuleProfile, Polynomial, Profile
from disttrain_cli.spec.work import Work
from tests.planning import synthetic


def cuts(layers: int, stages: int) -> list[list[int]]:
    """Every way to split layers into non-empty stages."""
    inner = itertools.combinations(range(1, layers), stages - 1)
    return [list(np.diff([0, *places, layers])) for places in inner]


def shapes(unit: Unit, size: int, gpus: int) -> list[UnitPlan]:
    return [UnitPlan(name=unit.name, modules=list(unit.modules), tp=tp, dp=dp, pp=pp, gpus=tp * dp * pp,
                     layers_per_stage=[int(count) for count in layers])
            for tp in unit.tps for dp in range(1, gpus + 1) for pp in range(1, unit.layers + 1)
            if tp * dp * pp <= gpus and not (unit.holds_llm and size % dp) for layers in cuts(unit.layers, pp)]


def brute_force(units: list[Unit], cluster: Cluster) -> float:
    """Time of the best layout, every combination tried; infinite where none fits."""
    best = np.inf
    for size in divisors(cluster.batch):
        slots = cluster.batch // size
        tables = [[(plan, unit_stages_ms(unit, plan.tp, plan.dp, plan.layers_per_stage, size))
                   for plan in shapes(unit, size, cluster.gpus - len(units) + 1)] for unit in units]
        for chosen in itertools.product(*tables):
            plans = [plan for plan, _ in chosen]
            used = sum(plan.gpus for plan in plans)
            time = combine([sum(ms) for _, ms in chosen], [max(ms) for _, ms in chosen], slots).total_ms
            if used > cluster.gpus or time >= best:
                continue
            holder = next(plan for plan in plans if "llm" in plan.modules)
            layout = Layout(global_batch_size=cluster.batch, microbatch_size=size // holder.dp, microbatches=slots,
                            gpus_used=used, units=plans)
            memory = layout_memory(units[0].profile, layout, cluster.zero_stage, cluster.memory_gib)
            if all(stage.peak_gib <= stage.limit_gib for stage in memory):
                best = time
    return best


@st.composite
def small_profiles(draw: st.DrawFn) -> tuple[Profile, Cluster]:
    """Two or three modules of one to three layers with random costs, and a cluster that may be too small."""
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    tps = draw(st.sampled_from([(1,), (1, 2)]))
    names = draw(st.sampled_from([synthetic.MODULES, synthetic.MODULES[1:], synthetic.MODULES[:2]]))
    modules: dict[str, ModuleProfile] = {}
    for name in names:
        kinds = [f"k{i}" for i in range(random.integers(1, 4))]
        costs: dict[str, LayerCost] = {
            kind: synthetic.layer(random.uniform(0.1, 2.0), random.uniform(0, 5), int(random.integers(1, 50)) * 10**6,
                                  random.uniform(1e4, 3e6), tps, 1e6) for kind in kinds}
        items = 1.0 if name == "llm" else float(random.choice([0.0, 0.3, 2.0, 5.0]))
        tokens = 50 * items
        modules[name] = synthetic.module(synthetic.KINDS[name], kinds, costs, Work(items, tokens, 0),
                                         Work(2 * items, 2 * tokens, 0), 1e5)
    batch, gpus = draw(st.sampled_from([(4, 5), (6, 4), (12, 3), (5, 6), (8, 1), (6, 7)]))
    run = synthetic.run_file(batch=batch, gpus=gpus)
    profile = synthetic.tiny(run).model_copy(update={"modules": modules})
    limit = draw(st.sampled_from([0.3, 0.6, 1.0, 1.5, 3.0, 100.0]))
    return profile, Cluster(gpus, 2 if gpus % 2 == 0 else 1, limit, draw(st.sampled_from([0, 1])), batch)


@settings(max_examples=40, deadline=None)
@given(small_profiles())
def test_search_equals_brute_force(case: tuple[Profile, Cluster]) -> None:
    profile, cluster = case
    units = group(profile, cluster, "disaggregated")
    expected = brute_force(units, cluster)
    found = search(units, cluster, top=3).best
    if not found:
        assert expected == np.inf
        return
    layout = layout_of(units, cluster, found[0], "disaggregated")
    assert found[0].total_ms == pytest.approx(expected, rel=1e-9)
    assert layout_time(units, layout).total_ms == pytest.approx(expected, rel=1e-9)
    memory = layout_memory(profile, layout, cluster.zero_stage, cluster.memory_gib)
    assert all(stage.peak_gib <= stage.limit_gib * (1 + 1e-9) for stage in memory)
    assert found == sorted(found) and len({(c.shapes, c.microbatch) for c in found}) == len(found)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(0, 2**16), st.integers(0, 3), st.integers(1, 5),
       st.floats(1.0, 12.0))
def test_split_is_the_best_of_all_splits(layers: int, seed: int, after: int, slots: int, limit: float) -> None:
    random = np.random.default_rng(seed)
    times, states, activations = random.random((3, layers))
    table = slowest_stage(times[None], states[None], activations[None], limit, slots, after, layers)[0]
    for stages in range(1, layers + 1):
        best = np.inf
        for counts in cuts(layers, stages):
            ends = np.cumsum(counts)
            ranges = [slice(end - count, end) for count, end in zip(counts, ends, strict=True)]
            peak = max(states[r].sum() + activations[r].sum() * min(slots, stages - stage + after)
                       for stage, r in enumerate(ranges))
            if peak <= limit:
                best = min(best, max(times[r].sum() for r in ranges))
        assert table[stages] == pytest.approx(best)
        chosen = split(times, states, activations, limit, slots, after, stages)
        assert (chosen is None) == (best == np.inf)
        if chosen is not None:
            assert sum(chosen) == layers and min(chosen) >= 1
            ends = np.cumsum(chosen)
            assert max(times[e - c:e].sum() for c, e in zip(chosen, ends, strict=True)) == pytest.approx(best)


def test_equally_fast_splits_are_even() -> None:
    ones, none = np.ones(6), np.zeros(6)
    assert split(ones, none, none, 1.0, 4, 0, 4) in ([2, 2, 1, 1], [1, 2, 2, 1], [1, 1, 2, 2], [2, 1, 1, 2],
                                                     [2, 1, 2, 1], [1, 2, 1, 2])
    assert split(np.array([9.0, 1, 1, 1, 1, 1]), none, none, 1.0, 4, 0, 3) in ([1, 2, 3], [1, 3, 2])


def test_busiest_replica_has_whole_images() -> None:
    dp = np.array([1.0, 2.0, 3.0, 7.0, 100.0])
    loads = busiest_load(False, 4, 2.5, dp) * 2.5  # ten images
    assert loads[0] == 10.0
    assert loads[1] == pytest.approx(10 / 2 + 1 / 4)
    assert loads[4] == 1.0
    assert (np.diff(loads) <= 0).all()
    assert busiest_load(False, 1, 0.25, dp).tolist() == [1.0] * 5  # a quarter of an image, on one replica
    assert busiest_load(True, 12, 1.0, np.array([3.0])).tolist() == [4.0]


def test_without_bases_the_objective_is_the_papers() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    free = profile.links.model_copy(update={"p2p_us": 0.0, "p2p_gbps": 1e12})
    modules = {}
    for name, module in profile.modules.items():
        costs = {}
        for kind, cost in module.costs.items():
            time = cost.tp["1"].model_copy(update={
                side: Polynomial(per_token=getattr(cost.tp["1"], side).per_token)
                for side in ("forward_ms", "backward_ms")})
            costs[kind] = cost.model_copy(update={"tp": {"1": time}})
        modules[name] = module.model_copy(update={"costs": costs})
    profile = profile.model_copy(update={"links": free, "modules": modules})
    units = group(profile, Cluster(6, 6, 4.0, 1, 24), "disaggregated")
    per_sample = [unit.layer_ms(1)[1].sum() for unit in units]  # C of one sequence
    plans = [UnitPlan(name=u.name, modules=list(u.modules), dp=dp, gpus=dp, layers_per_stage=[u.layers])
             for u, dp in zip(units, (1, 4, 1), strict=True)]
    layout = Layout(global_batch_size=24, microbatch_size=2, microbatches=3, gpus_used=6, units=plans)
    time = layout_time(units, layout)
    each = [8 / dp * c for dp, c in zip((1, 4, 1), per_sample, strict=True)]
    assert time.warmup_ms == pytest.approx(sum(each), rel=1e-6)
    assert time.steady_ms == pytest.approx(max(each) * 2, rel=1e-6)


def test_megatron_gives_encoder_and_generator_one_stage_each() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    cluster = Cluster(6, 6, 4.0, 1, 24)
    (unit,) = group(profile, cluster, "megatron")
    for candidate in search([unit], cluster, top=4).best:
        _, dp, pp = candidate.shapes[0]
        layers = layers_per_stage(unit, 1, dp, pp, candidate.slot_sequences, 24 // candidate.slot_sequences, 0)
        assert layers is not None
        assert layers[0] == 4 and layers[-1] == 4 and sum(layers[1:-1]) == 6


def test_memory_makes_the_llm_deeper() -> None:
    run = synthetic.run_file(batch=240, gpus=96, nodes=12, precision="bf16")
    profile = synthetic.paper_9b(run)
    depth = {}
    for limit in (40.0, 400.0):
        cluster = Cluster(96, 8, limit, 1, 240)
        found = search(group(profile, cluster, "disaggregated"), cluster).best[0]
        tp, _, pp = found.shapes[1]
        depth[limit] = tp * pp
    assert depth[40.0] > depth[400.0]
