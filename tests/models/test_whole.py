"""Whole published models: their weights in, losses equal to the library's own forward on the same
images and tokens."""

import io
import json
from functools import partial
from itertools import count, groupby

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from disttrain_cli.data.decoding import decode_image
from disttrain_cli.data.positions import grid_positions, sample_positions
from disttrain_cli.errors import SpecError
from disttrain_cli.models.graph import build_layers, describe, layer_table
from disttrain_cli.models.layer import Batch, Items
from disttrain_cli.models.weights import load_into, starting_weights
from disttrain_cli.spec.runfile.published import is_all, joins_as
from tests.batches import changed
from tests.cases import first_fast
from tests.models.conftest import VIT
from tests.whole_models import (
    IMAGE,
    image_processor,
    qwen_processor,
    run_of,
    write_llava,
    write_qwen,
)


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


LENGTH, BEFORE = 64, 3  # tokens of a sequence, and of the text before its image
FAMILIES = {
    "clip and llama": (partial(write_llava, vision_feature_layer=-2), image_processor()),
    "clip and mistral": (
        partial(write_llava, llm="mistral", vision_feature_layer=-1),
        image_processor(),
    ),
    "siglip and qwen2": (
        partial(write_llava, tower="siglip", llm="qwen2", vision_feature_layer=-1),
        image_processor("siglip"),
    ),
    "siglip and llama": (
        partial(write_llava, tower="siglip", vision_feature_layer=-3),
        image_processor("siglip"),
    ),
    "qwen2_5_vl": (partial(write_qwen, family="qwen2_5_vl", flat=True), qwen_processor()),
    "qwen3_vl": (partial(write_qwen, family="qwen3_vl"), qwen_processor()),
}


def sequences(inputs, files):
    """A batch of sequences of one image file each, with texts before and after."""
    head = inputs.image
    seen = sorted((head.grid(*image.size), number) for number, (_, image) in enumerate(files))
    draws = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 260, (len(files), LENGTH), generator=draws)
    positions, rows, values = {}, [], []
    scale, shift = torch.tensor(head.affine).T[..., None, None]
    for grid, number in seen:
        tokens = grid[0] * grid[1] // head.merge**2
        ids[number, BEFORE : BEFORE + tokens] = IMAGE
        rows.append(torch.arange(tokens) + number * LENGTH + BEFORE)
        places = [(BEFORE, grid_positions(head.frames(grid)))]
        positions[number] = torch.from_numpy(sample_positions(inputs.positions, LENGTH, places))
        pixels = torch.from_numpy(decode_image(files[number][0], grid, head))
        values.append((pixels * scale - shift)[None])
    labels = torch.where(ids == IMAGE, -100, ids)[:, 1:]
    return Batch(
        {"image": Items([grid for grid, _ in seen], {0: _runs(values)}, torch.cat(rows))},
        token_ids=ids,
        positions=torch.stack([positions[number] for number in range(len(files))], dim=-2),
        sample_lengths=[LENGTH] * len(files),
        labels=torch.nn.functional.pad(labels, (0, 1), value=-100),
        label_tokens=float((labels != -100).sum()),
    )


def _runs(values):
    """Images [1, C, H, W] of equal size, which are adjacent, as one tensor."""
    return [torch.cat(list(run)) for _, run in groupby(values, key=lambda one: one.shape)]


@pytest.mark.parametrize("family", first_fast(FAMILIES, 2))
def test_the_loss_is_the_librarys_own_on_the_same_images(tmp_path, family):
    """Through the processor's own preprocessing, one sequence at a time."""
    write, processor = FAMILIES[family]
    model = write(tmp_path / "whole")
    run = run_of(tmp_path / "whole", data={"sequence_length": LENGTH})
    assert is_all(run.published, run.file.model)
    inputs, layers = describe(run), loaded(run)
    files = [picture(50, 40), picture(33, 90, seed=1)]
    batch, total = sequences(inputs, files), torch.zeros(())
    for ids, labels, (_, image) in zip(batch.token_ids, batch.labels, files, strict=True):
        given = {"input_ids": ids[None], **processor([image], return_tensors="pt")}
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = (ids == IMAGE).int()[None]
        with torch.no_grad():
            logits = model(**given).logits[0]
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    expected = total / batch.label_tokens
    torch.testing.assert_close(loss_of(layers, batch), expected, atol=1e-4, rtol=0)
    blind = changed(batch, "image", values={0: [torch.zeros_like(v) for v in _pixels(batch)]})
    assert abs(loss_of(layers, blind) - expected) > 1e-3  # the images matter


def _pixels(batch):
    return batch.of("image").values[0]


@pytest.mark.slow
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
    index = file.parent / "model.safetensors.index.json"
    file.unlink()
    index.write_text(json.dumps({"weight_map": file_of | {names[0]: 3}}))
    with pytest.raises(SpecError, match="is damaged"):
        starting_weights(run)
    index.write_text(json.dumps({"weight_map": file_of}))
    found = {key: p for layer in loaded(run) for key, p in layer.named_parameters(layer.name)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    (file.parent / parts[1]).unlink()
    with pytest.raises(SpecError, match="Weight files are missing"):
        starting_weights(run)
    for gone in (index, file.parent / parts[0]):
        gone.unlink()
    assert "holds no weights" in " ".join(starting_weights(run))
    with pytest.raises(SpecError, match="holds no weights"):
        starting_weights(run, training=True)


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


def test_a_second_tower_that_would_resize_otherwise_is_refused(tmp_path):
    write_llava(tmp_path / "llava")
    other = {"kind": "encoder", "architecture": "vit", "config": {**VIT, "patch_size": 8}}
    with pytest.raises(SpecError, match="resized by crop as its folder says"):
        describe(run_of(tmp_path / "llava", {"modules": {"second": other}}))


def test_a_module_beside_the_folder_adjusts_its_own(tmp_path):
    write_llava(tmp_path / "llava")
    run = run_of(tmp_path / "llava", {"modules": {"llm": {"config": {"rms_norm_eps": 1e-5}}}})
    assert joins_as(run.published, run.file.model)
    spec = run.file.model.modules["llm"]
    assert (spec.kind, spec.folder, spec.config) == ("llm", "llava", {"rms_norm_eps": 1e-5})
    run = run_of(tmp_path / "llava", {"modules": {"vision": {"merge": 2}}})
    assert not joins_as(run.published, run.file.model) and describe(run).image.merge == 2


def test_weights_that_the_configuration_does_not_know_are_named(tmp_path):
    write_llava(tmp_path / "llava")
    run = run_of(tmp_path / "llava")
    assert "not used" not in " ".join(load_into(build_layers(run, 0, len(layer_table(run))), run))
    shorter = {"llm": {"config": {"num_hidden_layers": 1}}}
    run = run_of(tmp_path / "llava", {"modules": shorter})
    said = " ".join(load_into(build_layers(run, 0, len(layer_table(run))), run))
    assert "llm: not used of" in said and "layers.1.mlp" in said


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
