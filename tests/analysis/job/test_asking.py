"""`--sql` over own traces: what it may ask, and that its database is prepared once."""

import resource
import subprocess
import sys

import pytest

from disttrain_cli.analysis import cache
from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.job import database
from disttrain_cli.analysis.views import documented_views
from disttrain_cli.errors import UsageError

COUNT = "SELECT count(*) FROM trace"


@pytest.mark.slow
def test_an_endless_answer_is_refused_and_ctrl_c_ends_an_endless_query(clean, tmp_path):
    with pytest.raises(UsageError, match="too long"):
        ask([clean[0]], "SELECT * FROM range(1000000000)")
    endless = (
        "WITH RECURSIVE r AS (SELECT 1 AS i UNION ALL SELECT i + 1 FROM r) SELECT count(*) FROM r"
    )
    code = (
        "import os, sys, signal, threading\nfrom pathlib import Path\n"
        # ignored where the tests run in the background of a shell
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from disttrain_cli.analysis.analyze import ask\n"
        "ask([Path(sys.argv[1])], 'SELECT 1')\n"
        "threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()\n"
        "try:\n    ask([Path(sys.argv[1])], sys.argv[2])\n"
        "except KeyboardInterrupt:\n    print('ended')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(clean[0]), endless],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "ended\n"


@pytest.mark.slow
def test_views_answer_and_every_column_is_documented(clean):
    views = documented_views("own")
    shown = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main'"
    # made when asked
    assert {row[0] for row in ask([clean[0]], shown).rows} == {*views, "columns"} - {"losses"}
    for name, view in views.items():
        assert ask([clean[0]], f"SELECT * FROM {name} LIMIT 1").columns == list(view.columns), name
        assert all(view.columns.values()), name
    told = ask([clean[0]], 'SELECT "view", "column", meaning FROM columns').rows
    assert sorted(told) == sorted(
        (name, column, meaning)
        for name, view in views.items()
        for column, meaning in view.columns.items()
    )
    assert ask([clean[0]], "SELECT count(*) FROM trace").rows == [(len(clean[2].rows),)]
    assert ask([clean[0]], "WITH a AS (FROM steps) SELECT max(step) FROM a").rows == [(7,)]


def test_what_is_inside_is_neither_found_nor_suggested(clean):
    for query in ("FROM seen", "FROM segments", "SELECT * FROM knwon", "FROM sample_segments"):
        with pytest.raises(UsageError) as refused:
            ask([clean[0]], query)
        assert "internal" not in str(refused.value) and "operations" in str(refused.value)


def test_messages_tell_who_sent_and_how_long_was_waited(clean):
    rows = ask(
        [clean[0]],
        "SELECT direction, sender, receiver, waited_ms, transfer_ms, sent_ns, asked_ns, "
        "received_ns FROM messages WHERE step = 3 AND slot = 1",
    ).rows
    ends = {(way, sender, receiver) for way, sender, receiver, *_ in rows}
    forward = {
        (0, 1),
        (0, 2),
        (1, 3),
        (2, 4),
        (3, 5),
        (4, 5),
    }  # encoder, LLM of two stages and replicas, generator
    assert ends == {("forward", *pair) for pair in forward} | {
        ("backward", other, one) for one, other in forward
    }
    for _, _, _, waited, transfer, sent, asked, received in rows:
        assert waited == pytest.approx(max(0, min(received, sent) - asked) / 1e6)
        assert waited + transfer == pytest.approx((received - asked) / 1e6)


def test_losses_by_step_are_those_of_the_analysis(clean):
    found = analyze([clean[0]]).stragglers
    rows = ask(
        [clean[0]], "SELECT cause, avg(lost_s), avg(ideal_s) FROM Losses GROUP BY cause"
    ).rows
    assert {cause: lost for cause, lost, _ in rows} == pytest.approx(found.lost_s)
    whole = ask(
        [clean[0]],
        "SELECT step, sum(lost_s) + any_value(ideal_s) - any_value(step_s) FROM losses GROUP BY 1",
    )
    assert [row[1] for row in whole.rows] == pytest.approx(
        [0.0] * 6
    ) and found.ideal_s == pytest.approx(rows[0][2])
    assert (
        sorted(row[0] for row in whole.rows)
        == [one.step for one in found.by_step]
        == [2, 3, 4, 5, 6, 7]
    )


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM glob('/*')",
        "COPY (SELECT 1) TO '/tmp/stolen.csv'",
        "ATTACH '/tmp/other.db'",
        "SET enable_external_access = true",
        "SELECT 1; SELECT 2",
        "DROP VIEW trace",
        "DELETE FROM units",
        "",
        "CREATE TABLE x AS SELECT 1",
        "SELECT * FROM read_blob('/etc/passwd')",
        "SELECT * FROM read_parquet('/tmp/*/*/*.parquet')",
        "SELECT * FROM read_parquet('http://127.0.0.1:1/a.parquet')",
        "FROM query('COPY (SELECT 1) TO ''/tmp/stolen.csv''')",
        "LOAD httpfs",
        "EXPORT DATABASE '/tmp/stolen'",
        "PRAGMA database_list",
        "SELECT 1; COPY (SELECT 1) TO '/tmp/stolen.csv'; --",
    ],
)
def test_queries_read_the_trace_and_nothing_else(clean, query):
    with pytest.raises(UsageError):
        ask([clean[0]], query)


def test_a_query_cannot_overwrite_a_segment(clean):
    target = clean[0] / "rank-00000" / "segment-00000.parquet"
    before = target.read_bytes()
    with pytest.raises(UsageError):
        ask([clean[0]], f"COPY (SELECT 1) TO '{target}'")
    assert target.read_bytes() == before


@pytest.fixture
def prepared(monkeypatch):
    """How often a database was prepared."""
    calls, really = [], database.open_database

    def count(paths, file, **options):
        calls.append(file)
        return really(paths, file, **options)

    monkeypatch.setattr(database, "open_database", count)
    return calls


def test_the_database_is_prepared_once_whatever_is_asked(run, prepared, monkeypatch):
    rows = ask([run], COUNT).rows
    link = run.with_name("link")
    link.symlink_to(run)
    monkeypatch.chdir(run)
    assert (
        ask([run / "traces" / ".."], COUNT).rows == ask([link], COUNT).rows == rows
        and len(prepared) == 1
    )
    assert ask([run], "SELECT max(step) FROM idle").rows == [(2,)] and len(prepared) == 1
    assert (
        prepared[0].parent.parent == cache.cache_folder()
        and len(list(cache.cache_folder().glob("*"))) == 1
    )


@pytest.mark.slow
def test_what_changes_or_is_damaged_is_prepared_again(run, prepared):
    rows = ask([run], COUNT).rows
    (kept,) = cache.cache_folder().glob("*.duckdb")
    kept.write_bytes(b"damaged" * 1000)
    assert ask([run], COUNT).rows == rows and len(prepared) == 2
    for segment in (run / "traces" / "rank-00000").iterdir():
        segment.unlink()
    assert ask([run], COUNT).rows < rows and len(prepared) == 3


def test_without_a_cache_folder_it_answers_and_leaves_nothing(run, monkeypatch, tmp_path):
    (tmp_path / "blocked").write_text("a file where a folder should be")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    assert ask([run], COUNT).rows[0][0] > 0 and not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
def test_where_the_cache_cannot_be_written_memory_does(run):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # as a full disk
    try:
        rows = ask([run], COUNT).rows
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert rows == ask([run], COUNT).rows and len(list(cache.cache_folder().glob("*"))) == 1
