"""Interleaved stages: what a made-up job would take in truth, its own event loop says."""

import numpy as np
import pytest

from disttrain_cli.analysis.study import analyze_study
from disttrain_cli.analysis.study.graph import NoGraphError, StudyGraph, graph_of
from disttrain_cli.analysis.study.operations import BACKWARD, FORWARD
from disttrain_cli.analysis.study.reader import read_study
from disttrain_cli.analysis.study.replays import ideal_of
from tests.analysis.study import megatron
from tests.cases import first_fast

SHAPES = {
    "3 stages, 2 parts": {},
    "gradients reduced by part": {"overlapped": True},
    "2 stages, 3 parts": {"pp": 2, "slots": 8, "chunks": 3},
    "4 stages": {"pp": 4, "slots": 8, "overlapped": True},
}


def made(path, **known) -> StudyGraph:
    job = megatron.Job(**{"chunks": 2, "slots": 6, "steps": 4} | known)
    return graph_of(read_study([megatron.write(path / "t.parquet", megatron.rows(job))]))


def seconds(graph: StudyGraph) -> np.ndarray:
    return graph.trace.end.max(axis=0) - graph.trace.start.min(axis=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_replays_of_interleaved_stages_are_the_truth(tmp_path, shape):
    faults = {
        "slow_stage": {1: 1.8},
        "slow_rank": {3: 1.3},
        "load": {(0, 2): 1.5},
        "slow_part": {3: 1.2},
    }
    faulty, healthy = made(tmp_path, **SHAPES[shape], **faults), made(tmp_path, **SHAPES[shape])
    assert faulty.replay(faulty.taken, faulty.launch) == pytest.approx(seconds(faulty))
    assert faulty.contradictions == 0
    passes = np.isin(faulty.optype, (FORWARD, BACKWARD))
    repaired = np.where(passes[:, None], healthy.taken, faulty.taken)
    assert faulty.replay(repaired) == pytest.approx(seconds(healthy))
    assert (seconds(faulty) > 1.5 * seconds(healthy)).all()
    assert sorted(set(faulty.depth[passes])) == list(
        range(faulty.trace.chunks * (faulty.stage.max() + 1))
    )


def test_the_ideal_of_interleaved_stages_is_the_even_job(tmp_path):
    uneven = made(tmp_path, slow_stage={2: 1.9, 0: 0.1})
    even = made(tmp_path, slow_stage=dict.fromkeys(range(3), 1.0))
    passes = np.isin(uneven.optype, (FORWARD, BACKWARD))
    # transfers that move nothing take no time
    ideal = np.where(passes[:, None], ideal_of(uneven), uneven.taken)
    assert uneven.replay(ideal) == pytest.approx(seconds(even))


FAULTS = {
    "none": ({}, {}),
    "stage": ({"slow_part": {5: 2.0}}, {"stage": 2}),
    "worker": ({"dp": 4, "slow_rank": {5: 1.8}}, {"rank": 5, "stage": 1, "replica": 1}),
    "intra_microbatch": ({"load": {(0, slot): 1.8 for slot in range(6)}}, {}),
    "host": ({"launch_s": {0: 0.05, 1: 0.05}}, {}),
}


@pytest.mark.parametrize("cause", first_fast(FAULTS, 2))
def test_what_was_put_in_is_named(tmp_path, cause):
    known, place = FAULTS[cause]
    job = megatron.Job(**{"chunks": 2, "slots": 6} | known)
    found = analyze_study([megatron.write(tmp_path / "t.parquet", megatron.rows(job))])
    assert found.verdict.cause == cause
    assert all(getattr(found.verdict.place, key) == value for key, value in place.items())
    assert sum(found.stragglers.lost_s.values()) == pytest.approx(
        found.job.iteration_s - found.stragglers.ideal_s
    )
    assert abs(found.stragglers.lost_s["unexplained"]) < 1e-6
    assert found.job.layout == f"DP {job.dp}, PP 3, 2 parts per stage, 6 microbatches"


def rows(**known):
    return megatron.rows(megatron.Job(chunks=2, slots=6, steps=2, **known))


def test_only_transfers_that_move_something_need_be_there(tmp_path):
    whole = rows(slow_stage={1: 1.5})
    needed = [
        row
        for row in whole
        if not (row["duration"] == 0.0 and row["optype"].endswith(("-send", "-recv")))
    ]
    assert len(needed) < len(whole)
    more = [
        row
        | {
            "seq_id": row["seq_id"] + 12,
            "start_ts": row["start_ts"] + 9.0,
        }  # of no pass, after the last
        for row in whole
        if row["optype"] == "backward-recv" and row["stage"] == 1 and row["seq_id"] == 0
    ]
    first, second, third = (
        graph_of(read_study([megatron.write(tmp_path / f"{name}.parquet", found)]))
        for name, found in (("a", whole), ("b", needed), ("c", whole + more))
    )
    assert second.replay(second.taken) == pytest.approx(first.replay(first.taken))
    usual = third.taken.copy()
    usual[third.launch.max(axis=1) > 5.0] = 0.0
    assert third.replay(usual) == pytest.approx(first.replay(first.taken))


def test_transfers_that_do_not_match_are_told(tmp_path):
    lacking = [
        row
        for row in rows()
        if (row["optype"], row["stage"]) != ("forward-send", 1) or row["seq_id"] < 10
    ]
    with pytest.raises(
        NoGraphError, match="stage 1 has 12 forward passes that need a forward-send, but 10"
    ):
        graph_of(read_study([megatron.write(tmp_path / "a.parquet", lacking)]))
    swapped = [
        row | {"mc": 1 - row["mc"]}
        if row["optype"] == "forward-compute" and row["stage"] == 1
        else row
        for row in rows()
    ]
    with pytest.raises(NoGraphError, match="do not match"):
        graph_of(read_study([megatron.write(tmp_path / "b.parquet", swapped)]))


def test_a_step_in_another_order_is_left_out(tmp_path):
    found = rows() + [row | {"step": 2} for row in rows() if row["step"] == 0]
    other = [
        row | {"mc": 1 - row["mc"]}
        if row["step"] == 1 and row["optype"] == "forward-compute"
        else row
        for row in found
    ]
    trace = read_study([megatron.write(tmp_path / "t.parquet", other)])
    assert trace.steps.tolist() == [0, 2] and any(
        "1 step(s) lack operations" in text for text in trace.warnings
    )
