"""What the reader holds in memory."""

import duckdb
import pytest

from disttrain_cli.analysis.kineto.ingest import _fitting
from disttrain_cli.analysis.sql import connect

HUNGRY = (  # a list must fit whole
    "CREATE TABLE lists AS SELECT list(n) AS numbers FROM range(1_000_000) of(n)"
)


def test_what_does_not_fit_is_run_again_with_more(tmp_path):
    connection = connect(tmp_path / "kept.duckdb", memory_limit="8MB", threads=1)
    more = iter(("10MB", "1GB", "2GB"))
    _fitting(connection, HUNGRY, more)
    assert connection.execute("SELECT len(numbers) FROM lists").fetchall() == [(10**6,)]
    assert next(more) == "2GB"


def test_what_never_fits_is_said(tmp_path):
    connection = connect(tmp_path / "kept.duckdb", memory_limit="8MB", threads=1)
    with pytest.raises(duckdb.OutOfMemoryException):
        _fitting(connection, HUNGRY, iter(()))
    assert connection.execute("SELECT count(*) FROM duckdb_tables()").fetchall() == [(0,)]
