"""Faults: what each kind makes slower, by hand, and what is refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from disttrain_cli.costs.layout import CostedStage, stages_of
from disttrain_cli.errors import SpecError
from disttrain_cli.simulation.faults import begun, check_faults, inject, placed, slowdown, waited
from disttrain_cli.simulation.step import fed, pipeline_of
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout
from disttrain_cli.spec.profile import PreprocessProfile, Profile
from disttrain_cli.spec.runfile.rehearse import FaultSpec
from tests.planning import synthetic
from tests.planning.test_predict import three

PROFILE = synthetic.tiny(synthetic.run_file()).model_copy(
    update={"preprocess": PreprocessProfile(images_per_s_per_core=100, sequences_per_s_per_core=10)}
)
TIMES = ("forward_s", "backward_s", "weight_s", "transfer_s", "load_s")


@pytest.fixture
def case() -> tuple[Pipeline, list[CostedStage]]:
    """Stages: encoder (DP 2), LLM 0 and 1 (DP 2), generator 0 and 1 (DP 1)."""
    layout = three()
    stages, loads = (
        stages_of(PROFILE, layout),
        synthetic.loads_of(PROFILE, layout, synthetic.paper_policy(PROFILE, layout), 0),
    )
    pipeline = fed(pipeline_of(PROFILE, layout, stages, loads, 6), PROFILE, stages, loads, 1, 2)
    return dataclasses.replace(pipeline, weight_s=pipeline.backward_s / 2), stages


def factors(before: Pipeline, after: Pipeline) -> dict[str, dict[tuple[int, ...], float]]:
    """By table that changed, {(stage, replica) or (cut): factor} where it did; every slot alike."""
    found = {}
    for name in TIMES:
        old, new = getattr(before, name), getattr(after, name)
        if np.array_equal(old, new):
            continue
        places = np.argwhere((old != new).any(axis=0)) if old.ndim == 3 else np.argwhere(old != new)
        found[name] = {}
        for place in map(tuple, places.tolist()):
            old_s, new_s = old[(..., *place)], new[(..., *place)]
            factor = float(np.max(new_s / old_s, where=old_s > 0, initial=0.0))
            np.testing.assert_allclose(new_s, factor * old_s)
            found[name][place] = round(factor, 9)
    return found


def test_every_kind_by_hand(case: tuple[Pipeline, list[CostedStage]]) -> None:
    pipeline, stages = case

    def both(places: dict[tuple[int, ...], float]) -> dict[str, dict[tuple[int, ...], float]]:
        return dict.fromkeys(("forward_s", "backward_s", "weight_s"), places)

    for fault, expected in (
        (FaultSpec(slow="rank", unit="llm", stage=1, replica=1, factor=2.0), both({(2, 1): 2.0})),
        (FaultSpec(slow="host", unit="llm", stage=1, replica=0, factor=1.5), both({(2, 0): 1.5})),
        (
            FaultSpec(slow="stage", unit="llm", stage=0, factor=1.2),
            both({(1, 0): 1.2, (1, 1): 1.2}),
        ),
        (FaultSpec(slow="link", unit="image_encoder", factor=3.0), {"transfer_s": {(0,): 3.0}}),
        (FaultSpec(slow="link", unit="llm", stage=1, factor=3.0), {"transfer_s": {(2,): 3.0}}),
        (FaultSpec(slow="worker", unit="llm", factor=5.0), {"load_s": {(1, 0): 5.0, (1, 1): 5.0}}),
        (
            FaultSpec(slow="worker", unit="image_encoder", stage=7, replica=0, factor=5.0),
            {"load_s": {(0, 0): 5.0}},
        ),
    ):
        check_faults(stages, [fault], PROFILE)
        assert factors(pipeline, inject(pipeline, stages, [fault])) == expected


def test_faults_multiply_and_leave_their_pipeline_alone(
    case: tuple[Pipeline, list[CostedStage]],
) -> None:
    pipeline, stages = case
    kept = {name: getattr(pipeline, name).copy() for name in TIMES}
    slower = inject(
        pipeline,
        stages,
        [
            FaultSpec(slow="stage", unit="llm", factor=2.0),
            FaultSpec(slow="rank", unit="llm", replica=0, factor=1.5),
        ],
    )
    assert factors(pipeline, slower)["forward_s"] == {(1, 0): 3.0, (1, 1): 2.0}
    assert all(np.array_equal(getattr(pipeline, name), table) for name, table in kept.items())
    assert factors(pipeline, inject(pipeline, stages, [])) == {}


def test_a_place_of_its_own_has_the_factors_of_the_whole(
    case: tuple[Pipeline, list[CostedStage]],
) -> None:
    pipeline, stages = case
    faults = [
        FaultSpec(slow="stage", unit="llm", stage=1, factor=2.0),
        FaultSpec(slow="rank", unit="llm", stage=1, replica=0, factor=3.0),
        FaultSpec(slow="worker", unit="llm", factor=7.0),
        FaultSpec(slow="worker", unit="image_encoder", replica=1, factor=5.0),
        FaultSpec(slow="link", unit="llm", stage=0, factor=11.0),
    ]
    slower = inject(pipeline, stages, faults)
    for number, stage in enumerate(stages):
        where = stage.unit.name, stage.index
        for replica in range(stage.unit.dp):
            place = (slice(None), number, replica)
            slow = slowdown(faults, "stage", *where, replica) * slowdown(
                faults, "rank", *where, replica
            )
            np.testing.assert_allclose(slower.backward_s[place], slow * pipeline.backward_s[place])
            assert pipeline.load_s is not None and slower.load_s is not None
            np.testing.assert_allclose(
                slower.load_s[place],
                slowdown(faults, "worker", *where, replica) * pipeline.load_s[place],
            )
        if number < len(stages) - 1:
            assert (
                slower.transfer_s[number]
                == slowdown(faults, "link", *where) * pipeline.transfer_s[number]
            )


@pytest.mark.parametrize(
    ("fault", "field", "allowed"),
    [
        ({"slow": "stage", "unit": "vision"}, "unit", "image_encoder, llm, image_generator"),
        ({"slow": "stage", "unit": "llm", "stage": 2}, "stage", "0, 1"),
        ({"slow": "rank", "unit": "llm", "replica": 2}, "replica", "0, 1"),
        ({"slow": "worker", "unit": "image_generator", "replica": 1}, "replica", "0"),
        ({"slow": "link", "unit": "image_generator", "stage": 1}, "stage", "0"),
    ],
)
def test_places_that_the_layout_lacks_are_named(
    case: tuple[Pipeline, list[CostedStage]], fault: dict[str, object], field: str, allowed: str
) -> None:
    pipeline, stages = case
    faults = [FaultSpec(slow="stage", unit="llm", factor=2.0), FaultSpec(**fault, factor=2.0)]
    for refuse in (
        lambda: inject(pipeline, stages, faults),
        lambda: check_faults(stages, faults, PROFILE),
    ):
        with pytest.raises(SpecError, match=rf"rehearse.faults\[1\].{field}: ") as error:
            refuse()
        assert error.value.why == f"allowed: {allowed}" and str(fault[field]) in error.value.what


def with_rates(images: float, sequences: float) -> Profile:
    return PROFILE.model_copy(
        update={
            "preprocess": PreprocessProfile(
                images_per_s_per_core=images, sequences_per_s_per_core=sequences
            )
        }
    )


def test_a_worker_that_prepares_nothing_is_refused(
    case: tuple[Pipeline, list[CostedStage]],
) -> None:
    pipeline, stages = case
    worker = [FaultSpec(slow="worker", unit="llm", factor=2.0)]
    with pytest.raises(SpecError, match=r"rehearse.faults\[0\].unit") as error:
        check_faults(stages, worker, with_rates(images=1000, sequences=0))
    assert error.value.why == "allowed: image_encoder, image_generator"
    with pytest.raises(SpecError, match=r"rehearse.faults\[0\].unit") as error:
        check_faults(stages, worker, with_rates(images=0, sequences=0))
    assert error.value.why == "allowed: none"
    loads = synthetic.loads_of(PROFILE, three(), synthetic.paper_policy(PROFILE, three()), 0)
    unfed = pipeline_of(PROFILE, three(), stages, loads, 6)
    with pytest.raises(SpecError, match=r"rehearse.faults\[0\].slow"):
        inject(unfed, stages, worker)
    assert pipeline.load_s is not None


def test_the_others_of_a_cp_group_wait_for_the_slow_rank() -> None:
    slow = FaultSpec(slow="rank", unit="llm", stage=1, replica=1, cp_rank=1, factor=4.0)
    whole = FaultSpec(slow="rank", unit="llm", stage=1, replica=1, factor=2.0)
    assert waited([slow, whole], "llm", 1, 1, 0) == 0.75
    assert waited([slow, whole], "llm", 1, 1, 1) == 0.0
    assert waited([slow, whole], "llm", 1, 0, 0) == waited([slow], "llm", 0, 1, 0) == 0.0


def test_a_cp_rank_that_is_not_there_is_refused(
    case: tuple[Pipeline, list[CostedStage]],
) -> None:
    slow = FaultSpec(slow="rank", unit="llm", stage=1, replica=1, cp_rank=1, factor=4.0)
    with pytest.raises(SpecError, match=r"rehearse.faults\[0\].cp_rank: CP groups of unit llm"):
        check_faults(case[1], [slow], PROFILE)
    with pytest.raises(ValueError, match="a slow stage has no cp_rank"):
        FaultSpec(slow="stage", unit="llm", cp_rank=1, factor=4.0)


def test_faults_begin_with_their_step() -> None:
    slow = FaultSpec(slow="rank", unit="llm", stage=1, replica=0, factor=2.0, from_step=3)
    always = FaultSpec(slow="link", unit="llm", factor=2.0)
    assert begun([slow, always], 2) == [always] and begun([slow, always], 3) == [slow, always]
    now = three().model_copy(update={"left_out": [2, 3]})
    assert [one.from_step for one in placed([slow], three(), now, "llm", 4)] == [3]


def test_faults_move_with_their_devices() -> None:
    """Ranks: 0, 1 the encoder, 2 to 5 the LLM's stages of two replicas, 6, 7 the generator's."""
    first = three()
    now = first.model_copy(update={"left_out": [2, 3]})  # rank 2 on device 4

    def moved(layout: Layout, **fault: Any) -> list[tuple[str, str | None, int, int | None]]:
        faults = [FaultSpec(factor=2.0, **fault)]
        return [
            (one.slow, one.unit, one.stage, one.replica)
            for one in placed(faults, first, layout, "llm", 4)
        ]

    slow = {"slow": "rank", "unit": "llm", "stage": 1, "replica": 0}  # device 4
    assert moved(first, **slow) == [("rank", "llm", 1, 0)]
    assert moved(now, **slow) == [("rank", "llm", 0, 0)]
    gone = {"slow": "host", "unit": "llm", "stage": 0, "replica": 1}  # device 3
    assert moved(first, **gone) == [("host", "llm", 0, 1)] and moved(now, **gone) == []
    assert moved(first, slow="node", node=0) == [
        ("rank", "image_encoder", 0, 0),
        ("rank", "image_encoder", 0, 1),
        ("rank", "llm", 0, 0),
        ("rank", "llm", 0, 1),
    ]
    assert moved(now, slow="node", node=2) == [
        ("rank", "image_generator", 0, 0),
        ("rank", "image_generator", 1, 0),
    ]
    assert moved(now, slow="link", unit="llm", stage=1) == [("link", "llm", 1, None)]
    assert moved(now, slow="link", unit="image_generator", stage=1) == []
