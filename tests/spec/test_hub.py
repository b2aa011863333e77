"""Models by their names on Hugging Face, from a hub of our own on loopback."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from disttrain_cli.data.tokenizer import read_tokenizer
from disttrain_cli.errors import MismatchError, SpecError
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.weights import load_into, starting_weights
from disttrain_cli.runtime.checkpoints.folder import check_belongs, model_of
from disttrain_cli.runtime.outputs.export import export
from disttrain_cli.spec import hub as by_name
from disttrain_cli.spec.runfile import read_run
from tests.cases import first_fast
from tests.fake_hub import serving
from tests.runtime.outputs.test_export import trained
from tests.whole_models import run_of, write_llava

OTHER = "b" * 40


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    """A whole model as it is published, with files that nobody should download."""
    folder = tmp_path_factory.mktemp("published") / "llava"
    write_llava(folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")
    (folder / "modeling.py").write_text("raise SystemExit('executed')")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    return folder


@pytest.fixture
def hub(tmp_path, monkeypatch, llava):
    monkeypatch.setattr(by_name, "_snapshots", {})
    monkeypatch.setattr(by_name, "_complete", set())
    with serving(monkeypatch, tmp_path / "cache") as made:
        made.put("org/llava", llava)
        yield made


def run_by_name(folder, name="org/llava", **model):
    return run_of(folder / "none", {"folder": name, **model})


@pytest.mark.slow
def test_small_files_come_when_the_run_file_is_read_and_weights_when_they_are_needed(
    hub, tmp_path, llava
):
    run = run_by_name(tmp_path)
    assert {"config.json", "tokenizer.json", "processor_config.json"} <= set(hub.asked)
    assert not [name for name in hub.asked if name.endswith((".safetensors", ".bin", ".py"))]
    assert hub.asked.count("config.json") == 1
    assert run.revisions == {"org/llava": "a" * 40}
    assert read_tokenizer(run).image == run.published.image_token
    assert any("a" * 40 in note for note in starting_weights(run))
    assert "model.safetensors" not in hub.asked
    said = []
    run.fetch_weights(lambda *progress: said.append(progress))
    assert hub.asked.count("model.safetensors") == 1 and "modeling.py" not in hub.asked
    assert any("downloading org/llava" in what for what, *_ in said)
    asked = len(hub.asked)
    layers = build_layers(run, 0, len(layer_table(run)))
    load_into(layers, run)
    beside = run_of(llava)
    expected = build_layers(beside, 0, len(layers))
    load_into(expected, beside)
    for one, other in zip(layers, expected, strict=True):
        for (path, found), wanted in zip(one.named_parameters(), other.parameters(), strict=True):
            assert torch.equal(found, wanted), path
    assert len(hub.asked) == asked


def test_what_is_in_the_cache_is_taken_without_a_network(hub, tmp_path, llava, monkeypatch):
    run_by_name(tmp_path).fetch_weights()
    hub.put("org/llava", llava, OTHER)
    hub.asked.clear()
    assert run_by_name(tmp_path).revisions == {"org/llava": "a" * 40}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = run_by_name(tmp_path)
    run.fetch_weights()
    assert run.revisions == {"org/llava": "a" * 40} and not hub.asked
    with pytest.raises(SpecError, match=r"model.folder: there is no folder org/other") as caught:
        run_by_name(tmp_path, "org/other")
    assert "HF_HUB_OFFLINE" in caught.value.why and "hf download org/other" in str(caught.value)


def test_a_revision_is_pinned_and_another_is_not_resumed_from(hub, tmp_path, llava):
    hub.put("org/llava", llava, OTHER)
    pinned = run_by_name(tmp_path, f"org/llava@{'a' * 40}")
    assert pinned.revisions == {f"org/llava@{'a' * 40}": "a" * 40}
    run = run_by_name(tmp_path)
    assert run.revisions == {"org/llava": OTHER}
    trained(run, start=lambda layers: load_into(layers, run))
    newest = run.dir.checkpoints / "step-000001"
    check_belongs(newest, model_of(run))
    before = run.file.model_fingerprint()
    shutil.rmtree(tmp_path / "cache")
    hub.put("org/llava", llava, "c" * 40)
    again = run_by_name(tmp_path)
    assert again.file.model_fingerprint() != before
    with pytest.raises(MismatchError, match="other revisions of published models"):
        check_belongs(newest, model_of(again))


@pytest.mark.slow
def test_an_adapter_names_the_model_and_its_commit(hub, tmp_path):
    lora = {"lora": {"r": 2, "target_modules": ["q_proj"]}}
    run = run_by_name(tmp_path, modules={"llm": lora, "vision": lora})
    trained(run, start=lambda layers: load_into(layers, run))
    export(run, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/llava", "a" * 40)
    run = run_by_name(tmp_path, adapter="out")
    from disttrain_cli.models.adapters import check_adapters

    assert len(check_adapters(run, ["vision", "llm"])) == 2


@pytest.mark.parametrize(
    ("name", "told"),
    first_fast(
        [
            ("org/missing", "there is no such model, or it is private"),
            ("org/llava@v9", "there is no revision v9"),
            ("org/gated", "gated: its owner grants access"),
            ("org/a--b", "Cannot have -- or .. in repo_id"),
            ("org/llava.git", "Repo_id cannot end by '.git'"),
        ],
        2,
    ),
)
def test_what_cannot_be_had_is_said(hub, tmp_path, llava, name, told):
    hub.put("org/gated", llava)
    hub.gated.add("org/gated")
    with pytest.raises(SpecError, match="there is no folder org/") as caught:
        run_by_name(tmp_path, name)
    assert told in caught.value.why


def test_a_hub_that_does_not_answer_is_said(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(SpecError, match="not in the cache and cannot be downloaded"):
        run_by_name(tmp_path)


def test_weights_that_no_network_brings_are_said(hub, tmp_path, monkeypatch):
    """The small files are in the cache."""
    run = run_by_name(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SpecError, match="not in the cache and cannot be downloaded"):
        run.fetch_weights()


def test_an_interrupted_download_goes_on(hub, tmp_path, llava):
    """Of an older library's, behind the first of two shards."""
    folder = tmp_path / "sharded"
    shutil.copytree(llava, folder, ignore=lambda _, names: {"onnx", "model.safetensors"} & {*names})
    tensors = load_file(llava / "model.safetensors")
    shards = {f"model-0000{part}-of-00002.safetensors": {} for part in (1, 2)}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        list(shards.values())[number % 2][name] = tensor
    for file, values in shards.items():
        save_file(values, folder / file, metadata={"format": "pt"})
    places = {name: file for file, values in shards.items() for name in values}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    hub.put("org/llava", folder, OTHER)
    second = list(shards)[1]
    cached = tmp_path / "cache" / "models--org--llava"
    shutil.copytree(folder, cached / "snapshots" / OTHER, ignore=lambda *_: {second})
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(OTHER)
    run = run_by_name(tmp_path)
    run.fetch_weights()
    assert second in hub.asked
    load_into(build_layers(run, 0, len(layer_table(run))), run)


def test_weights_that_are_pickled_only_are_refused(hub, tmp_path, llava):
    folder = tmp_path / "pickled"
    shutil.copytree(llava, folder)
    (folder / "model.safetensors").unlink()
    hub.put("org/pickled", folder)
    with pytest.raises(SpecError, match="org/pickled has no safetensors weights"):
        run_by_name(tmp_path, "org/pickled").fetch_weights()
    assert "pytorch_model.bin" not in hub.asked


def test_a_folder_beside_the_run_file_comes_first(hub, tmp_path, llava):
    shutil.copytree(llava, tmp_path / "org" / "llava")
    run = run_by_name(tmp_path)
    assert run.resolve("org/llava") == tmp_path / "org" / "llava"
    assert not hub.asked and not run.revisions


def test_a_module_is_called_by_name(hub, tmp_path):
    run = run_by_name(tmp_path)
    content = {
        "name": "parts",
        "model": {
            "modules": {
                "eye": {"kind": "encoder", "folder": "org/llava", "feature_layer": -2},
                "llm": {"kind": "llm", "folder": "org/llava"},
            }
        },
        "data": {"sources": [{"path": "data"}], "sequence_length": 64, "max_image_pixels": 1024},
        "train": {"global_batch_size": 4, "steps": 1},
    }
    (tmp_path / "parts.yaml").write_text(json.dumps(content))
    parts = read_run(tmp_path / "parts.yaml")
    assert parts.resolve("org/llava") == run.resolve("org/llava")
    layers = build_layers(parts, 0, len(layer_table(parts)))
    assert any("llm: weights from" in note for note in load_into(layers, parts))
