"""The other strategies: what they may choose, and that they choose the best of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from disttrain_cli.costs.memory import layout_memory
from disttrain_cli.planning.baselines import candidates, megatron, pipelines, proportional
from disttrain_cli.planning.bounds import divisors
from disttrain_cli.planning.objective import combine, unit_stages_ms
from disttrain_cli.planning.options import layers_per_stage
from disttrain_cli.planning.search import search
from disttrain_cli.planning.units import Cluster, group
from disttrain_cli.spec.plan import Layout, UnitPlan
from tests.planning import synthetic
from tests.planning.synthetic import cuts


def test_megatron_gives_encoder_and_generator_one_stage_each() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    cluster = Cluster(6, 6, 4.0, 1, 24)
    (unit,) = group(profile, cluster, "megatron")
    for candidate in search([unit], cluster, top=4).best:
        _, dp, pp = candidate.shapes[0]
        layers = layers_per_stage(
            unit, 1, dp, pp, candidate.slot_sequences, 24 // candidate.slot_sequences, 0
        )
        assert layers is not None
        assert layers[0] == 4 and layers[-1] == 4 and sum(layers[1:-1]) == 6


@pytest.mark.parametrize(("memory_gib", "sound"), [(4.0, False), (0.03, False), (0.03, True)])
def test_replicated_encoders_are_the_best_of_all_pipelines(memory_gib: float, sound: bool) -> None:
    run = synthetic.run_file(batch=12, gpus=12)
    profile, cluster = (
        synthetic.tiny(run, tps=(1, 2)),
        Cluster(12, 4, memory_gib, 1, 12, checkpointing="auto"),
    )
    choices = [False, True]
    if sound:  # two encoders side by side; nothing recomputed, to try them all in time
        profile, cluster = (
            synthetic.with_audio(profile, share=0.5),
            replace(cluster, checkpointing="none"),
        )
        choices = [False]
    units = group(profile, cluster, "disaggregated")
    holder = len(units) - 2
    expected = np.inf
    for size, tp, dp in itertools.product(divisors(12), (1, 2), divisors(12)):
        if size % dp:
            continue
        sides = [[(tp, dp)] if unit.holds_llm else [(tp, dp), (1, tp * dp)] for unit in units]
        for pp in range(1, 7):
            for shapes in itertools.product(*sides):
                if tp * dp * (pp + len(units) - 1) > 12:
                    continue
                for kept, layers in itertools.product(
                    itertools.product(choices, repeat=len(units)), cuts(6, pp)
                ):
                    splits = [*[[4]] * holder, layers, [4]]
                    plans = [
                        UnitPlan(
                            name=unit.name,
                            modules=list(unit.modules),
                            tp=t,
                            dp=d,
                            pp=len(split),
                            gpus=t * d * len(split),
                            layers_per_stage=split,
                            checkpointing=recomputes,
                        )
                        for unit, (t, d), split, recomputes in zip(
                            units, shapes, splits, kept, strict=True
                        )
                    ]
                    ms = [
                        unit_stages_ms(
                            unit, plan.tp, plan.dp, plan.layers_per_stage, size, plan.checkpointing
                        )
                        for unit, plan in zip(units, plans, strict=True)
                    ]
                    time = combine(
                        [sum(each) for each in ms], [max(each) for each in ms], 12 // size, holder
                    ).total_ms
                    layout = Layout(
                        global_batch_size=12,
                        microbatch_size=size // dp,
                        microbatches=12 // size,
                        gpus_used=sum(plan.gpus for plan in plans),
                        units=plans,
                    )
                    if time < expected and all(
                        stage.peak_gib <= memory_gib
                        for stage in layout_memory(profile, layout, memory_gib)
                    ):
                        expected = time
    found = pipelines(units, cluster).best
    assert (found[0].total_ms if found else np.inf) == pytest.approx(expected)


def test_sharded_pipelines_are_those_of_the_search() -> None:
    run = synthetic.run_file(batch=12, gpus=12)
    cluster = Cluster(12, 4, 0.03, 1, 12)
    units = group(synthetic.tiny(run, tps=(1, 2)), cluster, "megatron")
    assert pipelines(units, cluster, top=4).best == search(units, cluster, top=4).best


def test_megatron_takes_the_faster_form_and_may_be_fixed() -> None:
    run = synthetic.run_file(batch=240, gpus=96, nodes=12, precision="bf16")
    profile, cluster = synthetic.paper_9b(run), Cluster(96, 8, 80.0, 1, 240)
    units, found = megatron(profile, cluster, top=3)
    assert len(found.best) == 3 and found.best == sorted(found.best)
    for form in ("megatron", "disaggregated"):
        assert (
            found.best[0].total_ms
            <= pipelines(group(profile, cluster, form), cluster).best[0].total_ms
        )
    units, fixed = megatron(profile, cluster, tp=8, pp=2)
    tp, dp, pp = fixed.best[0].shapes[len(units) // 2]
    assert (tp, pp) == (8, 2 if len(units) == 3 else 4) and fixed.best[0].total_ms > found.best[
        0
    ].total_ms
    if len(units) == 3:
        assert {shape[0] * shape[1] for shape in fixed.best[0].shapes} == {8 * dp}


def test_a_pipeline_of_one_unit_has_its_encoders_in_a_line() -> None:
    profile = synthetic.with_audio(synthetic.tiny(synthetic.run_file(batch=24, gpus=8)))
    (unit,) = group(profile, Cluster(8, 8, 4.0, 1, 24), "megatron")
    for pp in (4, 6):
        layers = layers_per_stage(unit, 1, 1, pp, 4, 6, 0)
        assert layers is not None and layers[:2] == [4, 4] and layers[-1] == 4


def test_a_generator_without_tp_is_replicated() -> None:
    run = synthetic.run_file(batch=240, gpus=96, nodes=12, precision="bf16")
    profile = synthetic.paper_9b(run)
    module = profile.modules["image_generator"]
    costs = {
        kind: cost.model_copy(update={"tp": {"1": cost.tp["1"]}})
        for kind, cost in module.costs.items()
    }
    profile = profile.model_copy(
        update={
            "modules": profile.modules
            | {"image_generator": module.model_copy(update={"costs": costs})}
        }
    )
    units, found = megatron(profile, Cluster(96, 8, 80.0, 1, 240), tp=8)
    _, dp, _ = found.best[0].shapes[1]
    assert [unit.name for unit in units] == list(synthetic.MODULES) and found.best[0].shapes[2] == (
        1,
        8 * dp,
        1,
    )


@pytest.mark.parametrize("sound", [False, True])
def test_every_strategy_is_no_faster_than_the_search(sound: bool) -> None:
    run = synthetic.run_file(batch=24, gpus=8)
    profile, cluster = synthetic.tiny(run), Cluster(8, 8, 4.0, 1, 24)
    profile = synthetic.with_audio(profile) if sound else profile
    best = search(group(profile, cluster, "disaggregated"), cluster).best[0]
    for strategy in ("distmm", "paper"):
        assert candidates(profile, cluster, strategy, 1)[1].best[0].total_ms >= best.total_ms


def test_shares_follow_flops() -> None:
    assert proportional([1.0, 2.0, 1.0], 8) == [2, 4, 2]
    assert proportional([1.0, 1000.0, 1.0], 6) == [1, 4, 1]
    assert sum(proportional([0.3, 0.3, 0.4], 10)) == 10
