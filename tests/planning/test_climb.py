"""Climbing from a finalist to better neighbours: only layouts that run, never a slower one."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from disttrain_cli.costs.layout import stages_of
from disttrain_cli.costs.memory import fits
from disttrain_cli.planning import climb as climbing
from disttrain_cli.planning import solve
from disttrain_cli.planning.climb import climb, neighbours
from disttrain_cli.planning.finalists import one_batch_s
from disttrain_cli.planning.layouts import layout_with
from disttrain_cli.planning.solve import cluster_of
from disttrain_cli.planning.units import Cluster, Unit, groupings, holder_of
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.shape import ParallelShape
from tests.planning import synthetic


@pytest.fixture(scope="module")
def case() -> tuple[Profile, list[Unit], Cluster]:
    run = synthetic.run_file(batch=96, gpus=32, nodes=4, precision="bf16")
    profile = synthetic.paper_9b(run)
    cluster = cluster_of(run, profile)
    return profile, groupings(profile, cluster, "disaggregated")[0], cluster


def built(case: tuple[Profile, list[Unit], Cluster]) -> climbing.Build:
    _, units, cluster = case

    def build(shapes: Sequence[ParallelShape], slot_sequences: int) -> Layout | None:
        return layout_with(units, cluster, shapes, slot_sequences, "disaggregated")

    return build


LOPSIDED = [ParallelShape(dp=3), ParallelShape(tp=4, dp=4), ParallelShape(dp=5)]


def test_neighbours_keep_to_the_devices_the_batch_and_the_profiled_tp(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    _, units, cluster = case
    llm = holder_of(units)
    tried = list(neighbours(units, cluster, LOPSIDED, 2))
    assert {size for shapes, size in tried if shapes == tuple(LOPSIDED)} == {1, 4}
    found = [shapes for shapes, size in tried if size == 2]
    assert len(set(found)) > 30 and tuple(LOPSIDED) not in found
    for shapes in found:
        assert sum(shape.gpus for shape in shapes) <= cluster.gpus
        assert cluster.batch % (2 * shapes[llm].dp) == 0
        assert all(shape.tp in unit.tps for shape, unit in zip(shapes, units, strict=True))
        assert all(1 <= shape.pp <= unit.layers for shape, unit in zip(shapes, units, strict=True))
        changed = [one != other for one, other in zip(shapes, LOPSIDED, strict=True)]
        assert sum(changed) <= 2
    used = [sum(shape.gpus for shape in shapes) for shapes in found]
    # groups twice as wide with half the replicas, on the same devices
    assert {ParallelShape(tp=8, dp=2), ParallelShape(tp=2, dp=8)} <= {one[llm] for one in found}
    assert used.count(cluster.gpus) > 10  # what is left goes to another unit


def test_replicas_follow_items_that_are_not_cut(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, units, cluster = case
    shapes = [ParallelShape(dp=43), *LOPSIDED[1:]]
    items = round(8 * profile.modules["image_encoder"].work_per_sequence.items)
    assert -(-items // 43) == 2
    tried = neighbours(units, replace(cluster, gpus=200), shapes, 2)
    replicas = {encoder.dp for (encoder, _, _), _ in tried}
    assert {items, -(-items // 2), -(-items // 3)} <= replicas


def test_a_layout_that_recomputes_is_another(
    case: tuple[Profile, list[Unit], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climbing, "estimate_s", lambda *given: 1.0)
    _, units, cluster = case
    cluster, build = replace(cluster, checkpointing="auto"), built(case)
    start, offered = build(LOPSIDED, 8), list[Layout]()
    assert start is not None

    def has_room(layout: Layout) -> bool:
        offered.append(layout)
        return False

    climb(units, cluster, start, 1.0, build, has_room, lambda _: 1.0, lambda one: (one, 1.0), set())
    recomputed = {
        (layout.microbatch_size, *(unit.checkpointing for unit in layout.units))
        for layout in offered
        if layout.describe() == start.describe()
    }
    assert recomputed >= {
        (2, False, True, False),
        (1, False, False, False),
        (1, False, True, False),
    }


@pytest.mark.slow
def test_the_way_up_gets_faster_and_ends_where_no_neighbour_is(
    case: tuple[Profile, list[Unit], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(climbing, "TRIED", 1000)
    monkeypatch.setattr(climbing, "BEST", 1000)
    monkeypatch.setattr(climbing, "MOST", 1000)
    profile, units, cluster = case
    build = built(case)

    def has_room(layout: Layout) -> bool:
        return fits(profile, layout, cluster.memory_gib)

    known: dict[str, float] = {}

    def simulated_s(layout: Layout) -> float:
        key = layout.model_dump_json()
        if key not in known:
            known[key] = one_batch_s(profile, layout, cluster)
        return known[key]

    def timed(layout: Layout) -> tuple[Layout, float]:
        return layout, simulated_s(layout)

    start = build(LOPSIDED, 8)
    assert start is not None
    start_s = timed(start)[1]
    seen: set[str] = set()
    way = climb(units, cluster, start, start_s, build, has_room, simulated_s, timed, seen)
    assert len(seen) > 30
    times_s = [start_s, *(seconds for _, seconds in way)]
    assert times_s[-1] < 0.8 * start_s and times_s == sorted(times_s, reverse=True)
    for layout, seconds in way:
        assert layout.gpus_used <= cluster.gpus and fits(profile, layout, cluster.memory_gib)
        assert seconds == timed(layout)[1]
    top, top_s = way[-1]
    shapes = [unit.shape for unit in top.units]
    others = [
        build(other, microbatch * other[holder_of(units)].dp)
        for other, microbatch in neighbours(units, cluster, shapes, top.microbatch_size)
        if cluster.batch % (microbatch * other[holder_of(units)].dp) == 0
    ]
    times_s = [timed(other)[1] for other in others if other and has_room(other)]
    assert min(times_s) >= top_s * (1 - climbing.LEAST_GAIN)


@pytest.mark.slow
def test_a_ranking_with_neighbours_is_never_slower(
    case: tuple[Profile, list[Unit], Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, _, cluster = case
    for strategy in ("disaggregated", "megatron"):
        times_s = []
        for climbed in (solve.CLIMBED, 0):
            monkeypatch.setattr(solve, "CLIMBED", climbed)
            times_s.append(solve.ranking(profile, cluster, strategy)[0][0].iteration_s)
        assert times_s[0] <= times_s[1]


def test_layers_of_most_weights_lie_on_different_stages() -> None:
    """Their reductions take longer than all passes, by which splits are found."""
    profile = synthetic.tiny(synthetic.run_file(batch=6, gpus=8, nodes=1), kind="cuda", tps=(1,))
    llm = synthetic.heavier(profile.modules["llm"], 1000)
    shorter = {
        "layers": ["embed", "block", "head"],
        "cut_bytes_per_sequence": llm.cut_bytes_per_sequence[:3],
    }
    modules = profile.modules | {"llm": llm.model_copy(update=shorter)}
    profile = profile.model_copy(update={"modules": modules})
    cluster = Cluster(8, 8, 80.0, 1, 6)
    (units,) = (found for found in groupings(profile, cluster, "megatron") if len(found) == 1)
    start = layout_with(units, cluster, [ParallelShape(dp=2, pp=4)], 6, "megatron")
    assert start is not None
    (unit,) = start.units
    shifted = unit.model_copy(update={"layers_per_stage": [4, 2, 3, 2]})
    start = start.model_copy(update={"units": [shifted]})

    def simulated_s(layout: Layout) -> float:
        return one_batch_s(profile, layout, cluster)

    way = climb(
        units,
        cluster,
        start,
        simulated_s(start),
        lambda shapes, size: None,
        lambda layout: True,
        simulated_s,
        lambda layout: (layout, simulated_s(layout)),
        set(),
    )
    best, best_s = way[-1]
    assert best_s < 0.95 * simulated_s(start) and best.describe() == start.describe()
    (stage,) = [
        stage for stage in stages_of(profile, best) if ("llm", "block", "trained") in stage.held
    ]
    assert [module for module, _, _ in stage.held].count("llm") == 1
