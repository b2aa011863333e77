"""Replicas joined into processes: the identity, lockstep by hand, never faster; how many processes
a plan takes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_cli.simulation.grouping import finest, grouped, unit_shares
from disttrain_cli.simulation.pipeline import simulate, simulate_steps
from disttrain_cli.simulation.timeline import Pipeline
from disttrain_cli.spec.plan import Layout, UnitPlan
from tests.simulation.test_feeding import fed_steps, same, with_loads
from tests.simulation.test_pipeline import equal, pipelines


def layout_of(*units: tuple[int, int, int]) -> Layout:
    """(TP, DP, PP) of every unit."""
    plans = [
        UnitPlan(
            name=f"unit{number}",
            modules=[f"module{number}"],
            tp=tp,
            dp=dp,
            pp=pp,
            gpus=tp * dp * pp,
            layers_per_stage=[1] * pp,
        )
        for number, (tp, dp, pp) in enumerate(units)
    ]
    return Layout(
        global_batch_size=1,
        microbatch_size=1,
        microbatches=1,
        gpus_used=sum(plan.gpus for plan in plans),
        units=plans,
    )


@settings(max_examples=30, deadline=None)
@given(pipelines())
def test_one_replica_each_is_the_identity(pipeline: Pipeline) -> None:
    alone = grouped(pipeline, [[1] * replicas for replicas in pipeline.replicas])
    assert same(simulate(alone), simulate(pipeline))


@settings(max_examples=60, deadline=None)
@given(fed_steps(), st.data())
def test_groups_are_never_faster(steps: list[Pipeline], data: st.DataObject) -> None:
    shares: list[list[int]] = []
    for replicas, entry in zip(steps[0].replicas.tolist(), steps[0].entry, strict=True):
        cuts = (
            sorted(data.draw(st.sets(st.integers(1, replicas - 1))))
            if replicas > 1 and entry
            else []
        )
        shares.append(np.diff([0, *cuts, replicas]).tolist() if entry else shares[-1])
    alone, together = (
        simulate_steps(steps),
        simulate_steps([grouped(step, shares) for step in steps]),
    )
    ends_s = np.cumsum(
        [[one.iteration_s for one in timelines] for timelines in (alone, together)], axis=1
    )
    assert (ends_s[1] >= ends_s[0] - 1e-9).all()
    processes = [len(share) for share in shares]
    assert np.isfinite(together[0].forward_end).sum() == len(steps[0].forward_s) * sum(processes)


def test_a_process_takes_the_slowest_of_its_replicas_by_hand() -> None:
    forward_s, backward_s = (
        np.array([[[1.0, 2.0, 3.0, 4.0, 9.0]]]),
        np.array([[[5.0, 3.0, 1.0, 2.0, 0.0]]]),
    )
    pipeline = with_loads(
        Pipeline(
            np.array([5]), np.array([True]), (), forward_s, backward_s, np.zeros(0), np.zeros(1)
        ),
        [1.0, 0.0, 0.0, 2.0, 0.0],
        1,
    )
    joined = grouped(pipeline, [[2, 2, 1]])
    assert joined.forward_s.tolist() == [[[2.0, 4.0, 9.0]]] and joined.backward_s.tolist() == [
        [[5.0, 2.0, 0.0]]
    ]
    assert joined.load_s is not None and joined.load_s.tolist() == [[[1.0, 2.0, 0.0]]]
    assert joined.replicas.tolist() == [3] and simulate(joined).iteration_s == 9.0


def test_what_is_no_ranks_own_stays() -> None:
    pipeline = equal(3, 4, 1.0, 2.0)
    joined = grouped(pipeline, [[1]] * 3)
    assert joined.transfer_s is pipeline.transfer_s and joined.load_s is None


@pytest.mark.parametrize(
    ("gpus_per_process", "shares"),
    [
        (1, [[1] * 5, [1, 1, 1]]),
        (4, [[3, 2], [1, 1, 1]]),
        (8, [[5], [2, 1]]),
        (3, [[3, 2], [1, 1, 1]]),
        (2, [[2, 2, 1], [1, 1, 1]]),
        (64, [[5], [3]]),
    ],
)
def test_processes_stand_for_whole_tp_groups_evenly(
    gpus_per_process: int, shares: list[list[int]]
) -> None:
    assert unit_shares(layout_of((1, 5, 1), (4, 3, 2)), gpus_per_process) == shares


@pytest.mark.parametrize(
    ("units", "gpus", "processes"),
    [
        ([(1, 2, 1), (1, 2, 1), (1, 2, 1)], 1, 6),  # six ranks
        (
            [(8, 4, 1), (8, 8, 2), (8, 4, 1)],
            1,
            24,
        ),  # 192 GPUs: a process stands for a TP group of eight as it is
        ([(1, 64, 1), (1, 32, 2), (1, 64, 1)], 8, 24),  # the same without TP: a node each
        (
            [(1, 82, 1), (4, 96, 3), (1, 62, 1)],
            64,
            21,
        ),  # 1,296 GPUs: 2 + 3 · 6 + 1; with 56 it is 2 + 3 · 7 + 2
        ([(1, 8, 30)], 8, 30),  # more stages than processes are wanted
        ([(1, 4, 30)], 4, 30),
    ],
)
def test_as_fine_as_the_processes_allow(
    units: list[tuple[int, int, int]], gpus: int, processes: int
) -> None:
    layout = layout_of(*units)
    assert finest(layout, 8) == gpus
    count = [
        sum(
            unit.pp * len(share)
            for unit, share in zip(layout.units, unit_shares(layout, size), strict=True)
        )
        for size in (gpus, gpus - 8 if gpus > 8 else gpus // 2)
        if size
    ]
    assert count[0] == processes and all(
        more > max(24, sum(unit.pp for unit in layout.units)) for more in count[1:]
    )
