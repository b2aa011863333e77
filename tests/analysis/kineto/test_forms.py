"""The forms in which such traces are met: gz, bare arrays, truncated, unnamed, mixed; what is wrong
is said."""

import gzip
import json
import os

import pytest

from disttrain_cli.analysis.analyze import analyze, ask
from disttrain_cli.analysis.views import documented_views
from disttrain_cli.errors import DataError, UsageError
from tests.analysis.kineto import traces
from tests.cases import first_fast


def same(found):
    """What must not depend on the form."""
    return found.ranks, found.collectives, found.kernels, found.verdict


@pytest.mark.slow
def test_every_form_gives_the_same_figures(tmp_path):
    arrivals = [[400, 400, 400], [400, 550, 450]]
    plain = same(analyze(traces.job(tmp_path / "plain", arrivals)))
    for form in ("bare gz", "texts", "broken pairs"):
        for path in traces.job(tmp_path / form, arrivals):
            document = json.loads(path.read_text())
            if form == "bare gz":
                text = json.dumps(document["traceEvents"]).encode()
                # two members, whatever the name says
                path.write_bytes(gzip.compress(text[:700]) + gzip.compress(text[700:]))
            elif form == "texts":
                for event in document["traceEvents"]:
                    event["pid"] = str(event["pid"])
                    event["args"] = {
                        name: str(value) for name, value in event.get("args", {}).items()
                    } or None
                path.write_text(json.dumps(document))
            else:
                document["traceEvents"] = [
                    part
                    for event in document["traceEvents"]
                    for part in (
                        {**event, "ph": "B"},
                        {
                            "ph": "E",
                            "pid": event["pid"],
                            "tid": event["tid"],
                            "ts": event["ts"] + event["dur"],
                        },
                    )
                ]
                document["traceEvents"].insert(0, traces.span("BAD", traces.BASE_US, 1))
                path.write_bytes(json.dumps(document).encode().replace(b"BAD", b"\xff\\q\x01"))
        assert same(analyze([tmp_path / form])) == plain, form


@pytest.mark.parametrize("packed", first_fast([True, False]))
def test_a_truncated_file_is_analysed_as_far_as_it_goes(tmp_path, packed):
    arrivals = [400 + step % 7 for step in range(40)]
    path = traces.write(tmp_path / "rank0.json", traces.document(traces.events(arrivals)))
    text = gzip.compress(path.read_bytes()) if packed else path.read_bytes()
    path.write_bytes(text[: len(text) * 2 // 3])
    found = analyze([path])
    assert 5 < found.job.steps_measured < 39
    assert any("rank0.json is truncated: the" in warning for warning in found.warnings)


@pytest.mark.slow
def test_ranks_come_from_names_or_are_numbered_and_that_is_said(tmp_path):
    for name in ("host_rank3.json", "host_rank5.json"):
        traces.write(tmp_path / "named" / name, traces.events([400, 400]))
    named = analyze([tmp_path / "named"])
    assert [row.rank for row in named.ranks] == [3, 5]
    assert any("ranks are taken from file names" in warning for warning in named.warnings)
    for name in ("b.json", "a.json"):
        traces.write(tmp_path / "unnamed" / name, traces.events([400, 400]))
    numbered = analyze([tmp_path / "unnamed"])
    assert [row.rank for row in numbered.ranks] == [0, 1]
    assert any("ranks are numbered in order" in warning for warning in numbered.warnings)


def test_missing_ranks_are_named(tmp_path):
    found = analyze(traces.job(tmp_path, [[400, 400], [400, 450]], world_size=4))
    assert any(warning.startswith("2 of 4 ranks are missing (2, 3)") for warning in found.warnings)


@pytest.mark.slow
def test_two_jobs_in_one_folder_are_told_apart(tmp_path):
    one = [[400, 400], [400, 450]]
    traces.job(tmp_path / "a", one)
    alone = same(analyze([tmp_path / "a"]))
    traces.write(tmp_path / "a" / "other.json", traces.document(traces.events([400]), 0, 1))
    sizes = analyze([tmp_path / "a"])
    assert same(sizes) == alone
    assert any(
        "traces of several jobs are mixed: other.json left out (different world size)" in warning
        for warning in sizes.warnings
    )
    traces.job(tmp_path / "b", one)
    traces.job(tmp_path / "b" / "earlier", one, ahead=[-(10**10), -(10**10)])
    times = analyze([tmp_path / "b"])
    assert same(times) == alone
    assert any("left out (different time" in warning for warning in times.warnings)


def test_a_rank_that_comes_twice_at_once_counts_once(tmp_path):
    first, _ = traces.job(tmp_path, [[400, 400], [400, 450]])
    (tmp_path / "copy.json").write_bytes(first.read_bytes())
    found = analyze([tmp_path])
    assert len(found.ranks) == 2 and any(
        "rank 0 again; left out" in warning for warning in found.warnings
    )


def test_steps_that_do_not_match_are_left_out(tmp_path):
    traces.write(tmp_path / "rank0.json", traces.document(traces.events([400] * 4), 0, 2))
    traces.write(tmp_path / "rank1.json", traces.document(traces.events([400] * 3), 1, 2))
    found = analyze([tmp_path])
    assert (found.job.steps, found.job.steps_measured) == (4, 2)
    assert any("1 step is not marked on every rank" in warning for warning in found.warnings)


def test_a_file_that_cannot_be_read_does_not_stop_the_others(tmp_path):
    traces.job(tmp_path, [[400, 400]])
    traces.write(tmp_path / "empty.json", "")
    traces.write(tmp_path / "config.json", '{"model": {"a": [1, 2]}}')
    traces.write(tmp_path / "words.json", "not a trace")
    (tmp_path / "half.json.gz").write_bytes(gzip.compress(b"[" + b" " * 99999)[:30])
    found = analyze([tmp_path])
    assert len(found.ranks) == 1
    for said in (
        "empty.json is empty",
        "config.json contains no traceEvents",
        "words.json is not JSON",
    ):
        assert any(said in warning for warning in found.warnings), said
    with pytest.raises(DataError, match="No readable trace"):
        analyze([tmp_path / "words.json"])
    with pytest.raises(DataError, match="no trace folder or file"):
        analyze([tmp_path / "nowhere"])


def test_strange_names_are_data(tmp_path):
    evil = "'; DROP TABLE files; --\x1b[31m\"\\ \u202e"
    found = [*traces.events([400]), *traces.kernel(evil, traces.BASE_US + 500, 10, 7)]
    path = traces.write(tmp_path / "it's rank0 ; [x] *.json", traces.document(found))
    analysis = analyze([path])
    assert evil in [row.name for row in analysis.kernels]
    quoted = evil.replace("'", "''")
    assert ask([path], f"SELECT count(*) FROM kernels WHERE name = '{quoted}'").rows == [(1,)]


@pytest.mark.slow
def test_sql_reads_the_views_and_nothing_else(tmp_path):
    (path,) = traces.job(tmp_path, [[400, 400]])
    for name, view in documented_views("kineto").items():
        assert ask([path], f"SELECT * FROM {name} LIMIT 1").columns == list(view.columns), name
    shown = "SELECT table_name FROM information_schema.tables WHERE table_schema = 'main'"
    assert {row[0] for row in ask([path], shown).rows} == {*documented_views("kineto"), "columns"}
    for query in (
        f"SELECT * FROM read_text('{path}')",
        "SELECT * FROM '/etc/passwd'",
        "CREATE TABLE x (i INTEGER)",
        f"COPY files TO '{tmp_path / 'out.csv'}'",
        "DROP VIEW events",
        "SET threads = 3",
        "SELECT 1; SELECT 2",
        "ATTACH 'x.db'",
    ):
        with pytest.raises(UsageError):
            ask([path], query)
    assert not (tmp_path / "out.csv").exists()


@pytest.mark.slow
def test_what_was_read_is_not_read_again_until_it_changes(tmp_path, own_cache):
    (path,) = traces.job(tmp_path, [[400, 400]])
    seen = []
    first = analyze([path], lambda what, done, total: seen.append(what))
    assert "measuring" in seen and len(list(own_cache.glob("*.duckdb"))) == 1
    seen.clear()
    assert analyze([path], lambda *said: seen.append(said)) == first and not seen
    traces.write(path, traces.document(traces.events([500, 500])))
    os.utime(path, (1, 1))
    assert analyze([path]) != first
    (own_cache.parent / "config" / "disttrain").mkdir(parents=True)
    (own_cache.parent / "config" / "disttrain" / "kernel_patterns.txt").write_text(
        "communication  sgemm\n"
    )
    assert {row.kind for row in analyze([path]).kernels} == {"communication"}


def test_a_damaged_cache_is_read_again(tmp_path, own_cache):
    (path,) = traces.job(tmp_path, [[400, 400]])
    first = analyze([path])
    for database in own_cache.glob("*.duckdb"):
        database.write_bytes(b"damaged" * 1000)
    assert analyze([path]) == first


def test_steps_in_which_nothing_was_launched_are_no_measure(tmp_path):
    late = [
        event | {"ts": event["ts"] + 10**6}
        if not event["name"].startswith("ProfilerStep")
        else event
        for event in traces.events([400, 400, 400])
    ]
    found = analyze([traces.write(tmp_path / "rank0.json", traces.document(late))])
    assert found.ranks[0].compute_us == 900 and found.job.iteration_s is None
    assert any("nothing was launched in the marked" in warning for warning in found.warnings)


def test_a_trace_of_nothing_that_takes_time(tmp_path):
    path = traces.write(
        tmp_path / "rank0.json",
        [{"ph": "X", "cat": "cuda_runtime", "name": "x", "ts": 1, "dur": 1}],
    )
    with pytest.raises(DataError, match="no event with a duration"):
        analyze([path])


def test_a_rank_that_recorded_no_kernel_is_named(tmp_path):
    traces.job(tmp_path, [[400, 400]], world_size=2)
    traces.write(
        tmp_path / "rank1.json",
        traces.document(
            [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": traces.BASE_US, "dur": 5}], 1, 2
        ),
    )
    found = analyze([tmp_path])
    assert len(found.ranks) == 1 and any(
        "rank 1 recorded nothing" in warning for warning in found.warnings
    )


def test_numbers_and_names_of_any_size(tmp_path):
    huge = 2**64 - 1
    found = [
        *traces.events([400]),
        *traces.kernel(
            "nul \0 name",
            traces.BASE_US + 500,
            10,
            7,
            bytes=huge,
            **{"External id": huge, "Collective name": "x" * 100_000, "In msg nelems": 10**30},
        ),
    ]
    found += [
        traces.span("far", 10**25, -1e300, pid=1, tid=1),
        traces.span("much", traces.BASE_US, 1e300, pid=1, tid=1),
    ]
    path = traces.write(tmp_path / "rank0.json", traces.document(found))
    found = analyze([path])
    assert {row.kind for row in found.kernels} == {"communication", "compute"}
    assert any("2 events of rank0.json are malformed" in warning for warning in found.warnings)
    assert ask([path], "SELECT external_id FROM events WHERE name = 'nul \0 name'").rows == [
        (2**63 - 1,)
    ]
