"""Whole published models: their weights in, losses equal to the library's own forward on the same
images and tokens."""

import io
import json
from itertools import count

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from disttrain_cli.data.decoding import decode_image
from disttrain_cli.errors import SpecError
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.probe import probe_batch
from disttrain_cli.models.weights import load_into, starting_weights
from disttrain_cli.spec.runfile.published import is_all, joins_as
from tests.batches import changed
from tests.models.conftest import VIT
from tests.whole_models import IMAGE, image_processor, run_of, write_llava


def picture(width, height, seed=0):
    """A PNG of smooth colours and some noise, and the same as PIL reads it."""
    noise = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack(
        [rows * 255 // height, columns * 255 // width, (rows + columns) % 256], axis=2
    )
    pixels = np.clip(pixels + noise.integers(-20, 20, pixels.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue(), Image.open(file).convert("RGB")


def loaded(run):
    layers = build_layers(run, 0, len(layer_table(run)))
    load_into(layers, run)
    return layers


def loss_of(layers, batch):
    state = {}
    with torch.no_grad():
        for layer in layers:
            state.update(layer(state, batch))
    return state["loss/text"]


@pytest.mark.parametrize(
    ("tower", "llm", "layer"),
    [
        ("clip", "llama", -2),
        ("clip", "mistral", -1),
        ("siglip", "qwen2", -1),
        ("siglip", "llama", -3),
    ],
)
def test_llavas_loss_is_its_librarys_on_the_same_images(tmp_path, tower, llm, layer):
    model = write_llava(tmp_path / "llava", tower, llm, vision_feature_layer=layer)
    run = run_of(tmp_path / "llava")
    inputs, layers = describe(run), loaded(run)
    head = inputs.image
    files = [picture(50, 40), picture(33, 90, seed=1)]
    grids = [head.grid(*image.size) for _, image in files]
    assert grids == [(4, 4), (4, 4)] and head.tokens(50, 40) == 16
    theirs = image_processor(tower)([image for _, image in files], return_tensors="pt")
    bytes_ = np.stack([decode_image(file, (4, 4), head) for file, _ in files])
    scale, shift = torch.tensor(head.affine).T[..., None, None]
    ours = torch.from_numpy(bytes_) * scale - shift
    torch.testing.assert_close(ours, theirs["pixel_values"], atol=1e-5, rtol=0)

    batch = probe_batch(inputs, image=grids, documents=[[64]])
    batch = changed(batch, "image", values={0: [ours]})
    ids = batch.token_ids.clone().flatten()
    ids[batch.of("image").rows] = IMAGE
    text = torch.arange(64)[None] >= 32
    labels = torch.where(text, ids, -100)
    following = torch.cat([labels[:, 1:], torch.full((1, 1), -100)], dim=1)
    batch = type(batch)(
        **{
            **vars(batch),
            "token_ids": ids[None],
            "labels": following,
            "label_tokens": float((following != -100).sum()),
            "cache": {},
        }
    )
    with torch.no_grad():
        expected = model(input_ids=ids[None], labels=labels, **theirs)
    torch.testing.assert_close(loss_of(layers, batch), expected.loss, atol=1e-4, rtol=0)
    assert is_all(run.published, run.file.model)


def test_a_folder_saved_by_an_older_library_is_read_too(tmp_path):
    """Names as llava-hf's folders have them, in several files with an index."""
    write_llava(tmp_path / "llava")
    run = run_of(tmp_path / "llava")
    expected = {key: p for layer in loaded(run) for key, p in layer.named_parameters(layer.name)}
    file = tmp_path / "llava" / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(file).items()
    }
    names, parts = sorted(tensors), [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    file_of = {name: parts[place % 2] for name, place in zip(names, count(), strict=False)}
    for part in parts:
        save_file(
            {name: tensors[name] for name in names if file_of[name] == part}, file.parent / part
        )
    (file.parent / "model.safetensors.index.json").write_text(json.dumps({"weight_map": file_of}))
    file.unlink()
    found = {key: p for layer in loaded(run) for key, p in layer.named_parameters(layer.name)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    (file.parent / parts[1]).unlink()
    with pytest.raises(SpecError, match="Weight files are missing"):
        starting_weights(run)


def test_a_module_beside_the_folder_takes_the_place_of_its_own_and_the_projector_is_new(tmp_path):
    write_llava(tmp_path / "llava")
    other = {"kind": "encoder", "architecture": "vit", "config": VIT, "merge": 2}
    run = run_of(tmp_path / "llava", {"modules": {"vision": other}})
    assert not joins_as(run.published, run.file.model)
    head = describe(run).image
    assert head.processor is None and (head.patch_px, head.merge) == (4, 2)
    assert run.file.data.max_image_pixels == 1_048_576  # no longer the folder's
    assert "projectors start from random weights" in " ".join(starting_weights(run))
    plain = build_layers(run, 0, len(layer_table(run)))
    made = {layer.name: layer for layer in loaded(run)}
    before = {layer.name: layer for layer in plain}
    assert torch.equal(
        made["vision.projector"].mlp[0].weight, before["vision.projector"].mlp[0].weight
    )
    assert not torch.equal(made["llm.head"].lm_head.weight, before["llm.head"].lm_head.weight)


def test_a_module_beside_the_folder_adjusts_its_own(tmp_path):
    write_llava(tmp_path / "llava")
    run = run_of(tmp_path / "llava", {"modules": {"llm": {"config": {"rms_norm_eps": 1e-5}}}})
    assert joins_as(run.published, run.file.model)
    spec = run.file.model.modules["llm"]
    assert (spec.kind, spec.folder, spec.config) == ("llm", "llava", {"rms_norm_eps": 1e-5})
    run = run_of(tmp_path / "llava", {"modules": {"vision": {"merge": 2}}})
    assert not joins_as(run.published, run.file.model) and describe(run).image.merge == 2


def test_a_module_of_a_whole_folder_can_be_named_by_itself(tmp_path):
    """No `model.folder`: the LLM of a LLaVA with a tower of one's own."""
    model = write_llava(tmp_path / "llava")
    modules = {
        "eye": {"kind": "encoder", "architecture": "vit", "config": VIT},
        "llm": {"kind": "llm", "folder": "llava"},
    }
    run = run_of(tmp_path / "llava", {"folder": None, "modules": modules})
    head = next(layer for layer in loaded(run) if layer.name == "llm.head")
    assert torch.equal(head.lm_head.weight, model.lm_head.weight)
