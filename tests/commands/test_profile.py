"""`disttrain profile --device analytic:NAME`: no device, no files of data; what it prints and refuses."""

import json

import pytest
import yaml

from disttrain_cli.app import main
from disttrain_cli.commands.init import preset_text
from disttrain_cli.commands.profile import CATALOGUE
from disttrain_cli.costs.hardware import catalogue


def call(words, capsys):
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    shown = capsys.readouterr()
    return left.value.code, shown.out, shown.err


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The tiny preset on two nodes of A800, its data drawn from a distribution."""
    value = yaml.safe_load(preset_text("tiny"))
    value["data"] = {"distribution": {"images_per_sequence": 2, "generated_per_sequence": 1, "sequences": 300},
                     "sequence_length": 256, "max_image_pixels": 1024}
    value["cluster"] = {"nodes": 2, "gpus_per_node": 2, "device": "analytic:A800"}
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(value))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_lists_the_catalogue():
    assert CATALOGUE.split(", ") == list(catalogue().devices)


def test_tables_and_where_the_figures_are_from(folder, capsys):
    code, out, err = call(["profile"], capsys)
    assert code == 0 and (folder / "runs" / "tiny" / "profile.json").is_file()
    for word in ("4 × A800 (analytic)", "peak 19.5", "A100 80GB", "by the curve ampere", "inside a node",
                 "between nodes", "1280.00, 10", "image_generator", "forward ms", "fit error"):
        assert word in out, word
    assert err.endswith("\nNext: disttrain plan\n") and "Wrote runs/tiny/profile.json" in err


def test_json_has_the_promised_keys(folder, capsys):
    code, out, _ = call(["profile", "--device", "analytic:H100", "--json", "--quiet"], capsys)
    document = json.loads(out)
    assert code == 0 and document["device"]["name"] == "H100"
    assert {"name", "kind", "count", "memory_gib", "peak_tflops"} <= set(document["device"])
    assert {"forward_ms", "backward_ms", "fit_error_pct"} <= set(document["modules"]["llm"]["tp"]["2"])
    assert {"p2p_gbps", "p2p_us", "all_reduce_gbps", "inter_node"} <= set(document["links"])
    assert {"samples", "fingerprint", "text_tokens", "image_tokens", "images_per_sequence"} <= set(document["data"])
    assert {"images_per_s_per_core", "sequences_per_s_per_core"} <= set(document["preprocess"])
    assert document["path"].endswith("profile.json")


def test_unknown_devices_are_refused(folder, capsys):
    code, _, err = call(["profile", "--device", "gpu"], capsys)
    assert code == 2 and "analytic:NAME" in err
    code, _, err = call(["profile", "--device", "analytic:X9"], capsys)
    assert code == 1 and "A800" in err and "cluster.peak_tflops, cluster.memory_gib" in err
