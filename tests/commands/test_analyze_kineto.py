"""`disttrain analyze` on Kineto traces."""

import json

import pytest

from tests.analysis.kineto import traces
from tests.commands.test_analyze import call


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def slow_rank(tmp_path):
    """A folder in which rank 2 is late in every step."""
    arrivals = [
        [620 + (rank + step) % 3 + 150 * (rank == 2) for step in range(12)] for rank in range(4)
    ]
    traces.job(tmp_path / "traces of; job", arrivals, compute=[600] * 4)
    return tmp_path / "traces of; job"


@pytest.mark.slow
def test_the_verdict_the_tables_and_the_next_command(slow_rank, capsys):
    code, out, err = call([slow_rank], capsys)
    assert code == 0 and out.startswith(
        "Rank 2 is the straggler: it is the last to join 11 of 11 collectives"
    )
    for title in (
        "Ranks; ms over",
        "Collectives with the longest waiting",
        "Kernels with the largest total time",
        "Warnings",
    ):
        assert title in out
    assert (
        f"Next: disttrain analyze '{slow_rank}' --sql " in err
        and "Units" not in out
        and "Report" not in out
    )
    assert "not computing" in out and "bubble" not in out  # nothing names a pipeline


@pytest.mark.slow
def test_json_sql_fail_if_and_compare(slow_rank, tmp_path, capsys):
    traces.job(tmp_path / "before", [[620] * 12] * 4, compute=[600] * 4)
    code, out, _ = call(
        [
            slow_rank,
            "--json",
            "--compare",
            tmp_path / "before",
            "--fail-if",
            "stragglers.lost_s.worker > 0.00005",
        ],
        capsys,
    )
    document = json.loads(out)
    assert code == 5 and document["fail_if"]["holds"] and document["format"] == "kineto"
    verdict, step_s = document["verdict"], document["job"]["iteration_s"]
    assert verdict["lost_fraction"] == pytest.approx(verdict["lost_s"] / step_s)
    assert f"({100 * verdict['lost_fraction']:.0f} %)" in verdict["headline"]
    changes = {change["what"]: change for change in document["compare"]["changes"]}
    assert (
        changes["stragglers.lost_s.worker"]["before"]
        == 0
        < changes["stragglers.lost_s.worker"]["after"]
    )
    times = {(row["measure"], row["name"]): row for row in document["compare"]["times"]["rows"]}
    assert times["operation", "all_reduce"]["significant"]  # the others wait in it
    assert not times["kernel", traces.GEMM]["significant"]
    code, out, _ = call(
        [
            slow_rank,
            "--json",
            "--sql",
            "SELECT rank, count(*) AS n FROM kernels GROUP BY 1 ORDER BY 1",
        ],
        capsys,
    )
    assert code == 0 and json.loads(out) == {
        "columns": ["rank", "n"],
        "rows": [[rank, 24] for rank in range(4)],
    }
    assert call([slow_rank, "--sql", "DROP TABLE files"], capsys)[0] == 2


def test_names_steer_no_terminal(tmp_path, capsys):
    found = [
        *traces.events([400]),
        *traces.kernel("evil \x1b[31m \u202e", traces.BASE_US + 500, 300, 7),
    ]
    path = traces.write(tmp_path / "rank0.json", traces.document(found))
    out = call([path], capsys)[1]
    assert "evil ?[31m ?" in out and "\x1b" not in out


def test_a_file_that_is_no_trace_is_an_error_of_the_user(tmp_path, capsys):
    code, _, err = call([traces.write(tmp_path / "x.json", "{}")], capsys)
    assert code == 1 and "x.json contains no traceEvents" in err
