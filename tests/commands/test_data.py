"""`disttrain data serve`: what it refuses before it opens a port. How it serves: tests/runtime/test_data_service.py."""

import json
import subprocess
import sys

import pytest

from disttrain_cli.app import main


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
    assert "--tls-cert and --tls-key, preprocess.token_file" in error["why"] and "127.0.0.1" in error["next"]


def test_a_certificate_needs_its_key(run_folder, capsys):
    code, error = serve(capsys, run_folder, "--tls-cert", "node.pem")
    assert code == 2 and "belong together" in error["what"]


def test_without_a_plan(run_folder, capsys):
    code, error = serve(capsys, run_folder)
    assert code == 1 and "plan.yaml" in error["what"] and "disttrain plan" in error["next"]


@pytest.mark.parametrize(("words", "named"), [(["serve", "--port", "80000"], "--port"), (["serv"], "serv"),
                                              (["serve", "--processes", "0"], "--processes")])
def test_wrong_usage(words, named, capsys):
    with pytest.raises(SystemExit) as left:
        main(["data", *words])
    said = capsys.readouterr().err
    assert left.value.code == 2 and named in said and "Next: disttrain data" in said


def test_no_torch_is_loaded():
    code = ("import sys, disttrain_cli.commands.data, disttrain_cli.data.serving.process, "
            "disttrain_cli.data.serving.worker, disttrain_cli.data.serving.supervisor, disttrain_cli.data.decoding; "
            "print([name for name in ('torch', 'transformers', 'deepspeed') if name in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
