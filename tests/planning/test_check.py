"""What is refused before a plan is run, and that every refusal names both sides."""

from collections.abc import Callable

import pytest

from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.planning.check import (
    _check_ranks,
    check,
    check_device,
    check_memory,
    not_run,
    refuse_not_run,
)
from disttrain_cli.planning.solve import check_profile
from disttrain_cli.spec.files import fingerprint
from disttrain_cli.spec.layer_costs import Experts, Heads
from disttrain_cli.spec.plan import Layout, Plan, Search, UnitPlan
from disttrain_cli.spec.prediction import Prediction, StageMemory
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from tests.planning import synthetic

Made = tuple[Plan, RunFile, Profile]


@pytest.fixture
def made() -> Made:
    """A plan of one GPU per module that `check` accepts."""
    run = synthetic.run_file(batch=24, gpus=6)
    profile = synthetic.tiny(run)
    units = [
        UnitPlan(name=name, modules=[name], gpus=1, layers_per_stage=[len(module.layers)])
        for name, module in profile.modules.items()
    ]
    plan = Plan(
        fingerprints=profile.fingerprints.model_copy(update={"profile": fingerprint(profile)}),
        plan=Layout(
            global_batch_size=24, microbatch_size=1, microbatches=24, gpus_used=3, units=units
        ),
        predicted=Prediction(
            iteration_s=1,
            sequences_per_s=24,
            mfu=0.5,
            warmup_s=0.1,
            steady_s=0.9,
            bubble_fraction=0,
            memory=[],
        ),
        search=Search(solve_s=0, candidates=1, exact=True),
    )
    return plan, run, profile


def with_layout(plan: Plan, **changes: object) -> Plan:
    return plan.model_copy(update={"plan": plan.plan.model_copy(update=changes)})


def with_unit(plan: Plan, **changes: object) -> Plan:
    return with_layout(
        plan, units=[plan.plan.units[0].model_copy(update=changes), *plan.plan.units[1:]]
    )


def edited(run: RunFile, section: str, **changes: object) -> RunFile:
    part = getattr(run, section)
    return run.model_copy(update={section: part.model_copy(update=changes)})


def without_data(run: RunFile) -> RunFile:
    named = RunFile.model_validate(
        run.model_dump() | {"data": {"distribution": {}}}
    ).data.distribution
    return edited(run, "data", sources=[], distribution=named)


def of_device(profile: Profile, kind: str, name: str) -> Profile:
    return profile.model_copy(
        update={"device": profile.device.model_copy(update={"kind": kind, "name": name})}
    )


def test_a_plain_plan_runs(made: Made) -> None:
    check(*made)
    assert not_run(*made) == []
    refuse_not_run(*made)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda plan, run, profile: (plan, without_data(run), profile),
            ["data.distribution: laion-like", "data.sources"],
        ),
        (
            lambda plan, run, profile: (plan, run, of_device(profile, "analytic", "A800")),
            ["A800", "cluster.device"],
        ),
    ],
)
def test_what_training_does_not_run_is_refused_by_name(
    made: Made, change: Callable[..., Made], named: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        refuse_not_run(*change(*made))
    for word in named:
        assert word in str(caught.value)
    assert caught.value.what and caught.value.why and caught.value.next_step


def test_all_reasons_are_reported_at_once(made: Made) -> None:
    plan, run, profile = made
    with pytest.raises(SpecError) as caught:
        refuse_not_run(plan, without_data(run), of_device(profile, "analytic", "A800"))
    assert len(caught.value.why.splitlines()) == 2


def test_frozen_modules_recomputed_activations_and_tensor_parallelism_run(made: Made) -> None:
    plan, run, profile = made
    changed = with_unit(with_layout(plan, trained=["llm"]), checkpointing=True, tp=2, gpus=2)
    assert not_run(changed, run, profile) == []


def test_projectors_alone_need_projectors(made: Made) -> None:
    plan, run, profile = made
    plan, run = (
        with_layout(plan, trained=["projectors"]),
        edited(run, "model", trained=["projectors"]),
    )
    with pytest.raises(SpecError, match=r"model\.trained: projectors has no weights"):
        check(plan, run, profile)
    with pytest.raises(SpecError, match=r"model\.trained: projectors has no weights"):
        check_profile(run, profile)
    joined = profile.modules["llm"].model_copy(update={"projector": [0]})
    profile = profile.model_copy(update={"modules": profile.modules | {"llm": joined}})
    fingerprints = plan.fingerprints.model_copy(update={"profile": fingerprint(profile)})
    check(plan.model_copy(update={"fingerprints": fingerprints}), run, profile)


@pytest.mark.parametrize(
    ("layout", "train", "model", "named"),
    [
        ({"trained": ["llm"]}, {}, {}, ["model.trained", "llm", "all"]),
        ({}, {}, {"trained": ["llm", "projectors"]}, ["model.trained", "projectors"]),
        ({"zero_stage": 0}, {}, {}, ["train.zero_stage", "plan: 0", "run file: 1"]),
        (
            {"zero_stage": 0},
            {"zero_stage": "auto", "precision": "bf16"},
            {},
            ["train.zero_stage", "auto"],
        ),
        (
            {},
            {"activation_checkpointing": "full"},
            {},
            ["train.activation_checkpointing", "no unit", "full"],
        ),
    ],
)
def test_choices_of_the_run_file_must_be_the_plans(
    made: Made, layout: dict, train: dict, model: dict, named: list[str]
) -> None:
    plan, run, profile = made
    run = edited(edited(run, "train", **train), "model", **model)
    fingerprints = plan.fingerprints.model_copy(update={"model": run.model_fingerprint()})
    plan = with_layout(plan, **layout).model_copy(update={"fingerprints": fingerprints})
    with pytest.raises(MismatchError) as caught:
        check(plan, run, profile)
    for word in [*named, "disttrain_cli.plan"]:
        assert word in str(caught.value)


def test_auto_takes_what_the_plan_chose(made: Made) -> None:
    plan, run, profile = made
    check(with_layout(plan, zero_stage=0), edited(run, "train", zero_stage="auto"), profile)
    check(with_unit(plan, checkpointing=True), run, profile)
    with pytest.raises(MismatchError, match="activation_checkpointing"):
        check(
            with_unit(plan, checkpointing=True),
            edited(run, "train", activation_checkpointing="none"),
            profile,
        )


@pytest.mark.parametrize(
    ("profiled", "wanted", "kind", "name", "fits"),
    [
        ("auto", "auto", "cpu", "EPYC", True),
        ("auto", "cpu", "cpu", "EPYC", True),
        ("auto", "cpu", "cuda", "A800", False),
        ("auto", "analytic:a800", "analytic", "A800", True),
        ("auto", "analytic:A800", "analytic", "H100", False),
        ("auto", "analytic:A800", "cuda", "A800", False),
        ("analytic:A800", "analytic:A800", "analytic", "H100", True),  # by profile --device
        ("analytic:A800", "analytic:H800", "analytic", "H100", False),
        ("analytic:A800", "auto", "analytic", "H100", True),
    ],
)
def test_a_profile_is_of_the_run_files_device_or_of_the_one_asked_for(
    made: Made, profiled: str, wanted: str, kind: str, name: str, fits: bool
) -> None:
    _, run, profile = made
    cluster = edited(run, "cluster", device=profiled).cluster
    profile = of_device(profile, kind, name).model_copy(update={"cluster": cluster})
    run = edited(run, "cluster", device=wanted)
    if fits:
        check_device(run, profile)
    else:
        with pytest.raises(MismatchError) as caught:
            check_device(run, profile)
        assert wanted in str(caught.value) and name in str(caught.value)


def test_stages_that_do_not_fit_are_named(made: Made) -> None:
    plan, run, profile = made
    of_stage = {"unit": "llm", "stage": 0, "limit_gib": 4.0}
    memory = [StageMemory(**of_stage, peak_gib=peak_gib) for peak_gib in (4.0, 5.5)]
    plans = [
        plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"memory": [stage]})})
        for stage in memory
    ]
    devices = synthetic.tiny(run, kind="cuda")
    check_memory(plans[0], devices)
    check_memory(plans[1], profile)  # processes share a machine's memory
    with pytest.raises(SpecError) as caught:
        check_memory(plans[1], devices)
    assert "stages llm 0: up to 5.5 of 4.0 GiB" in caught.value.why


def with_cp(made: Made, module: str, **degrees: int) -> tuple[Plan, RunFile, Profile]:
    """The plan with a CP group for the unit of a module, and a profile that knows of heads."""
    plan, run, profile = made
    llm = profile.modules["llm"]
    costs = {
        kind: cost.model_copy(update={"heads": Heads(8, 4, 16)}) for kind, cost in llm.costs.items()
    }
    modules = profile.modules | {"llm": llm.model_copy(update={"costs": costs})}
    profile = profile.model_copy(update={"modules": modules})
    units = [
        UnitPlan.model_validate(
            unit.model_dump()
            | (
                degrees | {"gpus": degrees["cp"] * degrees.get("tp", 1)}
                if module in unit.name
                else {}
            )
        )
        for unit in plan.plan.units
    ]
    plan = with_layout(plan, units=units, gpus_used=sum(unit.gpus for unit in units))
    fingerprints = plan.fingerprints.model_copy(update={"profile": fingerprint(profile)})
    return plan.model_copy(update={"fingerprints": fingerprints}), run, profile


def test_cp_of_the_llm_runs(made: Made) -> None:
    check(*with_cp(made, "llm", cp=2))


def test_cp_groups_may_lie_on_several_nodes(made: Made) -> None:
    plan, run, profile = with_cp(made, "llm", cp=2)
    run = run.model_copy(update={"cluster": run.cluster.model_copy(update={"gpus_per_node": 1})})
    nodes = {"gpus_per_node": 1, "inter_node": profile.links}
    known = profile.model_copy(update={"links": profile.links.model_copy(update=nodes)})
    _check_ranks(plan, run, known)
    with pytest.raises(SpecError) as caught:
        _check_ranks(plan, run, profile)
    assert "the profile is of a single node" in str(caught.value)


@pytest.mark.parametrize(
    ("module", "degrees", "named"),
    [
        ("image_encoder", {"cp": 2}, ["image_encoder cannot have CP 2", "has no attention"]),
        ("llm", {"cp": 3}, ["llm cannot have CP 3", "must divide the sequence length, 256"]),
        ("llm", {"cp": 4}, ["CP 4 of unit llm does not fit evenly into a node"]),
        ("llm", {"cp": 5}, ["The plan needs more ranks", "llm 1 × CP 5 × 1 × 1"]),
    ],
)
def test_a_wrong_cp_is_refused_by_name(
    made: Made, module: str, degrees: dict[str, int], named: list[str]
) -> None:
    with pytest.raises(SpecError) as caught:
        check(*with_cp(made, module, **degrees))
    for words in named:
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("modules", "layers", "replicated", "named"),
    [
        (["image_encoder", "llm"], [10], ["image_encoder"], []),
        (["llm", "image_generator"], [6, 4], ["image_generator"], []),
        (["image_encoder", "llm"], [3, 7], ["image_encoder"], ["layers 0 to 3", "3, 7"]),
        (["image_encoder", "llm"], [10], ["llm"], ["llm is the LLM"]),
        (["image_encoder"], [4], ["image_encoder"], ["does not hold llm", "dp 4"]),
    ],
)
def test_only_whole_modules_beside_the_llm_are_dealt_out(
    made: Made, modules: list[str], layers: list[int], replicated: list[str], named: list[str]
) -> None:
    plan, run, _ = made
    profile = synthetic.tiny(run, tps=(1, 2))
    shape = {"tp": 2, "pp": len(layers), "layers_per_stage": layers}
    one = UnitPlan(name="some", modules=modules, gpus=2 * len(layers), **shape)
    if "llm" not in modules:
        one = one.model_copy(update={"dp": 2})
    plan = with_layout(
        plan, units=[one.model_copy(update={"module_tp": dict.fromkeys(replicated, 1)})]
    )
    if not named:
        _check_ranks(plan, run, profile)
        return
    with pytest.raises(SpecError) as caught:
        _check_ranks(plan, run, profile)
    for words in named:
        assert words in str(caught.value)


def test_cp_needs_a_profile_that_knows_of_heads(made: Made) -> None:
    plan, run, _ = with_cp(made, "llm", cp=2)
    fingerprints = plan.fingerprints.model_copy(update={"profile": fingerprint(made[2])})
    with pytest.raises(SpecError, match="has no attention whose rows ranks could share"):
        check(plan.model_copy(update={"fingerprints": fingerprints}), run, made[2])


def with_ep(made: Made, module: str, ep: int, experts: Experts | None) -> Made:
    """The plan with EP for the unit of a module on four replicas, and such experts in the LLM."""
    plan, run, profile = made
    llm = profile.modules["llm"]
    costs = {kind: cost.model_copy(update={"experts": experts}) for kind, cost in llm.costs.items()}
    modules = profile.modules | {"llm": llm.model_copy(update={"costs": costs})}
    units = [
        unit.model_copy(update={"dp": 4, "gpus": 4, "ep": ep} if unit.name == module else {})
        for unit in plan.plan.units
    ]
    plan = with_layout(plan, units=units, gpus_used=6)
    return plan, run, profile.model_copy(update={"modules": modules})


def test_ep_of_the_llm_runs_where_the_runtime_knows_of_it(made: Made) -> None:
    plan, run, profile = with_ep(made, "llm", 4, Experts(8, 2, 16, 100, 100))
    _check_ranks(plan, run, profile)


@pytest.mark.parametrize(
    ("module", "experts", "named"),
    [
        ("llm", None, "no layer of llm has experts"),
        ("image_encoder", Experts(8, 2, 16, 100, 100), "no layer of image_encoder has experts"),
        ("llm", Experts(6, 2, 16, 100, 100), "EP 4 must divide the 6 experts of llm"),
    ],
)
def test_a_wrong_ep_is_refused_by_name(
    made: Made, module: str, experts: Experts | None, named: str
) -> None:
    with pytest.raises(SpecError, match=named) as caught:
        _check_ranks(*with_ep(made, module, 4, experts))
    assert f"Unit {module} cannot have EP 4" in str(caught.value)


def test_ep_divides_the_ranks_of_a_stage() -> None:
    unit = UnitPlan(name="l", modules=["llm"], gpus=4, dp=4, layers_per_stage=[3])
    assert UnitPlan.model_validate(unit.model_dump() | {"ep": 4}).expert_replicas == 1
    with pytest.raises(ValueError, match="tp × cp × dp = 1 × 1 × 4 = 4; given: 3"):
        UnitPlan.model_validate(unit.model_dump() | {"ep": 3})


def test_gpus_are_the_product_of_all_degrees() -> None:
    unit = UnitPlan(name="l", modules=["llm"], gpus=2, dp=2, layers_per_stage=[3])
    with pytest.raises(ValueError, match="tp × cp × dp × pp = 1 × 2 × 2 × 1 = 4; given: 2"):
        UnitPlan.model_validate(unit.model_dump() | {"cp": 2})
