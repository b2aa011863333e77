"""What a new plan says of the one in place, under the profile of now."""

from typing import Any

import pytest

from disttrain_cli.commands.plan_tables import worth_it
from disttrain_cli.planning.changes import Changes, changes, differences, not_comparable
from disttrain_cli.planning.explain import differences as in_words
from disttrain_cli.planning.predict import simulated_s
from disttrain_cli.planning.solve import cluster_of, solve
from disttrain_cli.spec.layer_costs import Polynomial
from disttrain_cli.spec.plan import Plan
from disttrain_cli.spec.profile import Profile
from disttrain_cli.spec.runfile import RunFile
from tests import profiles
from tests.planning import synthetic

Made = tuple[RunFile, Profile, Plan]


@pytest.fixture(scope="module")
def made() -> Made:
    run = synthetic.run_file(batch=24, gpus=16)
    # the policy best orders by costs, so that other modules' loads would move too
    run = run.model_copy(update={"train": run.train.model_copy(update={"ordering": "paper"})})
    profile = synthetic.tiny(run, kind="cuda")
    return run, profile, solve(run, profile, strategy="disaggregated", top=0)


def slower(profile: Profile, name: str, factor: float) -> Profile:
    """The profile with a module whose layers take `factor` times as long."""

    def scaled(value: Any) -> Any:
        return profiles.scaled(value, factor) if isinstance(value, Polynomial) else value

    module = profile.modules[name]
    costs = {
        kind: cost.model_copy(
            update={
                "tp": {
                    tp: shard.model_copy(
                        update={
                            times: scaled(getattr(shard, times))
                            for times in (
                                "forward_ms",
                                "backward_ms",
                                "backward_input_ms",
                                "weight_ms",
                            )
                        }
                    )
                    for tp, shard in cost.tp.items()
                }
            }
        )
        for kind, cost in module.costs.items()
    }
    return profile.model_copy(
        update={"modules": profile.modules | {name: module.model_copy(update={"costs": costs})}}
    )


def compared(
    old: Plan, run: RunFile, profile: Profile, gpus: int | None = None
) -> tuple[Plan, Changes]:
    new = solve(run, profile, gpus=gpus, strategy="disaggregated", top=0)
    assert not_comparable(old, new) is None
    return new, changes(old, new, run, profile, cluster_of(run, profile, gpus))


def edited(plan: Plan, unit: int, **update: Any) -> Plan:
    units = [
        other.model_copy(update=update if number == unit else {})
        for number, other in enumerate(plan.plan.units)
    ]
    return plan.model_copy(update={"plan": plan.plan.model_copy(update={"units": units})})


@pytest.mark.slow
def test_the_same_profile_twice_leaves_the_plan_in_place(made: Made) -> None:
    run, profile, old = made
    _, found = compared(old, run, profile)
    assert found.keep and found.unfit is None and not found.differences
    assert found.old_iteration_s == found.new_s == pytest.approx(found.old_now_s)
    assert found.gain_pct == pytest.approx(0)
    assert [one.now_ms for one in found.moved] == [
        pytest.approx(one.then_ms) for one in found.moved
    ]


@pytest.mark.slow
def test_a_slower_llm_takes_devices_and_the_gain_is_the_simulators(made: Made) -> None:
    run, profile, old = made
    moved = slower(profile, "llm", 3.0)
    new, found = compared(old, run, moved)
    devices = {
        one.unit: (one.before, one.after) for one in found.differences if one.what == "devices"
    }
    assert devices["llm"][0] == old.plan.units[1].gpus < devices["llm"][1] == new.plan.units[1].gpus
    now_s = simulated_s(moved, old.plan, cluster_of(run, moved))
    assert (
        found.old_iteration_s == old.predicted.iteration_s < found.old_now_s == pytest.approx(now_s)
    )
    assert found.gain_pct == pytest.approx(100 * (now_s / new.predicted.iteration_s - 1))
    assert found.gain_pct > 1 and not found.keep
    ratios = {one.unit: one.now_ms / one.then_ms for one in found.moved}
    assert ratios == {
        "image_encoder": pytest.approx(1),
        "llm": pytest.approx(3),
        "image_generator": pytest.approx(1),
    }


def test_a_gain_below_one_percent_keeps_the_plan_in_place(made: Made) -> None:
    run, profile, new = made
    cluster = cluster_of(run, profile)
    for slower_pct, keep in ((0.5, True), (2.0, False), (-5.0, True)):
        faster = new.model_copy(
            update={
                "predicted": new.predicted.model_copy(
                    update={"iteration_s": new.predicted.iteration_s / (1 + slower_pct / 100)}
                )
            }
        )
        found = changes(new, faster, run, profile, cluster)
        assert found.gain_pct == pytest.approx(slower_pct) and found.keep == keep


@pytest.mark.slow
def test_a_plan_in_place_that_fits_no_more_says_why(made: Made) -> None:
    run, profile, old = made
    for what, found in {
        "needs 16 devices (there are 6)": compared(old, run, profile, gpus=6)[1],
        "GiB (of a device, plans may use": compared(old, *_less_memory(run, profile, old))[1],
        "TP 2 of unit llm was not profiled": changes(
            edited(old, 1, tp=2), old, run, profile, cluster_of(run, profile)
        ),
        "must add up": changes(
            edited(old, 1, layers_per_stage=[1] * old.plan.units[1].pp),
            old,
            run,
            profile,
            cluster_of(run, profile),
        ),
        "hold every module once": changes(
            edited(old, 0, modules=["other"]), old, run, profile, cluster_of(run, profile)
        ),
    }.items():
        assert found.unfit is not None and what in found.unfit
        assert found.old_now_s is None and found.gain_pct is None and not found.keep


def _less_memory(run: RunFile, profile: Profile, old: Plan) -> tuple[RunFile, Profile]:
    """Devices that hold a little less than the plan's fullest one needs."""
    peak_gib = max(stage.peak_gib for stage in old.predicted.memory)
    return run, profile.model_copy(
        update={"device": profile.device.model_copy(update={"memory_gib": 0.9 * peak_gib})}
    )


@pytest.mark.slow
def test_every_difference_is_named(made: Made) -> None:
    layout = made[2].plan
    encoder, llm, generator = layout.units
    other = layout.model_copy(
        update={
            "microbatch_size": 7,
            "zero_stage": 0,
            "units": [
                encoder.model_copy(update={"checkpointing": True}),
                llm.model_copy(
                    update={"tp": 2, "dp": 9, "pp": 2, "gpus": 36, "layers_per_stage": [1, 5]}
                ),
                generator,
            ],
        }
    )
    found = {(one.unit, one.what): (one.before, one.after) for one in differences(layout, other)}
    assert found == {
        (encoder.name, "recomputes"): (False, True),
        ("llm", "devices"): (llm.gpus, 36),
        ("llm", "TP"): (llm.tp, 2),
        ("llm", "DP"): (llm.dp, 9),
        ("llm", "PP"): (llm.pp, 2),
        ("llm", "layers per stage"): (llm.layers_per_stage, [1, 5]),
        (None, "microbatch"): (layout.microbatch_size, 7),
        (None, "ZeRO"): (layout.zero_stage, 0),
    }
    whole = solve(made[0], made[1], gpus=1, top=0).plan
    units = next(one for one in differences(layout, whole) if one.what == "units")
    assert (units.unit, units.before, units.after) == (None, layout.describe(), whole.describe())


def test_hidden_messages_are_a_difference_in_few_words(made: Made) -> None:
    layout = made[2].plan
    encoder, llm, generator = layout.units
    hides = layout.model_copy(
        update={"units": [encoder, llm.model_copy(update={"tp_overlap": True}), generator]}
    )
    (found,) = differences(layout, hides)
    assert (found.unit, found.what) == ("llm", "TP messages overlapped")
    assert (found.before, found.after) == (False, True)
    assert in_words(layout, hides) == "llm overlaps TP messages"
    assert in_words(hides, layout) == "llm TP messages exposed"


def test_plans_of_other_work_are_not_compared(made: Made) -> None:
    old = made[2]
    layout = {"global_batch_size": 48, "strategy": "megatron", "trained": ["llm"]}
    for field, value in layout.items():
        new = old.model_copy(update={"plan": old.plan.model_copy(update={field: value})})
        assert (not_comparable(old, new) or "").startswith("another ")
    new = old.model_copy(
        update={"fingerprints": old.fingerprints.model_copy(update={"model": "feed"})}
    )
    assert not_comparable(old, new) == f"another model ({old.fingerprints.model}, now feed)"
    moved = old.model_copy(
        update={"fingerprints": old.fingerprints.model_copy(update={"data": "e", "profile": "e"})}
    )
    assert not_comparable(old, moved) is None


@pytest.mark.slow
def test_a_plan_edited_by_hand_is_not_compared_with_its_old_prediction(made: Made) -> None:
    run, profile, plan = made
    unit = next(n for n, one in enumerate(plan.plan.units) if one.name == "llm")
    by_hand = edited(plan, unit, checkpointing=not plan.plan.units[unit].checkpointing)
    _, found = compared(by_hand, run, profile)
    assert found.old_iteration_s is None and found.moved == []
    assert found.old_now_s is not None and found.old_now_s != plan.predicted.iteration_s
    assert "edited by hand" in worth_it(found) and "when it was made" not in worth_it(found)
