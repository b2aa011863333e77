"""Every preset that ships: it is read, its model is put together, its data are drawn, its device is
known."""

import json
from collections.abc import Collection
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from disttrain_cli.api.presets import has_model, preset_names, preset_text, write_model_files
from disttrain_cli.app import main
from disttrain_cli.costs.hardware import analytic_device
from disttrain_cli.data.epochs.mixture import Mixture
from disttrain_cli.data.indexing.building import open_index
from disttrain_cli.data.packing import pack
from disttrain_cli.models.graph import describe, layer_table
from disttrain_cli.spec.runfile import Run, read_run
from tests.cases import mostly_slow

#: Parameters of the LLM in billions, as its makers count them.
LLM_BILLIONS = {
    "mllm-9b": 6.74,
    "mllm-15b": 13.0,
    "mllm-72b": 69.0,
    "mllm-130b": 130.0,
    "vlm-8b": 6.74,
    "qwen-vl-8b": 7.62,
    "qwen2.5-vl-7b": 7.62,
    "qwen2.5-vl-7b-qwen-image": 7.62,
    "qwen2.5-vl-7b-lora": 7.66,  # with adapters of 0.04
    "qwen3-vl-8b": 8.19,
    "qwen3-vl-8b-long": 8.19,
    "qwen3-vl-8b-sd3.5": 8.19,
    "qwen3-vl-8b-flux": 8.19,
    "qwen3-vl-32b": 32.8,
    "qwen3-vl-30b-a3b": 30.5,
    "qwen3-vl-235b-a22b": 235.0,
    "internvl3-8b": 7.61,
    "qwen3.5-9b": 8.95,
    "gemma4-31b": 30.7,
    "glm-4.6v-flash": 9.40,
    "mistral-small-3.1-24b": 23.6,
    "qwen2.5-omni-7b": 7.62,
    "mllm-audio-10b": 6.74,
    "tiny": 0.0009,
    "tiny-audio": 0.0009,
    "tiny-flow": 0.0009,
    "tiny-qwen-image": 0.0009,
    "tiny-two-generators": 0.0009,
    "tiny-qwen2.5-vl": 0.00078,
    "tiny-qwen3-vl": 0.00078,
    "tiny-qwen3-vl-moe": 0.00241,
    "tiny-llava": 0.0009,
    "tiny-internvl": 0.00083,
    "tiny-smolvlm": 0.00078,
    "tiny-qwen3.5": 0.00086,
    "tiny-gemma4": 0.00081,
    "tiny-glm4v": 0.00083,
    "tiny-mistral3": 0.00083,
    "tiny-qwen2.5-omni": 0.00078,
}

#: Where the preset that is rehearsed is smaller.
SMALLER = {
    "  nodes: 4": "  nodes: 1",
    "  gpus_per_node: 8": "  gpus_per_node: 4",
    "  global_batch_size: 256": "  global_batch_size: 16",
}


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    return int(stopped.value.code or 0)


def preset(name: str, folder: Path) -> Run:
    if "mistral" in name:
        pytest.importorskip("torchvision")  # its processor's class imports it
    (folder / "disttrain.yaml").write_text(preset_text(name))
    if has_model(name):
        write_model_files(name, folder / "model")
    return read_run(folder / "disttrain.yaml")


#: Of generators that are transformers, without VAE and projector, as their makers count them.
GENERATOR_BILLIONS = {
    "qwen3-vl-8b-sd3.5": 2.5,
    "qwen3-vl-8b-flux": 11.9,
    "qwen2.5-vl-7b-qwen-image": 20.4,
}


#: In every run: one of each kind of module, those of published sizes.
FAST = {
    "internvl3-8b",
    "mllm-9b",
    "mllm-audio-10b",
    "qwen2.5-vl-7b-lora",
    "qwen3-vl-30b-a3b",
    "qwen3-vl-8b-flux",
    "tiny-two-generators",
}


def cases(names: Collection[str]) -> list[ParameterSet]:
    """Return presets as parameters; all but `FAST` are slow."""
    return mostly_slow(names, *(FAST & set(names)))


@pytest.mark.parametrize("name", cases(preset_names()))
def test_model_and_device(name: str, tmp_path: Path) -> None:
    run = preset(name, tmp_path)
    assert run.file.name == name
    inputs, table = describe(run), layer_table(run)
    billions = sum(layer.parameters for layer in table if layer.module == inputs.llm) / 1e9
    assert billions == pytest.approx(LLM_BILLIONS[name], rel=0.05)
    assert list(dict.fromkeys(layer.module for layer in table)) == run.file.model.order
    if name in GENERATOR_BILLIONS:
        billions = sum(
            layer.parameters
            for layer in table
            if layer.module == "image_generator" and layer.kind not in ("vae_encoder", "projector")
        )
        assert billions / 1e9 == pytest.approx(GENERATOR_BILLIONS[name], rel=0.02)
    kind, _, device = run.file.cluster.device.partition(":")
    if kind == "analytic":
        assert analytic_device(device, run.file.cluster, run.file.train.precision).name == device


@pytest.mark.parametrize(
    "name", cases([one for one in preset_names() if not one.startswith("tiny")])
)
def test_data(name: str, tmp_path: Path) -> None:
    run = preset(name, tmp_path)
    asked, inputs = run.file.data.distribution, describe(run)
    assert asked is not None
    epoch = pack(Mixture(open_index(run, inputs), 0), 0)
    assert epoch.fill_fraction == pytest.approx(1.0, abs=0.01)
    assert len(epoch.items["image"].segment) / len(epoch) == pytest.approx(
        asked.images_per_sequence, rel=0.01
    )
    assert len(epoch.items["target"].segment) / len(epoch) == pytest.approx(
        asked.generated_per_sequence, rel=0.01
    )
    assert epoch.items["audio"].counts.mean() == pytest.approx(asked.clips_per_sequence, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vlm-8b", "mllm-audio-10b"])
def test_profile_and_plan(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = preset(name, tmp_path)
    path = str(tmp_path / "disttrain.yaml")
    assert call("profile", path, "--quiet") == 0
    capsys.readouterr()
    assert call("plan", path, "--json", "--quiet") == 0
    plan = json.loads(capsys.readouterr().out)
    assert [
        module for unit in plan["plan"]["units"] for module in unit["modules"]
    ] == run.file.model.order
    assert 0.2 < plan["predicted"]["mfu"] < 0.75
    assert (
        plan["predicted"]["iteration_s"]
        <= min(base["iteration_s"] for base in plan["baselines"].values() if base and base["plan"])
        * 1.001
    )
    assert call("train", path) == 1  # sizes only, and a device that is not here
    message = capsys.readouterr().err
    assert "data.distribution" in message and "Next:" in message


@pytest.mark.slow
def test_a_vision_language_preset_is_rehearsed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Qwen3-VL 8B on four GPUs: images' features of four kinds travel between units."""
    preset("qwen3-vl-8b", tmp_path)
    path = tmp_path / "disttrain.yaml"
    text = path.read_text()
    for given, smaller in SMALLER.items():
        assert text.count(given) == 1
        text = text.replace(given, smaller)
    path.write_text(text)
    for words in (("profile",), ("plan", "--strategy", "disaggregated")):
        assert call(*words, str(path), "--quiet") == 0
    capsys.readouterr()
    assert call("train", str(path), "--rehearse", "--steps", "2", "--json", "--quiet") == 0
    said = json.loads(capsys.readouterr().out)
    assert said["processes"] == said["gpus"] == 4 and len(said["steps"]) == 2
    for rehearsed, simulated in zip(said["steps"], said["simulated"], strict=True):
        assert simulated["iteration_s"] == pytest.approx(said["predicted_iteration_s"], rel=0.05)
        assert rehearsed["iteration_s"] > 0.99 * simulated["iteration_s"]  # a busy host is later
    computed = [row for row in said["operations"] if row["operation"] in ("forward", "backward")]
    assert {row["unit"] for row in computed} == {"image_encoder", "llm"}
    assert all(abs(row["error_pct"]) < 1 for row in computed)
