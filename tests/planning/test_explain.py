"""Explanations add up, name the bottleneck, and say why others lose."""

import numpy as np
import pytest

from disttrain_cli.costs.routing import QUANTILE, balanced
from disttrain_cli.planning.explain import (
    Explanation,
    differences,
    explain,
    layers,
    not_measured_sentence,
    time_parts,
)
from disttrain_cli.planning.predict import predict, simulated_step
from disttrain_cli.planning.solve import cluster_of, solve
from disttrain_cli.planning.units import units_of
from disttrain_cli.spec.plan import Layout, Plan, UnitPlan
from disttrain_cli.spec.profile import Measuring, Profile
from disttrain_cli.spec.runfile import RunFile
from tests.cases import first_fast
from tests.costs.test_experts import over, with_experts
from tests.planning import synthetic

Made = tuple[RunFile, Profile, Plan, Explanation]


def explained(run: RunFile, profile: Profile, **wanted: object) -> tuple[Plan, Explanation]:
    plan = solve(run, profile, **{"strategy": "disaggregated"} | wanted)  # type: ignore[arg-type]
    cluster = cluster_of(run, profile)
    units = units_of(profile, cluster, plan.plan)
    return plan, explain(plan, units, simulated_step(profile, plan.plan, cluster))


@pytest.fixture(scope="module", params=first_fast(["cuda", "cpu"]))
def made(request: pytest.FixtureRequest) -> Made:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run, kind=request.param)
    return run, profile, *explained(run, profile, top=3)


def test_parts_of_the_time_add_up_to_the_step(made: Made) -> None:
    _, _, plan, why = made
    assert sum(part.seconds for part in why.time) == pytest.approx(plan.predicted.iteration_s)
    assert sum(part.fraction for part in why.time) == pytest.approx(1)
    parts = {part.what: part.seconds for part in why.time}
    assert list(parts) == [
        "steady",
        "warm-up and cool-down",
        "transfers",
        "gradient reduction",
        "optimizer",
        "uneven data",
    ]
    assert parts["steady"] > 0 and parts["gradient reduction"] >= -1e-12
    assert why.sentences[0].startswith("Time") and "steady" in why.sentences[0]


@pytest.mark.slow
def test_a_step_with_experts_over_ranks_has_its_skew_and_its_balance(made: Made) -> None:
    run = synthetic.run_file(batch=over(4).global_batch_size, gpus=16)
    profile = with_experts(synthetic.tiny(run, kind="cuda"))
    layout, cluster = over(4), cluster_of(run, profile)
    units = units_of(profile, cluster, layout)
    predicted = predict(units, layout, cluster)
    assert predicted.routing_quantile == QUANTILE
    assert predicted.balanced_s and predicted.balanced_s < predicted.iteration_s
    even = predict(units_of(balanced(profile), cluster, layout), layout, cluster)
    assert even.iteration_s == even.balanced_s == predicted.balanced_s
    other = made[2].model_copy(
        update={"plan": layout, "predicted": predicted, "baselines": {}, "alternatives": []}
    )
    step = simulated_step(profile, layout, cluster)
    (said,) = (one for one in explain(other, units, step).sentences if one.startswith("Experts"))
    assert "assumed skew" in said and "99 % of routings" in said
    alone = predict(units_of(profile, cluster, over(1)), over(1), cluster)
    assert alone.balanced_s is None and alone.routing_quantile is None


@pytest.mark.slow
def test_no_part_is_negative_where_devices_are_not_shared() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run, kind="cuda")
    plan, why = explained(run, profile, top=0)
    assert all(part.seconds > -1e-9 for part in why.time if part.what != "uneven data")
    work = {
        name: plan.plan.global_batch_size * np.array(module.work_per_sequence)
        for name, module in profile.modules.items()
    }
    parts = time_parts(
        profile, plan.plan, cluster_of(run, profile), work, plan.predicted.iteration_s
    )
    assert sum(part.seconds for part in parts) == pytest.approx(plan.predicted.iteration_s)


@pytest.mark.parametrize(
    ("gpus", "named"),
    [(6, "llm at 2, 4 and vit at 2 not"), (2, "llm at 2 and vit at 2 not"), (1, "")],
)
def test_tp_sizes_that_the_profile_left_out_are_named_where_they_fit(gpus: int, named: str) -> None:
    profile = synthetic.tiny(synthetic.run_file(batch=24, gpus=gpus), kind="cuda")
    sizes = {"llm": {"1": (9, 9), "2": (0, 9), "4": (0, 9)}, "vit": {"1": (9, 9), "2": (0, 9)}}
    measuring = Measuring(clock="wall", budget_s=180, started_s=9, spent_s=180, sizes=sizes)
    sentence = not_measured_sentence(profile.model_copy(update={"measuring": measuring}), gpus)
    assert (sentence or "").startswith(f"TP        {named}" * bool(named))
    assert sentence is None or "disttrain_cli.profile(" in sentence
    assert not_measured_sentence(profile, gpus) is None


def test_what_binds_is_named(made: Made) -> None:
    _, _, plan, why = made
    slowest = max(why.units, key=lambda share: share.stage_ms)
    fullest = max(plan.predicted.memory, key=lambda stage: stage.peak_gib / stage.limit_gib)
    assert why.binding_unit == slowest.unit and slowest.of_slowest_fraction == 1.0
    assert all(0 < share.of_slowest_fraction <= 1 for share in why.units)
    assert why.memory_unit == fullest.unit
    slowest_line, memory = why.sentences[1], why.sentences[2]
    assert f"stage {slowest.slowest_stage} of {slowest.unit}" in slowest_line
    assert f"stage {fullest.stage} of {fullest.unit}" in memory and "GiB left" in memory
    assert why.units[0].headroom_gib == pytest.approx(
        why.units[0].limit_gib - why.units[0].peak_gib
    )


def test_every_runner_up_is_compared_part_by_part(made: Made) -> None:
    _, _, plan, why = made
    assert len(why.runners_up) == len(plan.alternatives) > 0
    for other, alternative in zip(why.runners_up, plan.alternatives, strict=True):
        assert sum(other.more_s.values()) == pytest.approx(
            alternative.iteration_s - plan.predicted.iteration_s
        )
        assert other.gpus == alternative.gpus_used - plan.plan.gpus_used
        assert other.binding_unit in {unit.name for unit in alternative.plan.units}
        largest = max(other.more_s, key=lambda what: abs(other.more_s[what]))
        assert largest in other.why or "no part" in other.why
        assert other.differs != "same layout"


def test_ratios_are_per_gpu_given_and_used(made: Made) -> None:
    _, _, plan, why = made
    assert [ratio.name for ratio in why.baselines] == list(plan.baselines)
    for ratio in why.baselines:
        other = plan.baselines[ratio.name]
        if other is None:
            assert ratio.per_gpu_given is ratio.per_gpu_used is None
            continue
        assert ratio.per_gpu_given == pytest.approx(
            plan.predicted.sequences_per_s / other.sequences_per_s
        )
        assert ratio.per_gpu_used == pytest.approx(
            (plan.predicted.sequences_per_s / plan.plan.gpus_used)
            / (other.sequences_per_s / other.gpus_used)
        )


@pytest.mark.slow
def test_other_strategies_are_explained() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    plan, why = explained(run, synthetic.tiny(run, kind="cuda"), strategy="megatron", top=1)
    assert len(why.units) == len(plan.plan.units)
    assert sum(part.seconds for part in why.time) == pytest.approx(plan.predicted.iteration_s)


def unit(name: str, tp: int = 1, dp: int = 1, pp: int = 1, **changes: object) -> UnitPlan:
    return UnitPlan.model_validate(
        {
            "name": name,
            "modules": [name],
            "tp": tp,
            "dp": dp,
            "pp": pp,
            "gpus": tp * dp * pp,
            "layers_per_stage": [2] * pp,
        }
        | changes
    )


def layout(*units: UnitPlan, size: int = 1, zero: int = 1) -> Layout:
    dp = units[-1].dp
    return Layout.model_validate(
        {
            "global_batch_size": 24,
            "microbatch_size": size,
            "microbatches": 24 // dp // size,
            "gpus_used": sum(one.gpus for one in units),
            "zero_stage": zero,
            "units": units,
        }
    )


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (layout(unit("a"), unit("b", dp=2)), "b DP 1 → 2"),
        (layout(unit("a", tp=2), unit("b", pp=2)), "a TP 1 → 2, b PP 1 → 2"),
        (layout(unit("a", checkpointing=True), unit("b")), "a recomputes"),
        (layout(unit("a"), unit("b"), size=2), "M 1 → 2"),
        (layout(unit("a"), unit("b"), zero=0), "ZeRO-0"),
        (layout(unit("a"), unit("b")), "same layout"),
        (layout(unit("all", modules=["a", "b"])), "all (TP 1 DP 1 PP 1)"),
    ],
)
def test_differences_in_words(other: Layout, said: str) -> None:
    assert differences(layout(unit("a"), unit("b")), other) == said


def test_equal_shapes_with_other_layers_differ_in_them() -> None:
    mine, theirs = (
        unit("a", pp=2, layers_per_stage=[3, 1]),
        unit("a", pp=2, layers_per_stage=[2, 2]),
    )
    assert differences(layout(mine), layout(theirs)) == "a layers 2×2"


@pytest.mark.parametrize(
    ("stages", "said"),
    [([5], "5"), ([8, 8, 8, 8, 3, 3], "8×4, 3×2"), ([4, 3, 4], "4, 3, 4"), ([2, 2], "2×2")],
)
def test_layers_of_equal_stages_run_together(stages: list[int], said: str) -> None:
    assert layers(unit("a", pp=len(stages), layers_per_stage=stages)) == said
