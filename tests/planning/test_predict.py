"""Predictions: real orderings in, every figure of the prediction consistent with the others."""

import dataclasses

import numpy as np
import pytest

from disttrain_cli.costs.flops import module_flops
from disttrain_cli.costs.layout import optimizer_s, reduce_s, stages_of
from disttrain_cli.planning.finalists import Limits, diverse, faster_zero, one_batch_s
from disttrain_cli.planning.predict import predict, simulated_s, simulated_step
from disttrain_cli.planning.search import search
from disttrain_cli.planning.solve import (
    best_by_formula,
    cluster_of,
    layout_of,
    ranking,
)
from disttrain_cli.planning.traffic import preprocess_need
from disttrain_cli.planning.units import Cluster, Unit, groupings
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile, SizeSample
from tests import profiles
from tests.heads import with_heads
from tests.planning import synthetic

GIB = 2.0**30


def unit(name: str, tp: int, dp: int, layers: list[int], **more: bool) -> UnitPlan:
    return UnitPlan(
        name=name,
        modules=[name],
        tp=tp,
        dp=dp,
        pp=len(layers),
        gpus=tp * dp * len(layers),
        layers_per_stage=layers,
        **more,
    )


def layout(units: list[UnitPlan], microbatches: int, batch: int = 24, **more: object) -> Layout:
    llm = next(one for one in units if one.name == "llm")
    return Layout(
        global_batch_size=batch,
        microbatch_size=batch // microbatches // llm.dp,
        microbatches=microbatches,
        gpus_used=sum(one.gpus for one in units),
        units=units,
        **more,
    )


def three(
    encoder_dp: int = 2, llm_dp: int = 2, generator_dp: int = 1, tp: int = 1, **more: object
) -> Layout:
    return layout(
        [
            unit("image_encoder", 1, encoder_dp, [4]),
            unit("llm", tp, llm_dp, [3, 3]),
            unit("image_generator", 1, generator_dp, [2, 2]),
        ],
        microbatches=6,
        **more,
    )


@pytest.fixture
def case() -> tuple[Profile, list[Unit], Cluster]:
    run = synthetic.run_file(batch=24, gpus=16, nodes=4)
    profile = synthetic.tiny(run, kind="cuda", tps=(1, 2, 4))
    cluster = cluster_of(run, profile)
    return profile, groupings(profile, cluster, "disaggregated")[0], cluster


def test_every_sequence_is_worked_on_once_by_every_module(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, _, cluster = case
    for ordering in ("none", "paper", "best"):
        loads = simulated_step(
            profile, three(), dataclasses.replace(cluster, ordering=ordering)
        ).loads
        sums = {name: load.sum(axis=(0, 1)) for name, load in loads.items()}
        assert sums["llm"].tolist() == [24, 24 * 230, 24 * 20000]
        images = np.array(sums["image_encoder"])
        assert images[1:] == pytest.approx(images[0] * np.array([40, 1600]))
    # 24 of the 16 sizes that the profile keeps: each of them once or twice
    counts = sorted(len(images) for images in profile.data.sample.images)
    assert sum(counts) + sum(counts[:8]) <= images[0] <= sum(counts) + sum(counts[8:])


def test_times_are_the_cost_models_at_the_work_of_each_replica(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, _, cluster = case
    step = simulated_step(profile, three(), cluster)
    assert [stage.name for stage in step.stages] == [
        "image_encoder stage 0",
        "llm stage 0",
        "llm stage 1",
        "image_generator stage 0",
        "image_generator stage 1",
    ]
    encoder = profile.modules["image_encoder"]
    for slot, replica in np.ndindex(6, 2):
        items, tokens, length_sq = step.loads["image_encoder"][slot, replica]
        work = type(encoder.work_per_sequence)(items, tokens, length_sq)
        ms = (
            sum(encoder.costs[kind].tp["1"].forward_ms(work) for kind in encoder.layers)
            if items
            else 0.0
        )
        assert 1e3 * step.pipeline.forward_s[slot, 0, replica] == pytest.approx(ms)
    assert (step.pipeline.forward_s[:, 3:, 1] == 0).all()  # the generator has one replica


def test_levelling_and_ordering_make_skewed_data_faster(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, _, cluster = case
    in_order = dataclasses.replace(cluster, ordering="none")
    assert simulated_s(profile, three(), cluster) < simulated_s(profile, three(), in_order)
    equal = SizeSample(
        tokens=[230] * 4, length_sq=[20000] * 4, images=[[40] * 4] * 4, targets=[1] * 4
    )
    alike = profile.model_copy(update={"data": profile.data.model_copy(update={"sample": equal})})
    assert simulated_s(alike, three(), cluster) == pytest.approx(
        simulated_s(alike, three(), in_order)
    )


def check_figures(profile: Profile, plan: Layout, found: Prediction) -> None:
    """What must hold between the figures of any prediction on devices of their own."""
    iteration_s, peak = found.iteration_s, profile.device.peak_tflops * 1e12
    assert found.sequences_per_s == pytest.approx(plan.global_batch_size / iteration_s)
    ranks = [unit.tp * unit.dp for unit in plan.units for _ in range(unit.pp)]
    assert sum(
        n * stage.mfu for n, stage in zip(ranks, found.stages, strict=True)
    ) == pytest.approx(plan.gpus_used * found.mfu_used)
    assert sum(
        u.gpus * row.mfu for u, row in zip(plan.units, found.units, strict=True)
    ) == pytest.approx(plan.gpus_used * found.mfu_used)
    flops = {
        row.unit: row.mfu * unit.gpus * peak * iteration_s
        for row, unit in zip(found.units, plan.units, strict=True)
    }
    ideal = sum(flops.values()) / sum(
        flops[name] / found.kernel_mfu[name] for name in flops if flops[name]
    )
    assert found.orchestration_efficiency == pytest.approx(found.mfu_used / ideal)
    assert found.orchestration_efficiency == pytest.approx(1 - found.bubble_fraction)
    for memory in found.memory:
        assert memory.peak_gib == pytest.approx(sum(memory.parts.values()))
    fullest = max(found.memory, key=lambda stage: stage.peak_gib)
    assert found.memory_binds == f"{fullest.unit} stage {fullest.stage}"


@pytest.mark.parametrize(
    "plan",
    [
        three(),
        three(tp=2),
        three(4, 4, 2),
        three(1, 1, 1, trained=["llm"]),
        three(zero_stage=0),
        three(trained=["image_encoder"]),
    ],
)
def test_figures_belong_together(case: tuple[Profile, list[Unit], Cluster], plan: Layout) -> None:
    profile, units, cluster = case
    found = predict(units, plan, cluster)
    check_figures(profile, plan, found)
    assert found.mfu * cluster.gpus == pytest.approx(found.mfu_used * plan.gpus_used)


def test_flops_are_those_of_the_data(case: tuple[Profile, list[Unit], Cluster]) -> None:
    """Sixteen sizes, drawn once each: the sample's mean, which is the profile's."""
    profile, units, cluster = case
    plan = layout(
        [
            unit("image_encoder", 1, 2, [4]),
            unit("llm", 1, 2, [6]),
            unit("image_generator", 1, 1, [4]),
        ],
        4,
        16,
    )
    found = predict(units, plan, dataclasses.replace(cluster, batch=16))
    flops = found.mfu_used * found.iteration_s * plan.gpus_used * profile.device.peak_tflops * 1e12
    assert flops == pytest.approx(
        16
        * sum(
            module_flops(profile, name, module.work_per_sequence)
            for name, module in profile.modules.items()
        )
    )


@pytest.mark.slow
def test_frozen_and_recomputed_layers_change_backwards_only(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    _, units, cluster = case
    full, frozen = (
        predict(units, three(trained=trained), cluster) for trained in (None, ["image_generator"])
    )
    assert [u.forward_ms for u in frozen.units] == pytest.approx([u.forward_ms for u in full.units])
    assert [u.backward_ms for u in frozen.units[:2]] == [0.0, 0.0]
    assert frozen.units[2].backward_ms == pytest.approx(full.units[2].backward_ms)
    assert all(
        m.gradients_gib == m.optimizer_gib == 0
        for m in frozen.memory
        if m.unit != "image_generator"
    )
    plan = three()
    again = plan.model_copy(
        update={
            "units": [
                one.model_copy(update={"checkpointing": one.name == "llm"}) for one in plan.units
            ]
        }
    )
    recomputed = predict(units, again, cluster)
    assert recomputed.units[1].backward_ms == pytest.approx(
        full.units[1].backward_ms + full.units[1].forward_ms
    )
    assert recomputed.kernel_mfu["llm"] == pytest.approx(full.kernel_mfu["llm"] * 3 / 4)
    assert sum(m.activations_gib for m in recomputed.memory) < sum(
        m.activations_gib for m in full.memory
    )


def test_end_of_the_step(case: tuple[Profile, list[Unit], Cluster]) -> None:
    """Nodes of four: a group of two replicas is inside one, one of four with TP 2 is not: its ring
    has two ranks in each."""
    profile, _, cluster = case
    device = profile.device.model_copy(update={"optimizer_ns_per_parameter": 1000.0})
    profile = profile.model_copy(
        update={
            "device": device,
            "links": profile.links.model_copy(
                update={
                    "inter_node": profile.links.model_copy(
                        update={"all_reduce_gbps": 0.4, "all_gather_gbps": 0.2}
                    )
                }
            ),
        }
    )
    parameters = sum(
        profile.modules["llm"].costs[kind].tp["1"].parameters
        for kind in ("embed", "block", "block")
    )
    llm = stages_of(profile, three())[1]
    assert llm.trained == parameters
    one, none = three(), three(zero_stage=0)
    assert reduce_s(profile, none, llm, 4) == pytest.approx(100e-6 + 4 * parameters * 8 / 4e9)
    assert optimizer_s(profile, none, llm, 4) == pytest.approx(parameters * 1e-6)
    assert optimizer_s(profile, one, llm, 4) == pytest.approx(
        parameters / 2 * 1e-6 + 100e-6 + 4 * parameters / 2 * 8 / 4e9
    )
    wide = stages_of(profile, three(llm_dp=4, tp=2))[1]
    assert wide.trained == parameters / 2
    assert reduce_s(profile, none, wide, 4) == pytest.approx(
        100e-6 + 2 * 4 * parameters / 2 * 3 / 4 * 8 / (2 * 0.4e9)
    )
    # a replica that keeps a share of the optimizer's states needs no sum but its own
    links = profile.links.model_copy(update={"reduce_scatter_us": 7.0, "reduce_scatter_gbps": 2.0})
    halves = profile.model_copy(update={"links": links})
    assert reduce_s(halves, one, llm, 4) == pytest.approx(7e-6 + 4 * parameters / 2 * 8 / 2e9)
    assert faster_zero(profile, cluster, none).zero_stage == 1
    instant = profile.model_copy(
        update={"device": device.model_copy(update={"optimizer_ns_per_parameter": 0.0})}
    )
    assert faster_zero(instant, cluster, one).zero_stage == 0
    assert faster_zero(instant, dataclasses.replace(cluster, memory_gib=0.001), one).zero_stage == 1


@pytest.mark.slow
def test_traffic_counts_every_byte(case: tuple[Profile, list[Unit], Cluster]) -> None:
    profile, units, cluster = case
    plan = three(2, 2, 1, tp=2)
    rows = {(row.kind, row.unit): row for row in predict(units, plan, cluster).traffic}
    to_llm = rows["between_units", "image_encoder"]
    # there and back
    assert to_llm.to == "llm" and to_llm.job_gib * GIB == pytest.approx(2 * 24 * 30_000)
    assert to_llm.rank_gib * GIB == pytest.approx(24 * 30_000) and not to_llm.inside_a_node
    assert to_llm.rank_s == pytest.approx(24 * 30_000 * 8 / 8e9)
    assert rows["between_stages", "llm"].job_gib * GIB == pytest.approx(2 * 24 * 8_000)
    weights = max(stage.trained for stage in stages_of(profile, plan) if stage.unit.name == "llm")
    # bytes · (2 - 1) / 2
    assert rows["gradients", "llm"].rank_gib * GIB == pytest.approx(2 * weights)
    assert rows["weights", "llm"].rank_gib * GIB == pytest.approx(2 * weights)
    assert ("gradients", "image_generator") not in rows  # one replica
    assert ("tensor_parallel", "llm") not in rows  # nothing was counted
    frozen = {
        (row.kind, row.unit): row for row in predict(units, three(trained=["llm"]), cluster).traffic
    }
    # no gradient back
    assert frozen["between_units", "image_encoder"].job_gib * GIB == pytest.approx(24 * 30_000)
    assert ("gradients", "image_encoder") not in frozen


def test_encoders_side_by_side_both_send_to_the_llm(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, _, cluster = case
    profile = synthetic.with_audio(profile)
    plan = layout(
        [
            unit("image_encoder", 1, 2, [2, 2]),
            unit("audio_encoder", 1, 3, [4]),
            unit("llm", 1, 2, [3, 3]),
            unit("image_generator", 1, 1, [4]),
        ],
        microbatches=6,
    )
    step = simulated_step(profile, plan, cluster)
    assert step.pipeline.cuts == ((0, 1), (1, 3), (2, 3), (3, 4), (4, 5))
    assert step.pipeline.to_end.tolist() == [5, 4, 4, 3, 2, 1]
    assert (step.timeline.forward_start[0, [0, 2], 0] == 0.0).all()
    assert step.loads["audio_encoder"].sum(axis=(0, 1)).tolist() == list(
        profile.inputs.of("audio")[0].work(24 * 2)
    )
    found = predict(groupings(profile, cluster, "disaggregated")[0], plan, cluster)
    check_figures(profile, plan, found)
    assert {row.unit: row.to for row in found.traffic if row.kind == "between_units"} == {
        "image_encoder": "llm",
        "audio_encoder": "llm",
        "llm": "image_generator",
    }
    frozen = plan.model_copy(update={"trained": ["image_encoder", "llm"]})
    back = [stage.gradients_back for stage in stages_of(profile, frozen)]
    assert back == [True, True, False, True, True, True]


def test_one_unit_hands_on_what_both_encoders_made(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, _, _ = case
    profile = synthetic.with_audio(profile)
    plan = Layout(
        global_batch_size=24,
        microbatch_size=4,
        microbatches=6,
        gpus_used=4,
        units=[
            UnitPlan(
                name="model",
                modules=list(profile.modules),
                pp=4,
                gpus=4,
                layers_per_stage=[4, 4, 6, 4],
            )
        ],
    )
    stages = stages_of(profile, plan)
    assert [stage.after for stage in stages] == [(1,), (2,), (3,), ()]
    assert [stage.cut_bytes for stage in stages] == [30_000.0, 60_000.0, 8_000.0, 0.0]


def test_generators_side_by_side_both_take_from_the_llm(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, _, cluster = case
    profile = synthetic.with_refiner(profile, 0.5)
    plan = layout(
        [
            unit("image_encoder", 1, 2, [4]),
            unit("llm", 1, 2, [3, 3]),
            unit("image_generator", 1, 1, [2, 2]),
            unit("refiner", 1, 2, [4]),
        ],
        microbatches=6,
    )
    step = simulated_step(profile, plan, cluster)
    assert step.pipeline.cuts == ((0, 1), (1, 2), (2, 3), (2, 5), (3, 4))
    assert step.pipeline.to_end.tolist() == [5, 4, 3, 2, 1, 2]
    first, second = step.timeline.forward_start[0, [3, 5], 0]
    assert first == pytest.approx(second, rel=0.01)  # but for the links
    sums = [step.loads[name].sum(axis=(0, 1)) for name in ("image_generator", "refiner")]
    assert sums[0][:2] == pytest.approx(sums[1][:2] * np.array([1, 2]))
    found = predict(groupings(profile, cluster, "disaggregated")[0], plan, cluster)
    check_figures(profile, plan, found)
    assert sorted((row.unit, row.to) for row in found.traffic if row.kind == "between_units") == [
        ("image_encoder", "llm"),
        ("llm", "image_generator"),
        ("llm", "refiner"),
    ]
    frozen = plan.model_copy(update={"trained": ["image_generator"]})
    assert [stage.gradients_back for stage in stages_of(profile, frozen)] == [False] * 3 + [
        True,
        True,
        False,
    ]


def test_what_the_llm_made_passes_through_a_generator_to_the_next(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    profile, _, _ = case
    profile = synthetic.with_refiner(profile)

    def plan(*units: UnitPlan) -> Layout:
        return Layout(
            global_batch_size=24,
            microbatch_size=4,
            microbatches=6,
            gpus_used=sum(u.gpus for u in units),
            units=list(units),
        )

    one = plan(
        UnitPlan(
            name="model",
            modules=list(profile.modules),
            pp=5,
            gpus=5,
            layers_per_stage=[4, 6, 2, 4, 2],
        )
    )
    assert [stage.cut_bytes for stage in stages_of(profile, one)] == [
        30_000.0,
        8_000.0,
        8_000.0,
        0.0,
        0.0,
    ]
    both = plan(
        UnitPlan(name="e", modules=["image_encoder"], gpus=1, layers_per_stage=[4]),
        UnitPlan(
            name="l", modules=["llm", "image_generator"], pp=2, gpus=2, layers_per_stage=[8, 2]
        ),
        UnitPlan(name="r", modules=["refiner"], pp=2, gpus=2, layers_per_stage=[2, 2]),
    )
    assert [stage.cut_bytes for stage in stages_of(profile, both)] == [
        30_000.0,
        8_000.0,
        8_000.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_plan_of_two_generators_is_found(
    case: tuple[Profile, list[Unit], Cluster], share: float
) -> None:
    profile, _, cluster = case
    profile = synthetic.with_refiner(profile, share)
    cluster = dataclasses.replace(cluster, splits=False, overlaps=False)
    units = groupings(profile, cluster, "disaggregated")[0]
    found = search(units, cluster, 1)
    plan = layout_of(units, cluster, found.best[0], "disaggregated")
    assert [one.name for one in plan.units] == [
        "image_encoder",
        "llm",
        "image_generator",
        "refiner",
    ]


def test_preprocessing_keeps_up(case: tuple[Profile, list[Unit], Cluster]) -> None:
    _, units, cluster = case
    found = predict(units, three(), dataclasses.replace(cluster, cpu_node_cores=1))
    need = found.preprocess
    assert need is not None and need.sequences_per_s == pytest.approx(found.sequences_per_s)
    # three read, one generated
    assert need.images_per_s == pytest.approx(found.sequences_per_s * 4)
    assert need.cores == need.hosts == int(np.ceil(found.sequences_per_s / 300))


def test_images_whose_latents_are_prepared_are_not_counted_as_decoded(
    case: tuple[Profile, list[Unit], Cluster],
) -> None:
    """Of further generators only those that decode, beside the first that does, take more cores."""
    profile, _, _ = case
    target = profile.inputs.target
    assert target is not None

    def need(*latents: bool) -> tuple[float, int]:
        heads = [
            target.model_copy(
                update={"module": name, "cached_latents": cached and "bf16", "size_px": 16}
            )
            for name, cached in zip(("image_generator", "refiner"), latents, strict=False)
        ]
        changed = profile.model_copy(
            update={
                "inputs": with_heads(profile.inputs, "target", *heads),
                "modules": profile.modules | {"refiner": profile.modules["image_generator"]},
            }
        )
        found = preprocess_need(changed, 299_900, 8)
        assert found is not None
        return found.images_per_s / 299_900, found.cores

    # three read, one generated, at 300 sequences and 1,000 images per second and core
    assert need(False) == need(True, False) == need(False, True) == (4, 1000)
    assert need(True) == need(True, True) == (3, 1000)
    assert need(False, False) == (4, 1300)


def test_finalists_are_of_several_kinds() -> None:
    assert diverse(["a1", "a2", "a3", "b1", "a4", "c1", "b2"], lambda name: name[0], 4) == [
        "a1",
        "a2",
        "b1",
        "c1",
    ]
    assert diverse(["a1", "a2", "a3"], lambda name: name[0], 2) == ["a1", "a2"]
    assert diverse(["a1", "b1"], lambda name: name[0], 4) == ["a1", "b1"]


@pytest.mark.slow
def test_the_plan_is_near_the_best_of_all_layouts_in_the_simulator() -> None:
    """Slow links between nodes of two: what the formula leaves out, the reduction of gradients,
    decides."""
    run = synthetic.run_file(batch=24, gpus=14, nodes=7)
    profile = synthetic.tiny(run, kind="cuda")
    profile = profile.model_copy(
        update={"links": profiles.links(8, 50, 4, 100, between_nodes=0.025)}
    )
    cluster = dataclasses.replace(
        cluster_of(run, profile), ordering="paper", splits=False, overlaps=False
    )
    units = groupings(profile, cluster, "disaggregated")[0]
    found = search(units, cluster, 150)
    layouts = [layout_of(units, cluster, candidate, "disaggregated") for candidate in found.best]
    times = [one_batch_s(profile, one, cluster) for one in layouts]
    ranked, _, simulated = ranking(profile, cluster, "disaggregated")
    assert (
        simulated < 25
        and one_batch_s(profile, ranked[0].layout, cluster) <= 1.03 * min(times) < times[0] / 1.2
    )


def test_a_round_keeps_to_its_limits(case: tuple[Profile, list[Unit], Cluster]) -> None:
    _, units, cluster = case
    limits = Limits(1e9, most=4, least=2, without=frozenset({(1, 1, 2), (2, 1, 4)}))
    found = best_by_formula(units, cluster, 40, limits)
    shapes = {(one.units[1].tp, one.units[1].dp) for one in found.best}
    assert shapes and all(2 <= dp <= 4 for _, dp in shapes) and not shapes & {(1, 2), (2, 4)}
    faster = Limits(found.best[0].total_ms / 2, 4)
    assert not best_by_formula(units, cluster, 4, faster).best
