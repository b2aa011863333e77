"""Opening traces: whole, damaged, mixed, oddly named."""

import json
import shutil

import duckdb
import pyarrow.parquet as pq
import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.result.verdicts import Place
from disttrain_cli.errors import DataError
from disttrain_cli.spec.trace import STEP_COLUMNS, TRACE_COLUMNS
from tests.analysis import synthetic


@pytest.fixture
def folder(tmp_path, clean):
    return shutil.copytree(clean[0], tmp_path / "run" / "traces")


def test_strange_names_are_only_names(tmp_path, clean):
    strange = tmp_path / "it's [1-9]*; DROP VIEW trace; --" / "traces"
    shutil.copytree(clean[0], strange)
    for path in (strange, strange.parent):  # the run's folder does as well
        assert open_database([path]).query("ranks") == open_database([clean[0]]).query("ranks")


def test_damaged_files_are_named_and_the_rest_analysed(folder):
    (folder / "rank-00001" / "segment-00002.parquet").write_bytes(b"")
    whole = (folder / "rank-00002" / "segment-00001.parquet").read_bytes()
    (folder / "rank-00002" / "segment-00001.parquet").write_bytes(whole[: len(whole) // 2])
    (folder / "rank-00003" / ".segment-00009.parquet.tmp").write_bytes(b"open")
    synthetic.table(
        folder / "rank-00004" / "segment-00007.parquet", [{"run": "x"}], {"run": "string"}
    )
    found = synthetic.judged(folder)
    text = "\n".join(found.warnings)
    assert "rank-00001/segment-00002.parquet is empty or half-written" in text
    assert "rank-00002/segment-00001.parquet is empty or half-written" in text
    assert "rank-00004/segment-00007.parquet lacks the column(s) step" in text
    assert "without rows of some rank" in text
    assert found.job.steps == 8 and 0 < found.job.steps_measured < 6


def test_rows_that_cannot_be_read_are_named(folder):
    damaged = folder / "rank-00002" / "segment-00001.parquet"
    content = bytearray(damaged.read_bytes())
    footer = int.from_bytes(content[-8:-4], "little") + 8
    content[4:-footer] = b"x" * len(content[4:-footer])
    damaged.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read") as caught:
        analyze([folder])
    assert str(damaged) in caught.value.next_step


def test_missing_ranks_steps_and_job_are_said(folder):
    shutil.rmtree(folder / "rank-00005")
    shutil.rmtree(folder / "steps")
    warnings = synthetic.judged(folder).warnings
    assert any("5 of 6 ranks" in warning for warning in warnings)
    assert any("6 measured steps have no reported loss" in warning for warning in warnings)
    (folder / "job.json").write_text("{")
    found = synthetic.judged(folder)
    assert found.job.mfu is None and found.predicted_vs_measured == []
    assert any("MFU, predictions" in warning for warning in found.warnings)
    assert [unit.name for unit in found.units] == ["encoder", "llm"]


def test_nothing_to_analyse_is_an_error(tmp_path):
    with pytest.raises(DataError, match="There is no trace folder"):
        analyze([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="No readable trace"):
        analyze([tmp_path])
    synthetic.table(tmp_path / "rank-00000" / "segment-00000.parquet", [], TRACE_COLUMNS)
    with pytest.raises(DataError, match="No readable trace"):
        analyze([tmp_path])
    row = synthetic.simulate(synthetic.Synthetic(steps=1)).rows[0]
    synthetic.table(
        tmp_path / "rank-00000" / "segment-00000.parquet",
        [row | {"operation": "load"}],
        TRACE_COLUMNS,
    )
    with pytest.raises(DataError, match="no complete step"):
        analyze([tmp_path])


def test_a_folder_of_runs_names_them(tmp_path):
    for name in ("one", "two"):
        synthetic.write(tmp_path / name / "traces", synthetic.Synthetic(steps=2))
    with pytest.raises(DataError, match="traces of 2 runs") as caught:
        analyze([tmp_path])
    said = str(caught.value)
    assert str(tmp_path / "two") in said and f"disttrain_cli.analyze('{tmp_path / 'one'}')" in said


def test_a_single_step_is_taken_and_said(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(steps=1))
    found = synthetic.judged(tmp_path)
    assert (found.job.steps_measured, found.job.warmup_steps_excluded) == (1, 0)
    assert any("could not be left out" in warning for warning in found.warnings)


def test_a_start_with_more_ranks_than_the_jobs_is_of_another_plan(tmp_path):
    """A device was left out since: the last unit has lost a replica."""
    synthetic.write(
        tmp_path, synthetic.Synthetic(steps=8, run="start-001"), name="segment-start-001"
    )
    before = synthetic.simulate(synthetic.Synthetic(steps=4, run="start-000"))
    again = [row | {"rank": 6, "replica": 1} for row in before.rows if row["rank"] == 5]
    for rank in range(7):
        synthetic.table(
            tmp_path / f"rank-{rank:05d}" / "segment-start-000-00000.parquet",
            [
                row | {"start_ns": row["start_ns"] - 10**12, "end_ns": row["end_ns"] - 10**12}
                for row in (*before.rows, *again)
                if row["rank"] == rank
            ],
            TRACE_COLUMNS,
        )
    found = open_database([tmp_path])
    assert len(found.query("ranks")) == 6
    assert any("'start-000' left out" in warning for warning in found.warnings)


def test_steps_repeated_after_resuming_count_once(tmp_path):
    first = synthetic.write(
        tmp_path, synthetic.Synthetic(steps=6, run="start-000"), name="segment-start-000"
    )
    again = synthetic.simulate(synthetic.Synthetic(steps=8, run="start-001", load_ms=5.0))
    later = 10**12
    rows = [
        row | {"start_ns": row["start_ns"] + later, "end_ns": row["end_ns"] + later}
        for row in again.rows
        if row["step"] >= 4
    ]
    for rank in range(6):
        synthetic.table(
            tmp_path / f"rank-{rank:05d}" / "segment-start-001-00000.parquet",
            [row for row in rows if row["rank"] == rank],
            TRACE_COLUMNS,
        )
    database = open_database([tmp_path])
    assert any("2 steps were repeated" in warning for warning in database.warnings)
    kept = {
        (row["run"], row["step"]) for row in database.sql("SELECT DISTINCT run, step FROM trace")
    }
    assert kept == {("start-000", step) for step in range(4)} | {
        ("start-001", step) for step in range(4, 8)
    }
    windows = {row["step"]: row for row in database.sql("SELECT * FROM windows")}
    assert [step for step in windows if windows[step]["measured"]] == [
        1,
        2,
        3,
        5,
        6,
        7,
    ]  # warm-up at every start
    assert windows[3]["window_s"] == pytest.approx(
        (first.windows[3][1] - first.windows[3][0]) / 1e9
    )
    assert windows[6]["window_s"] == pytest.approx(
        (again.windows[6][1] - again.windows[6][0]) / 1e9
    )


def test_a_step_lasts_until_the_device_is_done_however_early_its_host_reports_it(tmp_path):
    """As on a GPU: the host reports a step, and begins the next, 1 ms before the optimizer step is
    done."""
    truth = synthetic.write(tmp_path, synthetic.Synthetic(steps=5))
    file = tmp_path / "steps" / "segment-00000.parquet"
    early = [row | {"end_ns": row["end_ns"] - 10**6} for row in pq.read_table(file).to_pylist()]
    synthetic.table(file, early, STEP_COLUMNS)
    windows = [
        (row["start_ns"], row["end_ns"])
        for row in open_database([tmp_path]).sql("SELECT * FROM windows")
    ]
    first, *others = truth.windows
    assert windows == [(first[0] - 10**6, first[1]), *others]


def test_another_plan_in_the_folder_is_left_out(folder):
    other = synthetic.simulate(synthetic.Synthetic(steps=3, run="other", dp=3))
    for rank in range(8):
        synthetic.table(
            folder / f"rank-{rank:05d}" / "segment-other.parquet",
            [
                row | {"start_ns": row["start_ns"] - 10**14, "end_ns": row["end_ns"] - 10**14}
                for row in other.rows
                if row["rank"] == rank
            ],
            TRACE_COLUMNS,
        )
    found = open_database([folder])
    assert any("'other' left out" in warning for warning in found.warnings)
    assert len(found.query("ranks")) == 6 and found.query("iterations")[0]["recorded"] == 8


def test_parts_of_a_trace_on_several_hosts_join_but_two_jobs_do_not(tmp_path, folder, clean):
    elsewhere = tmp_path / "elsewhere"
    for rank in (4, 5):
        shutil.move(folder / f"rank-{rank:05d}", elsewhere / f"rank-{rank:05d}")
    joined = open_database([folder, elsewhere])
    assert len(joined.query("ranks")) == 6 and joined.warnings == []
    both = open_database([clean[0], folder])
    assert any("another job" in warning for warning in both.warnings)
    assert both.query("iterations")[0]["recorded"] == 8


def test_text_only_slots_cost_nothing(tmp_path):
    """A replica without items has rows without work; they bring no FLOPs and break nothing."""
    truth = synthetic.write(tmp_path, synthetic.Synthetic())
    empty = [
        row | {"tokens": 0, "images": 0, "end_ns": row["start_ns"] + 1000}
        if row["unit"] == "generator" and row["slot"] == 2 and row["tokens"]
        else row
        for row in truth.rows
    ]
    for part in ("segment-00000", "segment-00001"):
        (tmp_path / "rank-00005" / f"{part}.parquet").unlink()
    synthetic.table(
        tmp_path / "rank-00005" / "segment-00000.parquet",
        [row for row in empty if row["rank"] == 5],
        TRACE_COLUMNS,
    )
    found = synthetic.judged(tmp_path)
    whole = 3 * synthetic.FLOPS["generator"] * 1000 * 6 / 1e12
    assert found.units[2].model_tflop_per_step == pytest.approx(whole * 5 / 6)


def test_columns_of_steps_are_those_of_the_schema(clean):
    assert ask([clean[0]], "SELECT * FROM steps").columns == list(STEP_COLUMNS)


def test_no_progress_bar_is_drawn_into_what_is_printed(tmp_path):
    synthetic.write(tmp_path, synthetic.Synthetic(steps=2))
    connection = open_database([tmp_path]).connection
    assert connection.execute("SELECT current_setting('enable_progress_bar')").fetchall() == [
        (False,)
    ]


def test_a_question_is_answered_once_ahead_or_not(clean):
    opened = open_database([clean[0]])
    slots = opened.query("slots")
    opened.ask_ahead("cells")
    cells = opened.query("cells")
    opened.connection.execute("DROP VIEW operations")
    assert opened.query("slots") == slots and opened.query("cells") == cells
    opened.query("slots")[0].clear()  # an answer is the asker's own
    assert opened.query("slots") == slots
    opened.ask_ahead("units")
    with pytest.raises(duckdb.Error, match="operations"):
        opened.query("units")


def test_a_job_description_of_another_version_is_said(clean, tmp_path):
    shutil.copytree(clean[0], tmp_path / "traces")
    job = tmp_path / "traces" / "job.json"
    job.write_text(json.dumps(json.loads(job.read_text()) | {"version": 99}))
    (said,) = [line for line in open_database([tmp_path]).warnings if "job.json" in line]
    assert "version: input should be 1 (given: 99)" in said and "MFU, predictions" in said


def test_ranks_of_a_cp_group_are_named(tmp_path):
    run = synthetic.simulate(synthetic.Synthetic(steps=3))
    rows = [
        row | {"replica": 0, "cp_rank": row["replica"]} if row["unit"] == "llm" else row
        for row in run.rows
    ]
    synthetic.table(tmp_path / "rank-00000" / "segment-00000.parquet", rows, TRACE_COLUMNS)
    found = analyze([tmp_path])
    assert {unit.name: (unit.cp, unit.dp) for unit in found.units}["llm"] == (2, 1)
    at = {(rank.unit, rank.stage, rank.replica, rank.cp_rank) for rank in found.ranks}
    assert {place for place in at if place[0] == "llm"} == {
        ("llm", stage, 0, cp_rank) for stage in range(2) for cp_rank in range(2)
    }
    assert all(cp_rank is None for unit, _, _, cp_rank in at if unit != "llm")
    place = Place(unit="llm", stage=1, replica=0, cp_rank=1, rank=5)
    assert place.named == "llm, stage 1, replica 0, CP rank 1"
