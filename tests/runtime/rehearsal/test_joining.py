"""Joined replicas: every item once, in the process of its replica, and routes that still cover all
rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.data.slots import Slot, StepOrder, replica_items, slot_items
from disttrain_cli.runtime.rehearsal.joining import (
    joined_layout,
    joined_order,
    ranks_of,
    replicas_of,
)
from disttrain_cli.runtime.units.routes import End, local_rows, routes
from disttrain_cli.simulation.grouping import unit_shares
from disttrain_cli.spec.heads import ImageInput
from disttrain_cli.spec.inputs import ModelInputs
from disttrain_cli.spec.plan import Layout, UnitPlan
from disttrain_cli.spec.stage_graph import stage_graph

INPUTS = ModelInputs(
    llm="llm",
    vocabulary=10,
    sequence_length=64,
    heads=[ImageInput(module="eye", patch_px=8, merge=1, max_pixels=4096)],
)


def layout(eye_dp: int, llm_dp: int, tp: int = 1) -> Layout:
    units = [
        UnitPlan(name="eye", modules=["eye"], dp=eye_dp, gpus=eye_dp, layers_per_stage=[2]),
        UnitPlan(
            name="llm",
            modules=["llm"],
            tp=tp,
            dp=llm_dp,
            pp=2,
            gpus=tp * llm_dp * 2,
            layers_per_stage=[1, 1],
        ),
    ]
    return Layout(
        global_batch_size=llm_dp,
        microbatch_size=1,
        microbatches=1,
        gpus_used=sum(unit.gpus for unit in units),
        units=units,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 7), st.integers(1, 7), st.sampled_from([1, 2, 4, 8]), st.integers(0, 999))
def test_items_stay_with_their_process_and_all_rows_travel(
    eye: int, llm: int, per_process: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 20))
    sequence = np.sort(random.integers(0, llm, count))
    owner = random.integers(0, eye, count)
    images = [replica_items(image=np.flatnonzero(owner == replica)) for replica in range(eye)]
    texts = [
        replica_items(sequence=np.array([replica]), image=np.flatnonzero(sequence == replica))
        for replica in range(llm)
    ]
    slot = Slot(
        INPUTS,
        np.arange(llm),
        np.full(llm, 60),
        np.full(llm, 3600),
        {"image": slot_items(sequence, random.integers(1, 5, (count, 2)))},
        {"eye": images, "llm": texts},
    )
    plan = layout(eye, llm)
    shares = dict(zip(["eye", "llm"], unit_shares(plan, per_process), strict=True))
    joined = joined_order(StepOrder(0, [slot], 1, 0), shares).slots[0]
    for unit, replicas in slot.replicas.items():
        for process, own in enumerate(joined.replicas[unit]):
            theirs = [replicas[replica] for replica in replicas_of(shares[unit], process)]
            assert own["image"].tolist() == [
                item for items in theirs for item in items["image"].tolist()
            ]
            assert own["sequence"].tolist() == [
                item for items in theirs for item in items["sequence"].tolist()
            ]
    for process in range(len(shares["llm"])):
        here, there = End("llm", replica=process), End("eye")
        arriving = sum(route.rows for route in routes(joined, "image", "tokens", here, there))
        assert arriving == local_rows(joined, "image", "tokens", "llm", process)


def test_the_joined_layout_has_processes_as_replicas() -> None:
    plan = layout(6, 5, tp=2)
    shares = dict(zip(["eye", "llm"], unit_shares(plan, 4), strict=True))
    joined = joined_layout(plan, shares)
    assert [(unit.dp, unit.tp, unit.gpus) for unit in joined.units] == [
        (2, 1, 2),
        (3, 1, 6),
    ]  # each of whole TP groups
    assert joined.gpus_used == 8 and shares == {"eye": [3, 3], "llm": [2, 2, 1]}
    assert [list(replicas_of(shares["llm"], process)) for process in range(3)] == [
        [0, 1],
        [2, 3],
        [4],
    ]
    assert plan.units[0].dp == 6


def test_shares_follow_the_tensor_parallel_groups() -> None:
    assert unit_shares(layout(1, 3, tp=8), 4)[1] == pytest.approx([1, 1, 1])


def test_processes_are_known_by_the_rank_that_they_stand_for():
    whole, shares = layout(3, 4, tp=2), {"eye": [1, 2], "llm": [1, 1, 2]}
    processes = stage_graph(joined_layout(whole, shares), "llm")
    assert ranks_of(processes, stage_graph(whole, "llm"), shares) == {
        0: 16,
        1: -1,
        2: 0,
        3: 2,
        4: -1,
        5: 8,
        6: 10,
        7: -1,
    }


@pytest.mark.parametrize(
    ("tp", "ep", "per_process", "shares", "processes"),
    [
        (1, 4, 1, [1] * 8, 4),
        (1, 4, 2, [2] * 4, 2),
        (1, 4, 3, [2] * 4, 2),  # a part of an EP group, of which all processes have as many
        (1, 4, 4, [4] * 2, 1),
        (1, 4, 6, [4] * 2, 1),
        (1, 4, 8, [8], 1),
        (2, 4, 2, [1] * 8, 2),
        (4, 2, 4, [1] * 8, 1),  # groups inside a replica
    ],
)
def test_processes_have_whole_ep_groups_or_parts_of_one(
    tp: int, ep: int, per_process: int, shares: list[int], processes: int
) -> None:
    plan = layout(1, 8, tp)
    units = [plan.units[0], plan.units[1].model_copy(update={"ep": ep})]
    plan = plan.model_copy(update={"units": units})
    found = dict(zip(["eye", "llm"], unit_shares(plan, per_process), strict=True))
    assert found["llm"] == shares
    joined = joined_layout(plan, found).units[1]
    assert (joined.ep, joined.dp) == (processes, len(shares))
