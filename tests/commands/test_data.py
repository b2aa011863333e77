"""`disttrain data serve`: what it refuses before it opens a port (how it serves:
tests/runtime/test_data_service.py); `disttrain data check`: what it lists and leaves out;
`disttrain data index`: one host or several."""

import json
import subprocess
import sys

import pytest

from disttrain_cli import api
from disttrain_cli.api import measuring
from disttrain_cli.app import main
from disttrain_cli.spec.progress import silent
from disttrain_cli.spec.runfile import read_run
from disttrain_cli.spec.whole import write_whole
from tests.data.dataset import damaged, encoded, write_tar
from tests.planning.synthetic import run_file, tiny


def serve(capsys, *words):
    """Exit code and error of a call that must fail, as `--json` tells them."""
    with pytest.raises(SystemExit) as left:
        main(["data", "serve", *map(str, words), "--json"])
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == left.value.code
    return left.value.code, error


def test_beyond_loopback_it_says_what_to_give(run_folder, capsys):
    code, error = serve(capsys, run_folder, "--host", "0.0.0.0")
    assert code == 2 and "TLS and a token" in error["what"]
    assert (
        "--tls-cert and --tls-key, preprocess.token_file" in error["why"]
        and "127.0.0.1" in error["next"]
    )


def test_a_certificate_needs_its_key(run_folder, capsys):
    code, error = serve(capsys, run_folder, "--tls-cert", "node.pem")
    assert code == 2 and "belong together" in error["what"]


def test_without_a_plan(run_folder, capsys):
    code, error = serve(capsys, run_folder)
    assert code == 1 and "plan.yaml" in error["what"] and "disttrain plan" in error["next"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["serve", "--port", "80000"], "--port"),
        (["serv"], "serv"),
        (["serve", "--processes", "0"], "--processes"),
        (["index", "--share", "2/2"], "'2/2'"),
        (["index", "--share", "1"], "'1'"),
    ],
)
def test_wrong_usage(words, named, capsys):
    with pytest.raises(SystemExit) as left:
        main(["data", *words])
    said = capsys.readouterr().err
    assert left.value.code == 2 and named in said and "Next: disttrain data" in said


@pytest.mark.slow
def test_no_torch_is_loaded():
    code = (
        "import sys, disttrain_cli.commands.data, disttrain_cli.data.serving.process,"
        " disttrain_cli.data.serving.worker, disttrain_cli.data.serving.supervisor,"
        " disttrain_cli.data.decoding; print([name for name in ('torch', 'transformers',"
        " 'deepspeed') if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "[]\n"
    )


@pytest.fixture
def damaged_folder(tmp_path, capsys):
    """A run whose data have a cut picture and one that only a decoder finds damaged, of 20."""
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path)])
    capsys.readouterr()
    whole, files = encoded(40, 40), []
    for n in range(20):
        picture = {3: whole[:-20], 5: damaged(whole)}.get(n, whole)
        files += [(f"{n:02d}.jpg", picture), (f"{n:02d}.txt", b"a picture")]
    files.append(("00.cls", b"7"))
    write_tar(tmp_path / "data" / "captions" / "0.tar", files)
    text = (tmp_path / "disttrain.yaml").read_text()
    text = "\n".join(line for line in text.splitlines() if "data/interleaved" not in line)
    (tmp_path / "disttrain.yaml").write_text(
        text.replace("\ndata:\n", "\ndata:\n  max_bad_fraction: 0.1\n")
    )
    return tmp_path


def check(capsys, *words):
    with pytest.raises(SystemExit) as left:
        main(["data", "check", *map(str, words)])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


@pytest.mark.slow
def test_a_check_lists_every_sample_with_its_reason_and_leaves_it_out(damaged_folder, capsys):
    code, out, err = check(capsys, damaged_folder)
    assert code == 0 and "data/captions/0.tar/03" in out and "data/captions/0.tar/05" in out
    assert "truncated jpeg file" in out and "premature end of data segment" in out
    assert "18 samples can be used, 2 are left out" in out and "Next: disttrain profile" in err
    assert "ignored: member `.cls` in 1 records" in out
    code, out, _ = check(capsys, damaged_folder, "--json")
    told = json.loads(out)
    assert (told["samples"], told["decoded"], told["found"]) == (18, 0, 0)
    assert told["unread_keys"] == [{"member `.cls`": 1}]
    assert [(one["key"], one["shard"]) for one in told["skipped"]] == [
        ("03", "data/captions/0.tar"),
        ("05", "data/captions/0.tar"),
    ]

    run, profile = read_run(damaged_folder / "disttrain.yaml"), tiny(run_file())
    model = run.file.model_fingerprint()
    for data, then in (("of other samples", "profile"), (told["data"], "plan")):
        made_for = profile.fingerprints.model_copy(update={"model": model, "data": data})
        profile = profile.model_copy(update={"fingerprints": made_for})
        write_whole(run.dir.profile, profile.model_dump_json())
        assert f"Next: disttrain {then}" in check(capsys, damaged_folder)[2]


@pytest.mark.parametrize(("allowed", "listed"), [("0.06", ["/03", "/05"]), ("0.01", ["/03"])])
def test_past_the_share_that_may_be_bad_all_are_listed_and_nothing_is_left_out(
    damaged_folder, capsys, allowed, listed
):
    file = damaged_folder / "disttrain.yaml"
    file.write_text(
        file.read_text().replace("max_bad_fraction: 0.1", f"max_bad_fraction: {allowed}")
    )
    code, out, err = check(capsys, damaged_folder)
    assert code == 1 and all(f"data/captions/0.tar{name}" in out for name in listed)
    assert "data.max_bad_fraction" in err and "bug" not in err


def index(capsys, *words):
    with pytest.raises(SystemExit) as left:
        main(["data", "index", *map(str, words), "--json"])
    assert left.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_an_index_is_made_by_one_host_or_several(damaged_folder, capsys):
    written = damaged_folder / "runs" / "tiny" / "index.parquet"
    told = index(capsys, damaged_folder)
    assert told == {"samples": 19, "skipped": 1, "unread_files": [], "path": str(written)}
    alone = written.read_bytes()
    written.unlink()
    told = [index(capsys, damaged_folder, "--share", f"{number}/2") for number in (0, 1)]
    assert [one["shards"] for one in told] == [1, 0] and not written.exists()
    index(capsys, damaged_folder)
    assert written.read_bytes() == alone


def test_reindexing_takes_nothing_over(damaged_folder, capsys):
    index(capsys, damaged_folder, "--share", "0/1")
    partial = damaged_folder / "runs" / "tiny" / "index.partial"
    assert len(list(partial.iterdir())) == 1
    measuring._reindex(api.open_run(damaged_folder), silent)
    assert not partial.exists()


def test_sizes_alone_cannot_be_checked(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path), "--preset", "mllm-9b"])
    capsys.readouterr()
    code, _, err = check(capsys, tmp_path)
    assert code == 1 and "data.distribution has sizes only" in err


def test_orders_are_made_ahead_and_once(damaged_folder, capsys):
    def order(*words):
        with pytest.raises(SystemExit) as left:
            main(["data", "order", str(damaged_folder), *words])
        return left.value.code, capsys.readouterr().out

    code, out = order("--epochs", "3", "--json", "--quiet")
    told = json.loads(out)
    assert code == 0
    assert [one["epoch"] for one in told["epochs"]] == [0, 1, 2]
    ends = [one["first_sequence"] + one["sequences"] for one in told["epochs"]]
    assert [one["first_sequence"] for one in told["epochs"]] == [0, *ends[:-1]]
    made = sorted(damaged_folder.glob("runs/*/orders/*/epoch-*"))
    times = [path.stat().st_mtime_ns for path in made]
    assert len(made) == 3
    code, out = order()
    assert code == 0 and "Epoch 0:" in out
    assert [path.stat().st_mtime_ns for path in made] == times


def test_sizes_alone_have_no_order_to_keep(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["init", str(tmp_path), "--preset", "mllm-9b"])
    with pytest.raises(SystemExit) as left:
        main(["data", "order", str(tmp_path)])
    assert left.value.code == 1 and "data.distribution" in capsys.readouterr().err
