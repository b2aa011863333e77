"""`disttrain profile`, of a catalogue's device or calibrated by a run: what it prints, writes and
refuses."""

import json

import pytest
import yaml

from disttrain_cli.api.presets import preset_text
from disttrain_cli.commands.profile import CATALOGUE, _render
from disttrain_cli.console import Console
from disttrain_cli.costs.hardware import catalogue
from disttrain_cli.profiling.recorded_data import with_data
from disttrain_cli.spec.profile import Measuring, read_profile
from disttrain_cli.spec.runfile import read_run
from tests.commands.calling import call
from tests.commands.conftest import make_profile
from tests.data.dataset import interleaved, text, write_dataset, write_tar
from tests.profiling.recorded import Recording, layout, retimed, sequences_with, with_layers


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The tiny preset on two nodes of A800, its data drawn from a distribution."""
    value = yaml.safe_load(preset_text("tiny"))
    value["data"] = {
        "distribution": {"images_per_sequence": 2, "generated_per_sequence": 1, "sequences": 300},
        "sequence_length": 256,
        "max_image_pixels": 1024,
    }
    value["cluster"] = {"nodes": 2, "gpus_per_node": 2, "device": "analytic:A800"}
    (tmp_path / "disttrain.yaml").write_text(yaml.safe_dump(value))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_lists_the_catalogue():
    assert CATALOGUE.split(", ") == list(catalogue().devices)


@pytest.mark.slow
def test_tables_and_where_the_figures_are_from(folder, capsys):
    code, out, err = call(["profile"], capsys)
    assert code == 0 and (folder / "runs" / "tiny" / "profile.json").is_file()
    for word in (
        "4 × A800 (analytic)",
        "peak 19.5",
        "A100 80GB",
        "by the curve ampere",
        "inside a node",
        "between nodes",
        "1280.00, 10",
        "image_generator",
        "forward ms",
        "fit error",
    ):
        assert word in out, word
    assert err.endswith("\nNext: disttrain plan\n") and "Wrote runs/tiny/profile.json" in err


def test_what_was_measured_and_spent_is_said(folder, capsys):
    measuring = Measuring(
        clock="cpu",
        budget_s=30,
        started_s=18.2,
        spent_s=28.7,
        sizes={"llm": {"1": (64, 129), "2": (0, 36)}},
    )
    profile = make_profile(read_run(folder / "disttrain.yaml").file)
    for budget_s, over in ((30, ""), (12, "; the first sizes at TP 1 are measured in any case")):
        measuring = measuring.model_copy(update={"budget_s": budget_s})
        shown = profile.model_copy(update={"measuring": measuring})
        _render(Console(), shown, folder / "p.json", "")
        assert (
            "Layers   measured 64 of 165 sizes in 29 s of CPU; the rest is interpolated (budget"
            f" {budget_s} s, start-up took 18 s{over})\n"
            "         llm without TP 2: not measured within the budget; profiling again"
            " continues with them\n"
        ) in capsys.readouterr().out


@pytest.mark.slow
def test_json_has_the_promised_keys(folder, capsys):
    value = yaml.safe_load((folder / "disttrain.yaml").read_text())
    del value["model"]["modules"]["image_generator"]
    del value["data"]["distribution"]["generated_per_sequence"]
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(value))
    code, out, _ = call(["profile", "--device", "analytic:H100", "--json", "--quiet"], capsys)
    document = json.loads(out)
    assert code == 0 and document["device"]["name"] == "H100"
    assert {"name", "kind", "count", "memory_gib", "peak_tflops"} <= set(document["device"])
    assert {"forward_ms", "backward_ms", "fit_error_pct"} <= set(
        document["modules"]["llm"]["tp"]["2"]
    )
    assert {"p2p_gbps", "p2p_us", "all_reduce_gbps", "inter_node"} <= set(document["links"])
    assert {"samples", "fingerprint", "text_tokens", "image_tokens", "images_per_sequence"} <= set(
        document["data"]
    )
    assert {"images_per_s_per_core", "sequences_per_s_per_core"} <= set(document["preprocess"])
    assert document["path"].endswith("profile.json")


@pytest.fixture
def indexed(folder):
    """The same run over a dataset of its own, with a broken sample."""
    value = yaml.safe_load((folder / "disttrain.yaml").read_text())
    value["cluster"]["gpus_per_node"] = 1  # no tensor parallelism to count
    value["data"] = {
        "sources": [{"path": "data/mixed"}],
        "sequence_length": 256,
        "max_image_pixels": 1024,
        "max_bad_fraction": 0.1,
    }
    (folder / "disttrain.yaml").write_text(yaml.safe_dump(value))
    write_dataset(folder / "data")
    write_tar(
        folder / "data" / "mixed" / "00002.tar",
        [("bad.json", b"{"), interleaved("good", text("fine")), ("good.cls", b"7")],
    )
    return folder


@pytest.mark.slow
def test_the_data_are_summed_up_and_changes_refused_until_told_otherwise(indexed, capsys):
    code, out, err = call(["profile"], capsys)
    assert code == 0, err
    for word in (
        "41 samples in",
        "sequences of 256 tokens (",
        " % full), 1 skipped",
        "trained including ends of samples",
        "skipped data/mixed/00002.tar/bad: not valid JSON",
        "scaled down to the budget of 1,024 pixels",
        "ignored: member `.cls` in 1 records",
    ):
        assert word in out, word
    write_tar(indexed / "data" / "mixed" / "00003.tar", [interleaved("new", text("new"))])
    code, out, _ = call(["profile", "--json", "--quiet"], capsys)
    data = json.loads(out)["data"]
    assert (
        code == 0
        and data["samples"] == 42
        and data["skipped"] == 1
        and 0 < data["fill_fraction"] <= 1
    )
    assert 0 < data["scaled_down"] <= data["images"]
    assert data["skipped_first"][0].startswith("data/mixed/00002.tar/bad: ")
    assert data["unread_keys"] == [{"member `.cls`": 1}]
    assert 42 < data["label_tokens"] == data["text_tokens"] + data["samples"]
    write_tar(indexed / "data" / "mixed" / "00003.tar", [interleaved("new", text("changed" * 8))])
    before = (indexed / "runs" / "tiny" / "index.parquet").read_bytes()
    code, _, err = call(["profile"], capsys)
    assert (
        code == 1
        and "00003.tar: was 10240 bytes of" in err
        and "disttrain profile --reindex" in err
    )
    assert (indexed / "runs" / "tiny" / "index.parquet").read_bytes() == before
    code, out, _ = call(["profile", "--reindex", "--json", "--quiet"], capsys)
    assert code == 0 and json.loads(out)["data"]["fingerprint"] != data["fingerprint"]


def test_unknown_devices_are_refused(folder, capsys):
    code, _, err = call(["profile", "--device", "gpu"], capsys)
    assert code == 2 and "analytic:NAME" in err
    code, _, err = call(["profile", "--device", "analytic:X9"], capsys)
    assert code == 1 and "A800" in err and "cluster.peak_tflops, cluster.memory_gib" in err


@pytest.fixture
def recorded(run_folder, monkeypatch):
    """A run of the tiny preset whose layers took 1.5 times what its profile says."""
    monkeypatch.chdir(run_folder)
    run = read_run(run_folder / "disttrain.yaml")
    profile = with_layers(make_profile(run.file), run)
    profile = profile.model_copy(update={"data": with_data(profile, run, sequences_with(2)).data})
    run.dir.profile.write_text(profile.model_dump_json())
    plan = layout(*((1, 1, [len(module.layers)]) for module in profile.modules.values()), batch=16)
    return Recording(
        profile, retimed(profile, lambda *place: 1.5), plan, profile.data.sample, steps=4
    )


def test_a_run_calibrates_its_profile(recorded, run_folder, capsys):
    recorded.write(run_folder / "runs" / "tiny" / "traces")
    before = (run_folder / "runs" / "tiny" / "profile.json").read_text()
    code, out, err = call(["profile", "--calibrate", "runs/tiny"], capsys)
    assert code == 0 and "image_encoder" in out and "+50.0 %" in out and "error before" in out
    assert "Wrote runs/tiny/profile.json; before it: runs/tiny/profile.json.before" in err
    assert err.endswith("\nNext: disttrain plan\n")
    assert (run_folder / "runs" / "tiny" / "profile.json.before").read_text() == before
    profile = read_profile(run_folder / "runs" / "tiny" / "profile.json")
    times, old = (one.modules["llm"].tp["1"] for one in (profile, recorded.planned))
    assert times.forward_ms == pytest.approx(1.5 * old.forward_ms, rel=0.02)
    assert (
        profile.data == recorded.planned.data
        and profile.fingerprints == recorded.planned.fingerprints
    )
    assert profile.provenance["calibrated"].startswith("run tiny, start start, 3 steps of 1 to 3")


def test_a_calibration_as_json_into_a_file(recorded, run_folder, capsys):
    recorded.write(run_folder / "traces")
    code, out, err = call(
        ["profile", "--calibrate", "traces", "--out", "new.json", "--json"], capsys
    )
    document = json.loads(out)
    assert code == 0 and err.endswith("Next: disttrain plan --profile new.json\n")
    assert not (run_folder / "runs" / "tiny" / "profile.json.before").exists()
    assert {
        "what",
        "where",
        "before",
        "after",
        "change_pct",
        "rows",
        "error_before_pct",
        "error_after_pct",
    } <= set(document["calibration"][0])
    assert document["modules"] and document["path"] == "new.json"


def test_drifted_data_come_into_the_profile(recorded, run_folder, capsys):
    recorded.sample, recorded.sizes_per_step = sequences_with(6), 32
    recorded.write(run_folder / "runs" / "tiny" / "traces")
    code, out, err = call(["profile", "--calibrate", "runs/tiny"], capsys)
    assert (
        code == 0
        and "images per sequence" in out
        and "images read per sequence instead of the planned" in err
    )
    old, new = recorded.planned, read_profile(run_folder / "runs" / "tiny" / "profile.json")
    assert len(new.data.sample.tokens) == 128 and new.data.sequences == old.data.sequences
    assert new.data.fingerprint == old.data.fingerprint
    works, before = (one.modules["image_encoder"].work_per_sequence for one in (new, old))
    times, earlier = (one.modules["image_encoder"].tp["1"] for one in (new, old))
    assert times.forward_ms == pytest.approx(
        1.5 * earlier.forward_ms * works.tokens / before.tokens, rel=0.02
    )


def test_data_as_planned_for_stay(recorded, run_folder, capsys):
    recorded.sizes_per_step = 32
    recorded.write(run_folder / "runs" / "tiny" / "traces")
    code, out, _ = call(["profile", "--calibrate", "runs/tiny", "--json"], capsys)
    row = next(
        row for row in json.loads(out)["calibration"] if row["what"] == "images per sequence"
    )
    assert code == 0 and row["change_pct"] == 0.0 and row["rows"] == 128


def test_calibrating_measures_nothing(run_folder, monkeypatch, capsys):
    monkeypatch.chdir(run_folder)
    code, _, err = call(["profile", "--calibrate", "runs/tiny", "--device", "cpu"], capsys)
    assert code == 2 and "--calibrate and --device exclude each other" in err
    code, _, err = call(["profile", "--calibrate", "runs/tiny", "--reindex"], capsys)
    assert code == 2 and "--calibrate and --reindex exclude each other" in err
    code, _, err = call(["profile", "--calibrate", "runs/none"], capsys)
    assert code == 1 and "disttrain train" in err
