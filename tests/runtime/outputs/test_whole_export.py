"""`disttrain export` of a run from a whole published folder: the same kind of folder, which
transformers loads and generates with."""

import json
import os
import shutil
import stat
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from disttrain_cli.errors import SpecError
from disttrain_cli.models.export import save_tensors
from disttrain_cli.models.weights import load_into
from disttrain_cli.runtime.checkpoints import origin
from disttrain_cli.runtime.outputs.export import export, generating
from tests.cases import mostly_slow
from tests.data.test_parts import told
from tests.runtime.outputs.test_export import trained
from tests.whole_models import (
    IMAGE,
    TILED,
    run_of,
    tiled_processor,
    write_llava,
    write_qwen,
    write_tiled,
)


def saved(run, by=0.0):
    """A checkpoint of the run's starting weights, with noise added; returns the layers."""
    return trained(run, by=by, start=lambda layers: load_into(layers, run))


def write_published_llava(folder):
    """Names as in published files, which the library does not write any more."""
    model = write_llava(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.") for name in tensors}
    save_tensors({names[name]: tensor for name, tensor in tensors.items()}, file)
    return model


WRITE = {
    "published clip": write_published_llava,
    "clip": partial(write_llava, tower="clip"),
    "siglip": partial(write_llava, tower="siglip"),
    "internvl": partial(write_tiled, family="internvl"),
    "tied internvl": partial(write_tiled, family="internvl", tie_word_embeddings=True),
    "idefics3": partial(write_tiled, family="idefics3"),
    "smolvlm": partial(write_tiled, family="smolvlm"),
    "tied smolvlm": partial(write_tiled, family="smolvlm", tie_word_embeddings=True),
    "llava_next": partial(write_tiled, family="llava_next"),
    "llava_onevision": partial(write_tiled, family="llava_onevision"),
    "qwen2_5_vl": partial(write_qwen, family="qwen2_5_vl", flat=True),
    "qwen3_vl": partial(write_qwen, family="qwen3_vl"),
    "tied clip": partial(write_llava, text={"tie_word_embeddings": True}, tie_word_embeddings=True),
    "tied qwen3_vl": partial(write_qwen, family="qwen3_vl", tie_word_embeddings=True),
}


def question(family, model):
    """Arguments of `generate` for a question about an image."""
    dtype, options = model.dtype, {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    if family.endswith(tuple(TILED)):
        given = told(tiled_processor(family.removeprefix("tied ")), [(50, 30)])
        del given["assistant_masks"]
        return {key: torch.as_tensor(np.array(value)) for key, value in given.items()} | options
    if "qwen" not in family:
        ids, more = [1, *[IMAGE] * 16, 40, 50, 60], {}
        pixels = torch.randn(1, 3, 32, 32)
    else:
        ids, pixels = [5, *[IMAGE] * 6, 40, 50, 60], torch.randn(24, 96)
        more = {
            "image_grid_thw": torch.tensor([[1, 4, 6]]),
            "mm_token_type_ids": (torch.tensor([ids]) == IMAGE).int(),
        }
    return {"input_ids": torch.tensor([ids]), "pixel_values": pixels.to(dtype)} | more | options


@pytest.mark.parametrize("family", mostly_slow(WRITE, "siglip", "published clip"))
def test_with_no_step_taken_the_folder_is_the_one_that_the_run_started_from(tmp_path, family):
    precision = "bf16" if family in ("siglip", "qwen3_vl") else "fp32"
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = WRITE[family](tmp_path / "given").to(dtype)
    run = run_of(tmp_path / "given", precision=precision)
    saved(run)
    exported = export(run, tmp_path / "out")
    (module,) = exported.modules.values()
    assert module.loads_with == "transformers.AutoModelForImageTextToText"
    assert exported.generates_with == generating(tmp_path / "out")
    given, found = (load_file(tmp_path / name / "model.safetensors") for name in ("given", "out"))
    assert found.keys() == given.keys()
    assert any("lm_head" in name for name in found) is not family.startswith("tied")
    assert all(torch.equal(found[name], given[name].to(dtype)) for name in given)
    described, original = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "given")
    )
    assert described == original | {"dtype": str(dtype).removeprefix("torch.")}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "given").iterdir()
    }
    from transformers import AutoModelForImageTextToText

    again, said = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True, dtype=dtype
    )
    assert not said["missing_keys"] and not said["unexpected_keys"]
    asked = question(family, model)
    # in bf16 two logits may tie, and how a product is summed depends on where its operands lie
    assert again.float().generate(**asked).tolist() == model.float().generate(**asked).tolist()


@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_weight_files_have_the_mode_that_the_umask_leaves(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_tensors({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    finally:
        os.umask(before)
    mode = (tmp_path / "model.safetensors").stat().st_mode
    assert stat.S_IMODE(mode) == 0o666 & ~umask


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


@pytest.mark.slow
def test_an_export_is_a_folder_to_start_from(tmp_path):
    write_llava(tmp_path / "llava")
    saved(run_of(tmp_path / "llava"), by=0.5)
    export(run_of(tmp_path / "llava"), tmp_path / "out")
    shutil.rmtree(tmp_path / "runs")
    with pytest.raises(SpecError, match=r"set model\.folder: "):
        origin.find(tmp_path / "out")
    run = run_of(tmp_path / "out")
    saved(run)
    export(run, tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
