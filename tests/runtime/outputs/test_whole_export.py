"""`disttrain export` of a run from a whole published folder: the same kind of folder, which
transformers loads and generates with."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from disttrain_cli.models.weights import load_into
from disttrain_cli.runtime.outputs.export import export, generating
from tests.runtime.outputs.test_export import trained
from tests.whole_models import IMAGE, run_of, write_llava


def saved(run, by=0.0):
    """A checkpoint of the run's starting weights, with noise added; returns the layers."""
    return trained(run, by=by, start=lambda layers: load_into(layers, run))


@pytest.mark.parametrize(
    ("tower", "precision", "tied"),
    [("clip", "fp32", False), ("siglip", "bf16", False), ("clip", "fp32", True)],
)
def test_with_no_step_taken_the_folder_is_the_one_that_the_run_started_from(
    tmp_path, tower, precision, tied
):
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    fields = {"text": {"tie_word_embeddings": True}, "tie_word_embeddings": True} if tied else {}
    model = write_llava(tmp_path / "llava", tower, **fields).to(dtype)
    run = run_of(tmp_path / "llava", precision=precision)
    saved(run)
    exported = export(run, tmp_path / "out")
    assert exported.modules["llava"].loads_with == "transformers.AutoModelForImageTextToText"
    assert exported.generates_with == generating(tmp_path / "out")
    given, found = (load_file(tmp_path / name / "model.safetensors") for name in ("llava", "out"))
    assert found.keys() == given.keys() and any("lm_head" in name for name in found) is not tied
    assert all(torch.equal(found[name], given[name].to(dtype)) for name in given)
    described, original = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "llava")
    )
    assert described == original | {"dtype": str(dtype).removeprefix("torch.")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "llava").iterdir()
    }
    from transformers import AutoModelForImageTextToText

    again, said = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=dtype
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    pixels = torch.randn(1, 3, 32, 32).to(dtype)
    ids = torch.tensor([[1, *[IMAGE] * 16, 40, 50, 60]])
    options = {"input_ids": ids, "pixel_values": pixels, "max_new_tokens": 4, "do_sample": False}
    assert again.generate(**options).tolist() == model.generate(**options).tolist()


def test_what_was_trained_is_in_it_and_what_nothing_reads_is_the_folders(tmp_path):
    write_llava(tmp_path / "llava")
    run = run_of(tmp_path / "llava")
    layers = {layer.name: layer for layer in saved(run, by=0.5)}
    export(run, tmp_path / "out")
    given, found = (load_file(tmp_path / name / "model.safetensors") for name in ("llava", "out"))
    # block 2 of 3 follows the one whose output is read, and so does the final norm
    unread = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.")
    same = {name for name, tensor in found.items() if torch.equal(tensor, given[name])}
    assert same == {name for name in given if name.startswith(unread)} and same
    projector = layers["vision.projector"].mlp
    assert torch.equal(found["multi_modal_projector.linear_1.weight"], projector[0].weight)
    assert torch.equal(found["multi_modal_projector.linear_2.bias"], projector[2].bias)


def test_a_run_with_another_tower_is_written_in_parts(tmp_path):
    write_llava(tmp_path / "llava")
    run = run_of(tmp_path / "llava", {"modules": {"vision": {"merge": 2}}})
    saved(run)
    exported = export(run, tmp_path / "out")
    assert exported.generates_with is None and set(exported.modules) == {"vision", "llm"}
    assert (tmp_path / "out" / "projectors.safetensors").exists()


def test_an_export_is_a_folder_to_start_from(tmp_path):
    write_llava(tmp_path / "llava")
    saved(run_of(tmp_path / "llava"), by=0.5)
    export(run_of(tmp_path / "llava"), tmp_path / "out")
    shutil.rmtree(tmp_path / "runs")
    run = run_of(tmp_path / "out")
    saved(run)
    export(run, tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
