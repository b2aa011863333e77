"""Ranks whose clocks are apart: seen by messages that arrive too early, put right, and told."""

import re

import pytest

from disttrain_cli.analysis.study import analyze_study
from disttrain_cli.analysis.study.graph import graph_of
from disttrain_cli.analysis.study.reader import read_study
from tests.analysis.study import megatron
from tests.cases import first_fast


def found(path, **known):
    return analyze_study([megatron.write(path / "t.parquet", megatron.rows(megatron.Job(**known)))])


@pytest.mark.parametrize(
    ("job", "ahead_s"),
    first_fast(
        [
            ({"slow_stage": {2: 1.8}}, {2: 0.5, 3: 0.5}),
            ({"dp": 4, "slow_rank": {5: 1.8}}, {1: -0.03}),
            ({"chunks": 2, "slots": 6, "slow_stage": {1: 1.8}}, {0: 0.2}),
        ]
    ),
)
def test_clocks_apart_are_put_right_and_told(tmp_path, job, ahead_s):
    true, seen = found(tmp_path, **job), found(tmp_path, **job, ahead_s=ahead_s)
    assert seen.verdict.cause == true.verdict.cause and seen.verdict.place == true.verdict.place
    assert seen.job.iteration_s == pytest.approx(true.job.iteration_s, abs=2e-3)
    assert seen.stragglers.lost_s == pytest.approx(true.stragglers.lost_s, abs=2e-3)
    (told,) = (text for text in seen.warnings if "clocks" in text)
    for number, shift, error in re.findall(r"rank (\d+) \(([-+.\d]+) ± ([.\d]+) ms\)", told):
        put_in = 1e3 * (ahead_s.get(int(number), 0.0) - ahead_s.get(0, 0.0))
        assert abs(float(shift) - put_in) <= float(error) < 20
    assert not any("clocks" in text for text in true.warnings)


def test_the_clocks_drift_is_followed(tmp_path):
    job = megatron.Job(slow_stage={2: 1.8}, steps=20)
    rows = [
        row | {"start_ts": row["start_ts"] + 100.0 * row["step"] * (1 + (row["rank"] == 1) * 1e-4)}
        for row in megatron.rows(job)
    ]  # 190 ms apart in the end
    graph = graph_of(read_study([megatron.write(tmp_path / "t.parquet", rows)]))
    true = graph_of(read_study([megatron.write(tmp_path / "u.parquet", megatron.rows(job))]))
    assert graph.contradictions == 0
    assert graph.replay(graph.taken, graph.launch) == pytest.approx(
        true.replay(true.taken, true.launch), abs=5e-3
    )


def test_rounding_moves_nothing(tmp_path):
    job = megatron.Job(ahead_s={4: 5e-4})
    trace = read_study([megatron.write(tmp_path / "t.parquet", megatron.rows(job))])
    assert graph_of(trace).trace is trace


def test_what_no_clock_explains_is_told_too(tmp_path):
    rows = megatron.rows(megatron.Job())
    early = [
        row | {"duration": 0.0, "start_ts": row["start_ts"] - 0.5}
        if (row["optype"], row["rank"], row["step"], row["seq_id"]) == ("forward-recv", 2, 3, 1)
        else row
        for row in rows
    ]
    trace = read_study([megatron.write(tmp_path / "t.parquet", early)])
    graph = graph_of(trace)
    assert (graph.trace.start == trace.start).all() and not trace.warnings
    assert any("from rank 0 to rank 2: no shift" in text for text in graph.trace.warnings)
