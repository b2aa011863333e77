"""`disttrain export` at the command line."""

import json

import pytest

from disttrain_cli.app import main
from tests.runtime.outputs.test_export import trained, written_run


def disttrain(*words):
    """Exit code of a command."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


@pytest.mark.slow
def test_one_json_document_a_table_and_the_path(tmp_path, monkeypatch, capsys):
    run = written_run(tmp_path)
    trained(run, 3)
    monkeypatch.chdir(tmp_path)
    assert disttrain("export", "--to", "out", "--json") == 0
    said = json.loads(capsys.readouterr().out)
    assert (
        said["path"] == "out" and said["step"] == 3 and said["checkpoint"].endswith("step-000003")
    )
    assert said["projectors"] == "out/projectors.safetensors"
    assert said["modules"]["llm"] == {
        "folder": "llm",
        "loads_with": "transformers.LlamaForCausalLM",
        "parameters": said["modules"]["llm"]["parameters"],
        "averaged": False,
        "base": None,
    }
    assert disttrain("export", run.path, "--out", tmp_path / "more") == 0
    told = capsys.readouterr()
    assert "diffusers.AutoencoderKL" in told.out + told.err and "cat more/README.md" in told.err
    assert disttrain("export", "--to", "third", "--quiet", "--checkpoint", 3) == 0
    assert capsys.readouterr().out.strip() == "third"


def test_errors_have_their_exit_codes_and_leave_nothing(tmp_path, monkeypatch, capsys):
    written_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert disttrain("export") == 2 and "--to" in capsys.readouterr().err
    assert disttrain("export", "--to", "out") == 1
    assert "no checkpoint" in capsys.readouterr().err
    assert disttrain("export", "--to", "out", "--json") == 1
    assert json.loads(capsys.readouterr().out)["error"]
    assert not (tmp_path / "out").exists()
