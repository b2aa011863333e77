"""`disttrain init`: presets, sample data, and what is refused."""

import json
import re

import pytest

from disttrain_cli.api.environment import cuda_devices
from disttrain_cli.api.presets import fitted, preset_names, preset_text
from disttrain_cli.app import main
from disttrain_cli.spec.runfile import read_run


def init(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["init", *words])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


@pytest.mark.parametrize("name", ["tiny", "mllm-9b", "qwen3-vl-8b", "tiny-qwen3-vl"])
def test_a_preset_is_a_valid_run_file_and_names_itself(name, tmp_path, capsys):
    code, _, err = init([str(tmp_path / "run"), "--preset", name], capsys)
    run = read_run(tmp_path / "run" / "disttrain.yaml")
    assert code == 0 and run.file.name == name
    if run.file.data.distribution is not None:
        assert err.endswith(f"Next: cd {tmp_path / 'run'} && disttrain profile\n")
    else:  # a profile would fail: there is no data yet
        assert err.endswith(
            f"Next: disttrain init {tmp_path / 'run'} --preset {name} --sample-data\n"
        )


def test_the_next_step_after_data_is_to_profile_it(tmp_path, capsys):
    code, _, err = init([str(tmp_path), "--sample-data"], capsys)
    assert code == 0 and err.endswith(f"Next: cd {tmp_path} && disttrain profile\n")


def test_help_names_every_preset(capsys):
    code, out, _ = init(["--help"], capsys)
    assert code == 0 and all(re.search(rf"[ ,.]{name}[,.]", out) for name in preset_names())


def test_writing_twice_is_fine_but_an_edited_file_is_kept(tmp_path, capsys):
    assert init([str(tmp_path)], capsys)[0] == 0
    assert init([str(tmp_path)], capsys)[0] == 0
    file = tmp_path / "disttrain.yaml"
    file.write_text(file.read_text() + "# mine\n")
    code, out, err = init([str(tmp_path)], capsys)
    assert code == 1 and out == "" and str(file) in err and file.read_text().endswith("# mine\n")


def test_json_names_what_was_written(tmp_path, capsys):
    code, out, _ = init([str(tmp_path), "--json"], capsys)
    assert code == 0
    assert json.loads(out) == {
        "path": str(tmp_path / "disttrain.yaml"),
        "preset": "tiny",
        "data": [],
    }


def test_a_folder_that_is_a_file_is_an_error_of_the_user(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    code, _, err = init([str(tmp_path / "taken")], capsys)
    assert code == 1 and "taken" in err and "bug" not in err


def test_a_preset_asks_for_no_more_gpus_than_there_are():
    assert "gpus_per_node: 1 " in fitted(preset_text("tiny"), 1)
    assert fitted(preset_text("tiny"), 0) == fitted(preset_text("tiny"), 64) == preset_text("tiny")


def test_gpus_are_counted_by_the_driver(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g'\necho 'GPU 1: A (UUID: y)'\n"
    )
    tool.chmod(0o755)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert cuda_devices() == 2
    for visible, count in {
        "1": 1,
        "": 0,
        "-1": 0,
        "0,-1,1": 1,
        "1, 0": 2,
        "7": 0,
        "GPU-x": 1,
    }.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert cuda_devices() == count, visible


def test_sample_data_is_written_where_the_run_file_looks(tmp_path, capsys):
    code, out, _ = init([str(tmp_path), "--sample-data", "--json"], capsys)
    run = read_run(tmp_path / "disttrain.yaml")
    assert code == 0 and json.loads(out)["data"] == [
        str(tmp_path / source.path) for source in run.file.data.sources
    ]
    assert all(list(run.resolve(source.path).glob("*.tar")) for source in run.file.data.sources)
