"""`disttrain analyze` on a synthetic trace."""

import json
import shutil
import subprocess
import sys

import pytest

from disttrain_cli.commands.analyze_tables import MOST_OPERATIONS
from tests.analysis import synthetic
from tests.commands import calling
from tests.runtime.factory import write_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("analyzed") / "runs" / "demo"
    synthetic.write(folder / "traces", synthetic.Synthetic())
    return folder


def call(words, capsys):
    return calling.call(["analyze", *words], capsys)


def test_the_verdict_comes_first_and_the_report_last(run_dir, capsys):
    code, out, err = call([run_dir], capsys)
    document = json.loads(call([run_dir, "--json"], capsys)[1])
    lines = out.splitlines()
    assert code == 0 and lines[0] == document["verdict"]["headline"]
    assert lines[-1].split() == ["Report", str(run_dir / "report.html")]
    assert (run_dir / "report.html").stat().st_size > 5000
    for word in (
        "Units",
        "Predicted against measured",
        "Slowest",
        *(unit["name"] for unit in document["units"]),
    ):
        assert word in out
    assert f"Next: {document['verdict']['next_command']}" in err


def test_a_run_files_folder_is_its_run(run_dir, capsys):
    top, count = run_dir.parent.parent, ["--sql", "SELECT count(*) FROM trace", "--json"]
    write_run(top, top, name="demo")
    code, out, _ = call([top, *count], capsys)
    assert code == 0 and out == call([run_dir, *count], capsys)[1]


def test_operations_are_shown_the_largest_error_first(run_dir, capsys):
    _, out, _ = call([run_dir], capsys)
    operations = json.loads(call([run_dir, "--json"], capsys)[1])["operations"]
    table = out[out.index("By operation") :]
    assert operations[0]["operation"] == "iteration" and len(operations) > 1 + MOST_OPERATIONS
    effects = [abs(row["measured"] - row["predicted"]) * row["per_step"] for row in operations[1:]]
    assert (
        effects == sorted(effects, reverse=True)
        and f"{operations[1]['measured']:.4g}" in table.splitlines()[3]
    )
    assert len([line for line in table.splitlines() if " stage " in line]) == MOST_OPERATIONS


def test_a_rehearsal_is_announced_before_its_verdict(run_dir, tmp_path, capsys):
    traces = shutil.copytree(run_dir / "traces", tmp_path / "traces")
    job = json.loads((traces / "job.json").read_text())
    job["rehearsed"] = {
        "processes": 2,
        "time_scale": 3.0,
        "messages": "scaled",
        "noise": 0.0,
        "faults": [{"slow": "stage", "unit": "llm", "stage": 1, "factor": 1.2}],
    }
    (traces / "job.json").write_text(json.dumps(job))
    lines = call([traces], capsys)[1].splitlines()
    assert (
        lines[0] == "Rehearsal: 2 processes emulated 6 GPUs; times are those of the cluster. "
        "Injected: slow stage (llm stage 1, × 1.2)."
    )
    assert lines[1] == json.loads(call([traces, "--json"], capsys)[1])["verdict"]["headline"]
    assert "Rehearsal: 2 processes" in (tmp_path / "report.html").read_text()


def test_sql_answers_as_a_table_or_as_json(run_dir, capsys):
    query = "SELECT count(DISTINCT rank) AS ranks, 'a''b' AS text FROM trace"
    assert call([run_dir, "--sql", query], capsys)[1].splitlines()[-1].split() == ["6", "a'b"]
    assert json.loads(call([run_dir, "--sql", query, "--json"], capsys)[1]) == {
        "columns": ["ranks", "text"],
        "rows": [[6, "a'b"]],
    }
    answered = json.loads(
        call([run_dir, "--sql", "SELECT 0.5, sum(1.25), [1.5]", "--json"], capsys)[1]
    )
    assert answered["rows"] == [[0.5, 1.25, [1.5]]]  # DuckDB's decimals are numbers
    code, out, err = call([run_dir, "--sql", "DROP TABLE units"], capsys)
    assert code == 2 and out == "" and "SELECT" in err


@pytest.mark.parametrize("other", ["--fail-if", "--compare", "--html", "--perfetto"])
def test_what_an_option_would_leave_out_silently_is_refused(run_dir, tmp_path, capsys, other):
    given = {"--fail-if": "job.mfu < 2", "--compare": run_dir}.get(other, tmp_path / "out")
    code, out, err = call([run_dir, "--sql", "SELECT 1", other, given], capsys)
    assert code == 2 and out == "" and f"--sql {other}" in err and not (tmp_path / "out").exists()


def test_fail_if_is_exit_5_and_keeps_stdout_one_document(run_dir, capsys):
    code, out, err = call([run_dir, "--fail-if", "job.iteration_s > 0"], capsys)
    assert code == 5 and "Units" in out and "holds" in err
    code, out, _ = call([run_dir, "--fail-if", "job.iteration_s > 0", "--json"], capsys)
    assert code == 5 and json.loads(out)["fail_if"]["holds"] is True
    code, out, _ = call([run_dir, "--fail-if", "job.iteration_s > 1e9", "--json"], capsys)
    assert code == 0 and json.loads(out)["fail_if"]["holds"] is False
    assert call([run_dir, "--fail-if", "nonsense"], capsys)[0] == 2


@pytest.mark.slow
def test_compare_and_html(run_dir, tmp_path, capsys):
    page = tmp_path / "page.html"
    code, out, _ = call([run_dir / "traces", "--compare", run_dir, "--html", page], capsys)
    assert code == 0 and f"Compared with {run_dir}" in out
    assert "job.iteration_s" in out and page.exists()


def test_quiet_prints_the_report_only(run_dir, capsys):
    assert call([run_dir, "--quiet"], capsys) == (0, f"{run_dir / 'report.html'}\n", "")


def test_no_trace_is_an_error_that_names_the_next_command(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "missing", tmp_path / "empty"):
        code, out, err = call([folder], capsys)
        assert code == 1 and out == "" and str(folder) in err and "disttrain train" in err


def test_without_a_path_the_run_of_the_run_file_here_is_taken(
    run_dir, run_folder, monkeypatch, capsys
):
    shutil.copytree(run_dir / "traces", run_folder / "runs" / "tiny" / "traces")
    monkeypatch.chdir(run_folder)
    code, out, _ = call([], capsys)
    assert code == 0 and out.splitlines()[-1].split() == ["Report", "runs/tiny/report.html"]


@pytest.mark.slow
def test_analyze_loads_no_torch(run_dir):
    code = (
        "import sys\nfrom disttrain_cli.app import main\ntry:\n    main(['analyze', sys.argv[1],"
        " '--quiet'])\nexcept SystemExit as left:\n    assert left.code == 0\nprint('LOADED',"
        " sorted({'torch', 'transformers', 'diffusers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "LOADED []"


def test_perfetto_writes_a_file_and_nothing_else(run_dir, tmp_path, capsys):
    file = tmp_path / "trace.json"
    code, out, _ = call([run_dir, "--perfetto", file], capsys)
    assert code == 0 and "steps 2 to 7" in out and "2 left out" in out and "Verdict" not in out
    assert json.loads(file.read_text())["traceEvents"]
    code, out, _ = call([run_dir, "--perfetto", file, "--json", "--quiet"], capsys)
    document = json.loads(out)
    assert code == 0 and document["path"] == str(file) and document["steps"] == [2, 3, 4, 5, 6, 7]
    code, out, err = call([file, "--perfetto", tmp_path / "again.json"], capsys)
    assert (
        code == 2
        and out == ""
        and "ui.perfetto.dev" in err
        and not (tmp_path / "again.json").exists()
    )
