"""Plans as a whole: what they hold, what is refused, and what a failure names."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from disttrain_cli.costs.hardware import RULES
from disttrain_cli.errors import InfeasibleError, MismatchError, SpecError
from disttrain_cli.planning import solve as solve_
from disttrain_cli.planning.check import check
from disttrain_cli.planning.draws import Draws
from disttrain_cli.planning.finalists import Ranked
from disttrain_cli.planning.predict import predict
from disttrain_cli.planning.solve import (
    check_profile,
    cluster_of,
    solve,
    solve_for,
    with_own_prediction,
)
from disttrain_cli.planning.units import Cluster, groupings, units_of
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.plan import Layout, Plan, read_plan, write_plan
from disttrain_cli.spec.prediction import Prediction
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from tests import profiles
from tests.cases import first_fast
from tests.planning import synthetic


@pytest.fixture(scope="module")
def made() -> tuple[RunFile, Profile, Plan]:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    return run, profile, solve(run, profile, strategy="disaggregated", top=3)


@pytest.mark.slow
def test_plan_of_the_tiny_model(made: tuple[RunFile, Profile, Plan], tmp_path: Path) -> None:
    run, profile, plan = made
    check(plan, run, profile)
    assert [unit.modules for unit in plan.plan.units] == [[name] for name in profile.modules]
    fastest = solve(run, profile, top=0)
    assert all(
        fastest.predicted.iteration_s <= other.iteration_s
        for other in fastest.baselines.values()
        if other
    )
    assert plan.fingerprints.profile == fingerprint(profile)
    assert plan.search.exact and plan.search.candidates > 100
    assert len(plan.alternatives) == 3
    alone = solve(run, synthetic.tiny(run, kind="cuda"), strategy="disaggregated", top=3)
    assert len(alone.alternatives) == 3 and all(
        other.slower_pct >= 0 for other in alone.alternatives
    )
    fsdp = alone.baselines["fsdp"]
    assert fsdp is not None and fsdp.plan is None and fsdp.layout == "FSDP over 6, M 4"
    assert plan.predicted.sequences_per_s == pytest.approx(24 / plan.predicted.iteration_s)
    assert 0 < plan.predicted.mfu < 1
    assert set(plan.baselines) == {"disaggregated", "megatron"}
    assert read_plan(write_plan(tmp_path / "plan.yaml", plan)) == plan


@pytest.mark.slow
def test_a_plan_says_which_ordering_it_was_predicted_with() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    train = run.train.model_copy(update={"ordering": "best"})
    plan, searched = (
        solve(each, profile, strategy="disaggregated", top=3)
        for each in (run, run.model_copy(update={"train": train}))
    )
    assert (plan.predicted.ordering, searched.predicted.ordering) == ("paper", "best")
    megatron = solve(
        run.model_copy(update={"train": train}), profile, strategy="megatron", top=3
    ).predicted
    baseline = searched.baselines["megatron"]
    assert megatron.ordering == "best" and baseline is not None
    assert baseline.iteration_s == pytest.approx(megatron.iteration_s, rel=1e-12)
    assert searched.plan == plan.plan
    assert searched.predicted.iteration_s != plan.predicted.iteration_s
    for one, other in zip(searched.alternatives, plan.alternatives, strict=True):
        assert one.slower_pct == other.slower_pct
        assert one.iteration_s / searched.predicted.iteration_s == pytest.approx(
            other.iteration_s / plan.predicted.iteration_s, rel=0.02
        )


@pytest.mark.slow
def test_a_baselines_plan_is_runnable(made: tuple[RunFile, Profile, Plan]) -> None:
    run, profile, best = made
    plan = solve(run, profile, strategy="megatron", top=0)
    check(plan, run, profile)
    assert plan.plan.strategy == "megatron"
    assert plan.predicted.iteration_s == pytest.approx(best.baselines["megatron"].iteration_s)


@pytest.mark.slow
def test_tp_groups_hide_their_messages_where_it_helps(tmp_path: Path) -> None:
    run = synthetic.run_file(batch=48, gpus=48, nodes=6)
    plain = synthetic.paper_9b(run, memory_gib=30.0)
    plans = {share: solve(run, profiles.hiding(plain, share)) for share in (-0.1, 0.0, 0.2)}
    assert plans[-0.1].plan == plans[0.0].plan
    assert not any(unit.tp_overlap for unit in plans[0.0].plan.units)
    best = plans[0.2]
    for unit in best.plan.units:
        assert unit.tp_overlap == (unit.tp > 1)
    assert any(unit.tp_overlap for unit in best.plan.units)
    assert best.predicted.iteration_s < 0.9 * plans[0.0].predicted.iteration_s
    written = write_plan(tmp_path / "plan.yaml", best)
    assert read_plan(written) == best
    old = tmp_path / "old.yaml"
    old.write_text(
        "\n".join(line for line in written.read_text().splitlines() if "tp_overlap" not in line)
    )
    assert not any(unit.tp_overlap for unit in read_plan(old).plan.units)


def test_part_of_a_node_has_the_tp_degrees_of_the_whole() -> None:
    run = synthetic.run_file(batch=64, gpus=8)
    profile = synthetic.paper_9b(run)
    for gpus in (5, 7, 8):
        units = groupings(profile, cluster_of(run, profile, gpus), "disaggregated")[0]
        assert [unit.tps for unit in units] == [[1, 2, 4, 8]] * 3


@pytest.mark.slow
def test_tp_groups_of_nodes_of_six_stay_inside_nodes() -> None:
    run = synthetic.run_file(batch=12, gpus=12, nodes=2)
    profile = synthetic.tiny(run, kind="cuda", tps=(1, 2, 3, 6))
    units = groupings(profile, cluster_of(run, profile), "disaggregated")[0]
    assert [unit.tps for unit in units] == [[1, 2, 6]] * 3
    plan = solve(run, profile, strategy="disaggregated")
    check(plan, run, profile)
    encoder, llm, generator = plan.plan.units
    straddling = [
        encoder.model_copy(update={"tp": 2, "dp": 2, "pp": 1, "gpus": 4, "layers_per_stage": [4]}),
        llm.model_copy(update={"tp": 3, "dp": 1, "pp": 1, "gpus": 3, "layers_per_stage": [6]}),
        generator.model_copy(
            update={"tp": 2, "dp": 2, "pp": 1, "gpus": 4, "layers_per_stage": [4]}
        ),
    ]
    none = {"weight_delay": None, "tp_overlap": False}
    straddling = [unit.model_copy(update=none) for unit in straddling]
    layout = {"microbatch_size": 2, "microbatches": 6, "gpus_used": 11, "units": straddling}
    with pytest.raises(SpecError, match="unit image_encoder would lie on two nodes"):
        check(edited(plan, **layout), run, profile)


@pytest.mark.slow
@pytest.mark.parametrize("top", [0, 3, 8])
def test_replicas_of_an_encoder_with_much_to_reduce_become_stages(top: int) -> None:
    """The formula, which knows no reductions, has two layouts before that; whatever runners-up are
    shown."""
    run = synthetic.run_file(batch=4, gpus=6, precision="bf16")
    profile, modules = synthetic.tiny(run, kind="cuda", memory_gib=0.2039), {}
    for name, kinds in (("image_encoder", ["embed", "block"]), ("llm", ["embed", "head"])):
        module = synthetic.heavier(profile.modules[name], 300)
        cuts = module.cut_bytes_per_sequence[:2]
        modules[name] = module.model_copy(update={"layers": kinds, "cut_bytes_per_sequence": cuts})
    profile = profile.model_copy(update={"modules": modules})
    plan = solve_for(profile, Cluster(6, 6, 0.2039, 1, 4), top=top)
    assert plan.plan.describe() == "image_encoder (TP 1 DP 2 PP 2) → llm (TP 1 DP 1 PP 2)"


@pytest.mark.parametrize(("second_s", "taken"), [(8.0, 1), (9.5, 0)])
def test_what_the_policy_of_training_gains_may_change_the_order(
    made: tuple[RunFile, Profile, Plan],
    monkeypatch: pytest.MonkeyPatch,
    second_s: float,
    taken: int,
) -> None:
    """Of layouts that are 5 % apart under the policy that ranks them, where training gains 17 %."""
    _, profile, plan = made
    gpu = profile.device.model_copy(update={"kind": "cuda"})
    profile = profile.model_copy(update={"device": gpu})
    layouts = [plan.plan, plan.alternatives[0].plan]
    assert layouts[0] and layouts[1]
    ranked = [Ranked(layouts[0], 10.0), Ranked(layouts[1], 10.5)]
    trained_s = {layouts[0].describe(): 8.5, layouts[1].describe(): second_s}

    def predicted(_: Profile, __: Cluster, layout: Layout, *___: Any) -> Prediction:
        return plan.predicted.model_copy(update={"iteration_s": trained_s[layout.describe()]})

    monkeypatch.setattr(solve_, "_predicted", predicted)
    cluster = Cluster(6, 6, 4.0, 1, 24, ordering="best")
    assert (
        solve_._as_trained(profile, cluster, ranked, Draws(profile, cluster))[0][0].layout
        == layouts[taken]
    )


@pytest.mark.slow
def test_one_gpu_gets_one_unit() -> None:
    run = synthetic.run_file(batch=6, gpus=1)
    plan = solve(run, synthetic.tiny(run)).plan
    assert [unit.modules for unit in plan.units] == [list(synthetic.MODULES)]
    assert plan.gpus_used == 1


@pytest.mark.slow
def test_text_only_data_costs_the_other_units_nothing() -> None:
    run = synthetic.run_file(batch=8, gpus=4)
    profile = synthetic.tiny(run)
    empty = profile.modules["image_generator"].model_copy(
        update={"work_per_sequence": (0.0, 0.0, 0.0), "max_work_per_sequence": (0.0, 0.0, 0.0)}
    )
    empty = type(empty).model_validate(empty.model_dump())
    sizes = profile.data.sample
    text = sizes.model_copy(update={"targets": [0] * len(sizes.tokens)})
    profile = profile.model_copy(
        update={
            "modules": profile.modules | {"image_generator": empty},
            "data": profile.data.model_copy(update={"sample": text}),
        }
    )
    plan = solve(run, profile, strategy="disaggregated")
    assert plan.predicted.units[2].forward_ms == 0.0
    assert plan.plan.units[2].gpus == 1


@pytest.mark.slow
def test_a_cpu_shares_its_cores() -> None:
    run = synthetic.run_file(batch=24, gpus=6)
    times = [
        solve(run, synthetic.tiny(run, cores=cores), top=0).predicted.iteration_s
        for cores in (6, 600)
    ]
    assert times[0] == pytest.approx(times[1])
    measured_together, few = (synthetic.tiny(run, cores=2), synthetic.tiny(run, cores=6))
    assert (
        solve(run, measured_together, top=0).predicted.iteration_s
        < solve(run, few, top=0).predicted.iteration_s
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stated", "recomputes"), first_fast([("full", True), ("none", False), ("auto", False)])
)
def test_a_cpu_recomputes_where_the_run_file_says_so(stated: str, recomputes: bool) -> None:
    run = synthetic.run_file(batch=4, gpus=3)
    run = run.model_copy(
        update={"train": run.train.model_copy(update={"activation_checkpointing": stated})}
    )
    profile = synthetic.tiny(run)
    plan = solve(run, profile, top=0)
    assert {unit.checkpointing for unit in plan.plan.units} == {recomputes}
    check(plan, run, profile)


@pytest.mark.slow
def test_memory_failure_names_stage_and_remedy(made: tuple[RunFile, Profile, Plan]) -> None:
    run, _, plan = made
    most = max(stage.peak_gib for stage in plan.predicted.memory)
    with pytest.raises(InfeasibleError) as caught:
        solve(run, synthetic.tiny(run, memory_gib=most / 100))
    assert caught.value.exit_code == 3
    assert (
        "stage" in caught.value.why
        and "unit" in caught.value.why
        and "GiB" in caught.value.next_step
    )


@pytest.mark.slow
def test_memory_remedy_is_true() -> None:
    run = synthetic.run_file(batch=4, gpus=3)
    with pytest.raises(InfeasibleError) as caught:
        solve(run, synthetic.tiny(run, memory_gib=0.01), top=0)
    needed = float(caught.value.next_step.split()[2])
    assert needed > 0.01
    assert solve(run, synthetic.tiny(run, memory_gib=needed * 1.01), top=0).plan.gpus_used == 3
    with pytest.raises(InfeasibleError):
        solve(run, synthetic.tiny(run, memory_gib=needed * 0.98), top=0)


def test_a_profile_computed_by_other_rules_is_refused(made: tuple[RunFile, Profile, Plan]) -> None:
    run, profile, _ = made
    device = profile.device.model_copy(update={"kind": "analytic"})
    for provenance, ok in (
        ({}, False),
        ({"rules": "operators fused"}, False),
        ({"rules": RULES}, True),
    ):
        computed = profile.model_copy(update={"device": device, "provenance": provenance})
        if ok:
            check_profile(run, computed)
            continue
        with pytest.raises(MismatchError, match="another version's rules") as caught:
            check_profile(run, computed)
        assert "disttrain_cli.profile" in str(caught.value.next_step)


def test_another_models_profile_is_refused(made: tuple[RunFile, Profile, Plan]) -> None:
    run, profile, _ = made
    for what in ("model", "cluster"):
        other = profile.model_copy(
            update={"fingerprints": profile.fingerprints.model_copy(update={what: "f" * 16})}
        )
        with pytest.raises(MismatchError, match=what) as caught:
            solve(run, other)
        assert (
            "f" * 16 in caught.value.why and getattr(profile.fingerprints, what) in caught.value.why
        )


def edited(plan: Plan, **changes: object) -> Plan:
    return plan.model_copy(update={"plan": plan.plan.model_copy(update=changes)})


def test_a_layout_that_was_edited_is_predicted_again(made: tuple[RunFile, Profile, Plan]) -> None:
    run, profile, plan = made
    assert with_own_prediction(plan, run, profile) is plan
    unknown = plan.predicted.model_copy(update={"layout": None})
    older = edited(plan.model_copy(update={"predicted": unknown}), microbatches=1)
    assert with_own_prediction(older, run, profile) is older
    batch = plan.plan.microbatches
    layout = edited(plan, microbatches=batch // 2, microbatch_size=2 * plan.plan.microbatch_size)
    found = with_own_prediction(layout, run, profile).predicted
    assert found != plan.predicted
    cluster = cluster_of(run, profile)
    assert found == predict(units_of(profile, cluster, layout.plan), layout.plan, cluster)


def test_hand_edited_plans_are_checked(made: tuple[RunFile, Profile, Plan]) -> None:
    run, profile, plan = made
    units = plan.plan.units
    llm = units[1]
    with pytest.raises(SpecError, match="layers_per_stage of unit llm"):
        check(
            edited(
                plan, units=[units[0], llm.model_copy(update={"layers_per_stage": [5]}), units[2]]
            ),
            run,
            profile,
        )
    with pytest.raises(SpecError, match="every module once"):
        check(edited(plan, units=units[:2]), run, profile)
    with pytest.raises(SpecError, match="global batch"):
        check(edited(plan, microbatches=plan.plan.microbatches + 1), run, profile)
    with pytest.raises(SpecError, match="different global batches"):
        check(edited(plan, global_batch_size=48), run, profile)
    with pytest.raises(SpecError, match="more ranks") as caught:
        check(edited(plan, gpus_used=7), run, profile)
    assert "the cluster has 6" in caught.value.why
    with pytest.raises(SpecError, match="TP 2"):
        check(
            edited(plan, units=[units[0], llm.model_copy(update={"tp": 2}), units[2]]), run, profile
        )


@pytest.mark.parametrize("what", ["model", "data", "cluster", "profile"])
def test_plans_for_something_else_are_refused(
    made: tuple[RunFile, Profile, Plan], what: str
) -> None:
    run, profile, plan = made
    other = plan.model_copy(
        update={"fingerprints": plan.fingerprints.model_copy(update={what: "f" * 16})}
    )
    with pytest.raises(MismatchError, match=what) as caught:
        check(other, run, profile)
    assert "f" * 16 in caught.value.why


@pytest.mark.slow
def test_planning_imports_no_torch() -> None:
    code = (
        "import sys, disttrain_cli.planning.solve, disttrain_cli.planning.check,"
        " disttrain_cli.planning.explain\nprint([m for m in ('torch', 'scipy', 'rich', 'duckdb') if"
        " m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
