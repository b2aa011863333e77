"""Rows that others write, or that are damaged, are used where they can be, else left out."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from disttrain_cli.analysis.job.database import open_database
from disttrain_cli.analysis.job.fitting import LAST_NS, fitted
from disttrain_cli.analysis.watching.looking import look_once
from disttrain_cli.errors import DataError
from disttrain_cli.spec.trace import TRACE_COLUMNS, arrow_schema
from tests.analysis import synthetic

Column = Callable[[pa.ChunkedArray], pa.Array | pa.ChunkedArray]


def always(value: Any) -> Column:
    return lambda column: pa.array([value] * len(column), column.type)


def cast(kind: pa.DataType) -> Column:
    return lambda column: column.cast(kind)


@pytest.fixture
def traces(tmp_path):
    spec = synthetic.Synthetic()
    synthetic.write(tmp_path / "traces", spec, name=f"segment-{spec.run}")
    return tmp_path / "traces"


def changed(traces, name: str, change: Column, segments: str = "*.parquet", rank: int = 2) -> None:
    """The column of a rank's segments is another."""
    for file in (traces / f"rank-{rank:05d}").glob(segments):
        table = pq.read_table(file)
        place = table.schema.get_field_index(name)
        pq.write_table(table.set_column(place, name, change(table.column(name))), file)


@pytest.mark.slow
def test_other_types_of_the_same_values_change_nothing(traces):
    before, watched = synthetic.judged(traces), look_once(traces.parent).analysis
    for rank, (name, change) in enumerate(
        [
            ("step", cast(pa.int64())),
            ("step", cast(pa.string())),
            ("step", cast(pa.float64())),
            ("start_ns", cast(pa.string())),
            ("operation", cast(pa.large_string())),
            ("unit", lambda column: column.dictionary_encode()),
        ]
    ):
        changed(traces, name, change, rank=rank)
    again = synthetic.judged(traces)
    assert again.verdict == before.verdict and again.warnings == before.warnings
    assert look_once(traces.parent).analysis.verdict == watched.verdict


@pytest.mark.parametrize(
    "changes",
    [
        {"start_ns": [always(0), always(-5)], "step": [always(None)]},
        {"end_ns": [always(5), always(2**63 - 1), always(LAST_NS)], "host": [always(None)]},
        {"operation": [always(None)]},
    ],
)
def test_rows_that_cannot_be_are_left_out_and_counted(traces, changes):
    pairs = [(name, change) for name, several in changes.items() for change in several]
    for rank, (name, change) in enumerate(pairs):
        changed(traces, name, change, "*-00001.parquet", rank)
    lost = sum(
        pq.read_metadata(next((traces / f"rank-{rank:05d}").glob("*-00001.parquet"))).num_rows
        for rank in range(len(pairs))
    )
    found = synthetic.judged(traces)
    assert f"{lost:,} row(s) with missing or impossible coordinates or times" in str(found.warnings)
    assert found.verdict.cause == "none" and 0 < found.job.steps_measured < 6


def test_a_clock_that_is_set_back_within_an_operation_ends_the_analysis(traces):
    """By an hour: times that do not add up are no verdict."""
    half = 10**18 + 3 * 10**9

    def back(column: pa.ChunkedArray) -> pa.Array:
        return pa.array([at - 3600 * 10**9 * (at > half) for at in column.to_pylist()])

    changed(traces, "end_ns", back)
    changed(traces, "start_ns", back)
    assert synthetic.judged(traces).verdict.cause in ("none", "unknown")


def test_units_that_the_job_does_not_have_are_left_out(traces):
    changed(traces, "unit", always("vision"), "*-00001.parquet")
    found = synthetic.judged(traces)
    assert "rows of vision, which are not units of job.json, are left out" in found.warnings
    assert found.verdict.cause == "none"


def test_traces_without_a_row_that_can_be_used(traces):
    for rank in traces.glob("rank-*"):
        if rank.name != "rank-00002":
            for file in rank.iterdir():
                file.unlink()
    changed(traces, "host", always(None))
    with pytest.raises(DataError, match="No row of the trace is usable"):
        open_database([traces])


def test_what_is_missing_or_of_another_type_is_named():
    table = pa.Table.from_pylist([], schema=arrow_schema(TRACE_COLUMNS))
    assert fitted(table, TRACE_COLUMNS) == table
    with pytest.raises(ValueError, match=r"lacks the column\(s\) host, step"):
        fitted(table.drop_columns(["step", "host"]), TRACE_COLUMNS)
    wrong = pa.table({name: pa.array(["x"]) for name in TRACE_COLUMNS})
    with pytest.raises(ValueError, match="has a column step of the type string"):
        fitted(wrong, TRACE_COLUMNS)
