"""Operation-level traces: the published answers, causes that were put in, and what bad input is
told."""

import json
import re
from pathlib import Path
from statistics import mean

import pytest
from msgspec.structs import asdict

from disttrain_cli.analysis.analyze import ask
from disttrain_cli.analysis.study import analyze_study
from disttrain_cli.analysis.study.graph import graph_of
from disttrain_cli.analysis.study.reader import read_study
from disttrain_cli.analysis.study.replays import replay
from disttrain_cli.errors import DataError, UsageError
from tests.analysis.study import megatron
from tests.cases import first_fast

PUBLISHED = Path(__file__).parents[4] / "shared/data/traces/straggler-ST"


@pytest.fixture(scope="module")
def published():
    """The replays of the published trace, and what its authors found."""
    if not (PUBLISHED / "trace-ST.parquet").is_file():
        pytest.skip("the published trace is not here")
    trace = PUBLISHED / "trace-ST.parquet"
    answers = {
        name: json.loads((PUBLISHED / f"{name}-ST.json").read_text())
        for name in ("result", "mw", "ms")
    }
    return trace, replay(graph_of(read_study([trace]))), answers


def test_step_times_are_the_published_ones(published):
    _, found, answers = published
    for times, name in (
        (found.measured, "base"),
        (found.undelayed, "nodelay"),
        (found.ideal, "noblk"),
    ):
        own = answers["result"][f"step_t_{name}"]
        assert times.mean() == pytest.approx(mean(own.values()), abs=1e-6)
        assert len(times) == len(own) == 32
    assert [
        round(float(times.mean()), 3) for times in (found.measured, found.undelayed, found.ideal)
    ] == [2.214, 2.173, 1.843]


def test_slowdowns_are_the_published_ones(published):
    _, found, answers = published
    result, study = answers["result"], found.what_if
    assert study.slowdown == pytest.approx(result["blocking_slowdown"], abs=1e-6)
    for ours, theirs in (
        (study.by_stage, "stage"),
        (study.by_replica, "dp_rank"),
        (study.by_operation, "optype"),
    ):
        assert ours == pytest.approx(result[f"blocking_decompose_by_{theirs}"], abs=1e-6)
    assert study.worst_workers_share == pytest.approx(answers["mw"]["Mw"], abs=1e-5)
    assert study.last_stage_share == pytest.approx(answers["ms"]["Ms"], abs=1e-5)


def test_the_published_trace_has_a_slow_stage(published):
    found = analyze_study([published[0]])
    assert found.format == "operations"
    assert found.verdict.cause == "stage" and found.verdict.place.stage == 3
    assert found.verdict.confidence > 0.9
    rows = {row.what: row.value for row in found.verdict.evidence}
    assert rows["stage 3: forward of a microbatch"] == pytest.approx(139.7, abs=0.05)
    assert rows["the other stages: forward of a microbatch"] == pytest.approx(67.1, abs=0.1)
    assert sum(found.stragglers.lost_s.values()) == pytest.approx(
        found.job.iteration_s - found.stragglers.ideal_s
    )
    assert found.verdict.next_command.startswith("disttrain analyze --sql")
    lost_s, even_s = found.verdict.lost_s, found.stragglers.lost_s["stage"]
    assert f"{lost_s:.3g} s of every 2.21 s step ({100 * lost_s / 2.214:.0f} %)" in (
        found.verdict.headline
    )
    assert found.verdict.lost_fraction == pytest.approx(lost_s / found.job.iteration_s)
    even = f"{even_s:.3g} s ({100 * even_s / found.job.iteration_s:.0f} %)"  # as in the table
    assert even in found.verdict.headline and even in found.verdict.advice
    assert rows["saved by equally long stages"] == pytest.approx(even_s)
    assert set(re.findall(r"[0-9]+ %", found.verdict.headline)) == {"24 %", "13 %"}
    query = found.verdict.next_command.split('"')[1]
    assert len(ask([published[0]], query).rows) == 8


def test_a_replay_of_everything_gives_the_record_back(tmp_path):
    job = megatron.Job(slow_rank={1: 1.7}, load={(0, 2): 1.5}, launch_s={0: 0.004})
    graph = graph_of(read_study([megatron.write(tmp_path / "t.parquet", megatron.rows(job))]))
    measured = graph.trace.end.max(axis=0) - graph.trace.start.min(axis=0)
    assert graph.replay(graph.taken, graph.launch) == pytest.approx(measured)
    assert graph.contradictions == 0


FAULTS = {
    "none": (megatron.Job(), {}),
    "stage": (megatron.Job(slow_stage={2: 1.8}), {"stage": 2}),
    "worker": (megatron.Job(dp=4, slow_rank={5: 1.8}), {"rank": 5, "stage": 1, "replica": 1}),
    "intra_microbatch": (megatron.Job(load={(0, slot): 1.8 for slot in range(4)}), {}),
    "inter_microbatch": (
        megatron.Job(slots=6, load={(third, slot): 2.5 for third in range(3) for slot in (0, 1)}),
        {},
    ),
    "host": (megatron.Job(launch_s={0: 0.05, 1: 0.05}), {}),
}


@pytest.mark.parametrize("cause", first_fast(FAULTS, 3))
def test_what_was_put_in_is_named(tmp_path, cause):
    job, place = FAULTS[cause]
    found = analyze_study([megatron.write(tmp_path / "t.parquet", megatron.rows(job))])
    assert found.verdict.cause == cause
    assert {
        key: value for key, value in asdict(found.verdict.place).items() if key in place
    } == place
    lost = found.stragglers.lost_s
    assert sum(lost.values()) == pytest.approx(found.job.iteration_s - found.stragglers.ideal_s)
    assert abs(lost["unexplained"]) < 1e-6
    assert len(found.ranks) == job.dp * job.pp and found.verdict.advice


@pytest.fixture(scope="module")
def rows():
    return megatron.rows(megatron.Job())


@pytest.mark.parametrize(("unit", "per_s"), [("ms", 1e3), ("µs", 1e6), ("ns", 1e9)])
def test_times_that_cannot_be_seconds_are_scaled_and_that_is_said(tmp_path, rows, unit, per_s):
    found = [
        analyze_study(
            [
                megatron.write(
                    tmp_path / f"{factor}.parquet",
                    [
                        row
                        | {
                            "start_ts": row["start_ts"] * factor,
                            "duration": row["duration"] * factor,
                        }
                        for row in rows
                    ],
                )
            ]
        )
        for factor in (20.0, 20.0 * per_s)
    ]
    assert found[1].job.iteration_s == pytest.approx(found[0].job.iteration_s)
    assert found[1].verdict.cause == found[0].verdict.cause and not found[0].warnings
    assert [warning for warning in found[1].warnings if f"they are read as {unit}" in warning]


def test_a_missing_rank_leaves_its_replica_out(tmp_path, rows):
    left = [row for row in rows if row["rank"] != 3 and not (row["rank"] == 1 and row["step"] == 2)]
    found = analyze_study([megatron.write(tmp_path / "t.parquet", left)])
    assert (found.job.ranks, found.job.steps_measured) == (3, 6)
    assert any("replica 1 lacks stage(s) 1" in warning for warning in found.warnings)


def test_steps_that_do_not_match_are_left_out(tmp_path, rows):
    lacking = [
        row
        for row in rows
        if not (row["step"] == 4 and row["optype"] == "forward-compute" and row["rank"] == 0)
    ]
    found = analyze_study([megatron.write(tmp_path / "t.parquet", lacking)])
    assert (found.job.steps, found.job.steps_measured) == (6, 5)
    assert any(
        "1 step(s) lack operations" in warning and "4" in warning for warning in found.warnings
    )


def test_two_jobs_and_damaged_files_are_told_apart(tmp_path, rows):
    good = megatron.write(tmp_path / "a.parquet", rows)
    other = megatron.write(tmp_path / "b.parquet", rows)
    half = tmp_path / "c'; DROP.parquet"
    half.write_bytes(good.read_bytes()[:500])
    found = analyze_study([good, other, half])
    assert found.job.ranks == 6
    assert any("another job" in warning for warning in found.warnings)
    assert any("half-written" in warning for warning in found.warnings)


def test_ranks_may_be_in_files_of_their_own(tmp_path, rows):
    files = [
        megatron.write(tmp_path / f"{rank}.parquet", [row for row in rows if row["rank"] == rank])
        for rank in range(6)
    ]
    assert analyze_study(files).job.ranks == 6


def test_missing_columns_and_rows_are_named(tmp_path, rows):
    short = [
        {name: value for name, value in row.items() if name not in ("stage", "seq_id")}
        for row in rows
    ]
    with pytest.raises(DataError) as error:
        analyze_study([megatron.write(tmp_path / "t.parquet", short)])
    assert "stage, seq_id" in error.value.why
    with pytest.raises(DataError) as error:
        analyze_study(
            [
                megatron.write(
                    tmp_path / "t.parquet", [row for row in rows if row["rank"] not in (0, 3)]
                )
            ]
        )
    assert "No replica is complete" in error.value.what
    with pytest.raises(DataError) as error:
        analyze_study(
            [megatron.write(tmp_path / "t.parquet", [row for row in rows if row["stage"] != 1])]
        )
    assert "stage 1" in error.value.what


def test_what_cannot_be_replayed_is_still_measured(tmp_path, rows):
    # without what the last stage sends to the first
    interleaved = [row | {"mc": row["mb_id"] % 2} for row in rows]
    found = analyze_study([megatron.write(tmp_path / "t.parquet", interleaved)])
    assert found.verdict.cause == "unknown" and "need a forward-recv" in found.verdict.headline
    assert found.job.iteration_s > 0 and len(found.ranks) == 6


def test_strange_rows_are_left_out_and_told(tmp_path, rows):
    strange = [
        rows[0] | {"duration": -1.0, "step": 5},
        rows[0] | {"optype": "'; DROP TABLE operations; --", "seq_id": 9},
    ]
    found = analyze_study([megatron.write(tmp_path / "t.parquet", rows + strange)])
    assert any("negative duration" in warning for warning in found.warnings)
    assert any("unknown types" in warning and "DROP TABLE" in warning for warning in found.warnings)
    assert found.job.steps_measured == 6


def test_sql_reaches_no_other_file(tmp_path, rows):
    file = megatron.write(tmp_path / "t.parquet", rows)
    other = megatron.write(tmp_path / "secret.parquet", rows)
    assert ask([file], "SELECT count(*) FROM operations").rows == [(len(rows),)]
    for query in (
        f"SELECT * FROM read_parquet('{other}')",
        "CREATE TABLE t (a INT)",
        "SELECT 1; SELECT 2",
    ):
        with pytest.raises(UsageError):
            ask([file], query)
