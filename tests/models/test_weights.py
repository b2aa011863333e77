"""Weights in from folders that the libraries wrote, and out into folders that they load; what is
wrong is named."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.whisper.modeling_whisper import sinusoids

from disttrain_cli.errors import SpecError
from disttrain_cli.models.architectures import read_configs
from disttrain_cli.models.export import write_model
from disttrain_cli.models.graph import build_layers, layer_table
from disttrain_cli.models.published import on_meta, published_class
from disttrain_cli.models.vae import decoder_maker
from disttrain_cli.models.weights import load_into, module_layers, starting_weights
from disttrain_cli.spec.runfile import Run, RunFile
from tests.cases import first_fast
from tests.models.conftest import AUDIO, LLAMA, MROPE, UNET
from tests.models.conftest import VIT as SQUARE
from tests.models.test_library_generators import PIXELS
from tests.models.test_vae import VAE

QWEN_EYE = {
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 4,
    "window_size": 16,
    "spatial_merge_size": 2,
    "out_hidden_size": 40,
    "fullatt_block_indexes": [1],
}
QWEN3_EYE = {
    "hidden_size": 32,
    "depth": 2,
    "num_heads": 4,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "out_hidden_size": 48,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
PIXART = {
    "num_attention_heads": 3,
    "attention_head_dim": 8,
    "in_channels": 3,
    "out_channels": 6,
    "num_layers": 2,
    "cross_attention_dim": 24,
    "caption_channels": 20,
    "norm_num_groups": 1,
}
SD3 = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 3,
    "out_channels": 3,
    "num_layers": 2,
    "joint_attention_dim": 20,
    "caption_projection_dim": 24,
    "pooled_projection_dim": 16,
    "pos_embed_max_size": 8,
    "qk_norm": "rms_norm",
    "dual_attention_layers": [0],
}
FLUX = {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 12,
    "num_layers": 1,
    "num_single_layers": 1,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 16,
    "axes_dims_rope": [2, 4, 6],
    "guidance_embeds": True,
}
LUMINA2 = {
    "hidden_size": 24,
    "num_attention_heads": 2,
    "num_kv_heads": 2,
    "in_channels": 3,
    "num_layers": 1,
    "num_refiner_layers": 1,
    "multiple_of": 16,
    "axes_dim_rope": [4, 4, 4],
    "cap_feat_dim": 20,
}
ENCODER, GENERATOR = (
    {"kind": "encoder", "merge": 2},
    {"kind": "generator", "image_size": 16, "context_tokens": 4},
)
#: A small module of each class, without what says where its configuration comes from.
CLASSES = {
    "vit": (ENCODER, SQUARE),
    "clip_vision_model": (ENCODER, SQUARE),
    "siglip_vision_model": (ENCODER, SQUARE),
    "internvl_vision": (ENCODER | {"projector": "norm_mlp"}, SQUARE),
    "idefics3_vision": (ENCODER | {"projector": "linear"}, SQUARE),
    "smolvlm_vision": (ENCODER | {"projector": "linear"}, SQUARE),
    "qwen2_5_vl_vision": ({"kind": "encoder"}, QWEN_EYE),
    "qwen3_vl_vision": ({"kind": "encoder"}, QWEN3_EYE),
    "whisper": ({"kind": "encoder", "merge": 3}, AUDIO["config"]),
    "llama": ({"kind": "llm"}, LLAMA),
    "mistral": ({"kind": "llm"}, LLAMA),
    "qwen2": ({"kind": "llm"}, LLAMA),
    "qwen3": ({"kind": "llm"}, LLAMA | {"head_dim": 12}),
    "qwen2_5_vl_text": ({"kind": "llm"}, LLAMA | MROPE),
    "qwen3_vl_text": ({"kind": "llm"}, LLAMA | MROPE | {"head_dim": 12}),
    "unet2d_condition": (GENERATOR, UNET),
    "pixart": (GENERATOR, PIXART),
    "sd3": (GENERATOR, SD3),
    "flux": (GENERATOR, FLUX),
    "lumina2": (GENERATOR, LUMINA2),
    **{name: (GENERATOR, PIXELS[name]) for name in ("qwen_image", "flux2", "z_image", "wan")},
}


def make(place, name, **spec):
    """A run of an LLM and, if it is none itself, a module called `own` of a class or a folder."""
    own = dict(CLASSES[name][0]) | (
        {"architecture": name, "config": CLASSES[name][1]} if "folder" not in spec else {}
    )
    modules = {"own": own | spec}
    if own["kind"] != "llm":
        modules["llm"] = {"kind": "llm", "architecture": "llama", "config": LLAMA}
    file = RunFile.model_validate(
        {
            "name": "tiny",
            "model": {"modules": modules},
            "data": {"sources": [{"path": "data"}], "sequence_length": 48},
            "train": {"global_batch_size": 4, "steps": 1, "precision": "fp32"},
        }
    )
    return Run(path=place / "disttrain.yaml", file=file)


def layers_of(run, **options):
    places = [place for place, info in enumerate(layer_table(run)) if info.module == "own"]
    return build_layers(run, places[0], places[-1] + 1, **options)


def library_model(run, name, part="own"):
    """The library's model with random weights."""
    torch.manual_seed(3)
    config = read_configs(run)["own"]
    model = on_meta(name, config.vae if name == "vae" else config.config).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.1)
        if name == "sd3":  # a buffer that is saved
            model.pos_embed.pos_embed.normal_(0.0, 0.1)
        if name == "whisper":
            model.embed_positions.weight.copy_(sinusoids(*model.embed_positions.weight.shape))
    return model


def weights_of(layers):
    made = {}
    for layer in layers:
        made |= layer.to_published({path: p.detach() for path, p in layer.named_parameters()})
    return made


@pytest.mark.parametrize("name", first_fast(CLASSES, 3))
def test_every_class_starts_from_what_its_library_saved_and_is_saved_for_it(tmp_path, name):
    plain = make(tmp_path, name)
    model = library_model(plain, name)
    model.save_pretrained(tmp_path / "given", max_shard_size="40kB")
    run = make(tmp_path, name, folder="given")
    layers = layers_of(run)
    notes = load_into(layers, run)
    assert str(tmp_path / "given") in notes[0]
    found, expected = weights_of(layers), model.state_dict()
    assert found and all(torch.equal(tensor, expected[path]) for path, tensor in found.items()), (
        name
    )

    by_name = {layer.name: layer for layer in layers}
    config = read_configs(run)["own"]
    written = write_model(
        tmp_path / "out",
        name,
        config.config,
        module_layers(run, "own"),
        lambda layer: dict(by_name[layer.name].named_parameters()),
        torch.float32,
        most_bytes=40_000,
    )
    again, said = published_class(name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not said["unexpected_keys"] and not said["mismatched_keys"]
    assert all(path.startswith(("pooler", "head")) for path in said["missing_keys"]), said[
        "missing_keys"
    ]
    assert all(torch.equal(again.state_dict()[path], tensor) for path, tensor in found.items())
    assert written.parameters == sum(tensor.numel() for tensor in found.values())
    several = len([layer for layer in layers if layer.published]) > 1  # a file has whole layers
    assert (len(list((tmp_path / "out").glob("*.safetensors"))) > 1) == several
    described = json.loads((tmp_path / "out" / "config.json").read_text())
    assert described.get("architectures", [described.get("_class_name")]) == [
        written.loads_with.split(".")[-1]
    ]
    shutil.rmtree(tmp_path / "given")
    rerun = make(tmp_path, name, folder="out")
    more = layers_of(rerun)
    load_into(more, rerun)
    assert all(
        torch.equal(a, b) for a, b in zip(weights_of(more).values(), found.values(), strict=True)
    )


@pytest.mark.parametrize("tp", [2, 4])
def test_a_tp_rank_takes_its_part(tmp_path, tp):
    plain = make(tmp_path, "llama", config=LLAMA | {"vocab_size": 264, "num_key_value_heads": 4})
    library_model(plain, "llama").save_pretrained(tmp_path / "given")
    run = make(tmp_path, "llama", folder="given")
    whole = layers_of(run)
    load_into(whole, run)
    expected = dict(whole[1].named_parameters())
    parts = [layers_of(run, tp=tp, tp_rank=rank) for rank in range(tp)]
    for part in parts:
        load_into(part, run)
    for path, dim in (("layer.self_attn.k_proj.weight", 0), ("layer.mlp.down_proj.weight", 1)):
        joined = torch.cat([dict(part[1].named_parameters())[path] for part in parts], dim)
        assert torch.equal(joined, expected[path])
    path = "layer.input_layernorm.weight"
    assert all(
        torch.equal(dict(part[1].named_parameters())[path], expected[path]) for part in parts
    )


def test_a_stage_reads_only_its_own_tensors_in_its_own_precision(tmp_path):
    library_model(make(tmp_path, "llama"), "llama").save_pretrained(
        tmp_path / "given", max_shard_size="30kB"
    )
    index = json.loads((tmp_path / "given" / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]
    # Files without a tensor of the last block may even be nonsense of the right size.
    run = make(tmp_path, "llama", folder="given")
    block = layers_of(run, dtype=torch.bfloat16)[2]
    load_into([block], run)
    stored = load_file(tmp_path / "given" / index["model.layers.1.mlp.up_proj.weight"])
    assert torch.equal(
        block.layer.mlp.up_proj.weight, stored["model.layers.1.mlp.up_proj.weight"].bfloat16()
    )


PREFIXES = [
    ("llama", {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}),
    ("llama", {"model.": "model.language_model.", "lm_head.": "lm_head."}),
    ("llama", {"model.": "", "lm_head.": "lm_head."}),
    ("clip_vision_model", {"": "vision_tower.vision_model."}),
    ("siglip_vision_model", {"": "model.vision_tower.vision_model."}),
    ("siglip_vision_model", {"": "vision_model."}),
    ("qwen2_5_vl_vision", {"": "visual."}),
    ("whisper", {"": "model.encoder."}),
]


@pytest.mark.parametrize(("name", "prefixes"), first_fast(PREFIXES, 2))
def test_a_part_of_a_larger_model_is_found(tmp_path, name, prefixes):
    model = library_model(make(tmp_path, name), name)
    model.save_pretrained(tmp_path / "given")
    path = tmp_path / "given" / "model.safetensors"
    tensors = {}
    for key, tensor in load_file(path).items():
        own, theirs = next(item for item in prefixes.items() if key.startswith(item[0]))
        tensors[theirs + key.removeprefix(own)] = tensor
    # Another part, with the same names inside.
    others = {"whisper": "model.decoder.", "siglip_vision_model": "text_model."}.get(name, "other.")
    decoys = {
        key: tensor
        for key, tensor in load_file(path).items()
        if "conv" not in key and "patch" not in key and key.startswith(("layers", "encoder"))
    }
    tensors |= {others + key: torch.zeros_like(tensor) for key, tensor in decoys.items()}
    save_file(tensors, path)
    run = make(tmp_path, name, folder="given")
    layers = layers_of(run)
    notes = load_into(layers[-2:], run) + load_into(layers[:-2], run)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights_of(layers).items())
    assert bool(decoys) == any("not used" in note for note in notes)


@pytest.mark.parametrize("tp", [1, 3])
def test_new_token_ids_start_at_random(tmp_path, tp):
    config = LLAMA | {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    model = library_model(make(tmp_path, "llama", config=config), "llama")
    model.save_pretrained(tmp_path / "given")
    run = make(tmp_path, "llama", folder="given", config={"vocab_size": 264})
    parts = [layers_of(run, tp=tp, tp_rank=rank) for rank in range(tp)]
    before = torch.cat([part[-1].lm_head.weight for part in parts]).clone()
    notes = [load_into(part, run) for part in parts]
    assert all("3 token ids are new" in own[1] for own in notes)
    for made, published in (
        (torch.cat([part[0].embedding.weight for part in parts]), model.model.embed_tokens),
        (torch.cat([part[-1].lm_head.weight for part in parts]), model.lm_head),
    ):
        assert torch.equal(made[:261], published.weight) and made[261:].isfinite().all()
    assert torch.equal(torch.cat([part[-1].lm_head.weight for part in parts])[261:], before[261:])


def test_a_folder_with_fewer_token_ids_than_it_says_is_refused(tmp_path):
    """Nobody asked for new ones."""
    library_model(make(tmp_path, "llama"), "llama").save_pretrained(tmp_path / "given")
    file = tmp_path / "given" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 264}))
    run = make(tmp_path, "llama", folder="given", config={})
    with pytest.raises(SpecError, match="has another shape"):
        load_into(layers_of(run), run)


def test_nothing_is_taken_from_another_part_of_a_larger_model(tmp_path):
    library_model(make(tmp_path, "siglip_vision_model"), "siglip_vision_model").save_pretrained(
        tmp_path / "given"
    )
    path = tmp_path / "given" / "model.safetensors"
    tensors = load_file(path)
    whole = {
        f"{part}.{key}": tensor.clone()
        for key, tensor in tensors.items()
        for part in ("text_model", "vision_model")
        if part == "vision_model" or "patch" not in key
    }
    del whole["vision_model.encoder.layers.1.mlp.fc1.weight"]
    save_file(whole, path)
    run = make(tmp_path, "siglip_vision_model", folder="given")
    with pytest.raises(SpecError, match=r"missing: encoder\.layers\.1\.mlp\.fc1\.weight"):
        load_into(layers_of(run), run)


def test_a_head_that_is_tied_starts_as_a_copy_of_the_embedding(tmp_path):
    library_model(make(tmp_path, "llama"), "llama").save_pretrained(tmp_path / "given")
    path = tmp_path / "given" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)
    described = json.loads((tmp_path / "given" / "config.json").read_text())
    (tmp_path / "given" / "config.json").write_text(
        json.dumps(described | {"tie_word_embeddings": True})
    )
    run = make(tmp_path, "llama", folder="given")
    layers = layers_of(run)
    load_into(layers[-1:], run)
    assert torch.equal(layers[-1].lm_head.weight, tensors["model.embed_tokens.weight"])
    run = make(tmp_path, "llama", folder="given", config={"tie_word_embeddings": False})
    layers = layers_of(run)
    notes = load_into(layers[-1:], run)
    assert torch.equal(layers[-1].lm_head.weight, tensors["model.embed_tokens.weight"])
    assert (
        "own: there is no lm_head.weight; it starts as a copy of model.embed_tokens.weight."
        in notes
    )
    (tmp_path / "given" / "config.json").write_text(
        json.dumps(described | {"tie_word_embeddings": False})
    )
    with pytest.raises(SpecError, match=r"missing: lm_head\.weight"):
        load_into(layers[-1:], make(tmp_path, "llama", folder="given"))


def test_a_tied_head_that_differs_from_the_embedding_is_refused(tmp_path):
    library_model(make(tmp_path, "llama"), "llama").save_pretrained(tmp_path / "given")
    run = make(tmp_path, "llama", folder="given", config={"tie_word_embeddings": True})
    layers = layers_of(run)
    load_into(layers[:-1], run)
    with pytest.raises(SpecError, match="tie_word_embeddings: false in"):
        load_into(layers[-1:], run)
    path = tmp_path / "given" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    load_into(layers, run)
    assert torch.equal(layers[-1].lm_head.weight, tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (
            "lm_head.weight",
            lambda tensor: tensor.index_fill(0, torch.tensor([3]), torch.nan),
            "are NaN",
        ),
        ("model.embed_tokens.weight", lambda tensor: tensor * torch.nan, "are NaN"),
        ("model.norm.weight", lambda tensor: tensor.to(torch.int8), "I8"),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda tensor: tensor.to(torch.float8_e4m3fn),
            "F8_E4M3",
        ),
    ],
)
def test_what_is_no_plain_number_is_refused(tmp_path, name, change, words):
    library_model(make(tmp_path, "llama"), "llama").save_pretrained(tmp_path / "given")
    path = tmp_path / "given" / "model.safetensors"
    save_file(
        {key: change(tensor) if key == name else tensor for key, tensor in load_file(path).items()},
        path,
    )
    run = make(tmp_path, "llama", folder="given")
    with pytest.raises(SpecError, match=words) as error:
        load_into(layers_of(run), run)
    assert name in str(error.value)


def test_a_vae_comes_from_its_own_folder_old_names_too(tmp_path):
    spec = {"config": UNET | {"in_channels": 4, "out_channels": 4}}
    model = library_model(make(tmp_path, "unet2d_condition", vae=VAE, **spec), "vae")
    model.save_pretrained(tmp_path / "vae")
    path = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = load_file(path)
    for new, name in old.items():
        tensors = {key.replace(f".{new}.", f".{name}."): tensor for key, tensor in tensors.items()}
    assert any("proj_attn" in key for key in tensors)
    save_file(tensors, path)
    run = make(tmp_path, "unet2d_condition", vae_folder="vae", **spec)
    assert read_configs(run)["own"].vae["latent_channels"] == 4
    layers = [layers_of(run)[0], decoder_maker("own", read_configs(run)["own"].vae).build(0)]
    notes = load_into(layers, run)
    assert len(notes) == 1 and all(
        torch.equal(tensor, model.state_dict()[key]) for key, tensor in weights_of(layers).items()
    )


def test_without_weights_or_by_wish_a_module_starts_at_random(tmp_path):
    model = library_model(make(tmp_path, "vit"), "vit")
    model.save_pretrained(tmp_path / "given")
    plain = weights_of(layers_of(make(tmp_path, "vit")))
    unwanted = make(tmp_path, "vit", folder="given", pretrained=False)
    layers = layers_of(unwanted)
    assert load_into(layers, unwanted) == []
    run = make(tmp_path, "vit", folder="given")
    assert starting_weights(run) == [
        f"model.modules.own.folder: own starts from the weights in {tmp_path / 'given'}."
    ]
    (tmp_path / "given" / "model.safetensors").rename(tmp_path / "given" / "pytorch_model.bin")
    with pytest.raises(SpecError, match="pickled"):  # by profile too
        starting_weights(run)
    (tmp_path / "given" / "pytorch_model.bin").unlink()
    others = layers_of(run)
    assert load_into(others, run) == []
    assert [
        "holds no weights; own starts from random ones" in note for note in starting_weights(run)
    ] == [True]
    assert starting_weights(unwanted) == []
    for made in (weights_of(layers), weights_of(others)):
        assert all(torch.equal(tensor, plain[key]) for key, tensor in made.items())


def damage_index(folder):
    next(folder.glob("model-00001*")).unlink()


def damage_half(folder):
    path = next(folder.glob("model-00001*"))
    path.write_bytes(path.read_bytes()[:200])


def pickle_only(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"never opened")


def drop_tensor(folder):
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        tensors.pop("model.layers.1.mlp.up_proj.weight", None)
        if tensors:
            save_file(tensors, path)


def other_shape(folder):
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"intermediate_size": 80}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_index, ("missing: model-00001-of", "Download")),
        (damage_half, ("model-00001-of", "damaged")),
        (pickle_only, ("pickled", "pytorch_model.bin", "safetensors", "pretrained: false")),
        (drop_tensor, ("model.modules.own.folder", "model.layers.1.mlp.up_proj.weight", "lack")),
        (
            other_shape,
            (
                "model.layers.0.mlp.gate_proj.weight",
                "given [96, 48]",
                "expected [80, 48]",
                "config.json",
            ),
        ),
    ],
)
def test_bad_weights_are_named(tmp_path, damage, words):
    library_model(make(tmp_path, "llama"), "llama").save_pretrained(
        tmp_path / "given", max_shard_size="50kB"
    )
    damage(tmp_path / "given")
    run = make(tmp_path, "llama", folder="given")
    with pytest.raises(SpecError) as error:
        load_into(layers_of(run), run)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_models_fingerprint_follows_the_weight_files(tmp_path):
    import yaml

    from disttrain_cli.spec.runfile import read_run

    library_model(make(tmp_path, "vit"), "vit").save_pretrained(tmp_path / "given")
    path = tmp_path / "disttrain.yaml"
    content = make(tmp_path, "vit", folder="given").file.model_dump(mode="json", exclude_none=True)

    def fingerprint():
        path.write_text(yaml.safe_dump(content))
        return read_run(path).file.model_fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    tensors = load_file(tmp_path / "given" / "model.safetensors")
    save_file(tensors | {"more": torch.zeros(3)}, tmp_path / "given" / "model.safetensors")
    assert fingerprint() != first
